"""The folder of a run: where everything lies in it, its log, and its single owner."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flowcredit.config import Recipe
from flowcredit.destinations import check_folder
from flowcredit.disk import writing
from flowcredit.errors import InputError
from flowcredit.recipe_io import dump_recipe


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run.

    ``recipe.yaml`` the resolved recipe, ``environment.json`` and ``inputs.json`` what it was begun with,
    ``log.jsonl`` one object an iteration, ``checkpoints/``, ``evaluations/NNNNNN.json``,
    ``images/NNNNNN.png``, ``final/`` the exported weights, ``report.html``; ``guard.jsonl`` and ``faults/``
    where something went wrong.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    def evaluation(self, iteration: int) -> Path:
        return self.path / "evaluations" / f"{iteration:06d}.json"

    def images(self, iteration: int) -> Path:
        return self.path / "images" / f"{iteration:06d}.png"

    def check_free(self) -> None:
        """Raises InputError if something is there already, or nothing can be made there."""
        check_folder(self.path.parent, "output")
        if self.path.exists():
            raise InputError(
                f"{self.path}: exists already and nothing is written over; go on with it by `flowcredit train"
                f" --resume {self.path}`, or choose another name (name=my_run)"
            )

    def create(
        self, recipe: Recipe, environment: Mapping[str, str], inputs: Mapping[str, str] | None = None
    ) -> None:
        """Make the folder with its recipe and what it was begun with, all at once: versions and device, and
        digests of what it reads. Raises InputError if something is there already."""
        self.check_free()
        partial = self.path.with_name(f".{self.path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        begun = RunFolder(partial)
        begun.write_recipe(recipe)
        write_text(begun.environment, json.dumps(environment, indent=1) + "\n")
        write_text(begun.inputs, json.dumps(inputs or {}, indent=1) + "\n")
        partial.rename(self.path)

    def write_recipe(self, recipe: Recipe) -> None:
        write_text(self.recipe, dump_recipe(recipe))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Held by one process at a time. Raises InputError where another one is at work in the folder."""
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(
                f"{self.path}: another process is at work in this run; wait for its end, or stop it"
            ) from None
        try:
            yield
        finally:
            lock.release()

    @property
    def guard(self) -> Path:
        return self.path / "guard.jsonl"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def inputs(self) -> Path:
        return self.path / "inputs.json"

    def begun_with(self) -> dict[str, str]:
        """Digests of what the run read as it began, by setting; none in runs of older versions."""
        try:
            content = json.loads(self.inputs.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.inputs}: not readable ({error}); remove it to go on without knowing whether files"
                " have changed"
            ) from None
        return content if isinstance(content, dict) else {}

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def faults(self) -> Path:
        return self.path / "faults"

    def log_records(self) -> list[dict[str, Any]]:
        """The whole lines of the log, in order."""
        return [record for _, record in self._log_lines()]

    def forget_after(self, iteration: int) -> None:
        """Remove the evaluations, then the checkpoints of later iterations, the newest first.

        Wherever this is cut short, what is left is a run that can be resumed, and comes to the same.
        """
        for folder in (self.evaluation(0).parent, self.images(0).parent, self.checkpoints):
            later = [each for each in folder.glob("[0-9]*") if int(each.stem) > iteration]
            for each in sorted(later, reverse=True):
                shutil.rmtree(each) if each.is_dir() else each.unlink()

    def logged_iterations(self) -> set[int]:
        """The iterations of which the log has a whole line."""
        return {record["iteration"] for _, record in self._log_lines()}

    def _log_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.log.exists():
            return
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and type(record.get("iteration")) is int:
                yield line, record

    def append_log(self, record: Mapping[str, Any]) -> None:
        with writing(self.log), self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def cut_log(self, iterations: int) -> None:
        """Keep the lines of the first ``iterations``; a line torn by a kill goes with the rest."""
        if not self.log.exists():
            return
        kept = [line for line, record in self._log_lines() if record["iteration"] <= iterations]
        write_text(self.log, "".join(line + "\n" for line in kept))


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it, so that it is never seen half written.

    Raises InputError where the disk takes no more; then what was there before is there still.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with writing(path):
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except InputError:
        partial.unlink(missing_ok=True)
        raise
