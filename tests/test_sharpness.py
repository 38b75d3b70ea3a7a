"""Sharpness against the paper's formula, written here over scipy's filters."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.scoring import score_images
from tiny_clip import random_images


def slope(grey: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Sobel's: the difference of the neighbours along the axis, smoothed across it."""
    across = ndimage.convolve1d(grey, [0.25, 0.5, 0.25], axis=1 - axis, mode="reflect")
    return np.abs(ndimage.convolve1d(across, [0.5, 0, -0.5], axis=axis, mode="reflect"))


def paper(image: Tensor) -> float:
    """One minus what share of the variation along the worse axis is left by a second blur."""
    pixels = (image * 255).round().to(torch.float64).numpy() / 255
    grey = np.tensordot([0.2125, 0.7154, 0.0721], pixels, axes=1)
    blurs = []
    for axis in (0, 1):
        blurred = ndimage.convolve1d(grey, np.full(11, 1 / 11), axis=axis, mode="reflect")
        before = slope(grey, axis)
        lost = np.clip(before - slope(blurred, axis), 0, None)
        inner = (slice(2, grey.shape[0] - 1), slice(2, grey.shape[1] - 1))
        # Where nothing varies there is nothing to lose: blurred entirely.
        blurs.append(1 - lost[inner].sum() / max(before[inner].sum(), 1e-12))
    return 1 - max(blurs)


def test_sharpness_is_the_papers_whatever_the_batch() -> None:
    pytest.importorskip("skimage")
    images = random_images(4, 40, 56)
    images[1] = torch.nn.functional.avg_pool2d(images[1:2], 7, stride=1, padding=3)[0]
    images[2] = images[2].mean(dim=1, keepdim=True)  # rows alone differ: nothing sharp across them
    images[3] = torch.rand(3, 40, 56, generator=torch.Generator().manual_seed(1))
    rewards = {"sharpness": load_reward("sharpness", {}, "cpu")}
    together = score_images(rewards, images, ["a"] * 4, {}, batch_size=4)[0]
    alone = score_images(rewards, images, ["b"] * 4, {}, batch_size=1)[0]
    expected = torch.tensor([paper(image) for image in images], dtype=torch.float32)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(together, alone, atol=0, rtol=0)
    assert together[1] < together[0] < together[3]


def test_a_flat_image_is_not_sharp() -> None:
    pytest.importorskip("skimage")
    reward: Any = load_reward("sharpness", {}, "cpu")
    flat = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32), torch.full((3, 32, 32), 0.3)])
    assert reward(flat, ["a"] * 3).tolist() == [0.0, 0.0, 0.0]


def test_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.measure", None)
    with pytest.raises(InputError, match=r"'sharpness' needs .*pip install 'flowcredit\[rewards\]'"):
        load_reward("sharpness", {}, "cpu")


def test_it_has_no_options() -> None:
    with pytest.raises(InputError, match="unknown option 'h_size'; it has no options"):
        load_reward("sharpness", {"h_size": 3}, "cpu")
