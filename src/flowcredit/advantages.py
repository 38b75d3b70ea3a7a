"""From rewards to advantages: normalised within a group, gathered over the leaves of a transition.

Axes: R rewards, P prompts, W samples for a prompt at a segment, G group.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from flowcredit.plan import Plan

Combine = Literal["sum", "mean"]
Rule = Literal["leaves", "state", "gain"]
WeightsOn = Literal["advantages", "rewards"]

RELATIVE_ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Rewards that lie this close, relative to the largest, are equal: float32 tells no more."""
ABSOLUTE_ROUNDING = 1e-7
"""The same for rewards near 0 that are left over where numbers of order 1 cancel."""


def normalise(rewards: Tensor) -> Tensor:
    """``(r - mean) / std`` over the last axis, unbiased std: [..., G] to [..., G] float32 or float64.

    The group-relative advantage of GRPO (arXiv 2402.03300). A group whose rewards are equal, if only up
    to rounding, gets exactly 0, and so does one with fewer than two scores. NaN means no score: left out
    of the statistics, its advantage is 0. ValueError for an infinite reward.
    """
    if bool(torch.isinf(rewards).any()):
        raise ValueError("a reward is infinite: expected finite scores, or NaN where there is none")
    values = rewards.detach().to(torch.float64)
    known = ~torch.isnan(values)
    count = known.sum(-1, keepdim=True)
    filled = torch.where(known, values, 0.0)
    mean = filled.sum(-1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, values - mean, 0.0)
    std = torch.sqrt((centred**2).sum(-1, keepdim=True) / (count - 1).clamp(min=1))
    highest = torch.where(known, values, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(known, values, torch.inf).amin(-1, keepdim=True)
    relative = (
        max(RELATIVE_ROUNDING, 4 * torch.finfo(rewards.dtype).eps) if rewards.is_floating_point() else 0
    )
    rounding = relative * filled.abs().amax(-1, keepdim=True) + ABSOLUTE_ROUNDING
    alive = (count > 1) & (highest - lowest > rounding)
    advantage = torch.where(alive, centred / torch.where(alive, std, 1.0), 0.0)
    return advantage.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)


def leaf_advantages(
    plan: Plan,
    rewards: Mapping[int, Tensor],
    weights: Tensor,
    combine: Combine = "sum",
    clamp: float | None = 5.0,
) -> dict[int, Tensor]:
    """Advantages of every transition of a plan from the leaves below it: [P, W] for each.

    ``rewards`` maps each scored segment to [R, P, W]; ``weights`` is [R]. Each leaf is normalised for
    each prompt and reward over its whole width; rewards are added by weight, leaves summed or averaged;
    leaves that fan out below the transition are averaged to its width; the result is clamped to
    ``+-clamp``. With several strides as leaves this is the multi-granularity integration of G2RPO
    (arXiv 2510.01982); with one leaf the terminal advantage of Flow-GRPO (arXiv 2505.05470).
    """
    if combine not in ("sum", "mean"):
        raise ValueError(f"leaves are combined by {combine!r}: expected 'sum' or 'mean'")
    if clamp is not None and not clamp > 0:
        raise ValueError(f"advantages are clamped to {clamp}: expected a number above 0, or None")
    by_leaf = {leaf: _weighted(plan, leaf, rewards, weights) for leaf in plan.scored}
    result = {}
    for transition in plan.transitions:
        width = plan.width(transition)
        parts = [
            by_leaf[leaf].reshape(-1, width, plan.width(leaf) // width).mean(2)
            for leaf in plan.leaves_under(transition)
        ]
        total = torch.stack(parts).sum(0)
        if combine == "mean":
            total = total / len(parts)
        result[transition] = total if clamp is None else total.clamp(-clamp, clamp)
    return result


def credit_steps(
    plan: Plan,
    rewards: Mapping[int, Tensor],
    weights: Tensor,
    rule: Rule = "leaves",
    combine: Combine = "sum",
    clamp: float | None = 5.0,
    weights_on: WeightsOn = "advantages",
) -> dict[int, Tensor]:
    """Advantages of every transition, [P, W], by one of three rules.

    "leaves": ``leaf_advantages``. "state": the reward of the transition's own probe, the scored segment
    that continues it, normalised over the W samples of each prompt. "gain": that reward less the probe's
    of the state where the transition starts, normalised alike (DenseGRPO, arXiv 2601.20218). Where the
    start has no probe, it is one state that the whole group shares, and its reward cancels.

    ``weights_on`` "advantages": each reward is normalised, then they are added by weight, so that none
    dominates by its unit. "rewards": the rewards are added by weight and their sum is normalised; an image
    that lacks one of them has no score.
    """
    if weights_on == "rewards":
        rewards = {leaf: _summed(scores, weights) for leaf, scores in rewards.items()}
        weights = torch.ones(1)
    if rule == "leaves":
        return leaf_advantages(plan, rewards, weights, combine, clamp)
    found = step_rewards(plan, rewards, gain=rule == "gain")
    result = {}
    for transition, values in found.items():
        total = (normalise(values) * weights.to(values).view(-1, 1, 1)).sum(0)
        result[transition] = total if clamp is None else total.clamp(-clamp, clamp)
    return result


def step_rewards(plan: Plan, rewards: Mapping[int, Tensor], gain: bool) -> dict[int, Tensor]:
    """The reward of every transition before normalisation: [R, P, W]; arguments as in ``credit_steps``.

    The gains of one trajectory sum to its last probe's reward minus its first's. ValueError where a
    transition has no probe, or, for gains, where states that differ within a group have none.
    """
    probes = {plan.segments[leaf].parent: leaf for leaf in reversed(plan.scored)}
    result = {}
    for transition in plan.transitions:
        start = plan.segments[transition].parent
        if transition not in probes:
            raise ValueError(f"segment {transition} is stochastic and has no scored segment of its own")
        values = rewards[probes[transition]]
        if gain and start in probes:
            before = rewards[probes[start]]
            values = values - before.repeat_interleave(values.shape[-1] // before.shape[-1], dim=-1)
        elif gain and (plan.root_width if start is None else plan.width(start)) > 1:
            raise ValueError(f"segment {transition} starts at states that are not scored: it has no gain")
        result[transition] = values
    return result


def _summed(scores: Tensor, weights: Tensor) -> Tensor:
    """[R, P, W] to [1, P, W]; a weight of 0 leaves its reward out, missing scores and all."""
    there = weights != 0
    return (scores[there] * weights[there].to(scores).view(-1, 1, 1)).sum(0, keepdim=True)


def _weighted(plan: Plan, leaf: int, rewards: Mapping[int, Tensor], weights: Tensor) -> Tensor:
    if leaf not in rewards:
        raise ValueError(f"scored segment {leaf} has no rewards: got those of {sorted(rewards)}")
    scores = rewards[leaf]
    if scores.dim() != 3 or scores.shape[0] != len(weights) or scores.shape[2] != plan.width(leaf):
        raise ValueError(
            f"rewards of segment {leaf} have shape {tuple(scores.shape)}: expected"
            f" [{len(weights)} rewards, prompts, {plan.width(leaf)} samples]"
        )
    advantage = normalise(scores)
    return (advantage * weights.to(advantage).view(-1, 1, 1)).sum(0)
