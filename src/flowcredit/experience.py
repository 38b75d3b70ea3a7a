"""What one iteration trains on: a rollout, its scores and their credit, as sets of states with a loss.

Axes: R rewards, P prompts, W samples of a prompt at a segment, *D latent dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowcredit.advantages import Images, credit_steps, quasi_normalised
from flowcredit.assembly import Setup
from flowcredit.credit import Neighbours
from flowcredit.interfaces import Conditioning
from flowcredit.neighbours import neighbour_sets
from flowcredit.noise import generator
from flowcredit.objectives import TrainingSet, policy_sets
from flowcredit.plan import Plan
from flowcredit.prompts import PromptSet
from flowcredit.rollout import KeyedNoise, Rollout, rollout
from flowcredit.scoring import ScoreCounts, score_leaves


class Listener(Protocol):
    """Who is told how far it is; it may raise KeyboardInterrupt."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins, of so many units."""
        ...

    def advance(self, units: int) -> None:
        """So many units are done."""
        ...


@dataclass(frozen=True)
class Experience:
    """``scores`` by scored segment [R, P, W] and ``advantages`` by transition [P, W], for the log; ``sets``
    in the order in which they are trained."""

    cond: Conditioning
    sets: tuple[TrainingSet, ...]
    scores: Mapping[int, Tensor]
    advantages: Mapping[int, Tensor]
    counts: ScoreCounts
    velocity_evaluations: int

    @property
    def teaches(self) -> bool:
        """Whether any advantage is not 0."""
        return any(bool(each.any()) for each in self.advantages.values())


def collect(
    setup: Setup,
    prompts: PromptSet,
    places: Sequence[int],
    iteration: int,
    listener: Listener,
    noise_iteration: int | None = None,
) -> Experience:
    """Roll out, score, and credit the steps of some prompts.

    ``places`` are the prompts' places in the whole iteration, over all processes. ``noise_iteration`` keys
    the noises; the iteration itself by default. Raises RewardError and InputError as
    ``scoring.score_leaves``.
    """
    recipe, plan = setup.recipe, setup.algorithm.plan_at(iteration)
    cond = setup.model.encode(prompts.prompts)
    listener.stage("rolling out", plan.velocity_evaluations * len(prompts))
    keyed = iteration if noise_iteration is None else noise_iteration
    ran = rollout(
        setup.model,
        plan,
        cond,
        setup.grid,
        setup.kernel,
        KeyedNoise(setup.model, recipe.seed, keyed, places),
        recipe.rollout.batch_size,
        progress=listener.advance,
    )
    listener.stage("scoring", plan.decodes * len(prompts))
    scores, counts = score_leaves(
        setup.model,
        ran.leaves,
        prompts.prompts,
        prompts.columns,
        setup.rewards,
        batch_size=recipe.scoring.batch_size,
        on_error=recipe.scoring.on_error,
        timeout_s=recipe.scoring.timeout_s,
        progress=listener.advance,
    )
    credit, sets = (
        _policy(setup, plan, ran, scores)
        if setup.algorithm.objective is None
        else _neighbours(setup, plan, ran, scores, setup.algorithm.objective, (keyed, places))
    )
    return Experience(cond, sets, scores, credit, counts, ran.velocity_evaluations)


def _policy(
    setup: Setup, plan: Plan, ran: Rollout, scores: Mapping[int, Tensor]
) -> tuple[dict[int, Tensor], tuple[TrainingSet, ...]]:
    """Advantages by transition, and the trained ones under the clipped objective."""
    credit = credit_steps(
        plan,
        scores,
        setup.reward_weights,
        setup.algorithm.credit,
        setup.recipe.train.reward_weights_on,
        _images(ran) if setup.algorithm.credit.rule == "similarity" else None,
    )
    trained = [step for step in ran.transitions if plan.segments[step.segment].trained]
    kept = {step.segment: plan.segments[step.segment].kept for step in trained}
    return credit, policy_sets(trained, credit, setup.kernel, setup.recipe.train, kept)


def _neighbours(
    setup: Setup,
    plan: Plan,
    ran: Rollout,
    scores: Mapping[int, Tensor],
    objective: Neighbours,
    keys: tuple[int, Sequence[int]],
) -> tuple[dict[int, Tensor], tuple[TrainingSet, ...]]:
    """Advantages of the images, and the recorded steps of the anchors, drawn for each prompt."""
    (leaf,) = plan.scored
    train, sigmas = setup.recipe.train, setup.grid.tolist()
    advantages = quasi_normalised(
        scores[leaf], setup.reward_weights, objective.quasi_norm, train.reward_weights_on
    )
    clamp = setup.algorithm.credit.clamp
    if clamp is not None:
        advantages = advantages.clamp(-clamp, clamp)
    iteration, places = keys
    drawn = [
        torch.randperm(plan.root_width, generator=generator(setup.recipe.seed, iteration, place, "anchors"))
        for place in places
    ]
    paths = [plan.segments[segment].path for segment in ran.recorded]
    sets = neighbour_sets(
        list(ran.recorded.values()),
        [(sigmas[k], sigmas[k_next]) for k, k_next in paths],
        advantages,
        torch.stack(drawn)[:, : objective.anchors],
        objective,
        train.clip_range,
    )
    return {leaf: advantages}, sets


def _images(ran: Rollout) -> Images:
    """The images that the states of a rollout predict, x - s v, and those that it came to."""
    return Images({step.segment: step.x - step.sigma * step.v for step in ran.transitions}, ran.leaves)
