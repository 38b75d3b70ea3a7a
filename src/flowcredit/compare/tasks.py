"""Runs as tasks: trained, then evaluated at further numbers of sampling steps; and paces measured."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowcredit.compare.arms import Arm
from flowcredit.compare.processes import Task
from flowcredit.compare.runs import Run
from flowcredit.compare.steps import steps_command, steps_there
from flowcredit.costs import iteration_costs
from flowcredit.errors import InputError, misfit
from flowcredit.recipe_io import dump_recipe
from flowcredit.run_folder import RunFolder, write_text

PACE_ITERATIONS = 4
"""Iterations by which a pace is measured; the first, which is slower, is not counted."""


def run_task(run: Run, steps: Sequence[int]) -> Task:
    """Train a run, then evaluate its final weights at the numbers of ``steps`` that its recipe does not
    have."""
    costs = [cost.velocity_evaluations for cost in run.costs()]
    wanted = [count for count in steps if count != run.own_steps]
    prompts = run.recipe.evaluation.prompts

    def missing() -> list[int]:
        return [count for count in wanted if count not in steps_there(run.folder)]

    def command() -> list[str] | None:
        if not run.trained:
            return run.train()
        left = missing()
        return steps_command(run.folder, run.folder, left) if left else None

    return Task(
        name=run.name,
        console_file=run.console_file,
        command=command,
        work=costs[-1] + prompts * sum(wanted),
        done=lambda: costs[min(run.done(), run.iterations)] + prompts * (sum(wanted) - sum(missing())),
        peak=lambda size: _keep_peak(run.memory_file, size),
    )


def before_place(out: Path) -> Path:
    """Beside this lie the scores before training."""
    return out / "before"


def before_task(run: Run, out: Path, steps: Sequence[int]) -> Task:
    """Evaluate the model of a run as it was before training at the numbers of ``steps``."""
    place = before_place(out)
    wanted = [count for count in steps if count != run.own_steps]

    def missing() -> list[int]:
        return [count for count in wanted if count not in steps_there(place)]

    def command() -> list[str] | None:
        left = missing()
        return steps_command(run.recipe_file, place, left) if left else None

    prompts = run.recipe.evaluation.prompts
    return Task(
        name="before training",
        console_file=place.with_name("before.log"),
        command=command,
        work=prompts * sum(wanted),
        done=lambda: prompts * (sum(wanted) - sum(missing())),
    )


def pace_task(arm: Arm, seed: int, out: Path) -> Task:
    """A few iterations of an arm, in a folder of their own, by which its pace is measured."""
    folder = RunFolder(out / arm.slug / "pace")
    short = arm.load(
        [
            f"seed={seed}",
            "name=pace",
            f"output={json.dumps(str(out / arm.slug))}",
            f"train.iterations={PACE_ITERATIONS}",
            "train.warmup_iterations=0",
            "evaluation.every=0",
            "evaluation.prompts=1",
            "evaluation.images=0",
        ]
    )
    file = folder.path.with_name("pace.yaml")

    def command() -> list[str] | None:
        if len(folder.logged_iterations()) >= PACE_ITERATIONS:
            return None
        if folder.recipe.is_file():
            return ["train", "--resume", str(folder.path)]
        write_text(file, dump_recipe(short))
        return ["train", str(file)]

    return Task(
        name=f"{arm.name}, its pace",
        console_file=folder.path.with_name("pace.log"),
        command=command,
        work=PACE_ITERATIONS,
        done=lambda: float(len(folder.logged_iterations())),
    )


def measured_pace(arm: Arm, seed: int, out: Path) -> float:
    """Training seconds a velocity evaluation, from what `pace_task` left. InputError where that is wrong."""
    folder = RunFolder(out / arm.slug / "pace")
    try:
        lines = [json.loads(line) for line in folder.log.read_text(encoding="utf-8").splitlines()]
        seconds = lines[PACE_ITERATIONS - 1]["seconds"] - lines[0]["seconds"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{folder.log}: no pace to be read from it ({misfit(error)}); remove"
            f" {folder.path} and give the command again"
        ) from None
    costs = iteration_costs(arm.load([f"seed={seed}"]))
    counted = [next(costs).velocity_evaluations for _ in range(PACE_ITERATIONS)][1:]
    return float(seconds / sum(counted))


def _keep_peak(file: Path, size: int) -> None:
    """The largest memory over all processes of a run."""
    if size <= 0:
        return
    before = json.loads(file.read_text(encoding="utf-8"))["bytes"] if file.is_file() else 0
    write_text(file, json.dumps({"bytes": max(size, before)}) + "\n")
