"""The prompts whose held-out scores rose and fell most."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from flowcredit.report.run_data import Snapshot

SHOWN = 4
"""Prompts at either end."""


@dataclass(frozen=True)
class Change:
    """Of one prompt: its place among the held-out ones and how its score changed, in words."""

    place: int
    prompt: str
    words: str


def extremes(
    before: Snapshot | None, after: Snapshot | None, weights: Mapping[str, float], count: int
) -> tuple[list[Change], list[Change]]:
    """The largest rises and the largest falls by the trained rewards, among the first ``count`` prompts.

    Several rewards are added by their weights, each in units of its deviation over prompts before training.
    """
    if before is None or after is None:
        return [], []
    old, new = before.evaluation.scores, after.evaluation.scores
    names = [name for name in weights if name in old and name in new]
    totals: dict[int, float] = {}
    for place in range(count):
        moved = [weights[name] * (new[name][place] - old[name][place]) / _unit(old[name]) for name in names]
        if moved and all(math.isfinite(each) for each in moved):
            totals[place] = sum(moved)
    order = sorted(totals, key=lambda place: -totals[place])
    rises = [place for place in order[:SHOWN] if totals[place] > 0]
    falls = [place for place in reversed(order[-SHOWN:]) if totals[place] < 0]

    def told(place: int) -> Change:
        words = ", ".join(
            f"{name.rpartition(':')[2]} {old[name][place]:.3g} to {new[name][place]:.3g}" for name in names
        )
        return Change(place, before.evaluation.prompts[place], words)

    return [told(place) for place in rises], [told(place) for place in falls]


def _unit(scores: tuple[float, ...]) -> float:
    there = [score for score in scores if math.isfinite(score)]
    return (statistics.stdev(there) if len(there) > 1 else 0.0) or 1.0
