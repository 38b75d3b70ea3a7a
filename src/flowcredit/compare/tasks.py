"""Runs as tasks: trained, then evaluated at further numbers of sampling steps; and paces measured."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowcredit.compare.arms import Arm
from flowcredit.compare.processes import Task
from flowcredit.compare.runs import Run
from flowcredit.costs import iteration_costs
from flowcredit.errors import InputError
from flowcredit.recipe_io import dump_recipe
from flowcredit.run_folder import RunFolder, write_text

PACE_ITERATIONS = 4
"""Iterations by which a pace is measured; the first, which is slower, is not counted."""


def run_task(run: Run, steps: Sequence[int]) -> Task:
    """Train a run, then evaluate its final weights at the numbers of ``steps`` that its recipe does not
    have."""
    costs = [cost.velocity_evaluations for cost in run.costs()]
    wanted = [count for count in steps if count != _own_steps(run)]
    prompts = run.recipe.evaluation.prompts

    def command() -> list[str] | None:
        if not run.trained:
            return run.train()
        missing = run.missing_steps(steps)
        if not missing:
            return None
        return ["evaluate", str(run.folder), "--steps", str(missing[0]), "--out", str(run.steps_file(missing[0]))]

    def done() -> float:
        evaluated = sum(set(wanted) - set(run.missing_steps(wanted)))
        return costs[min(run.done(), run.iterations)] + prompts * evaluated

    return Task(
        name=run.name,
        console_file=run.console_file,
        command=command,
        work=costs[-1] + prompts * sum(wanted),
        done=done,
        peak=lambda size: _keep_peak(run.memory_file, size),
    )


def base_file(out: Path, steps: int) -> Path:
    """The scores before training at a number of sampling steps."""
    return out / "before" / f"steps-{steps}.json"


def base_task(run: Run, out: Path, steps: Sequence[int]) -> Task:
    """Evaluate the model of a run as it was before training at the numbers of ``steps``."""
    wanted = [count for count in steps if count != _own_steps(run)]

    def missing() -> list[int]:
        return [count for count in wanted if not base_file(out, count).is_file()]

    def command() -> list[str] | None:
        for count in missing():
            to = base_file(out, count)
            return ["evaluate", str(run.recipe_file), "--steps", str(count), "--out", str(to)]
        return None

    return Task(
        name="before training",
        console_file=out / "before" / "steps.log",
        command=command,
        work=run.recipe.evaluation.prompts * sum(wanted),
        done=lambda: run.recipe.evaluation.prompts * (sum(wanted) - sum(missing())),
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
            f"{folder.log}: no pace to be read from it ({type(error).__name__}: {error}); remove"
            f" {folder.path} and give the command again"
        ) from None
    costs = iteration_costs(arm.load([f"seed={seed}"]))
    counted = [next(costs).velocity_evaluations for _ in range(PACE_ITERATIONS)][1:]
    return float(seconds / sum(counted))


def _own_steps(run: Run) -> int:
    return run.recipe.evaluation.num_steps or run.recipe.algorithm.num_steps


def _keep_peak(file: Path, size: int) -> None:
    """The largest memory over all processes of a run."""
    if size <= 0:
        return
    before = json.loads(file.read_text(encoding="utf-8"))["bytes"] if file.is_file() else 0
    write_text(file, json.dumps({"bytes": max(size, before)}) + "\n")
