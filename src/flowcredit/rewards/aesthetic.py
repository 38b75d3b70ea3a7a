"""LAION's improved aesthetic predictor: how much people like an image, whatever the prompt; about 4 to 7.

Schuhmann, https://github.com/christophschuhmann/improved-aesthetic-predictor (2022): the image embedding of
OpenAI's CLIP ViT-L/14, of length one, through five linear layers without activations.

Axes: B images, H and W image height and width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.rewards.clip import ClipScore, load_clip_score
from flowcredit.rewards.files import linear_head, read_tensors


@dataclass(frozen=True)
class Aesthetic:
    """The reward: the head's output, in the points of the ratings it was trained on (1 to 10)."""

    clip: ClipScore
    head: nn.Module

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] to [B] float32; the prompts are not read."""
        embedding = self.clip.embed_images(images)
        with torch.no_grad(), torch.autocast(embedding.device.type, enabled=False):
            scores: Tensor = self.head(embedding)
        return scores.squeeze(-1)

    def modules(self) -> tuple[nn.Module, ...]:
        """The networks, for `interfaces.HoldsModules`."""
        return (*self.clip.modules(), self.head)


def load_aesthetic(path: str, head: str, device: torch.device) -> Aesthetic:
    """Load the predictor from local files.

    Args:
        path: the folder of a transformers ``CLIPModel``: ``openai/clip-vit-large-patch14``.
        head: ``sac+logos+ava1-l14-linearMSE.pth`` as published in the project's repository (read without
            unpickling), or the same tensors as ``.safetensors``.

    Raises:
        InputError: a file or folder that is missing or not complete, or a head for another CLIP.
    """
    clip = load_clip_score(path, device)
    file = Path(head)
    layers = linear_head(read_tensors(file, "the aesthetic predictor's head"), "layers.", file)
    takes, width = layers[0].in_features, clip.model.config.projection_dim
    if takes != width:
        raise InputError(
            f"{file}: takes an embedding of {takes} numbers, but the CLIP in {path} gives {width}; expected "
            "the CLIP that the head was trained on: ViT-L/14, 768 numbers"
        )
    return Aesthetic(clip, layers.to(device))
