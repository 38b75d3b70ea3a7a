"""One policy update: transitions and their advantages to optimizer steps.

Every distinct state of a transition is evaluated once, with gradient, and serves its whole fan-out.

Axes: P prompts, W samples of a prompt at a state, F fan-out, N = P W rows of a transition, B rows in a
forward pass, *D latent dimensions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcredit.config import TrainSettings
from flowcredit.errors import InputError
from flowcredit.interfaces import Conditioning, FlowModel
from flowcredit.policy_loss import LossMetrics, clipped_loss
from flowcredit.rollout import Transition, rows_of
from flowcredit.transition import Kernel

Reference = Callable[[], AbstractContextManager[None]]
"""Turns the model into the reference policy while entered."""


@dataclass(frozen=True)
class UpdateMetrics:
    """Means over all entries of the update; ``on_policy_deviation`` is the largest ``|ratio - 1|`` before
    the first optimizer step, ``grad_norm`` the mean norm before clipping. ``kl_reference`` is the KL
    divergence of the steps from the reference policy's, a mean over dimensions; None where none is asked for.
    """

    loss: float
    grad_norm: float
    on_policy_deviation: float
    ratio_mean: float
    ratio_max_deviation: float
    clip_fraction_low: float
    clip_fraction_high: float
    approx_kl: float
    kl_reference: float | None = None


@dataclass(frozen=True)
class _Rows:
    """A transition: ``x`` [N, *D], ``x_next`` [N, F, *D], ``log_prob`` and ``advantages`` [N, F].

    ``v_reference`` [N, *D] are the reference policy's velocities, where there is a KL.
    """

    k: int
    k_next: int
    sigma: float
    x: Tensor
    x_next: Tensor
    log_prob: Tensor
    advantages: Tensor
    prompts: Tensor
    v_reference: Tensor | None = None

    def part(self, first: int, last: int) -> "_Rows":
        cut = slice(first, last)
        return _Rows(
            self.k,
            self.k_next,
            self.sigma,
            self.x[cut],
            self.x_next[cut],
            self.log_prob[cut],
            self.advantages[cut],
            self.prompts[cut],
            None if self.v_reference is None else self.v_reference[cut],
        )

    @property
    def entries(self) -> int:
        return self.advantages.numel()


def learning_rate(settings: TrainSettings, iteration: int) -> float:
    """The rate of an iteration, from 0 on: a linear warm-up, then the schedule, 0 after the last."""
    if iteration < settings.warmup_iterations:
        return settings.learning_rate * (iteration + 1) / settings.warmup_iterations
    if settings.lr_schedule == "constant":
        return settings.learning_rate
    left = settings.iterations - settings.warmup_iterations
    progress = (iteration - settings.warmup_iterations) / left
    share = 1 - progress if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * share


def update_policy(
    model: FlowModel,
    cond: Conditioning,
    kernel: Kernel,
    transitions: Sequence[Transition],
    advantages: Mapping[int, Tensor],
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    after_step: Callable[[], None],
    reference: Reference | None = None,
) -> UpdateMetrics:
    """Train on a rollout: one optimizer step for each transition ("per_step") or one for all ("accumulated").

    ``advantages`` maps each transition's segment to [P, W F]. The loss is the mean over prompts, branches and
    the transitions of an optimizer step. ``after_step`` is called after each. ``reference`` turns the model
    into the policy from which ``settings.kl_weight`` keeps it. Raises InputError where the gradient is not
    finite, and, in float32, where the ratio strays from 1 before the first step.
    """
    sets = [_rows(transition, advantages[transition.segment]) for transition in transitions]
    if reference is not None:
        with reference():
            sets = [_with_reference(model, cond, rows, settings.micro_batch_size) for rows in sets]
    steps = [[rows] for rows in sets] if settings.update == "per_step" else [sets]
    weights: list[int] = []
    metrics: list[LossMetrics] = []
    divergences: list[float] = []
    norms, losses, on_policy = [], [], math.nan
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, rows in enumerate(steps):
        total = sum(each.entries for each in rows)
        for chunk in _chunks(rows, settings.micro_batch_size):
            loss, seen, divergence = _chunk_loss(model, cond, kernel, chunk, total, settings)
            loss.backward()
            losses.append(loss.item() * total)
            divergences += divergence
            weights += [piece.entries for piece in chunk]
            metrics += seen
        if number == 0:
            on_policy = max(each.ratio_max_deviation for each in metrics)
            _check_ratio(on_policy, settings)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        if not math.isfinite(norm):
            raise InputError(
                f"the gradient norm is {norm}: training has diverged; go back to a checkpoint and lower"
                f" train.learning_rate (now {settings.learning_rate:g})"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step()
        norms.append(norm)
    return _summary(metrics, weights, losses, norms, on_policy, divergences)


def _rows(transition: Transition, advantages: Tensor) -> _Rows:
    prompts, width, fan_out = transition.log_prob.shape
    assert advantages.shape == (prompts, width * fan_out), "advantages do not match the transition"
    device = transition.x.device
    return _Rows(
        transition.k,
        transition.k_next,
        transition.sigma,
        transition.x.flatten(0, 1),
        transition.x_next.flatten(0, 1),
        transition.log_prob.flatten(0, 1),
        advantages.to(device).unflatten(1, (width, fan_out)).flatten(0, 1),
        torch.arange(prompts, device=device).repeat_interleave(width),
    )


@torch.no_grad()
def _with_reference(model: FlowModel, cond: Conditioning, rows: _Rows, size: int) -> _Rows:
    parts = []
    for first in range(0, len(rows.x), size):
        part = rows.part(first, first + size)
        at = part.x.new_full((len(part.x),), part.sigma)
        parts.append(model.velocity(part.x, at, rows_of(cond, part.prompts)))
    return replace(rows, v_reference=torch.cat(parts))


def _chunks(sets: Sequence[_Rows], size: int) -> Iterator[list[_Rows]]:
    """Rows in order, ``size`` to a chunk, across the bounds of transitions."""
    chunk: list[_Rows] = []
    room = size
    for rows in sets:
        first, count = 0, len(rows.x)
        while first < count:
            last = min(count, first + room)
            chunk.append(rows.part(first, last))
            room -= last - first
            first = last
            if room == 0:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def _chunk_loss(
    model: FlowModel,
    cond: Conditioning,
    kernel: Kernel,
    chunk: Sequence[_Rows],
    total: int,
    settings: TrainSettings,
) -> tuple[Tensor, list[LossMetrics], list[float]]:
    """The chunk's share of a mean over ``total`` entries, metrics and KL divergences of its pieces."""
    x = torch.cat([rows.x for rows in chunk])
    sigma = torch.cat([rows.x.new_full((len(rows.x),), rows.sigma) for rows in chunk])
    prompts = torch.cat([rows.prompts for rows in chunk])
    velocities = model.velocity(x, sigma, rows_of(cond, prompts)).split([len(rows.x) for rows in chunk])
    shares, seen, divergences = [], [], []
    for rows, v in zip(chunk, velocities, strict=True):
        step = kernel(rows.x.unsqueeze(1), v.unsqueeze(1), rows.k, rows.k_next)
        new = step.log_prob(rows.x_next, batch_dims=2)
        loss, metrics = clipped_loss(new, rows.log_prob, rows.advantages, settings.clip_range)
        if rows.v_reference is not None:
            reference = kernel(rows.x.unsqueeze(1), rows.v_reference.unsqueeze(1), rows.k, rows.k_next)
            divergence = step.kl_from(reference, batch_dims=2).mean()
            loss = loss + settings.kl_weight * divergence
            divergences.append(divergence.item())
        shares.append(loss * (rows.entries / total))
        seen.append(metrics)
    return torch.stack(shares).sum(), seen, divergences


def _check_ratio(deviation: float, settings: TrainSettings) -> None:
    if settings.mixed_precision == "no" and not deviation <= settings.ratio_tolerance:
        raise InputError(
            f"the on-policy ratio is {deviation:.2e} away from 1, above train.ratio_tolerance"
            f" {settings.ratio_tolerance:g}: rollout and training do not see the same policy; check that the"
            " model is deterministic (no dropout) and computes in float32, or raise the tolerance"
        )


def _summary(
    metrics: Sequence[LossMetrics],
    weights: Sequence[int],
    losses: Sequence[float],
    norms: Sequence[float],
    on_policy: float,
    divergences: Sequence[float],
) -> UpdateMetrics:
    total = sum(weights)

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / total

    return UpdateMetrics(
        loss=sum(losses) / total,
        grad_norm=sum(norms) / len(norms),
        on_policy_deviation=on_policy,
        ratio_mean=mean([m.ratio_mean for m in metrics]),
        ratio_max_deviation=max(m.ratio_max_deviation for m in metrics),
        clip_fraction_low=mean([m.clip_fraction_low for m in metrics]),
        clip_fraction_high=mean([m.clip_fraction_high for m in metrics]),
        approx_kl=mean([m.approx_kl for m in metrics]),
        kl_reference=mean(divergences) if divergences else None,
    )
