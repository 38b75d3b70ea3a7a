"""Scenes to placed objects: clean ones to test with, sloppy ones to learn from.

The base model is meant to be worth aligning, as models trained on the web are: a share of its training
pictures differs from their captions in a colour, a shape, a count or a side, and outlines are ragged.
"""

import math
from dataclasses import dataclass

import numpy as np

from flowcredit.shapes.canvas import EXTENT, GROUND, Array, Placed, colour_rgb
from flowcredit.shapes.scenes import COLOURS, RELATIONS, SHAPES, Asked, Scene

CENTRES = (7.0, 16.0, 25.0)
"""Objects stand on nine places, a little off: what a small model can learn to draw in an hour."""
JITTER = 0.75
"""How far off, at most, along either axis; in pixels."""
RADIUS = (3.6, 4.2)
"""Range of the area radius, in pixels."""


@dataclass(frozen=True)
class Sloppiness:
    """How often a training picture differs from its caption: probabilities, but for the last three.

    ``clutter`` is an object that nobody asked for, beside up to three that were. ``ordered`` is how often
    what is named first stands on the left, or above if both share a column; a relation overrides it.
    ``dull`` are the smallest and largest share of grey in a picture's colours;
    ``wobble`` is the largest amplitude of a ragged outline, as a share of the radius; ``crowd`` scales the
    distance that two objects keep: below 1 some touch, which a checker cannot tell from one object.
    """

    colour: float = 0.10
    shape: float = 0.10
    count: float = 0.15
    extra: float = 0.05
    relation: float = 0.20
    ragged: float = 0.4
    clutter: float = 0.0
    ordered: float = 0.0
    dull: tuple[float, float] = (0.0, 0.0)
    wobble: float = 0.14
    crowd: float = 0.92


CLEAN = Sloppiness(colour=0, shape=0, count=0, extra=0, relation=0, ragged=0, wobble=0, crowd=1.05)


GREY = 0.45
"""Where dull colours lie: in [0, 1], in all three channels."""

Spot = tuple[str, float, float, float]
"""Shape, centroid x and y, area radius; in pixels."""


def _apart(placed: list[Spot], new: Spot, crowd: float) -> bool:
    shape, x, y, r = new
    for other, ox, oy, o_r in placed:
        reach = EXTENT[shape] * r + EXTENT[other] * o_r
        if math.hypot(x - ox, y - oy) < crowd * reach + 1.5:
            return False
    return True


def related(relation: str, dx: float, dy: float) -> float:
    """How far the second object lies on the wanted side of the first, less half the drift across, in pixels.

    ``dx``, ``dy`` lead from the first object to the second.
    """
    along, across = {
        "left of": (dx, dy),
        "right of": (-dx, dy),
        "above": (dy, dx),
        "below": (-dy, dx),
    }[relation]
    return along - 0.5 * abs(across)


def _try_place(
    rng: np.random.Generator, shapes: list[str], relation: str | None, crowd: float
) -> list[Spot] | None:
    places = rng.permutation([(x, y) for x in CENTRES for y in CENTRES])
    placed: list[Spot] = []
    for shape in shapes:
        for x, y in places + rng.uniform(-JITTER, JITTER, places.shape):
            spot = (shape, float(x), float(y), float(rng.uniform(*RADIUS)))
            if not _apart(placed, spot, crowd):
                continue
            if relation and placed and related(relation, x - placed[0][1], y - placed[0][2]) < 4:
                continue
            placed.append(spot)
            break
        else:
            return None
    return placed


def _in_reading_order(spots: list[Spot]) -> bool:
    """Whether the first of the spots stands left of the second, or above it in the same column."""
    if len(spots) < 2:
        return True
    (_, x, y, _), (_, other_x, other_y, _) = spots[:2]
    return x + 0.3 * y < other_x + 0.3 * other_y


def place(
    rng: np.random.Generator, objects: tuple[Asked, ...], relation: str | None, sloppy: Sloppiness
) -> list[Placed]:
    """Objects that do not touch, inside the canvas, on the sides asked for; free colours are drawn."""
    shapes = [o.shape for o in objects]
    ordered = relation is None and sloppy.ordered > 0 and rng.random() < sloppy.ordered
    for _ in range(1000):
        spots = _try_place(rng, shapes, relation, sloppy.crowd)
        if spots is not None and (not ordered or _in_reading_order(spots)):
            break
    else:
        raise AssertionError(f"no room for {shapes}")
    grey = rng.uniform(*sloppy.dull) if sloppy.dull[1] > 0 else 0.0
    picture = []
    for asked, (shape, x, y, r) in zip(objects, spots, strict=True):
        colour = asked.colour or str(rng.choice(list(COLOURS)))
        jitter = rng.uniform(-0.04, 0.04, 3)
        rgb = np.clip((1 - grey) * np.asarray(colour_rgb(colour)) + grey * GREY + jitter, 0, 1)
        wobble = (0.0, 2, 0.0)
        if rng.random() < sloppy.ragged:
            amplitude = rng.uniform(0, sloppy.wobble)
            wobble = (float(amplitude), int(rng.integers(2, 6)), float(rng.uniform(0, 2 * math.pi)))
        picture.append(Placed(shape, x, y, r, (float(rgb[0]), float(rgb[1]), float(rgb[2])), wobble))
    return picture


def _other(rng: np.random.Generator, names: tuple[str, ...], but: str | None) -> str:
    return str(rng.choice([name for name in names if name != but]))


def misread(
    rng: np.random.Generator, scene: Scene, sloppy: Sloppiness
) -> tuple[tuple[Asked, ...], str | None]:
    """What a careless illustrator draws for a scene."""
    objects = list(scene.objects)
    if scene.task == "counting":
        if rng.random() < sloppy.count:
            objects = objects[:1] * int(rng.choice([n for n in (1, 2, 3, 4) if n != len(objects)]))
        shape, colour = objects[0].shape, objects[0].colour
        if rng.random() < sloppy.shape:
            shape = _other(rng, SHAPES, shape)
        if rng.random() < sloppy.colour:
            colour = _other(rng, tuple(COLOURS), colour)
        return _cluttered(rng, [Asked(shape, colour)] * len(objects), sloppy), None
    for i, asked in enumerate(objects):
        shape, colour = asked.shape, asked.colour
        if rng.random() < sloppy.shape:
            shape = _other(rng, SHAPES, shape)
        if colour is not None and rng.random() < sloppy.colour:
            colour = _other(rng, tuple(COLOURS), colour)
        objects[i] = Asked(shape, colour)
    relation = scene.relation
    if relation is not None and rng.random() < sloppy.relation:
        relation = _other(rng, RELATIONS, relation)
    if rng.random() < sloppy.extra:
        extra = Asked(str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS))))
        objects = objects[:1] if len(objects) > 1 and rng.random() < 0.5 else [*objects, extra]
    if len(objects) < 2:
        relation = None
    return _cluttered(rng, objects, sloppy), relation


def _cluttered(rng: np.random.Generator, objects: list[Asked], sloppy: Sloppiness) -> tuple[Asked, ...]:
    if sloppy.clutter > 0 and len(objects) < 4 and rng.random() < sloppy.clutter:
        objects = [*objects, Asked(str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS))))]
    return tuple(objects)


def draw(
    rng: np.random.Generator, scenes: list[Scene], sloppy: Sloppiness
) -> tuple[list[list[Placed]], Array]:
    """A picture and a ground colour for every scene, ready for ``render``."""
    pictures = [place(rng, *misread(rng, scene, sloppy), sloppy) for scene in scenes]
    grounds = np.asarray(GROUND) / 255 * rng.uniform(0.6, 1.4, (len(scenes), 1))
    return pictures, grounds
