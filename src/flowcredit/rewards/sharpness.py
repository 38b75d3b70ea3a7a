"""Sharpness: one minus the blur of an image, as scikit-image measures it; in [0, 1].

Crete et al., "The blur effect: perception and estimation with a new no-reference perceptual blur metric",
SPIE 6492 (2007): an image that a blur of 11 pixels hardly changes was blurred before. The grey image is
compared with its blurred self along each axis, and the more blurred axis counts. A flat image has nothing
sharp: 0. Noise is sharp, so that this is a reward to watch rather than one to train on.

Axes: B images, H and W image height and width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowcredit.image_grid import to_pixels
from flowcredit.rewards.files import need_module


@dataclass(frozen=True)
class Sharpness:
    """The reward; it computes on the CPU, from 8-bit pixels."""

    blur: Callable[..., Any]

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] to [B] float32; the prompts are not read."""
        return torch.tensor([1.0 - float(self.blur(image, channel_axis=-1)) for image in to_pixels(images)])


def load_sharpness(device: torch.device) -> Sharpness:
    """Make the reward; InputError if scikit-image is not installed."""
    return Sharpness(need_module("skimage.measure", "sharpness", "rewards").blur_effect)
