"""GenEval's rules on found objects: counts, colours and positions, right or wrong, or by degrees.

Ghosh et al., "GenEval", arXiv 2310.11513, and its released evaluation; by degrees as Flow-GRPO (arXiv
2505.05470) rewards it. Nothing here looks at an image: objects come with a class, a box and a confidence.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POSITION_MARGIN = 0.1
"""Share of both objects' sizes by which their centres must lie apart to be beside or above one another."""


@dataclass(frozen=True)
class Found:
    """An object in an image: its box (left, top, right, bottom) in pixels, and the detector's confidence."""

    box: tuple[float, float, float, float]
    confidence: float


@dataclass(frozen=True)
class Wanted:
    """One entry of a prompt's ``include`` or ``exclude``."""

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None
    """A relation ("left of") to the objects of an earlier entry, by its place in the list."""


Objects = Mapping[str, Sequence[Found]]
"""What was found by class, the most confident first."""
ColorsOf = Callable[[str, Sequence[Found]], Sequence[str]]
"""Names a colour for each object of a class."""


def read_wanted(entries: Sequence[Mapping[str, Any]], column: str) -> tuple[Wanted, ...]:
    """Entries of GenEval's metadata; ValueError where one is not of its format."""
    result: list[Wanted] = []
    for place, entry in enumerate(entries):
        where = f"{column}, entry {place + 1}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("class"), str):
            raise ValueError(f"{where} is {entry!r}: expected an object with the keys class and count")
        count, position = entry.get("count"), entry.get("position")
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{where}: count is {count!r}; expected a whole number, 1 or more")
        if position is not None:
            relation, target = position
            if relation not in RELATIONS or not isinstance(target, int) or not 0 <= target < place:
                raise ValueError(
                    f"{where}: position is {position!r}; expected one of {', '.join(RELATIONS)} and the place"
                    " of an earlier entry"
                )
            position = (relation, target)
        result.append(Wanted(entry["class"], count, entry.get("color"), position))
    return tuple(result)


RELATIONS = ("left of", "right of", "above", "below")


def relations(a: Found, b: Found, margin: float = POSITION_MARGIN) -> frozenset[str]:
    """How object a lies to object b: none, one or two of ``RELATIONS``."""
    centres = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in (a.box, b.box)]
    offset = [centres[0][axis] - centres[1][axis] for axis in (0, 1)]
    sizes = [sum(abs(box[axis + 2] - box[axis]) for box in (a.box, b.box)) for axis in (0, 1)]
    beyond = [
        math.copysign(max(abs(offset[axis]) - margin * sizes[axis], 0), offset[axis]) for axis in (0, 1)
    ]
    if max(map(abs, beyond)) < 1e-3:
        return frozenset()
    dx, dy = (part / math.hypot(*offset) for part in beyond)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return frozenset(name for name, yes in holds.items() if yes)


def is_right(
    wanted: Sequence[Wanted], unwanted: Sequence[Wanted], objects: Objects, colors_of: ColorsOf
) -> bool:
    """GenEval's own verdict.

    Of each class the most confident objects count, as many as are wanted; more may be there unless
    ``unwanted`` says so. All of them must have the colour and lie as asked to all those of the other entry.
    """
    groups: list[Sequence[Found] | None] = []
    for entry in wanted:
        found = objects.get(entry.name, ())[: entry.count]
        right = len(found) == entry.count
        if right and entry.color is not None:
            right = all(color == entry.color for color in colors_of(entry.name, found))
        if right and entry.position is not None:
            right = _lies(found, groups, entry.position)
        groups.append(found if right else None)
    few_enough = all(len(objects.get(entry.name, ())) < entry.count for entry in unwanted)
    return few_enough and all(group is not None for group in groups)


def degree(wanted: Sequence[Wanted], objects: Objects, colors_of: ColorsOf) -> float:
    """By degrees, at most 1: the mean over all that is asked for of ``1 - |found - wanted| / wanted``.

    Each entry asks for a count and perhaps for a colour and a position; these two give nothing unless the
    count is exact, and the position nothing unless the colour is too. Far too many objects give less than 0,
    as in Flow-GRPO.
    """
    parts: list[float] = []
    groups: list[Sequence[Found] | None] = []
    for entry in wanted:
        found = objects.get(entry.name, ())
        parts.append(1 - abs(len(found) - entry.count) / entry.count)
        right = len(found) == entry.count
        if entry.color is not None:
            share = 0.0
            if right:
                share = sum(color == entry.color for color in colors_of(entry.name, found)) / entry.count
            parts.append(share)
            right = share == 1
        if entry.position is not None:
            right = right and _lies(found, groups, entry.position)
            parts.append(float(right))
        groups.append(found if right else None)
    return sum(parts) / len(parts)


def _lies(
    found: Sequence[Found], groups: Sequence[Sequence[Found] | None], position: tuple[str, int]
) -> bool:
    relation, target = position
    others = groups[target]
    return others is not None and all(relation in relations(a, b) for a in found for b in others)
