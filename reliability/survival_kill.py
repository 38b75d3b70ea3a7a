"""Kills a run at random moments until it is finished, and compares its end with one never interrupted."""

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from survival_lives import RUN, Aim, Life, live, operations, recorded
from survival_sameness import differences
from survival_world import Cell, write_recipe

ITERATIONS = 5
KILLS = "kills survived"
TWICE = 0.3
"""The share of kills after which the resumed process is killed again at once."""
MOST_LIVES = 12
"""Kills of one run, at most; then it may finish."""


@dataclass(frozen=True)
class Reference:
    """A run that nothing interrupted, in its working folder."""

    cell: Cell
    folder: Path
    recipe: Path
    seconds: float
    operations: int
    writes: int
    """Operations in its folder of checkpoints."""


@cache
def reference(world: Path, cell: Cell, iterations: int = ITERATIONS) -> Reference:
    """Run the cell from its start to its end. SystemExit where it fails."""
    folder = world / "reference" / cell.name
    folder.mkdir(parents=True)
    recipe = write_recipe(world, cell, iterations)
    life = recorded(folder, recipe)
    if life.code != 0:
        raise SystemExit(f"{cell}: the uninterrupted run failed:\n{life.said}")
    return Reference(
        cell, folder, recipe, life.seconds, operations(folder), operations(folder, "/checkpoints/")
    )


def kill_until(
    cells: Sequence[Cell], kills: int, seed: int, world: Path, counts: Counter[str], wrong: list[str]
) -> None:
    """``kills`` kills over the cells in turn; adds to the counts, and a line for each difference."""
    trial = 0
    while counts[KILLS] < kills:
        ref = reference(world, cells[trial % len(cells)])
        folder = world / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        wrong += _one_run(ref, folder, random.Random(f"{seed}/{trial}"), kills, counts)
        counts["runs"] += 1
        trial += 1


def _one_run(ref: Reference, folder: Path, rng: random.Random, kills: int, counts: Counter[str]) -> list[str]:
    """One run with as many lives as it takes."""
    deaths, before = 0, False
    allowed = rng.randint(1, MOST_LIVES)
    while True:
        aim = None
        if deaths < allowed and counts[KILLS] < kills:
            at_once = before and rng.random() < TWICE
            aim = Aim(rng.uniform(0, 0.3 * ref.seconds)) if at_once else _aim(ref, rng)
        life = live(folder, ref.recipe, aim)
        if not life.killed:
            break
        before = True
        deaths += 1
        _count(folder, aim, deaths, counts)
    if life.code != 0:
        return [f"{ref.cell}: exit code {life.code}: {_end(life)}"]
    return [f"{ref.cell}: {line}" for line in differences(ref.folder, folder)]


def _aim(ref: Reference, rng: random.Random) -> Aim:
    """At any time, at any operation on the run's files, or in the writing of a checkpoint."""
    kind = rng.choice(("time", "operation", "operation", "write", "write"))
    if kind == "time":
        return Aim(rng.uniform(0, 1.1 * ref.seconds))
    delay = rng.choice((0.0, rng.uniform(0, 0.004)))
    if kind == "operation":
        return Aim(delay, rng.randint(1, ref.operations))
    return Aim(delay, rng.randint(1, ref.writes), "/checkpoints/")


def _count(folder: Path, aim: Aim | None, deaths: int, counts: Counter[str]) -> None:
    counts[KILLS] += 1
    counts["again before the end"] += deaths > 1
    run = folder / RUN
    counts["while a checkpoint was written"] += any(run.glob("checkpoints/.*.partial"))
    counts["before the first checkpoint"] += not any(run.glob("checkpoints/0*"))
    counts["while files were exported"] += (run / "final.partial").exists()
    if aim is not None and aim.operation is None:
        counts["at a random time"] += 1


def _end(life: Life) -> str:
    lines = life.said.strip().splitlines()
    return lines[-1] if lines else "said nothing"
