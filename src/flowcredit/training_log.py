"""What an iteration leaves behind: a record for the log, a line for the console.

Axes: R rewards, P prompts, W samples of a prompt at a leaf.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowcredit.leaf_scoring import ScoreCounts
from flowcredit.update import UpdateMetrics

Record = dict[str, float | int | None]
"""A line of ``log.jsonl``; None where there is no number, as for a reward without a single score."""


def iteration_record(
    rewards: Sequence[str],
    scores: Mapping[int, Tensor],
    counts: ScoreCounts,
    advantages: Mapping[int, Tensor],
    metrics: UpdateMetrics,
    spread: Tensor,
    steps: Mapping[int, int],
) -> Record:
    """The record of one iteration, without its counters.

    For each reward: ``reward/`` its mean over all leaves [R, P, W], ``reward_spread/`` the mean standard
    deviation within a group, ``missing/`` the images without a score, ``failed/`` those of them on
    which the reward failed. ``dead_groups`` is the share of groups whose advantages are all 0.
    ``image_spread`` is the mean of ``spread`` [P], by which the images of a prompt differ.
    ``advantage/`` and ``dead_groups/`` with the number of a denoising step are the mean size of its
    advantages, and the share of its groups in which all are 0; ``steps`` has the step of each transition, and
    nothing where advantages are whole images' own. Where nothing was sampled there are none of these.
    """
    record: Record = {}
    if not advantages:
        return record | metrics
    # Squares of large scores are beyond float32.
    wide = [each.double() for each in scores.values()]
    everything = torch.cat([each.flatten(1) for each in wide], dim=1)
    # A single image has no deviation, and torch warns where one is asked for.
    spreads = [each.std(-1) for each in wide if each.shape[-1] > 1]
    spread_of = torch.cat(spreads, dim=1) if spreads else everything[:, :0]
    for row, name in enumerate(rewards):
        record[f"reward/{name}"] = _number(everything[row].nanmean())
        record[f"reward_spread/{name}"] = _number(spread_of[row].nanmean())
        record[f"missing/{name}"] = counts.missing.get(name, 0)
        record[f"failed/{name}"] = counts.failed.get(name, 0)
    groups = torch.cat([(each == 0).all(-1) for each in advantages.values()])
    record["dead_groups"] = _number(groups.float().mean())
    record["image_spread"] = _number(spread.nanmean())
    return record | _by_step(advantages, steps) | metrics


def _by_step(advantages: Mapping[int, Tensor], steps: Mapping[int, int]) -> Record:
    record: Record = {}
    for step in sorted({steps[i] for i in advantages if i in steps}):
        own = [each for i, each in advantages.items() if steps.get(i) == step]
        record[f"advantage/{step}"] = _number(torch.cat([each.abs().flatten() for each in own]).mean())
        dead = torch.cat([(each == 0).all(-1) for each in own])
        record[f"dead_groups/{step}"] = _number(dead.float().mean())
    return record


def unscored(rewards: Sequence[str], record: Record) -> tuple[str, ...]:
    """The rewards that gave no score to any image of an iteration that sampled."""
    return tuple(name for name in rewards if record.get(f"reward/{name}", 0.0) is None)


def iteration_line(rewards: Sequence[str], record: Record) -> str:
    """Rewards, how far the ratio or the preference strayed, and the gradient norm, in one line."""
    means = {name: record[f"reward/{name}"] for name in rewards}
    shown = "  ".join(
        f"{name} {'no score' if mean is None else format(mean, '.4f' if abs(mean) < 1e6 else '.4g')}"
        for name, mean in means.items()
    )
    parts = [shown] if shown else []
    if "on_policy_deviation" in record:
        parts.append(
            f"ratio off by {record['on_policy_deviation']:.0e} before the update, at most"
            f" {record['ratio_max_deviation']:.0e} in it"
        )
    if "implicit_margin" in record:
        parts.append(
            f"loss {record['loss']:.4f}  margin {record['implicit_margin']:+.4f}, above 0 in"
            f" {record['implicit_accuracy']:.0%} of pairs"
        )
    parts.append(f"gradient {record['grad_norm']:.3f}" if "grad_norm" in record else "no update")
    clipped = [record.get(f"clip_fraction_{side}") for side in ("low", "high")]
    shares = {"clipped": sum(each for each in clipped if each is not None) if any(clipped) else None}
    shares["no signal"] = record.get("dead_groups")
    parts += [f"{name} {share:.0%}" for name, share in shares.items() if share]
    return "  ".join(parts)


def _short(value: float) -> str:
    return format(value, ".4f" if abs(value) < 1e6 else ".4g")


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
