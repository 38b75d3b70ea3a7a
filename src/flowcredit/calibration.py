"""DenseGRPO's Algorithm 1: for each step the noise at which exploration helps as often as it hurts.

arXiv 2601.20218. The paper leaves open how many trajectories judge a step, when to stop and how far a level
may fall; here each is a setting (``CalibrationSettings``).

Axes: K stochastic steps, N trajectories, R rewards, P prompts, W samples of a prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flowcredit.algorithms import dense_grpo
from flowcredit.assembly import Setup
from flowcredit.config import CalibrationSettings, Recipe
from flowcredit.errors import InputError
from flowcredit.measurement import scored_rollouts
from flowcredit.methods import DenseGRPOSettings
from flowcredit.step_rewards import state_rewards
from flowcredit.transition import make_kernel

_FIRST = -1_000_000
"""Iteration that keys the noises of the first round: none of training's or evaluation's."""


@dataclass(frozen=True)
class Balance:
    """Of one step: the shares of trajectories that gained and lost by it; mean and deviation of the gains."""

    gained: float
    lost: float
    mean: float
    spread: float


@dataclass(frozen=True)
class Round:
    """One judgement: K levels, what they led to, and whether each step was found balanced."""

    levels: tuple[float, ...]
    balances: tuple[Balance, ...]
    balanced: tuple[bool, ...]


@dataclass(frozen=True)
class State:
    """Where a calibration stands: the next K levels, by how much each moves, and the rounds so far."""

    levels: tuple[float, ...]
    strides: tuple[float, ...]
    rounds: tuple[Round, ...] = ()

    def turns(self, k: int) -> int:
        """How often step k changed between balanced and not."""
        sides = [each.balanced[k] for each in self.rounds]
        return sum(a != b for a, b in pairwise(sides))


def balances(gains: Tensor) -> tuple[Balance, ...]:
    """Gains [K, N] to the balance of each step; trajectories without a score (NaN) count for nothing."""
    result = []
    for row in gains.double():
        known = row[~row.isnan()]
        count = max(1, len(known))
        gained, lost = float((known > 0).sum()) / count, float((known < 0).sum()) / count
        mean = float(known.mean()) if len(known) else math.nan
        result.append(Balance(gained, lost, mean, float(known.std()) if len(known) > 1 else math.nan))
    return tuple(result)


def begin(levels: Sequence[float], settings: CalibrationSettings) -> State:
    """The state before the first round: K levels of a uniform setting, each to move by a share of itself."""
    start = tuple(max(settings.floor, float(level)) for level in levels)
    return State(start, tuple(settings.step * level for level in start))


def judge(state: State, found: tuple[Balance, ...], settings: CalibrationSettings) -> State:
    """One round of Algorithm 1: the level of a balanced step rises by its stride, that of another falls.

    A stride is halved where its step changes sides, three times at most, so that the level settles.
    """
    balanced = tuple(abs(each.gained - each.lost) < settings.tolerance for each in found)
    after = State(state.levels, state.strides, (*state.rounds, Round(state.levels, found, balanced)))
    levels, strides = [], []
    for k, even in enumerate(balanced):
        stride = state.strides[k]
        if state.turns(k) < after.turns(k) <= 3:
            stride /= 2
        levels.append(max(settings.floor, state.levels[k] + (stride if even else -stride)))
        strides.append(stride)
    return State(tuple(levels), tuple(strides), after.rounds)


def finished(state: State, settings: CalibrationSettings) -> bool:
    """Every step has changed sides often enough, or lies at the floor and is not balanced there; or the
    limit of rounds is reached."""
    if not state.rounds:
        return False
    last = state.rounds[-1]
    settled = (
        state.turns(k) >= settings.turns or (last.levels[k] <= settings.floor and not last.balanced[k])
        for k in range(len(state.levels))
    )
    return len(state.rounds) >= settings.rounds or all(settled)


def settled_levels(state: State) -> tuple[float, ...]:
    """The levels to use: midway between the last at which a step was balanced and the last at which not.

    A step that never was the one or the other keeps its last level.
    """
    result = []
    for k, level in enumerate(state.levels):
        ends = {each.balanced[k]: each.levels[k] for each in state.rounds}
        result.append(sum(ends.values()) / 2 if len(ends) == 2 else level)
    return tuple(result)


def gain_settings(recipe: Recipe) -> DenseGRPOSettings:
    """The settings of a method that has gains. Raises InputError where the recipe's has none."""
    if not isinstance(recipe.algorithm, DenseGRPOSettings):
        raise InputError(
            f"algorithm.name is {recipe.algorithm.name!r}; expected dense_grpo: noise is calibrated on gains"
        )
    return recipe.algorithm


def round_size(recipe: Recipe) -> tuple[int, int]:
    """Prompts of a round, and its velocity evaluations."""
    settings = gain_settings(recipe)
    prompts = math.ceil(recipe.calibration.trajectories / settings.group_size)
    return prompts, prompts * dense_grpo(settings, score_start=True).plan.velocity_evaluations


def measure_gains(
    setup: Setup, levels: Sequence[float], number: int, progress: Callable[[int], None] | None = None
) -> Tensor:
    """Gains of N trajectories with the noise ``levels`` [K]: [K, N] float32, N at least as many as asked for.

    The recipe's method must be dense_grpo. Several rewards are added by weight. ``number`` counts the rounds:
    each has noises and prompts of its own. ``progress`` is told the velocity evaluations.
    Raises InputError where no trajectory has a score, or where every image has the same.
    """
    plan = dense_grpo(gain_settings(setup.recipe), score_start=True).plan
    found, everything = [], []
    for scores in scored_rollouts(
        setup,
        plan,
        make_kernel("table", setup.grid, levels),
        setup.rewards,
        count=round_size(setup.recipe)[0],
        draw=number,
        noise_iteration=_FIRST - number,
        progress=progress,
    ):
        everything.append(torch.cat([each.flatten(1) for each in scores.values()], 1))
        gains = torch.stack(list(state_rewards(plan, scores, gain=True).values()))
        found.append((gains * setup.reward_weights.view(1, -1, 1, 1)).sum(1).flatten(1))
    _check_signal(torch.cat(everything, 1), tuple(setup.rewards))
    return torch.cat(found, 1)


def _check_signal(scores: Tensor, names: Sequence[str]) -> None:
    """[R, M] scores of a round; InputError where they cannot tell one trajectory from another."""
    for name, row in zip(names, scores, strict=True):
        known = row[~row.isnan()]
        if len(known) == 0:
            raise InputError(f"reward {name!r} gave no image a score: there is nothing to calibrate on")
        if bool((known == known[0]).all()):
            raise InputError(
                f"reward {name!r} is {float(known[0]):g} for all of {len(known)} images: a constant reward"
                " has no gains to calibrate on; expected one that tells images apart"
            )
