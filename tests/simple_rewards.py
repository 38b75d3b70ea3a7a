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


def redness_but_of_blue(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Redness, and the same for every image of a prompt with blue in it: its group teaches nothing."""
    alike = [0.0 if "blue" in prompt else 1.0 for prompt in prompts]
    return redness(images, prompts) * images.new_tensor(alike)


def huge_for_blue(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Redness; for prompts with blue in it numbers whose mean is no finite float32."""
    huge = images.new_tensor([3e38 if "blue" in prompt else 0.0 for prompt in prompts])
    return redness(images, prompts) + huge
