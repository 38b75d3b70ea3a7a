"""The bundled world's checker as a reward: what was asked for, found in the image by computation.

Axes: B images, H and W their height and width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowcredit.shapes.checker import check_batch


@dataclass(frozen=True)
class ShapesReward:
    """Graded agreement in [0, 1] with partial credit, or 0/1 for the exact match of GenEval's table."""

    exact: bool

    def __call__(
        self,
        images: Tensor,
        prompts: Sequence[str],
        objects: Sequence[list[dict[str, Any]]],
        relation: Sequence[str | None],
    ) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and the asked-for objects and relations to [B] float32.

        The prompt's text is not read: the columns ``objects`` and ``relation`` say what it asks for.
        """
        graded, exact = check_batch(images.cpu().numpy(), objects, relation)
        return torch.as_tensor(exact if self.exact else graded).to(torch.float32)


def load_graded(device: torch.device) -> ShapesReward:
    """Agreement with partial credit; it computes on the CPU whatever the device."""
    return ShapesReward(exact=False)


def load_exact(device: torch.device) -> ShapesReward:
    """1 where everything that was asked for is there, else 0; on the CPU whatever the device."""
    return ShapesReward(exact=True)
