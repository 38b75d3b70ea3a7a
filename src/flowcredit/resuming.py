"""What a stopped run left behind, and whether it can go on: its recipe, its newest checkpoint, its log."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowcredit.checkpoint import Checkpoint, latest_checkpoint
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.recipe_io import Change, load_recipe, recipe_diff
from flowcredit.run_folder import RunFolder

MAY_CHANGE = (
    "train.iterations",
    "checkpoint.",
    "evaluation.every",
    "guard.",
    "train.on_nonfinite",
    "logging.",
    "model.offload",
    "rollout.",
    "scoring.",
    "parallel.",
)
"""Settings, or beginnings of them, that a resumed run may change; batch sizes move it by rounding alone."""

LONGEST_DIFFERENCE = 12
"""Changed settings told at once: those of another method are many."""


@dataclass(frozen=True)
class Left:
    """Where a run can go on: from ``checkpoint``, or from its beginning where there is none."""

    recipe: Recipe
    checkpoint: Checkpoint | None
    notes: tuple[str, ...]
    """Lines for the user on what is damaged or missing."""


def read_back(run_dir: Path, overrides: Sequence[str] = ()) -> Left:
    """What the run in a folder left, with its recipe changed by ``overrides``.

    Raises InputError where there is no run, where the recipe would make it another run than it was, where
    finished iterations are lost, or where it has gone further than it now shall.
    """
    folder = RunFolder(run_dir)
    if not folder.recipe.is_file():
        raise InputError(
            f"{run_dir}: no run to resume here (it has no recipe.yaml); expected the folder of a run"
        )
    began, recipe = load_recipe(folder.recipe), load_recipe(folder.recipe, overrides)
    _refuse_another_run(recipe_diff(began, recipe), recipe)
    checkpoint, damaged = latest_checkpoint(folder.checkpoints)
    logged = folder.logged_iterations()
    if checkpoint is None:
        notes = [f"passed over: {line}" for line in damaged]
        # The line of an iteration comes before its checkpoint: so many may stand there without one.
        if logged and not damaged and max(logged) <= began.checkpoint.every:
            notes.append("the run was stopped before its first checkpoint: it begins again")
        elif logged:
            why = "; ".join(damaged) or f"nothing in {folder.checkpoints}"
            raise InputError(
                f"{run_dir}: its log tells of {max(logged)} finished iterations, but no checkpoint is whole"
                f" ({why}); bring one back, or begin anew under another name"
            )
        return Left(recipe, None, tuple(notes))
    _refuse_edits(folder, began, checkpoint.state.get("recipe"))
    if checkpoint.iteration > recipe.train.iterations:
        raise InputError(
            f"{run_dir}: has finished {checkpoint.iteration} iterations, more than train.iterations"
            f" {recipe.train.iterations}; expected at least as many"
        )
    notes = [f"passed over: {line}" for line in damaged]
    lost = sorted(set(range(1, checkpoint.iteration + 1)) - logged)
    if lost:
        notes.append(f"{folder.log} has no line on {len(lost)} of the finished iterations, first {lost[0]}")
    if not folder.evaluation(0).exists():
        notes.append(
            f"{folder.evaluation(0)} is missing: there will be no comparison with the model before training"
        )
    if checkpoint.iteration == recipe.train.iterations:
        notes.append(
            f"all {checkpoint.iteration} iterations are finished: only what comes after them is made anew,"
            " final/ and the report (and the evaluation, if it is missing)"
        )
    return Left(recipe, checkpoint, tuple(notes))


def _refuse_another_run(changes: Sequence[Change], recipe: Recipe) -> None:
    refused = [change for change in changes if not change.setting.startswith(MAY_CHANGE)]
    if refused:
        free = ", ".join(name + "*" if name.endswith(".") else name for name in MAY_CHANGE)
        raise InputError(
            f"a resumed run cannot change {_difference(refused)}: it would be another run; start one under"
            f" another name (may change: {free})"
        )
    for change in changes:
        if change.setting == "train.iterations" and recipe.train.lr_schedule != "constant":
            raise InputError(
                f"a resumed run cannot change {change}: the {recipe.train.lr_schedule} learning rate falls"
                " over all iterations, and those already done ran at other rates; to train on, begin a new"
                " run with model.path set to this one's folder final/"
            )


def _difference(changes: Sequence[Change]) -> str:
    """All that differs, on one line; of very much the beginning."""
    more = len(changes) - LONGEST_DIFFERENCE
    told = [str(change) for change in changes[:LONGEST_DIFFERENCE]]
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _refuse_edits(folder: RunFolder, now: Recipe, then: Any) -> None:
    """``then`` is the recipe of the checkpoint, as JSON; None in those of older versions."""
    if then is None:
        return
    changes = [
        change
        for change in recipe_diff(Recipe.model_validate(then), now)
        if not change.setting.startswith(MAY_CHANGE)
    ]
    if changes:
        raise InputError(
            f"{folder.recipe}: was changed after the run's newest checkpoint ({_difference(changes)}): it"
            " would be another run; change it back, or start one under another name"
        )
