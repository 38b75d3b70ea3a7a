"""What one iteration trains on: a rollout, its scores and their credit, as sets of states with a loss.

Axes: R rewards, P prompts, W samples of a prompt at a segment, *D latent dimensions.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from flowcredit.advantages import credit_steps, image_advantages, quasi_normalised
from flowcredit.assembly import Setup
from flowcredit.credit import Neighbours, Preferences
from flowcredit.distributed import ALONE, Share, World
from flowcredit.faults import Fault
from flowcredit.image_pairs import Columns, read_pairs
from flowcredit.interfaces import Conditioning
from flowcredit.leaf_scoring import ScoreCounts
from flowcredit.neighbours import neighbour_sets
from flowcredit.noise import generator
from flowcredit.objectives import TrainingSet, policy_sets
from flowcredit.plan import Plan
from flowcredit.preference import extremes, pair_draws, pair_sets
from flowcredit.prompts import PromptSet
from flowcredit.rollout import Rollout
from flowcredit.sampling import Listener, added_counts, sample
from flowcredit.step_rewards import remaining_similarity

NOT_SAMPLED = torch.full((1,), torch.nan)


@dataclass(frozen=True)
class Experience:
    """``scores`` by scored segment [R, P, W] and ``advantages`` by transition [P, W], of the prompts of all
    processes, for the log. ``cond`` and ``sets``, in the order in which they are trained, are of this
    process's prompts; the first ``own`` of them count."""

    cond: Conditioning
    sets: tuple[TrainingSet, ...]
    scores: Mapping[int, Tensor]
    advantages: Mapping[int, Tensor]
    counts: ScoreCounts
    velocity_evaluations: int
    own: int
    spread: Tensor = NOT_SAMPLED
    """[P] how much a prompt's images differ, as in `flowcredit.leaf_scoring.Scored`."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Per reward that failed on this process's images, those on which it did first."""

    @property
    def teaches(self) -> bool:
        """Whether any advantage is not 0, or, without advantages, whether there is anything to train on."""
        if not self.advantages:
            return len(self.sets) > 0
        return any(bool(each.any()) for each in self.advantages.values())


def collect(
    setup: Setup,
    prompts: PromptSet,
    iteration: int,
    listener: Listener,
    world: World = ALONE,
    noise_iteration: int | None = None,
) -> Experience:
    """Roll out, score, and credit the steps of this process's share of an iteration's ``prompts``; or read
    the pairs of images that they name.

    Scores are exchanged, so that every process credits all of them alike. ``noise_iteration`` keys the
    noises; the iteration itself by default. Raises RewardError and InputError as ``scoring.score_leaves``.
    """
    return explore(setup, prompts, iteration, listener, world, noise_iteration)[1]


def explore(
    setup: Setup,
    prompts: PromptSet,
    iteration: int,
    listener: Listener,
    world: World = ALONE,
    noise_iteration: int | None = None,
) -> tuple[Rollout | None, Experience]:
    """`collect`, with the rollout that it comes from; None where nothing is sampled."""
    plan = setup.algorithm.plan_at(iteration)
    objective = setup.algorithm.objective
    share = world.share(len(prompts))
    mine = prompts.take(share.places)
    cond = setup.model.encode(mine.prompts)
    draw = _Draw(iteration if noise_iteration is None else noise_iteration, share, world)
    if isinstance(objective, Preferences) and objective.columns is not None:
        images = _encoded_pairs(setup, mine, objective.columns, listener)
        there = torch.ones(len(mine), dtype=torch.bool)
        sets = _pairs(setup, images, there, objective, draw)
        return None, Experience(cond, sets, {}, {}, ScoreCounts(0, 0), 0, share.own)
    ran, found = sample(setup, plan, mine, cond, draw.iteration, share.places, share.own, listener)
    scores = {leaf: world.gathered(each, dim=1) for leaf, each in found.scores.items()}
    credit, sets = _credited(setup, plan, ran, scores, draw)
    assert world.largest([ran.velocity_evaluations]) == [ran.velocity_evaluations], (
        "processes do not keep step"
    )
    (evaluated,) = world.summed([ran.velocity_evaluations])
    told = [ScoreCounts(**each) for each in world.told(asdict(found.counts))]
    spread = world.gathered(found.spread)
    return ran, Experience(
        cond, sets, scores, credit, added_counts(told), evaluated, share.own, spread, found.faults
    )


@dataclass(frozen=True)
class _Draw:
    """Whose prompts these are: the noises' key, this process's share of the prompts."""

    iteration: int
    share: Share
    world: World

    def own(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """[P of all processes, ...] to this process's; those that only fill up have 0."""
        begin, own = self.share.places[0], self.share.own
        spare = len(self.share.places) - own
        return {
            key: torch.cat(
                [value[begin : begin + own], torch.zeros_like(value[:1]).repeat_interleave(spare, 0)]
            )
            for key, value in values.items()
        }


def _credited(
    setup: Setup, plan: Plan, ran: Rollout, scores: Mapping[int, Tensor], draw: _Draw
) -> tuple[dict[int, Tensor], tuple[TrainingSet, ...]]:
    """Advantages of all processes' prompts, and what this one trains on, as the method's objective has it."""
    match setup.algorithm.objective:
        case None:
            return _policy(setup, plan, ran, scores, draw)
        case Neighbours() as objective:
            return _neighbours(setup, plan, ran, scores, draw, objective)
        case Preferences() as objective:
            return _ranked(setup, plan, ran, scores, draw, objective)


def _policy(
    setup: Setup, plan: Plan, ran: Rollout, scores: Mapping[int, Tensor], draw: _Draw
) -> tuple[dict[int, Tensor], tuple[TrainingSet, ...]]:
    """Advantages by transition, and the trained ones under the clipped objective."""
    credit = credit_steps(
        plan,
        scores,
        setup.reward_weights,
        setup.algorithm.credit,
        setup.recipe.train.reward_weights_on,
        _shares(plan, ran, draw) if setup.algorithm.credit.rule == "similarity" else None,
    )
    trained = [step for step in ran.transitions if plan.segments[step.segment].trained]
    kept = {step.segment: plan.segments[step.segment].kept for step in trained}
    return credit, policy_sets(trained, draw.own(credit), setup.kernel, setup.recipe.train, kept)


def _shares(plan: Plan, ran: Rollout, draw: _Draw) -> dict[int, Tensor]:
    """Each step's share of its image's credit, from the images that its state predicts, x - s v."""
    predicted = {step.segment: step.x - step.sigma * step.v for step in ran.transitions}
    own = remaining_similarity(plan, predicted, ran.leaves)
    return {step: draw.world.gathered(each[: draw.share.own].cpu()) for step, each in own.items()}


def _neighbours(
    setup: Setup,
    plan: Plan,
    ran: Rollout,
    scores: Mapping[int, Tensor],
    draw: _Draw,
    objective: Neighbours,
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
    keyed = [generator(setup.recipe.seed, draw.iteration, place, "anchors") for place in draw.share.places]
    anchors = torch.stack([torch.randperm(plan.root_width, generator=each) for each in keyed])
    paths = [plan.segments[segment].path for segment in ran.recorded]
    sets = neighbour_sets(
        list(ran.recorded.values()),
        [(sigmas[k], sigmas[k_next]) for k, k_next in paths],
        draw.own({leaf: advantages})[leaf],
        anchors[:, : objective.anchors],
        objective,
        train.clip_range,
    )
    return {leaf: advantages}, sets


def _ranked(
    setup: Setup,
    plan: Plan,
    ran: Rollout,
    scores: Mapping[int, Tensor],
    draw: _Draw,
    objective: Preferences,
) -> tuple[dict[int, Tensor], tuple[TrainingSet, ...]]:
    """Advantages of the images, and the best and the worst of each prompt as a pair; where all are equal, one
    that does not count."""
    (leaf,) = plan.scored
    weights_on = setup.recipe.train.reward_weights_on
    advantages = image_advantages(scores[leaf], setup.reward_weights, weights_on)
    ends, differ = extremes(draw.own({leaf: advantages})[leaf])
    rows, device = torch.arange(len(ends)), ran.leaves[leaf].device
    images = ran.leaves[leaf][rows.to(device).unsqueeze(1), ends.to(device)]
    return {leaf: advantages}, _pairs(setup, images, differ, objective, draw)


def _pairs(
    setup: Setup, images: Tensor, differ: Tensor, objective: Preferences, draw: _Draw
) -> tuple[TrainingSet, ...]:
    """Pairs of images [P, 2, *D], one a prompt, noised; those that do not ``differ`` [P] do not count."""
    places = draw.share.places
    drawn = pair_draws(setup.model, setup.grid, setup.recipe.seed, draw.iteration, places, objective.draws)
    return pair_sets(images, torch.arange(len(images)), *drawn, objective.beta, differ)


def _encoded_pairs(setup: Setup, prompts: PromptSet, columns: Columns, listener: Listener) -> Tensor:
    """The latents [P, 2, *D] of the images that the prompts name."""
    listener.stage("reading pairs", len(prompts))
    model, encoded = setup.model, []
    for row in range(len(prompts)):
        pair = read_pairs(prompts.take([row]), columns, setup.recipe.model.height, setup.recipe.model.width)
        encoded.append(model.encode_images(pair[0].to(model.device)))
        listener.advance(1)
    return torch.stack(encoded)
