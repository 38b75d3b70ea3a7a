"""The clipped policy objective.

Axes: G samples that share a group, in the last dimension; any dimensions before it.
"""

import torch
from torch import Tensor

from flowcredit.transition import Gaussian


def clipped_loss(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, dict[str, float]]:
    """``-mean(min(ratio A, clip(ratio, 1 - e, 1 + e) A))`` over all entries (PPO, arXiv 1707.06347, eq. 7).

    Both are [..., G]; gradients flow through ``log_ratio`` alone. The loss is a scalar to minimise. With it
    comes what to watch, means over entries but the deviation: ``ratio_mean`` and ``ratio_max_deviation``
    (largest ``|ratio - 1|``) are 1 and 0 on-policy; ``clip_fraction_low`` and ``clip_fraction_high`` are the
    shares of ratios below and above the clip range; ``approx_kl`` estimates KL(old || new) by
    ``ratio - 1 - log ratio`` (Schulman's k3). ValueError where shapes differ or the clip range is not in
    (0, 1).
    """
    if log_ratio.shape != advantages.shape or log_ratio.dim() == 0 or log_ratio.numel() == 0:
        raise ValueError(
            f"log-ratios and advantages have shapes {tuple(log_ratio.shape)}, {tuple(advantages.shape)}:"
            " expected one shape [..., G]"
        )
    if not 0 < clip_range < 1:
        raise ValueError(f"the clip range is {clip_range}: expected a number between 0 and 1")
    advantages = advantages.detach()
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    return loss, _metrics(log_ratio.detach(), clip_range)


def guarded_log_ratio(log_ratio: Tensor, step: Gaussian, before: Gaussian) -> Tensor:
    """The log-ratio without its drift and on the scale of a unit noise (GRPO-Guard, arXiv 2510.22319).

    ``std (log ratio + (mean - mean_before)^2 / (2 std^2))``, the square a mean over dimensions: for a state
    drawn by ``before`` this is the mean over dimensions of ``(mean - mean_before) noise``, whose mean is 0
    and whose spread knows nothing of the step's deviation. ``log_ratio`` [N, F]; both steps [N, 1, *D].
    """
    drift = step.kl_from(before, batch_dims=2)
    return step.std.to(log_ratio) * (log_ratio + drift)


def _metrics(log_ratio: Tensor, clip_range: float) -> dict[str, float]:
    ratio = torch.exp(log_ratio)
    # One transfer for all of them: on an accelerator each would wait for the device.
    values = torch.stack(
        [
            ratio.mean(),
            (ratio - 1).abs().amax(),
            (ratio < 1 - clip_range).to(ratio.dtype).mean(),
            (ratio > 1 + clip_range).to(ratio.dtype).mean(),
            (torch.expm1(log_ratio) - log_ratio).mean(),
        ]
    )
    names = ("ratio_mean", "ratio_max_deviation", "clip_fraction_low", "clip_fraction_high", "approx_kl")
    return dict(zip(names, values.tolist(), strict=True))
