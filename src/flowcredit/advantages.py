"""From rewards to advantages: normalised within a group, gathered over the leaves of a transition.

Axes: R rewards, P prompts, W samples for a prompt at a segment, G group, *D latent dimensions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flowcredit.credit import Combine, Credit, Spread, WeightsOn
from flowcredit.plan import Plan
from flowcredit.step_rewards import fused, state_rewards, turning_rewards

DEFAULT = Credit()

RELATIVE_ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Rewards that lie this close, relative to the largest, are equal: float32 tells no more."""
ABSOLUTE_ROUNDING = 1e-7
"""The same for rewards near 0 that are left over where numbers of order 1 cancel."""


def normalise(rewards: Tensor, spread: Spread = "group") -> Tensor:
    """``(r - mean) / std`` over the last axis, unbiased std: [..., G] to [..., G] float32 or float64.

    The group-relative advantage of GRPO (arXiv 2402.03300). A group whose rewards are equal, if only up
    to rounding, gets exactly 0, and so does one with fewer than two scores. NaN means no score: left out
    of the statistics, its advantage is 0. ``spread`` "batch", for [..., P, G]: the std is that of all P G
    rewards, the mean still the group's (the global std of Flow-GRPO's released code). ValueError for an
    infinite reward.
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
    if spread == "batch":
        std = _std_of_all(filled, known)
    highest = torch.where(known, values, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(known, values, torch.inf).amin(-1, keepdim=True)
    relative = (
        max(RELATIVE_ROUNDING, 4 * torch.finfo(rewards.dtype).eps) if rewards.is_floating_point() else 0
    )
    rounding = relative * filled.abs().amax(-1, keepdim=True) + ABSOLUTE_ROUNDING
    alive = (count > 1) & (highest - lowest > rounding)
    advantage = torch.where(alive, centred / torch.where(alive, std, 1.0), 0.0)
    return advantage.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)


def _std_of_all(filled: Tensor, known: Tensor) -> Tensor:
    """[..., P, G] to [..., 1, 1]: the deviation of all known values, over prompts and samples."""
    count = known.sum((-2, -1), keepdim=True)
    mean = filled.sum((-2, -1), keepdim=True) / count.clamp(min=1)
    squares = torch.where(known, filled - mean, 0.0) ** 2
    return torch.sqrt(squares.sum((-2, -1), keepdim=True) / (count - 1).clamp(min=1))


def leaf_advantages(
    plan: Plan,
    rewards: Mapping[int, Tensor],
    weights: Tensor,
    combine: Combine = "sum",
    clamp: float | None = 5.0,
    spread: Spread = "group",
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
    by_leaf = {leaf: _weighted(plan, leaf, rewards, weights, spread) for leaf in plan.scored}
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
        result[transition] = _clamped(total, clamp)
    return result


def credit_steps(
    plan: Plan,
    rewards: Mapping[int, Tensor],
    weights: Tensor,
    credit: Credit = DEFAULT,
    weights_on: WeightsOn = "advantages",
    shares: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Advantages of every transition, [P, W], by the rule of ``credit``.

    "leaves": ``leaf_advantages``. "similarity": those times ``shares``, [P, W] for each transition
    (``step_rewards.remaining_similarity``), normalised again over the trajectory's steps and samples
    together, as CoCA does (arXiv 2505.19196). The other rules first give each transition a reward of its own,
    which is then normalised. "fused": the mean reward of the leaves below it (BranchGRPO, arXiv 2509.06040).
    "state": the reward of its own probe, the scored segment that continues it. "gain": that reward less the
    probe's of the state where the transition starts (DenseGRPO, arXiv 2601.20218); where the start has no
    probe, it is one state that the whole group shares, and its reward cancels. "turning":
    ``step_rewards.turning_rewards``.

    ``weights_on`` "advantages": each reward is normalised, then they are added by weight, so that none
    dominates by its unit. "rewards": the rewards are added by weight and their sum is normalised; an image
    that lacks one of them has no score.
    """
    if weights_on == "rewards":
        rewards = {leaf: _summed(scores, weights) for leaf, scores in rewards.items()}
        weights = torch.ones(1)
    if credit.rule in ("leaves", "similarity"):
        found = leaf_advantages(plan, rewards, weights, credit.combine, credit.clamp, credit.spread)
        if credit.rule == "leaves":
            return found
        if shares is None:
            raise ValueError("credit by similarity needs each step's share")
        scored = {step: _scored(plan, step, rewards, weights) for step in found}
        own = {
            step: torch.where(scored[step], each * shares[step].to(each), torch.nan).unsqueeze(0)
            for step, each in found.items()
        }
        weights = torch.ones(1)
    elif credit.rule == "fused":
        own = {step: fused(plan, step, rewards) for step in plan.transitions}
    elif credit.rule == "turning":
        own = turning_rewards(plan, rewards)
    else:
        own = state_rewards(plan, rewards, gain=credit.rule == "gain")
    normal = _normalised(plan, own, credit)
    added = {step: (each * weights.to(each).view(-1, 1, 1)).sum(0) for step, each in normal.items()}
    return {step: _clamped(each, credit.clamp) for step, each in added.items()}


def _normalised(plan: Plan, own: Mapping[int, Tensor], credit: Credit) -> dict[int, Tensor]:
    """Rewards of transitions, [R, P, W], over the group that the credit's scope says."""
    if credit.scope == "trajectory":
        widths = [each.shape[-1] for each in own.values()]
        together = normalise(torch.cat(list(own.values()), -1), credit.spread)
        return dict(zip(own, together.split(widths, -1), strict=True))
    if credit.scope == "siblings":
        return {
            step: normalise(each.unflatten(-1, (-1, plan.segments[step].fan_out))).flatten(-2)
            for step, each in own.items()
        }
    return {step: normalise(each, credit.spread) for step, each in own.items()}


def _scored(plan: Plan, segment: int, rewards: Mapping[int, Tensor], weights: Tensor) -> Tensor:
    """[P, W] of a segment: whether any leaf below has a score that counts."""
    known = [(~rewards[leaf][weights != 0].isnan()).any(0) for leaf in plan.leaves_under(segment)]
    return torch.cat([each.unflatten(1, (plan.width(segment), -1)) for each in known], -1).any(-1)


def _clamped(advantages: Tensor, clamp: float | None) -> Tensor:
    return advantages if clamp is None else advantages.clamp(-clamp, clamp)


def quasi_normalised(
    rewards: Tensor, weights: Tensor, order: float, weights_on: WeightsOn = "advantages"
) -> Tensor:
    """Centred rewards over their quasi-norm, ``A / (sum |A|^p)^(1/p)``, added by weight: [R, P, W] to [P, W].

    Below p = 2 a group whose rewards are all alike moved counts less than one with a few that stand out
    (Neighbor GRPO, arXiv 2511.16955, eq. 11). Equal rewards give 0, and so does one without a score.
    """
    if weights_on == "rewards":
        rewards, weights = _summed(rewards, weights), torch.ones(1)
    centred = normalise(rewards)
    size = (centred.abs() ** order).sum(-1, keepdim=True) ** (1 / order)
    whole = torch.where(size > 0, centred / torch.where(size > 0, size, 1.0), 0.0)
    return (whole * weights.to(whole).view(-1, 1, 1)).sum(0)


def image_advantages(rewards: Tensor, weights: Tensor, weights_on: WeightsOn = "advantages") -> Tensor:
    """Each image's advantage within its group, rewards added by weight: [R, P, W] to [P, W].

    Equal rewards give 0, and so does a group with fewer than two scores.
    """
    if weights_on == "rewards":
        rewards, weights = _summed(rewards, weights), torch.ones(1)
    advantage = normalise(rewards)
    return (advantage * weights.to(advantage).view(-1, 1, 1)).sum(0)


def _summed(scores: Tensor, weights: Tensor) -> Tensor:
    """[R, P, W] to [1, P, W]; a weight of 0 leaves its reward out, missing scores and all."""
    there = weights != 0
    return (scores[there] * weights[there].to(scores).view(-1, 1, 1)).sum(0, keepdim=True)


def _weighted(
    plan: Plan, leaf: int, rewards: Mapping[int, Tensor], weights: Tensor, spread: Spread
) -> Tensor:
    if leaf not in rewards:
        raise ValueError(f"scored segment {leaf} has no rewards: got those of {sorted(rewards)}")
    scores = rewards[leaf]
    if scores.dim() != 3 or scores.shape[0] != len(weights) or scores.shape[2] != plan.width(leaf):
        raise ValueError(
            f"rewards of segment {leaf} have shape {tuple(scores.shape)}: expected"
            f" [{len(weights)} rewards, prompts, {plan.width(leaf)} samples]"
        )
    advantage = normalise(scores, spread)
    return (advantage * weights.to(advantage).view(-1, 1, 1)).sum(0)
