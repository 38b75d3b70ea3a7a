"""Training runs side by side, in processes of their own, resumable; what their evaluations say together."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from flowcredit.recipe_io import load_recipe, recipe_diff


@dataclass(frozen=True)
class Run:
    """One `flowcredit train`: its folder, its recipe with overrides, and the iteration at which it ends."""

    folder: Path
    recipe: Path
    overrides: tuple[str, ...]
    iterations: int

    @property
    def command(self) -> list[str]:
        train = [sys.executable, "-m", "flowcredit", "train"]
        if (self.folder / "recipe.yaml").exists():
            return [*train, "--resume", str(self.folder)]
        return [*train, str(self.recipe), *self._changes]

    @property
    def _changes(self) -> tuple[str, ...]:
        return (*self.overrides, f"name={self.folder.name}", f"output={self.folder.parent}")

    def refuse_another(self) -> None:
        """SystemExit where the folder holds a run of other settings: it is neither resumed nor counted."""
        there = self.folder / "recipe.yaml"
        if there.exists():
            changes = [
                change
                for change in recipe_diff(load_recipe(there), load_recipe(self.recipe, self._changes))
                if change.setting != "output"  # The same place may be written in other ways.
            ]
            if changes:
                raise SystemExit(
                    f"{self.folder}: a run of other settings ({changes[0]}); choose another --out"
                )

    @property
    def finished(self) -> bool:
        last = self.folder / "evaluations" / f"{self.iterations:06d}.json"
        return last.exists() and (self.folder / "final").exists()

    def evaluation(self, iteration: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(
            (self.folder / "evaluations" / f"{iteration:06d}.json").read_text()
        )
        return content

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]


def run_all(runs: Sequence[Run], parallel: int, threads: int) -> None:
    """Start what is not finished, ``parallel`` at a time; SystemExit names the log of a run that fails."""
    for run in runs:
        run.refuse_another()
    waiting = [run for run in runs if not run.finished]
    running: dict[Run, subprocess.Popen[bytes]] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < parallel:
            run = waiting.pop(0)
            run.folder.parent.mkdir(parents=True, exist_ok=True)
            with _log_file(run).open("ab") as log:
                running[run] = subprocess.Popen(run.command, stdout=log, stderr=log, env=environment)
        time.sleep(1)
        for run, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[run]
            if process.returncode != 0:
                raise SystemExit(f"{run.folder} failed: see {_log_file(run)}")
            minutes = (time.monotonic() - began) / 60
            left = len(waiting) + len(running)
            print(f"{run.folder} finished after {minutes:.1f} min, {left} to go", flush=True)


def _log_file(run: Run) -> Path:
    return run.folder.with_name(run.folder.name + ".log")


def means(run: Run, iteration: int) -> dict[str, float]:
    """Every held-out reward's mean, and every group's as "reward, group"."""
    found = {}
    for name, reward in run.evaluation(iteration)["rewards"].items():
        found[name] = reward["mean"]
        for group, summary in reward.get("groups", {}).items():
            found[f"{name}, {group}"] = summary["mean"]
    return found


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean (Student's t over seeds)."""
    if len(values) < 2:
        return math.nan
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(student.ppf(0.975, len(values) - 1)) * spread


def changes(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """For each score its values before and after, one a seed, with the mean change and its interval."""
    rows = {}
    for name in before[0]:
        pairs = [(b[name], a[name]) for b, a in zip(before, after, strict=True)]
        gained = [a - b for b, a in pairs]
        rows[name] = {
            "before": [b for b, _ in pairs],
            "after": [a for _, a in pairs],
            "mean_change": statistics.mean(gained),
            "interval_95": interval(gained),
            "lowest_change": min(gained),
        }
    return rows
