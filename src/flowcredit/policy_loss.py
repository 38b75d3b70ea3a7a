"""The clipped policy objective.

Axes: G samples that share a group, in the last dimension; any dimensions before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossMetrics:
    """What to watch while a policy is updated; every value is a mean over entries but the deviation.

    ``ratio_mean`` and ``ratio_max_deviation`` (largest ``|ratio - 1|``) are 1 and 0 on-policy.
    ``clip_fraction_low`` and ``clip_fraction_high`` are the shares of ratios below and above the clip
    range. ``approx_kl`` estimates KL(old || new) by ``ratio - 1 - log ratio`` (Schulman's k3).
    ``dead_groups`` is the share of groups whose advantages are all 0: they teach nothing.
    """

    ratio_mean: float
    ratio_max_deviation: float
    clip_fraction_low: float
    clip_fraction_high: float
    approx_kl: float
    dead_groups: float


def clipped_loss(
    log_prob_new: Tensor, log_prob_old: Tensor, advantages: Tensor, clip_range: float
) -> tuple[Tensor, LossMetrics]:
    """``-mean(min(ratio A, clip(ratio, 1 - e, 1 + e) A))`` over all entries (PPO, arXiv 1707.06347, eq. 7).

    All three are [..., G]; gradients flow through ``log_prob_new`` alone. The loss is a scalar to
    minimise. ValueError where shapes differ or the clip range is not in (0, 1).
    """
    shapes = {tuple(each.shape) for each in (log_prob_new, log_prob_old, advantages)}
    if len(shapes) != 1 or log_prob_new.dim() == 0 or log_prob_new.numel() == 0:
        raise ValueError(
            f"log-probs and advantages have shapes {tuple(log_prob_new.shape)}, {tuple(log_prob_old.shape)},"
            f" {tuple(advantages.shape)}: expected one shape [..., G]"
        )
    if not 0 < clip_range < 1:
        raise ValueError(f"the clip range is {clip_range}: expected a number between 0 and 1")
    advantages = advantages.detach()
    log_ratio = log_prob_new - log_prob_old.detach()
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    return loss, _metrics(log_ratio.detach(), advantages, clip_range)


def _metrics(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> LossMetrics:
    ratio = torch.exp(log_ratio)
    # One transfer for all of them: on an accelerator each would wait for the device.
    values = torch.stack(
        [
            ratio.mean(),
            (ratio - 1).abs().amax(),
            (ratio < 1 - clip_range).to(ratio.dtype).mean(),
            (ratio > 1 + clip_range).to(ratio.dtype).mean(),
            (torch.expm1(log_ratio) - log_ratio).mean(),
            (advantages == 0).all(-1).to(ratio.dtype).mean(),
        ]
    )
    return LossMetrics(*values.tolist())
