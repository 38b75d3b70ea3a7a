"""Rewards of one line, for tests that need any."""

from collections.abc import Sequence

from torch import Tensor


def redness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Red minus green, mean over the image."""
    return (images[:, 0] - images[:, 1]).mean((1, 2))


def brightness(images: Tensor, prompts: Sequence[str]) -> list[float]:
    return images.mean((1, 2, 3)).tolist()


def contrast(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The deviation of an image's pixels."""
    return images.flatten(1).std(1)
