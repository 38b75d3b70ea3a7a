"""The reward of a step of its own, from the rewards of the leaves: before anything is normalised.

Axes: R rewards, P prompts, W samples for a prompt at a segment, *D latent dimensions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flowcredit.plan import Plan

EQUAL = 1e-9
"""Cosines that are this close to 1 say that two images are the same."""


def fused(plan: Plan, segment: int, rewards: Mapping[int, Tensor]) -> Tensor:
    """The mean reward of the leaves below a segment, for each of its samples: [R, P, W].

    ``rewards`` maps each scored segment to [R, P, W]. A leaf without a score (NaN) is left out.
    """
    width = plan.width(segment)
    below = [
        rewards[leaf].reshape(*rewards[leaf].shape[:2], width, -1) for leaf in plan.leaves_under(segment)
    ]
    return torch.cat(below, -1).nanmean(-1)


def state_rewards(plan: Plan, rewards: Mapping[int, Tensor], gain: bool) -> dict[int, Tensor]:
    """The reward of the state that each transition ends in, or its gain over the start: [R, P, W].

    The reward of a state is that of the scored segment that continues it, its probe. The gains of one
    trajectory sum to its last probe's reward minus its first's (DenseGRPO, arXiv 2601.20218). ValueError
    where a transition has no probe, or, for gains, where states that differ within a group have none.
    """
    probes = _probes(plan)
    result = {}
    for transition in plan.transitions:
        start = plan.segments[transition].parent
        if transition not in probes:
            raise ValueError(f"segment {transition} is stochastic and has no scored segment of its own")
        values = rewards[probes[transition]]
        if gain and start in probes:
            values = values - _spread_out(rewards[probes[start]], values)
        elif gain and (plan.root_width if start is None else plan.width(start)) > 1:
            raise ValueError(f"segment {transition} starts at states that are not scored: it has no gain")
        result[transition] = values
    return result


def _probes(plan: Plan) -> dict[int | None, int]:
    """By segment the scored segment that continues it; by None that of the initial noise."""
    return {plan.segments[leaf].parent: leaf for leaf in reversed(plan.scored)}


def _spread_out(values: Tensor, like: Tensor) -> Tensor:
    """[R, P, W] to the samples that descend from each, as many as ``like`` has."""
    return values.repeat_interleave(like.shape[-1] // values.shape[-1], dim=-1)


def remaining_similarity(
    plan: Plan, predicted: Mapping[int, Tensor], ends: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """How much of the likeness to the image is still to come at the start of each transition: [P, W].

    CoCA's reward-to-go (arXiv 2505.19196; its window of one step): with c the cosine between the image that a
    state predicts and the final one, ``(1 - c[k]) / (1 - c[first])``, 1 at the first transition of the
    trajectory. Where the first state predicts the final image, every step has 1. ``predicted`` maps each
    transition to the images ``x - s v`` predicted at its start [P, W of the start, *D], ``ends`` each scored
    segment to [P, W, *D]. ValueError unless the plan is one chain of transitions with one leaf.
    """
    leaves = {leaf for step in plan.transitions for leaf in plan.leaves_under(step)}
    if len(leaves) != 1 or not plan.transitions:
        raise ValueError(f"similarity to the image needs one leaf below all transitions: found {len(leaves)}")
    leaf = leaves.pop()
    final = ends[leaf].flatten(2).double()
    missing = {
        step: 1 - torch.cosine_similarity(_widened(predicted[step].flatten(2).double(), final), final, dim=-1)
        for step in plan.transitions
    }
    first = missing[plan.transitions[0]]
    result = {}
    for step, each in missing.items():
        whole = torch.where(first > EQUAL, each / first.clamp(min=EQUAL), 1.0)
        result[step] = whole.reshape(*whole.shape[:1], plan.width(step), -1).mean(-1)
    return result


def turning_rewards(plan: Plan, rewards: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """TurningPoint-GRPO's reward of every transition, [R, P, W] (arXiv 2602.06422, definition 5.1, appendix
    D).

    With d the gain of each step and D the gain of the whole trajectory: a step after one that went against D,
    that goes with it, and after which the rest still does, is a turning point; so is the first step if the
    rest goes on as it does. The last never is: no rest follows. There the reward is the gain from its start
    to the image, elsewhere d. Turning points are balanced over the prompts: as many of rising trajectories as
    of falling ones are kept, those of the largest ``|D|``, where both occur. ``rewards`` as in
    ``state_rewards``, the initial noise's probe among them; ValueError without it.
    """
    probes = _probes(plan)
    if None not in probes:
        raise ValueError("turning points need the reward of the initial noise: score it")
    gains = state_rewards(plan, rewards, gain=True)
    steps = plan.transitions
    last = rewards[probes[steps[-1]]]
    states = [rewards[probes[plan.segments[step].parent]] for step in steps]
    before = torch.stack([_spread_out(each, last) for each in states])
    after = torch.stack([rewards[probes[step]] for step in steps])
    gain = torch.stack([gains[step] for step in steps])
    with_trend = gain.sign() * (last - before[0]).sign()
    # Of the states' own rewards: sums of gains are rounded, and where nothing is to come 0 must stay 0.
    turning = (last - after).sign() * gain.sign() > 0
    turning[1:] &= (with_trend[1:] > 0) & (with_trend[:-1] < 0)
    kept = torch.stack([_balanced(turning[:, r], (last - before[0])[r]) for r in range(last.shape[0])], 1)
    found = torch.where(kept, last - before, gain)
    return dict(zip(steps, found, strict=True))


def _balanced(turning: Tensor, trend: Tensor) -> Tensor:
    """[T, P, W] turning points and [P, W] trends to those kept: as many of rising trends as of falling
    ones."""
    trends = trend.expand(turning.shape)
    rising, falling = turning & (trends > 0), turning & (trends < 0)
    fewest = min(int(rising.sum()), int(falling.sum()))
    if fewest == 0:
        return turning
    kept = torch.zeros_like(turning)
    for group in (rising, falling):
        places = group.flatten().nonzero().flatten()
        largest = trends.abs().flatten()[places].argsort(descending=True, stable=True)[:fewest]
        kept.view(-1)[places[largest]] = True
    return kept


def _widened(values: Tensor, like: Tensor) -> Tensor:
    """[P, W, D] to the samples that descend from each, as many as ``like`` has."""
    return values.repeat_interleave(like.shape[1] // values.shape[1], dim=1)
