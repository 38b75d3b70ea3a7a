"""Arms, from a comparison file or from the command line, each a recipe with changes."""

import hashlib
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowcredit.compare.settings import ArmSettings, Changes, ComparisonSettings
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.recipe_io import load_recipe, load_settings
from flowcredit.text_file import read_text
from flowcredit.yaml_lines import parse_yaml

LONGEST_NAME = 80
"""Of the folder of a comparison from the command line, in characters."""
_ARM = "expected such as --arm 'one stride: recipes/my.yaml algorithm.strides=[1]'"


@dataclass(frozen=True)
class Arm:
    """A recipe with changes, under a name; ``slug`` names its folder.

    ``where`` says where the arm was asked for, ``places`` where each of its changes was.
    """

    name: str
    recipe: Path
    overrides: tuple[str, ...] = ()
    slug: str = ""
    where: str = ""
    places: Mapping[str, str] = field(default_factory=dict, compare=False)

    def load(self, more: Sequence[str] = ()) -> Recipe:
        """The arm's recipe, changed further. Raises InputError with the arm's name and place."""
        path = self.recipe / "recipe.yaml" if self.recipe.is_dir() else self.recipe
        try:
            return load_recipe(path, (*self.overrides, *more))
        except InputError as error:
            raise self.wrong(error) from None

    def wrong(self, error: InputError) -> InputError:
        """The same, told of this arm."""
        place = next((at for text, at in self.places.items() if f"'{text}'" in str(error)), self.where)
        return InputError(f"{place}: arm '{self.name}': {error}" if place else f"arm '{self.name}': {error}")


@dataclass(frozen=True)
class Comparison:
    """What is to be compared; ``budget`` is as it was written, None where none was."""

    name: str
    arms: tuple[Arm, ...]
    budget: str | None = None
    budget_from: str = "--budget"
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: tuple[int, ...] = ()
    points: int = 5
    images: int = 8
    title: str = ""
    beside: tuple[str, ...] = ()


def from_words(recipes: Sequence[str], arms: Sequence[str]) -> Comparison:
    """The comparison that the command line names: one file of arms, or recipes and ``--arm``s.

    Raises InputError where a file cannot be read, a name stands twice, or there is nothing to compare.
    """
    if len(recipes) == 1 and not arms and _is_comparison(Path(recipes[0])):
        return read_comparison(Path(recipes[0]))
    for recipe in recipes:
        if _is_comparison(Path(recipe)):
            raise InputError(f"{recipe}: is a comparison file; expected it alone, or recipes")
    named = [Arm(_name_of(recipe), Path(recipe)) for recipe in recipes] + [_arm(text) for text in arms]
    if not named:
        raise InputError(f"compare needs recipes, arms or a comparison file; {_ARM}")
    found = with_slugs(named)
    return Comparison(_joined([arm.slug for arm in found]), found)


def _joined(slugs: Sequence[str]) -> str:
    """A name for all of them; too long a one is cut, and told apart from others that begin so."""
    whole = "-vs-".join(slugs)
    if len(whole) <= LONGEST_NAME:
        return whole
    return _told_apart(whole[: LONGEST_NAME - 9].rstrip("-."), whole)


def read_comparison(path: Path) -> Comparison:
    """Read a comparison file. Raises InputError with file and line."""
    settings = load_settings(ComparisonSettings, path, what="a comparison")
    lines = parse_yaml(read_text(path, "a comparison in YAML"), str(path)).lines
    arms = []
    for place, arm in enumerate(settings.arms):
        common = {
            key: value for key, value in settings.set.items() if not any(_within(key, own) for own in arm.set)
        }
        at = {_override(key, value): f"{path}:{lines['set', key]}" for key, value in common.items()}
        at |= {
            _override(key, value): f"{path}:{lines['arms', place, 'set', key]}"
            for key, value in arm.set.items()
        }
        source = arm.recipe or settings.recipe
        assert source is not None
        whole = Arm(arm.name, Path(source), tuple(at), where=f"{path}:{lines['arms', place]}", places=at)
        for values in _combinations({**settings.grid, **arm.grid}):
            changed = {
                _override(key, value): f"{path}:{lines[_grid_of(arm, place, key)]}"
                for key, value in values.items()
            }
            label = ", ".join(
                [arm.name, *(f"{key.rpartition('.')[2]} {_short(v)}" for key, v in values.items())]
            )
            arms.append(
                replace(whole, name=label, overrides=(*whole.overrides, *changed), places={**at, **changed})
            )
    count = settings.seeds
    name = settings.name or re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "comparison"
    return Comparison(
        name=name,
        arms=with_slugs(arms),
        budget=settings.budget,
        budget_from=f"{path}:{lines['budget',]}" if settings.budget is not None else "--budget",
        seeds=tuple(range(count)) if isinstance(count, int) else count,
        steps=settings.steps,
        points=settings.points,
        images=settings.images,
        title=settings.title or "",
        beside=settings.beside,
    )


def with_slugs(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Arms with a folder's name each. Raises InputError where two have one name."""
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            raise InputError(
                f"{count} arms are called '{name}'; name them apart, by --arm 'another name: RECIPE ...' or"
                " name= in the recipes"
            )
    plain = [re.sub(r"[^a-z0-9.]+", "-", arm.name.lower()).strip("-.")[:60] for arm in arms]
    return tuple(
        replace(arm, slug=slug if slug and plain.count(slug) == 1 else _told_apart(slug, arm.name))
        for arm, slug in zip(arms, plain, strict=True)
    )


def changed_in_all(comparison: Comparison, overrides: Sequence[str]) -> Comparison:
    """The same with further changes in every arm, which win over the arms' own."""
    arms = tuple(replace(arm, overrides=(*arm.overrides, *overrides)) for arm in comparison.arms)
    return replace(comparison, arms=arms)


def _told_apart(slug: str, name: str) -> str:
    return f"{slug or 'arm'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _within(key: str, own: str) -> bool:
    """Whether an arm's own change replaces, or lies above, a common one."""
    return key == own or key.startswith(f"{own}.")


def _grid_of(arm: ArmSettings, place: int, key: str) -> tuple[str | int, ...]:
    return ("arms", place, "grid", key) if key in arm.grid else ("grid", key)


def _combinations(grid: Mapping[str, Sequence[Any]]) -> Iterator[Changes]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_comparison(path: Path) -> bool:
    """Whether a file is meant as a comparison: it has arms, or no model but what a comparison has."""
    if path.is_dir():
        return False
    value = parse_yaml(read_text(path, "a recipe or a comparison in YAML"), str(path)).value
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no settings; expected a recipe, or a comparison with arms")
    own = ComparisonSettings.model_fields.keys() - Recipe.model_fields.keys()
    return "arms" in value or ("model" not in value and bool(own & value.keys()))


def _name_of(recipe: str) -> str:
    path = Path(recipe)
    return load_recipe(path / "recipe.yaml" if path.is_dir() else path).name


def _arm(text: str) -> Arm:
    """``NAME: RECIPE SETTING=VALUE ...``, with quotes as in a shell around what holds blanks."""
    name, colon, rest = text.partition(":")
    where = f"--arm '{text}'"
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise InputError(f"{where}: {str(error).lower()}; {_ARM}") from None
    if not colon or not name.strip() or not words:
        raise InputError(f"{where}: expected NAME: RECIPE, and settings to change; {_ARM}")
    return Arm(name.strip(), Path(words[0]), tuple(words[1:]), where=where)
