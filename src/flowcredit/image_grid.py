"""Images side by side in one PNG, and back: small images are enlarged pixel by pixel.

Axes: N images, H and W their height and width.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

_GROUND = 255


@dataclass(frozen=True)
class Layout:
    """Where the images lie in their grid: row by row, ``gap`` pixels around each."""

    count: int
    columns: int
    tile_height: int
    tile_width: int
    gap: int
    enlarged: int
    """Side in pixels of one pixel of the original."""


def save_grid(
    images: Tensor, path: Path, *, columns: int | None = None, smallest_tile: int = 128, gap: int = 4
) -> Layout:
    """Write [N, 3, H, W] images in [0, 1] to a PNG, each enlarged by a whole factor to ``smallest_tile``.

    Raises:
        ValueError: no image, or not of that shape.
    """
    if images.ndim != 4 or images.shape[1] != 3 or len(images) == 0:
        raise ValueError(f"got images of shape {list(images.shape)}, expected [N, 3, H, W] with N at least 1")
    enlarged = max(1, math.ceil(smallest_tile / min(images.shape[2:])))
    pixels = to_pixels(images).repeat(enlarged, axis=1).repeat(enlarged, axis=2)
    count, height, width, _ = pixels.shape
    columns = min(count, columns or math.ceil(math.sqrt(count)))
    layout = Layout(count, columns, height, width, gap, enlarged)
    rows = math.ceil(count / columns)
    canvas = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), _GROUND, np.uint8)
    for index, image in enumerate(pixels):
        left, top, right, bottom = tile_box(layout, index)
        canvas[top:bottom, left:right] = image
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(canvas).save(path)
    return layout


def save_image(image: Tensor, path: Path) -> None:
    """Write one [3, H, W] image in [0, 1] to a PNG of its own size."""
    Image.fromarray(to_pixels(image[None])[0]).save(path)


def tile_box(layout: Layout, index: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of an image in its grid, in pixels, as Pillow's ``crop`` takes them."""
    row, column = divmod(index, layout.columns)
    top = layout.gap + row * (layout.tile_height + layout.gap)
    left = layout.gap + column * (layout.tile_width + layout.gap)
    return left, top, left + layout.tile_width, top + layout.tile_height


def to_pixels(images: Tensor) -> NDArray[np.uint8]:
    """[N, 3, H, W] in [0, 1] to [N, H, W, 3] bytes, rounded."""
    scaled = (images.detach().float().clamp(0, 1) * 255).round()
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
