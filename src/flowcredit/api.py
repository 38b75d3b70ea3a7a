"""Runs from Python: a recipe, one's own rewards and prompts. ``flowcredit.Trainer`` is the way in."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flowcredit.comparison import Evaluation, Summary, paired_change, summarise
from flowcredit.config import Recipe
from flowcredit.errors import InputError, one_line
from flowcredit.evaluation_files import load_evaluation
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder, write_text

Rows = Sequence[str | Mapping[str, Any]]
"""Prompts, or rows with a ``prompt`` and the columns that rewards ask for."""


@dataclass(frozen=True)
class Outcome:
    """What a run has come to: its folder, and the held-out evaluations before and after it."""

    folder: Path
    before: Evaluation | None
    after: Evaluation

    @property
    def weights(self) -> Path:
        """The exported weights, for plain diffusers: a pipeline's folder, or a LoRA's."""
        return RunFolder(self.folder).final

    def mean(self, reward: str) -> Summary:
        """Mean of a reward after the training, with its standard error."""
        return summarise(self.after.scores[reward])

    def change(self, reward: str) -> Summary:
        """Mean change of a reward, prompt by prompt; ValueError where nothing was measured before."""
        if self.before is None:
            raise ValueError("the run has no evaluation from before the training")
        return paired_change(self.before, self.after, reward)


class Trainer:
    """A run from Python, as ``flowcredit train`` makes it: the same folder, log, checkpoints and report."""

    def __init__(
        self,
        recipe: str | Path,
        *,
        rewards: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None = None,
        prompts: Rows | None = None,
        heldout: Rows | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Read a recipe, and put into it what is given beside it.

        Args:
            recipe: a recipe file.
            rewards: trained in place of the recipe's, one or a list: functions (images [B, 3, H, W] float32
                in [0, 1], prompts, columns by name -> B numbers, None for no score), or names of registered
                rewards. A function must be found by its name in its module, so that a run can be resumed.
            prompts: trained in place of the recipe's; kept beside the runs, as JSONL.
            heldout: evaluated in place of the recipe's; ``prompts`` where they alone are given. They are
                split by the recipe's ``evaluation.group_by`` only if they have that column.
            settings: by dotted name, such as ``{"train.iterations": 20}``.

        Raises:
            InputError: whatever in the recipe, or beside it, cannot be used.
        """
        if not isinstance(settings, Mapping | None):
            raise _unfit("settings", settings, "names and values, as in {'train.iterations': 20}")
        for name, rows in (("prompts", prompts), ("heldout", heldout)):
            # Rows are gone through twice, which an iterator allows once; a data set need be no Sequence.
            if rows is not None and (
                isinstance(rows, str | Mapping | Iterator) or not hasattr(rows, "__getitem__")
            ):
                raise _unfit(name, rows, "a list of prompts, or of rows with a prompt")
        changes = dict(settings or {})
        if rewards is not None:
            chosen = [rewards] if callable(rewards) or isinstance(rewards, str) else rewards
            if not isinstance(chosen, Sequence):
                raise _unfit("rewards", rewards, "a function, the name of a reward, or a list of them")
            changes["rewards"] = [{"name": _name_of(each)} for each in chosen]
        began = load_recipe(recipe)
        given = {"train": prompts, "heldout": prompts if heldout is None else heldout}
        for name, rows in given.items():
            if rows is not None:
                output = Path(str(changes.get("output", began.output)))
                changes[f"prompts.{name}"] = str(_kept(rows, output / "prompts"))
                changes["prompts.column"] = "prompt"
        if given["heldout"] is not None and not _has(given["heldout"], began.evaluation.group_by):
            changes.setdefault("evaluation.group_by", None)
        words = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
        self.recipe: Recipe = load_recipe(recipe, words)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.output) / self.recipe.name

    def train(self, *, resume: bool = False, console: Console | None = None) -> Outcome:
        """Run the recipe to its end, or with ``resume`` go on where the folder's run was stopped.

        Raises InputError as ``flowcredit train`` does, and KeyboardInterrupt on Ctrl-C; no finished iteration
        is lost by either.
        """
        from flowcredit import trainer

        if resume and self.folder.exists():
            trainer.resume(self.folder, console=console)
        else:
            trainer.train(self.recipe, self.folder, console)
        return self.outcome()

    def outcome(self) -> Outcome:
        """What a finished run has come to. Raises InputError where it has no evaluation."""
        folder = RunFolder(self.folder)
        files = sorted(folder.evaluation(0).parent.glob("*.json"))
        if not files:
            raise InputError(f"{self.folder}: has no evaluation yet; train first")
        first, last = (load_evaluation(file)[0] for file in (files[0], files[-1]))
        return Outcome(self.folder, first if first.iteration == 0 else None, last)


def _unfit(argument: str, given: object, expected: str) -> InputError:
    return InputError(f"Trainer: {argument} is {one_line(repr(given))[:100]}; expected {expected}")


def _name_of(reward: Callable[..., Any] | str) -> str:
    """A reward's name in a recipe: its own, or where it is found: ``module:attribute``."""
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise _unfit("rewards", reward, "functions, or names of rewards")
    for module in (getattr(reward, "__module__", None), "__main__"):
        for name, value in vars(sys.modules.get(str(module), object)).items():
            if value is reward:
                return f"{module}:{name}"
    shown = getattr(reward, "__qualname__", repr(reward))
    raise InputError(
        f"reward {shown}: is found by no name in its module; define it, or the object that is called, at the"
        " top of a module or of the script, so that a resumed run finds it again"
    )


def _has(rows: Rows, column: str | None) -> bool:
    return any(not isinstance(row, str) and column in row for row in rows)


def _kept(rows: Rows, folder: Path) -> Path:
    """Write rows to a file named by what is in it, and return that."""
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, str | Mapping):
            raise _unfit(f"prompts, row {number},", row, "a text, or a row with a prompt")
        entry = {"prompt": row} if isinstance(row, str) else dict(row)
        try:
            lines.append(json.dumps(entry, ensure_ascii=True) + "\n")
        except TypeError as error:
            raise InputError(
                f"prompts, row {number}: cannot be kept as JSON ({error}); expected texts, numbers and lists"
            ) from error
    if not lines:
        raise InputError("prompts are an empty list; expected at least one")
    text = "".join(lines)
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    write_text(file, text)
    return file
