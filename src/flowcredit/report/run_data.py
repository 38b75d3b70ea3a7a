"""What a run has written so far, read with forgiveness: a run may be under way, killed, or just begun."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowcredit.comparison import Evaluation
from flowcredit.errors import InputError, misfit
from flowcredit.evaluation_files import load_evaluation
from flowcredit.image_grid import Layout
from flowcredit.run_folder import RunFolder
from flowcredit.yaml_lines import parse_yaml

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """An evaluation, and where its images lie: None if they were not kept or cannot be found."""

    evaluation: Evaluation
    layout: Layout | None
    picture: Path | None


@dataclass(frozen=True)
class RunData:
    """Recipe, log by iteration, evaluations by iteration, and what could not be read."""

    name: str
    recipe: Mapping[str, Any]
    recipe_text: str
    log: tuple[Record, ...]
    snapshots: tuple[Snapshot, ...]
    notes: tuple[str, ...]
    guard: tuple[Mapping[str, Any], ...] = ()
    """What the guard found, with ``iteration``, ``why`` and what was ``done``."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the rewards that were trained on."""
        return tuple(str(reward["name"]) for reward in self.recipe["rewards"])

    @property
    def iterations(self) -> int:
        """Finished iterations."""
        return int(self.log[-1]["iteration"]) if self.log else 0

    @property
    def planned(self) -> int:
        """Iterations that the recipe asks for."""
        return int(self.recipe["train"]["iterations"])

    def column(self, key: str) -> list[float]:
        """A column of the log; NaN where a record lacks it, or holds no number."""
        return [_number(record.get(key)) for record in self.log]

    def evaluations_until(self, iteration: int) -> float:
        """Velocity evaluations that training had spent after ``iteration``; NaN if the log does not say."""
        if iteration == 0:
            return 0.0
        spent = [_number(r.get("velocity_evaluations")) for r in self.log if r["iteration"] == iteration]
        return spent[0] if spent else math.nan


def read_run(run_dir: Path) -> RunData:
    """Read a run's folder. Raises InputError if it holds no recipe, and for nothing else."""
    folder = RunFolder(run_dir)
    recipe, text = _read_recipe(folder)
    log, log_notes = _read_log(folder.log)
    snapshots, file_notes = _read_evaluations(folder)
    return RunData(
        name=str(recipe.get("name", run_dir.name)),
        recipe=recipe,
        recipe_text=text,
        log=tuple(log),
        snapshots=tuple(snapshots),
        notes=(*log_notes, *file_notes),
        guard=tuple(_read_guard(folder.guard)),
    )


def _read_guard(path: Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        return []
    found: list[Mapping[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"iteration", "why", "done"} <= entry.keys():
            found.append(entry)
    return found


def _read_recipe(folder: RunFolder) -> tuple[Mapping[str, Any], str]:
    try:
        text = folder.recipe.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{folder.path} is no run: {folder.recipe.name} ({misfit(error)}); expected the folder that "
            "flowcredit train wrote"
        ) from error
    recipe = parse_yaml(text, str(folder.recipe)).value
    try:
        # What the page cannot do without; the rest is shown where it is there.
        _ = [reward["name"] for reward in recipe["rewards"]], int(recipe["train"]["iterations"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder.recipe}: not the recipe of a run ({misfit(error)}); expected the file that flowcredit "
            "train wrote"
        ) from error
    return recipe, text


def _read_log(path: Path) -> tuple[list[Record], list[str]]:
    if not path.exists():
        return [], []
    records: dict[int, Record] = {}
    broken: list[int] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            iteration = int(record["iteration"])
        except (ValueError, KeyError, TypeError):
            # A run that is killed while it writes leaves its last line torn; that is no fault to report.
            if line.strip() and number < len(lines):
                broken.append(number)
            continue
        # A resumed run goes on from its checkpoint: later lines replace those of the same iterations.
        records = {known: each for known, each in records.items() if known < iteration}
        records[iteration] = record
    notes = [f"{path.name}: line {number} cannot be read and is left out" for number in broken]
    return list(records.values()), notes


def _read_evaluations(folder: RunFolder) -> tuple[list[Snapshot], list[str]]:
    found, notes = [], []
    for path in sorted((folder.path / "evaluations").glob("*.json")):
        try:
            evaluation, layout = load_evaluation(path)
        except InputError as error:
            notes.append(f"{error}; it is left out")
            continue
        picture = folder.images(evaluation.iteration)
        found.append(Snapshot(evaluation, layout, picture if layout and picture.is_file() else None))
    found.sort(key=lambda snapshot: snapshot.evaluation.iteration)
    return found, notes


def comparable(snapshots: Sequence[Snapshot]) -> tuple[Snapshot | None, Snapshot | None]:
    """The first evaluation and the last of the same prompts; None where there is none."""
    if not snapshots:
        return None, None
    first = snapshots[0]
    later = [s for s in snapshots[1:] if s.evaluation.prompts == first.evaluation.prompts]
    return first, later[-1] if later else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
