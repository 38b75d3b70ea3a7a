"""What is in a picture, found by computation: the exact reward of the bundled world.

The ground is the median colour; what differs from it falls into connected parts; each part's colour is the
palette's nearest and its shape the ideal silhouette, of the same area and centroid, that overlaps it best.

Axes: N images, H and W pixels; lengths are in pixels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.optimize import linear_sum_assignment

from flowcredit.shapes.canvas import colour_rgb, coverage
from flowcredit.shapes.drawing import related
from flowcredit.shapes.scenes import COLOURS, SHAPES

Array = NDArray[np.floating]
_PALETTE = np.array([colour_rgb(name) for name in COLOURS], np.float32)
_NAMES = tuple(COLOURS)

FOREGROUND = 0.22
"""Distance from the ground, largest over channels, from which a pixel belongs to an object."""
SMALLEST = 10
"""Pixels of the smallest part that counts as an object."""
MOST = 8
"""Objects that are looked at, the largest first; no prompt asks for more than half as many."""
RECOGNISED = 0.72
"""Overlap with its ideal silhouette from which an object has a shape at all."""
COLOUR_SPREAD = 0.30
"""RGB distance at which the credit for a colour has fallen to 1/e."""


@dataclass(frozen=True)
class Found:
    """One object of a picture: centroid in pixels, mean colour, overlap with each ideal silhouette."""

    x: float
    y: float
    rgb: Array
    overlaps: Array

    @property
    def shape(self) -> str | None:
        """The best fitting shape, None if none fits."""
        best = int(self.overlaps.argmax())
        return SHAPES[best] if self.overlaps[best] >= RECOGNISED else None

    @property
    def colour(self) -> str:
        """The nearest palette colour."""
        return _NAMES[int(_distances(self.rgb).argmin())]


def _distances(rgb: Array) -> Array:
    return np.sqrt(((_PALETTE - rgb) ** 2).sum(-1))


def _split_by_colour(part: NDArray[np.bool_], image: Array) -> list[NDArray[np.bool_]]:
    """Objects of different colours that touch: a part is split when a second colour fills a fifth of it."""
    ys, xs = np.nonzero(part)
    pixels = image[:, ys, xs].T
    nearest = ((pixels[:, None, :] - _PALETTE) ** 2).sum(-1)
    classes = np.where(nearest.min(1) < 0.08, nearest.argmin(1), -1)
    counts = np.bincount(classes[classes >= 0], minlength=len(_NAMES))
    large = [c for c in np.argsort(-counts) if counts[c] >= max(SMALLEST, 0.2 * len(ys))]
    if len(large) < 2:
        return [part]
    parts = []
    for c in large:
        mask = np.zeros_like(part)
        mask[ys[classes == c], xs[classes == c]] = True
        labels, count = ndimage.label(mask)
        parts += [labels == i + 1 for i in range(count) if (labels == i + 1).sum() >= SMALLEST]
    return parts


def _measure(part: NDArray[np.bool_], image: Array, ground: Array, distance: Array) -> Found:
    rows, columns = (np.flatnonzero(part.any(axis)) for axis in (1, 0))
    window = (slice(max(0, rows[0] - 1), rows[-1] + 2), slice(max(0, columns[0] - 1), columns[-1] + 2))
    part, image, distance = part[window], image[:, *window], distance[window]
    inside = np.sort(distance[part])
    core = part & (distance >= 0.75 * inside[int(0.8 * (len(inside) - 1))])
    rgb = image[:, core].mean(1)
    towards = rgb - ground
    alpha = np.tensordot(towards, image - ground[:, None, None], 1) / (towards @ towards)
    alpha = np.clip(alpha, 0, 1) * ndimage.binary_dilation(part)
    area = float(alpha.sum())
    y = np.arange(alpha.shape[0]) + window[0].start + 0.5
    x = np.arange(alpha.shape[1]) + window[1].start + 0.5
    centre_y, centre_x = float(alpha.sum(1) @ y) / area, float(alpha.sum(0) @ x) / area
    dx, dy = np.broadcast_arrays(x[None, :] - centre_x, y[:, None] - centre_y)
    r = math.sqrt(area / math.pi)
    shared = np.array([np.minimum(coverage(shape, dx, dy, r), alpha).sum() for shape in SHAPES])
    # Both silhouettes have the same area, wherever the ideal one lies outside the window.
    return Found(centre_x, centre_y, rgb, shared / (2 * area - shared))


def find_objects(image: Array) -> list[Found]:
    """Objects of a [3, H, W] image in [0, 1]."""
    ground = np.median(image.reshape(3, -1), axis=1)
    distance = np.abs(image - ground[:, None, None]).max(0)
    labels, count = ndimage.label(distance > FOREGROUND)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    largest = [i for i in np.argsort(-sizes, kind="stable") if sizes[i] >= SMALLEST][:MOST]
    parts = [part for i in largest for part in _split_by_colour(labels == i + 1, image)]
    return [_measure(part, image, ground, distance) for part in parts[:MOST]]


def _colour_credit(found: Found, colour: str | None) -> float:
    distances = _distances(found.rgb)
    distance = distances.min() if colour is None else distances[_NAMES.index(colour)]
    return float(np.exp(-((distance / COLOUR_SPREAD) ** 2)))


def _shape_credit(found: Found, shape: str) -> float:
    overlap = float(found.overlaps[SHAPES.index(shape)])
    return 0.5 * (found.shape == shape) + 0.5 * min(1.0, max(0.0, (overlap - 0.4) / 0.58))


def _matches(found: Found, asked: Mapping[str, Any]) -> bool:
    return found.shape == asked["shape"] and asked["colour"] in (None, found.colour)


def check(image: Array, objects: Sequence[Mapping[str, Any]], relation: str | None) -> tuple[float, bool]:
    """Graded score in [0, 1] and exact match of a [3, H, W] image in [0, 1].

    Every object asked for is paired with one that was found so that the credit is largest. A pair earns
    45 % for its colour and 55 % for its shape (half for being recognised as it, half for how well the
    silhouette fits); the sum is divided by the larger of the two counts, so that missing and surplus
    objects cost alike. Where a relation is asked for, it makes a quarter of the score. An exact match has
    the right count, shapes, colours and relation.
    """
    found = find_objects(image)
    if not found:
        return 0.0, False
    credit = np.array(
        [
            [0.45 * _colour_credit(f, o["colour"]) + 0.55 * _shape_credit(f, o["shape"]) for f in found]
            for o in objects
        ]
    )
    rows, columns = linear_sum_assignment(-credit)
    score = float(credit[rows, columns].sum()) / max(len(objects), len(found))
    exact = len(found) == len(objects)
    exact = exact and all(_matches(found[j], objects[i]) for i, j in zip(rows, columns, strict=True))
    if relation is not None:
        pair = dict(zip(rows.tolist(), columns.tolist(), strict=True))
        side = -math.inf
        if 0 in pair and 1 in pair:
            first, second = found[pair[0]], found[pair[1]]
            side = related(relation, second.x - first.x, second.y - first.y)
        # Each object weighs in: a relation between wrong objects is worth little.
        held = credit[rows, columns].mean() / (1 + math.exp(-side / 2)) if side > -50 else 0.0
        score = 0.75 * score + 0.25 * float(held)
        exact = exact and side > 2
    return score, bool(exact)


def check_batch(
    images: Array, objects: Sequence[Sequence[Mapping[str, Any]]], relations: Sequence[str | None]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """``check`` for [N, 3, H, W] images: graded scores [N] and exact matches [N].

    Raises ValueError if the three lengths differ.
    """
    if not len(images) == len(objects) == len(relations):
        raise ValueError(f"{len(images)} images, {len(objects)} object lists, {len(relations)} relations")
    checked = [check(i, o, r) for i, o, r in zip(images, objects, relations, strict=True)]
    return np.array([c[0] for c in checked]), np.array([c[1] for c in checked])
