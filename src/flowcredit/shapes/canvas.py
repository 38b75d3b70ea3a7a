"""Silhouettes and pictures of the bundled world: placed objects to 32 x 32 images, by coverage.

Axes: N images, J objects of an image, H and W pixels. Lengths are in pixels, y points down. An object is
placed by its centroid and its area radius r: whatever its shape, its area is pi r^2. The checker compares
what it finds with these same silhouettes, so that a perfect picture fits perfectly.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowcredit.shapes.scenes import COLOURS, SHAPES

SIZE = 32
GROUND = (20, 20, 28)
Array = NDArray[np.floating]

# Centroid to the farthest point of the outline, over the area radius.
EXTENT = {"circle": 1.0, "square": 1.26, "triangle": 1.56, "cross": 1.26, "ring": 1.16}
_SQUARE = math.sqrt(math.pi) / 2
_TRIANGLE = math.sqrt(math.pi / math.sqrt(27))
_CROSS = math.sqrt(math.pi / 20)
_RING = 1 / math.sqrt(0.75)


def signed_distance(shape: str, x: Array, y: Array, r: Array | float) -> Array:
    """Distance to the outline, negative inside; exact across edges, a lower bound past corners."""
    ax, ay = np.abs(x), np.abs(y)
    if shape == "circle":
        return np.hypot(x, y) - r
    if shape == "square":
        return np.maximum(ax, ay) - _SQUARE * r
    if shape == "triangle":
        return np.maximum(y, math.sqrt(0.75) * ax - 0.5 * y) - _TRIANGLE * r
    if shape == "cross":
        arm, half = 3 * _CROSS * r, _CROSS * r
        return np.minimum(np.maximum(ax - arm, ay - half), np.maximum(ax - half, ay - arm))
    if shape == "ring":
        rho = np.hypot(x, y)
        return np.maximum(rho - _RING * r, 0.5 * _RING * r - rho)
    raise ValueError(f"no shape is named {shape!r}; there are {', '.join(SHAPES)}")


def coverage(shape: str, x: Array, y: Array, r: Array | float) -> Array:
    """Share of each pixel that the silhouette covers, in [0, 1]."""
    return np.clip(0.5 - signed_distance(shape, x, y, r), 0.0, 1.0)


@dataclass(frozen=True)
class Placed:
    """One object on the canvas: centroid and area radius in pixels, colour in [0, 1].

    ``wobble`` (amplitude, lobes, phase) makes the outline ragged: the radius is modulated by
    1 + amplitude sin(lobes * angle + phase).
    """

    shape: str
    x: float
    y: float
    r: float
    rgb: tuple[float, float, float]
    wobble: tuple[float, int, float] = (0.0, 2, 0.0)


def colour_rgb(name: str) -> tuple[float, float, float]:
    """A palette colour in [0, 1]."""
    red, green, blue = COLOURS[name]
    return red / 255, green / 255, blue / 255


def render(pictures: list[list[Placed]], grounds: Array | None = None) -> NDArray[np.float32]:
    """Pictures to [N, 3, H, W] float32 images in [0, 1]; ``grounds`` [N, 3] replaces the standard ground."""
    count = len(pictures)
    base = np.asarray(GROUND, np.float32) / 255
    ground = np.broadcast_to(base, (count, 3)) if grounds is None else grounds
    images = np.repeat(ground.astype(np.float32)[:, :, None, None], SIZE, 2).repeat(SIZE, 3)
    by_shape: dict[str, list[tuple[int, Placed]]] = {}
    for n, picture in enumerate(pictures):
        for placed in picture:
            by_shape.setdefault(placed.shape, []).append((n, placed))
    axis = np.arange(SIZE, dtype=np.float32) + 0.5
    for shape, items in by_shape.items():
        values = [(p.x, p.y, p.r, *p.rgb, *p.wobble) for _, p in items]
        x0, y0, r, red, green, blue, amplitude, lobes, phase = (
            column[:, None, None] for column in np.asarray(values, np.float32).T
        )
        x, y = axis[None, None, :] - x0, axis[None, :, None] - y0
        x, y = np.broadcast_arrays(x, y)
        ragged = r * (1 + amplitude * np.sin(lobes * np.arctan2(y, x) + phase))
        alpha = coverage(shape, x, y, ragged)
        for j, (n, _) in enumerate(items):
            rgb = np.array([red[j, 0, 0], green[j, 0, 0], blue[j, 0, 0]], np.float32)[:, None, None]
            images[n] += alpha[j] * (rgb - images[n])
    return images
