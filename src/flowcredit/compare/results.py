"""What the runs of a comparison came to: scores by seed and by point of training, with what they cost."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.stats import t as student

from flowcredit.compare.arms import Arm
from flowcredit.compare.runs import Run
from flowcredit.compare.steps import read_steps, steps_there
from flowcredit.compare.tasks import before_place
from flowcredit.comparison import Evaluation, summarise
from flowcredit.costs import Cost
from flowcredit.errors import InputError
from flowcredit.evaluation_files import from_json
from flowcredit.report.run_data import RunData, Snapshot, read_run
from flowcredit.run_folder import RunFolder

Means = Mapping[str, float]
"""Mean held-out score by reward; NaN where no image had one."""


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds and half the width of its 95 % interval (Student's t); NaN where too few for one."""

    mean: float
    half: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Of the values that are not NaN; the half width needs two."""
    there = [value for value in values if not math.isnan(value)]
    if not there:
        return Estimate(math.nan, math.nan, 0)
    mean = statistics.fmean(there)
    if len(there) < 2:
        return Estimate(mean, math.nan, 1)
    error = statistics.stdev(there) / math.sqrt(len(there))
    return Estimate(mean, float(student.ppf(0.975, len(there) - 1)) * error, len(there))


@dataclass(frozen=True)
class Point:
    """A moment of a run: what had been spent, and what its evaluation said."""

    iteration: int
    cost: Cost
    seconds: float
    means: Means


@dataclass(frozen=True)
class Finished:
    """A run that is done: its points, the first before training and the last at its end; ``steps`` the final
    scores by number of sampling steps; ``peak`` the largest memory of its process in bytes, 0 if unknown."""

    run: Run
    points: tuple[Point, ...]
    steps: Mapping[int, Means]
    peak: int
    last: Snapshot
    notes: tuple[str, ...] = ()

    @property
    def end(self) -> Point:
        return self.points[-1]


@dataclass(frozen=True)
class ArmResult:
    """An arm with its finished runs, in the order of the seeds."""

    arm: Arm
    runs: tuple[Run, ...]
    finished: tuple[Finished, ...]

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.runs[0].recipe.rewards)

    @property
    def own_steps(self) -> int:
        return self.runs[0].own_steps


@dataclass(frozen=True)
class Results:
    """All arms; the scores ``before`` training, by number of sampling steps (the first arm's own among
    them), and the images then; what is missing or odd in ``notes``."""

    arms: tuple[ArmResult, ...]
    before: Mapping[int, Means]
    first: Snapshot | None
    notes: tuple[str, ...] = field(default=())

    @property
    def rewards(self) -> tuple[str, ...]:
        """Every reward measured: those that some arm trained first."""
        trained = [name for arm in self.arms for name in arm.trained]
        seen = [name for arm in self.arms for each in arm.finished for name in each.end.means]
        return tuple(name for name in dict.fromkeys(trained + seen) if name in seen)


def read_results(runs: Sequence[Run], out: Path, steps: Sequence[int]) -> Results:
    """Read what the runs left. A run that is not finished is a note, and so is whatever has no score."""
    arms = tuple(
        ArmResult(
            arm,
            tuple(run for run in runs if run.arm == arm),
            tuple(_finished(run, steps) for run in runs if run.arm == arm and run.trained),
        )
        for arm in dict.fromkeys(run.arm for run in runs)
    )
    notes = [
        f"{run.name} is not finished: {run.done()} of {run.iterations} iterations; it is left out"
        for run in runs
        if not run.trained
    ]
    notes += [note for arm in arms for each in arm.finished for note in each.notes]
    lead = next((arm for arm in arms if arm.finished), None)
    if lead is None:
        return Results(arms, {}, None, tuple(notes))
    before = {lead.own_steps: lead.finished[0].points[0].means}
    before |= _step_means(before_place(out), [count for count in steps if count != lead.own_steps])
    first = read_run(lead.finished[0].run.folder).snapshots[0]
    return Results(arms, before, first, (*notes, *_other_beginnings(arms, lead)))


def _other_beginnings(arms: Sequence[ArmResult], lead: ArmResult) -> list[str]:
    """The row before training is the first arm's: say where another began elsewhere."""
    start = lead.finished[0].points[0].means
    found = []
    for arm in arms:
        for each in arm.finished[:1]:
            means = each.points[0].means
            if any(abs(means[name] - start[name]) > 1e-3 for name in means.keys() & start.keys()):
                found.append(
                    f"{arm.arm.name} began with other held-out scores than {lead.arm.name}: its model, grid"
                    f" or number of steps differs; the row before training is {lead.arm.name}'s"
                )
    return found


def _finished(run: Run, steps: Sequence[int]) -> Finished:
    data = read_run(run.folder)
    costs = run.costs()
    points = tuple(
        Point(
            snapshot.evaluation.iteration,
            costs[snapshot.evaluation.iteration],
            _seconds(data, snapshot.evaluation.iteration),
            _means(snapshot.evaluation),
        )
        for snapshot in data.snapshots
        if snapshot.evaluation.iteration <= run.iterations
    )
    if not points or points[0].iteration != 0:
        raise InputError(f"{run.folder}: has no evaluation before training; remove it and run it anew")
    further = _step_means(run.folder, steps)
    own = run.own_steps
    last = next((each for each in data.snapshots if each.evaluation.iteration == run.iterations), None)
    if last is None:
        file = RunFolder(run.folder).evaluation(run.iterations)
        raise InputError(f"{file}: is no whole evaluation; remove it and give the command again")
    return Finished(run, points, {own: points[-1].means, **further}, _peak(run), last, _odd(run, data, last))


def _odd(run: Run, data: RunData, last: Snapshot) -> tuple[str, ...]:
    notes = [f"{run.name}: {note}" for note in data.notes]
    if run.done() < run.iterations:
        notes.append(
            f"{run.name}: its log has lines of {run.done()} of {run.iterations} iterations: times are missing"
        )
    for name, scores in last.evaluation.scores.items():
        missing = sum(math.isnan(score) for score in scores)
        if missing:
            notes.append(f"{run.name}: {missing} of {len(scores)} held-out images have no score by {name}")
    return tuple(notes)


def _means(evaluation: Evaluation) -> Means:
    return {name: summarise(scores).mean for name, scores in evaluation.scores.items()}


def _seconds(data: RunData, iteration: int) -> float:
    if iteration == 0:
        return 0.0
    found = [record.get("seconds") for record in data.log if record["iteration"] == iteration]
    return float(found[0]) if found and isinstance(found[0], int | float) else math.nan


def _step_means(beside: Path, steps: Sequence[int]) -> dict[int, Means]:
    there = steps_there(beside)
    return {
        count: _means(from_json(read_steps(there[count], count), there[count]))
        for count in steps
        if count in there
    }


def _peak(run: Run) -> int:
    """Largest memory in bytes; 0, which is told as none, where the note of it is missing or damaged."""
    try:
        return int(json.loads(run.memory_file.read_text(encoding="utf-8"))["bytes"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def curve(arm: ArmResult) -> list[list[Point]]:
    """Points of an arm's runs that belong together: at the iterations that all evaluated, and at their ends.

    Runs of an arm may differ by an iteration where a method draws its tree.
    """
    if not arm.finished:
        return []
    by_run = [{point.iteration: point for point in each.points[:-1]} for each in arm.finished]
    common = sorted(set.intersection(*(set(points) for points in by_run)))
    within = [[points[iteration] for points in by_run] for iteration in common]
    return [*within, [each.end for each in arm.finished]]


def final(arm: ArmResult, reward: str, steps: int | None = None) -> dict[int, float]:
    """By seed, the mean score of the final weights; ``steps`` the recipe's own by default."""
    count = arm.own_steps if steps is None else steps
    return {
        each.run.seed: each.steps[count].get(reward, math.nan) for each in arm.finished if count in each.steps
    }


def paired(first: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """Differences of the second from the first by seed, over the seeds that both have."""
    return estimate([other[seed] - first[seed] for seed in other if seed in first])
