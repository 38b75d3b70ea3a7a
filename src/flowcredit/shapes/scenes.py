"""What can be asked of the bundled world: objects, prompts of GenEval's six kinds, and their split.

A scene is what a prompt asks for, not yet placed on a canvas. The two prompt sets are split by content
(which objects, colours, counts and relation), so that no held-out request was ever trained on.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLOURS = {
    "red": (228, 52, 52),
    "yellow": (240, 216, 56),
    "green": (60, 196, 84),
    "cyan": (64, 208, 216),
    "blue": (72, 100, 240),
    "purple": (188, 72, 220),
    "white": (232, 232, 232),
}
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
TASKS = ("single_object", "two_objects", "counting", "colors", "position", "attribute_binding")
HELD_OUT_SHARE = 5
"""One content in this many is held out."""


@dataclass(frozen=True)
class Asked:
    """One object that a prompt asks for; ``colour`` None means that any colour will do."""

    shape: str
    colour: str | None


@dataclass(frozen=True)
class Scene:
    """A prompt and what it asks for; ``relation`` is of the first object to the second."""

    task: str
    prompt: str
    objects: tuple[Asked, ...]
    relation: str | None = None

    def record(self) -> dict[str, Any]:
        """The scene as a line of a prompt file."""
        objects = [{"shape": o.shape, "colour": o.colour} for o in self.objects]
        return {"prompt": self.prompt, "task": self.task, "objects": objects, "relation": self.relation}


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def single_object() -> Iterator[Scene]:
    for colour, shape in itertools.product(COLOURS, SHAPES):
        yield Scene("single_object", f"a {colour} {shape}", (Asked(shape, colour),))


def two_objects() -> Iterator[Scene]:
    for first, second in itertools.permutations(SHAPES, 2):
        yield Scene("two_objects", f"a {first} and a {second}", (Asked(first, None), Asked(second, None)))


def counting() -> Iterator[Scene]:
    for count, colour, shape in itertools.product(NUMBERS, COLOURS, SHAPES):
        prompt = f"{NUMBERS[count]} {colour} {plural(shape)}"
        yield Scene("counting", prompt, (Asked(shape, colour),) * count)


def colors() -> Iterator[Scene]:
    for colour, (first, second) in itertools.product(COLOURS, itertools.permutations(SHAPES, 2)):
        prompt = f"a {first} and a {second} , both {colour}"
        yield Scene("colors", prompt.replace(" ,", ","), (Asked(first, colour), Asked(second, colour)))


def position() -> Iterator[Scene]:
    for relation, (c1, c2), (s1, s2) in itertools.product(
        RELATIONS, itertools.permutations(COLOURS, 2), itertools.permutations(SHAPES, 2)
    ):
        prompt = f"a {c1} {s1} {relation} a {c2} {s2}"
        yield Scene("position", prompt, (Asked(s1, c1), Asked(s2, c2)), relation)


def attribute_binding() -> Iterator[Scene]:
    for (c1, c2), (s1, s2) in itertools.product(
        itertools.permutations(COLOURS, 2), itertools.permutations(SHAPES, 2)
    ):
        yield Scene("attribute_binding", f"a {c1} {s1} and a {c2} {s2}", (Asked(s1, c1), Asked(s2, c2)))


@cache
def all_scenes() -> Mapping[str, tuple[Scene, ...]]:
    """Every scene there is, by task."""
    makers = (single_object, two_objects, counting, colors, position, attribute_binding)
    return MappingProxyType({task: tuple(make()) for task, make in zip(TASKS, makers, strict=True)})


@cache
def _by_prompt() -> dict[str, Scene]:
    return {scene.prompt: scene for scenes in all_scenes().values() for scene in scenes}


def scene_of(text: str) -> Scene | None:
    """The scene that a typed prompt names, whatever its case, spaces and full stop; None for other texts."""
    return _by_prompt().get(" ".join(text.lower().rstrip(". ").split()))


def is_held_out(scene: Scene) -> bool:
    """Whether the content is held out; the order in which two objects are named does not count.

    ``position`` keeps its order, but "A left of B" and "B right of A" are one content.
    """
    named = sorted(f"{o.colour}/{o.shape}" for o in scene.objects)
    if scene.relation is not None:
        opposite = {"left of": "right of", "above": "below"}
        first, second = (f"{o.colour}/{o.shape}" for o in scene.objects)
        inverse = {v: k for k, v in opposite.items()}
        if scene.relation in inverse:
            first, second, relation = second, first, inverse[scene.relation]
        else:
            relation = scene.relation
        named = [first, relation, second]
    digest = hashlib.sha256(f"{scene.task}:{'|'.join(named)}".encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0
