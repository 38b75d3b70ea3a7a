"""Where a run came from: the nearest of the recipes that come along, what differs, and how to repeat it."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from flowcredit.config import Recipe
from flowcredit.recipe_io import Change, recipe_diff
from flowcredit.report.run_data import RunData
from flowcredit.text_file import PACKAGE

NAMES = ("name", "seed")
"""Settings that make another run of the same recipe."""


@dataclass(frozen=True)
class Origin:
    """``base`` is the recipe's name, `recipes/NAME.yaml`; ``changes`` lead from it to the run's."""

    base: str
    changes: tuple[Change, ...]

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Setting, its value in the base, its value in the run."""
        return [(each.setting, _shown(each.before), _shown(each.after)) for each in self.changes]


def origin_of(data: RunData) -> Origin | None:
    """The nearest of the recipes that come along, by the number of settings that differ; None for a run whose
    recipe this version cannot read."""
    try:
        own = Recipe.model_validate(dict(data.recipe))
    except ValidationError:
        return None
    found = []
    for file in sorted((PACKAGE / "recipes").glob("*.yaml")):
        base = Recipe.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
        found.append(Origin(f"recipes/{file.name}", tuple(recipe_diff(base, own))))
    return min(found, key=lambda each: sum(change.setting not in NAMES for change in each.changes))


def repetition(run_dir: Path, data: RunData) -> str:
    """The command that runs the same again."""
    return shlex.join(["flowcredit", "train", str(run_dir / "recipe.yaml"), f"name={data.name}-again"])


def environment_of(run_dir: Path) -> list[tuple[str, str]]:
    """What the run was computed with, as it wrote it down; nothing where it did not."""
    try:
        content = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [(str(key), str(value)) for key, value in content.items()] if isinstance(content, dict) else []


def _shown(value: object) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False, default=str).strip('"')
