"""A watch over a run: has the policy collapsed, and what then.

It looks at every iteration's record and judges every evaluation. What it knows can be read back from the
run's log and evaluations, so a resumed run is guarded as if it had never stopped.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowcredit.comparison import Evaluation, Summary, paired_change
from flowcredit.disk import writing
from flowcredit.errors import InputError
from flowcredit.run_folder import RunFolder
from flowcredit.running import GuardSettings
from flowcredit.standing import evaluations_of, standing

FEWEST_PROMPTS = 16
"""Held-out prompts below which standard errors are too uncertain to judge by."""


class Collapse(InputError):
    """A run that its guard has stopped."""

    exit_code = 3


@dataclass
class Guard:
    """``weights``: of the trained rewards, by name."""

    settings: GuardSettings
    weights: Mapping[str, float]
    base: Evaluation | None = None
    best: Evaluation | None = None
    first_spread: float | None = None
    first_rewards: dict[str, float] = field(default_factory=dict)
    """Of the rollouts of the first iteration that had any, by reward."""
    streaks: Counter[str] = field(default_factory=Counter)

    def look(self, record: Mapping[str, Any]) -> str | None:
        """Take an iteration's record; why it is a collapse, or None."""
        spread = record.get("image_spread")
        if self.first_spread is None:
            self.first_spread = spread
        signs = _signs(record, spread, self.first_spread, self.settings)
        for name, why in (*signs, *self._rollouts_fallen(record)):
            self.streaks[name] = self.streaks[name] + 1 if why else 0
            # A warning is given once, not in every iteration that follows.
            over = self.streaks[name] - self.settings.patience
            if why and (over == 0 or (over > 0 and self.settings.action != "warn")):
                return f"{why}, in {self.streaks[name]} iterations in a row"
        return None

    def judge(self, evaluation: Evaluation) -> str | None:
        """Take an evaluation; why it is a collapse, or None."""
        if evaluation.iteration == 0 or self.base is None:
            self.base = self.base or evaluation
            return None
        why = self._fallen(self.base, evaluation, 0.0)
        if why is None and self.best is not None:
            why = self._fallen(self.best, evaluation, self.settings.heldout_lost)
        if why is None and (self.best is None or self._stands(evaluation) > self._stands(self.best)):
            self.best = evaluation
        return why

    def _directions(self) -> Iterator[tuple[str, float]]:
        """Each trained reward, with 1 where it is to rise and -1 where, by a negative weight, to fall."""
        return ((name, math.copysign(1.0, weight)) for name, weight in self.weights.items() if weight)

    def _rollouts_fallen(self, record: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
        """By reward: whether its mean in rollouts is clearly below that of the first iteration.

        Each iteration has other prompts, so the error is that of two means of so many prompts, which vary as
        the held-out prompts' scores did before training. It sees what held-out evaluations come too late for,
        or what an average of the weights hides from them.
        """
        for name, toward in self._directions():
            now = record.get(f"reward/{name}")
            if now is None:
                continue
            first = self.first_rewards.setdefault(name, now)
            scores = [] if self.base is None else [s for s in self.base.scores[name] if not math.isnan(s)]
            if len(scores) < FEWEST_PROMPTS:
                continue
            error = statistics.stdev(scores) * math.sqrt(2 / record["prompts"])
            fallen = toward * (first - now) > self.settings.heldout_errors * error > 0
            words = f"{name} in rollouts is {now:.4g}, {first:.4g} at first" if fallen else None
            yield f"reward/{name}", words

    def _stands(self, evaluation: Evaluation) -> float:
        assert self.base is not None
        return standing(self.base, evaluation, self.weights)

    def _fallen(self, before: Evaluation, now: Evaluation, share: float) -> str | None:
        """Whether a trained reward is clearly below ``before``, by more than a share of its gain then."""
        assert self.base is not None
        if len(now.prompts) < FEWEST_PROMPTS or before.prompts != now.prompts:
            return None
        for name, toward in self._directions():
            change = paired_change(before, now, name)
            gain = toward * paired_change(self.base, before, name).mean
            loss = -toward * change.mean
            clearly = loss > self.settings.heldout_errors * change.standard_error
            if clearly and (before is self.base or loss > share * gain > 0):
                return _fall(name, before, change)
        return None


def _signs(
    record: Mapping[str, Any], spread: float | None, first: float | None, settings: GuardSettings
) -> list[tuple[str, str | None]]:
    """By name: why an iteration looks like a collapse, None where it does not."""
    signs = [
        ("kl_reference", settings.kl, "the KL divergence from the reference is {:.3g}, above {:g}"),
        ("ratio_max_deviation", settings.ratio, "the ratio strays from 1 by {:.3g}, more than {:g}"),
        ("clip_fraction", settings.clip_fraction, "{:.0%} of the ratios are clipped, more than {:.0%}"),
    ]
    values = dict(record)
    if "clip_fraction_low" in record:
        values["clip_fraction"] = record["clip_fraction_low"] + record["clip_fraction_high"]
    found: list[tuple[str, str | None]] = []
    for name, limit, words in signs:
        value = values.get(name)
        over = limit is not None and value is not None and value > limit
        found.append((name, words.format(value, limit) if over else None))
    alike = spread is not None and bool(first) and spread < settings.image_spread * (first or 0.0)
    differ = f"images of a prompt differ by {spread:.3g}, {first:.3g} at first" if alike else None
    found.append(("image_spread", differ))
    lost = record.get("skipped_steps", 0) > 0 and "grad_norm" not in record
    found.append(("skipped_steps", "every optimizer step was skipped as not finite" if lost else None))
    return found


def _fall(name: str, before: Evaluation, change: Summary) -> str:
    then = "before training" if before.iteration == 0 else f"at iteration {before.iteration}"
    by = f"{abs(change.mean):.4g} ± {change.standard_error:.2g}"
    return f"held-out {name} has {'fallen' if change.mean < 0 else 'risen'} by {by} from what it was {then}"


def guard_of(
    folder: RunFolder, settings: GuardSettings, weights: Mapping[str, float], iteration: int
) -> Guard:
    """The guard of a run after ``iteration`` finished ones, from what the run has written."""
    guard = Guard(settings, weights)
    evaluations = evaluations_of(folder)
    if 0 in evaluations:
        guard.judge(evaluations[0])
    for record in folder.log_records():
        if record["iteration"] <= iteration:
            guard.look(record)
    for number, evaluation in evaluations.items():
        # That of this very iteration is judged anew when the loop comes to it.
        if 0 < number < iteration:
            guard.judge(evaluation)
    return guard


def note(folder: RunFolder, iteration: int, why: str, done: str) -> None:
    """Add to ``guard.jsonl`` that the guard found a collapse, and what was done."""
    line = json.dumps({"iteration": iteration, "why": why, "done": done})
    with writing(folder.guard), folder.guard.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
