"""What one iteration trains on: a rollout, its scores and their credit, as sets of states with a loss.

Axes: R rewards, P prompts, W samples of a prompt at a segment, *D latent dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowcredit.advantages import Images, credit_steps, image_advantages, quasi_normalised
from flowcredit.assembly import Setup
from flowcredit.credit import Neighbours, Preferences
from flowcredit.image_pairs import Columns, read_pairs
from flowcredit.interfaces import Conditioning
from flowcredit.neighbours import neighbour_sets
from flowcredit.noise import generator
from flowcredit.objectives import TrainingSet, policy_sets
from flowcredit.plan import Plan
from flowcredit.preference import extremes, pair_draws, pair_sets
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
        """Whether any advantage is not 0, or, without advantages, whether there is anything to train on."""
        if not self.advantages:
            return len(self.sets) > 0
        return any(bool(each.any()) for each in self.advantages.values())


def collect(
    setup: Setup,
    prompts: PromptSet,
    places: Sequence[int],
    iteration: int,
    listener: Listener,
    noise_iteration: int | None = None,
) -> Experience:
    """Roll out, score, and credit the steps of some prompts; or read the pairs of images that they name.

    ``places`` are the prompts' places in the whole iteration, over all processes. ``noise_iteration`` keys
    the noises; the iteration itself by default. Raises RewardError and InputError as
    ``scoring.score_leaves``.
    """
    recipe, plan = setup.recipe, setup.algorithm.plan_at(iteration)
    objective = setup.algorithm.objective
    cond = setup.model.encode(prompts.prompts)
    keyed = iteration if noise_iteration is None else noise_iteration
    if isinstance(objective, Preferences) and objective.columns is not None:
        images = _encoded_pairs(setup, prompts, objective.columns, listener)
        sets = _pairs(setup, images, torch.arange(len(prompts)), objective, (keyed, places))
        return Experience(cond, sets, {}, {}, ScoreCounts(0, 0), 0)
    listener.stage("rolling out", plan.velocity_evaluations * len(prompts))
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
    credit, sets = _credited(setup, plan, ran, scores, (keyed, places))
    return Experience(cond, sets, scores, credit, counts, ran.velocity_evaluations)


def _credited(
    setup: Setup, plan: Plan, ran: Rollout, scores: Mapping[int, Tensor], keys: tuple[int, Sequence[int]]
) -> tuple[dict[int, Tensor], tuple[TrainingSet, ...]]:
    """Advantages, and what is trained on, as the method's objective has it."""
    match setup.algorithm.objective:
        case None:
            return _policy(setup, plan, ran, scores)
        case Neighbours() as objective:
            return _neighbours(setup, plan, ran, scores, objective, keys)
        case Preferences() as objective:
            return _ranked(setup, plan, ran, scores, objective, keys)


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


def _ranked(
    setup: Setup,
    plan: Plan,
    ran: Rollout,
    scores: Mapping[int, Tensor],
    objective: Preferences,
    keys: tuple[int, Sequence[int]],
) -> tuple[dict[int, Tensor], tuple[TrainingSet, ...]]:
    """Advantages of the images, and the best and the worst of each prompt as a pair; none where all are
    equal."""
    (leaf,) = plan.scored
    weights_on = setup.recipe.train.reward_weights_on
    advantages = image_advantages(scores[leaf], setup.reward_weights, weights_on)
    rows, ends = extremes(advantages)
    if len(rows) == 0:
        return {leaf: advantages}, ()
    device = ran.leaves[leaf].device
    images = ran.leaves[leaf][rows.to(device).unsqueeze(1), ends.to(device)]
    return {leaf: advantages}, _pairs(setup, images, rows, objective, keys)


def _pairs(
    setup: Setup, images: Tensor, rows: Tensor, objective: Preferences, keys: tuple[int, Sequence[int]]
) -> tuple[TrainingSet, ...]:
    """Pairs of images [N, 2, *D] of the prompts at ``rows`` [N], noised."""
    iteration, places = keys
    here = [places[row] for row in rows.tolist()]
    drawn = pair_draws(setup.model, setup.grid, setup.recipe.seed, iteration, here, objective.draws)
    return pair_sets(images, rows, *drawn, objective.beta)


def _encoded_pairs(setup: Setup, prompts: PromptSet, columns: Columns, listener: Listener) -> Tensor:
    """The latents [P, 2, *D] of the images that the prompts name."""
    listener.stage("reading pairs", len(prompts))
    model, encoded = setup.model, []
    for row in range(len(prompts)):
        pair = read_pairs(prompts.take([row]), columns, setup.recipe.model.height, setup.recipe.model.width)
        encoded.append(model.encode_images(pair[0].to(model.device)))
        listener.advance(1)
    return torch.stack(encoded)


def _images(ran: Rollout) -> Images:
    """The images that the states of a rollout predict, x - s v, and those that it came to."""
    return Images({step.segment: step.x - step.sigma * step.v for step in ran.transitions}, ran.leaves)
