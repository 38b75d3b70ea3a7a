"""PickScore v1: how well people like an image for a prompt, by a CLIP ViT-H/14 trained on their choices.

Kirstain et al., "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image Generation", arXiv
2305.01569. The score is exp(logit scale) times the cosine, as the authors' model card computes it: about 20
to 24. Flow-GRPO (arXiv 2505.05470) divides it by 26, and the tables of G²RPO (arXiv 2510.01982) print the
cosine, about 0.23. A constant factor does not change advantages that are divided by their group's spread.

Axes: B images, H and W image height and width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flowcredit.rewards.clip import ClipScore, clip_score, load_clip_model
from flowcredit.rewards.preprocessing import read_preprocessing


@dataclass(frozen=True)
class PickScore:
    """The reward: logit scale times cosine."""

    clip: ClipScore
    scale: float
    """exp of the model's trained ``logit_scale``; about 100."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32."""
        return self.scale * self.clip(images, prompts)

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many of the prompts are longer than the text encoder's context."""
        return self.clip.truncated(prompts)

    def modules(self) -> tuple[nn.Module, ...]:
        """The network, for `interfaces.HoldsModules`."""
        return self.clip.modules()


def load_pickscore(path: str, device: torch.device, processor: str | None = None) -> PickScore:
    """Load PickScore from local folders.

    Args:
        path: the folder of the ``CLIPModel``, as published under ``yuvalkirstain/PickScore_v1``.
        processor: the folder of its tokenizer and image processor; the authors take those of
            ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K``. None: they lie in ``path``.

    Raises:
        InputError: a folder that is missing or not complete.
    """
    model = load_clip_model(Path(path))
    files = Path(path if processor is None else processor)
    clip = clip_score(model, files, read_preprocessing(files), device)
    return PickScore(clip, model.logit_scale.float().exp().item())
