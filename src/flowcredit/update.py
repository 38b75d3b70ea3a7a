"""One policy update: sets of states and their losses to optimizer steps.

Axes: P prompts, B rows in a forward pass, S states of a row, *D latent dimensions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flowcredit.config import TrainSettings
from flowcredit.errors import InputError
from flowcredit.interfaces import Conditioning, FlowModel
from flowcredit.objectives import Metrics, TrainingSet
from flowcredit.rollout import rows_of

Reference = Callable[[], AbstractContextManager[None]]
"""Turns the model into the reference policy while entered."""

UpdateMetrics = dict[str, float]
"""What the objective told, over all entries of the update; ``loss``; ``grad_norm``, the mean norm before
clipping; and, where there is a ratio, ``on_policy_deviation``, the largest ``|ratio - 1|`` before the first
optimizer step. ``kl_reference`` is the KL divergence of the steps from the reference policy's."""

RATIO = "ratio_max_deviation"


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
    sets: Sequence[TrainingSet],
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    after_step: Callable[[], None],
    reference: Reference | None = None,
) -> UpdateMetrics:
    """Train on what a rollout gave: one optimizer step for each set ("per_step") or one for all
    ("accumulated").

    The loss is the mean over the entries of the sets of an optimizer step. ``after_step`` is called after
    each. ``reference`` turns the model into the policy that a KL or a preference is measured from. Without
    sets nothing happens, and there are no metrics. Raises InputError where the gradient is not finite, and,
    in float32, where the ratio strays from 1 before the first step.
    """
    if not sets:
        return {}
    sets = [_with_reference(model, cond, each, settings.micro_batch_size, reference) for each in sets]
    steps = [[each] for each in sets] if settings.update == "per_step" else [list(sets)]
    seen: list[tuple[int, Metrics]] = []
    norms, losses, on_policy = [], [], math.nan
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, together in enumerate(steps):
        total = sum(each.entries for each in together)
        for chunk in _chunks(together, settings.micro_batch_size):
            loss, metrics = _chunk_loss(model, cond, chunk, total)
            loss.backward()
            losses.append(loss.item() * total)
            seen += metrics
        if number == 0 and all(RATIO in each for _, each in seen):
            on_policy = max(each[RATIO] for _, each in seen)
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
    found = _gathered(seen)
    if not math.isnan(on_policy):
        found["on_policy_deviation"] = on_policy
    return {"loss": sum(losses) / sum(n for n, _ in seen), "grad_norm": sum(norms) / len(norms), **found}


@torch.no_grad()
def _with_reference(
    model: FlowModel, cond: Conditioning, rows: TrainingSet, size: int, reference: Reference | None
) -> TrainingSet:
    if not rows.needs_reference:
        return rows
    assert reference is not None, "an objective that needs a reference was given none"
    with reference():
        parts = [_velocities(model, cond, part)[0] for part in _chunks([rows], size)]
    return rows.with_reference(torch.cat(parts))


def _velocities(model: FlowModel, cond: Conditioning, chunk: Sequence[TrainingSet]) -> list[Tensor]:
    """Velocities of every set of the chunk in one evaluation, each [N, S, *D]."""
    x = torch.cat([rows.x.flatten(0, 1) for rows in chunk])
    sigma = torch.cat([rows.sigma.repeat_interleave(rows.x.shape[1]) for rows in chunk])
    prompts = torch.cat([rows.prompts.repeat_interleave(rows.x.shape[1]) for rows in chunk])
    v = model.velocity(x, sigma, rows_of(cond, prompts))
    parts = v.split([rows.x.shape[0] * rows.x.shape[1] for rows in chunk])
    return [part.unflatten(0, rows.x.shape[:2]) for part, rows in zip(parts, chunk, strict=True)]


def _chunks(sets: Sequence[TrainingSet], size: int) -> Iterator[list[TrainingSet]]:
    """Rows in order, ``size`` states to a chunk, across the bounds of sets; one row at least."""
    chunk: list[TrainingSet] = []
    room = size
    for rows in sets:
        first, count, states = 0, len(rows.x), rows.x.shape[1]
        while first < count:
            if room < states and chunk:
                yield chunk
                chunk, room = [], size
            last = min(count, first + max(1, room // states))
            chunk.append(rows.part(first, last))
            room -= (last - first) * states
            first = last
    if chunk:
        yield chunk


def _chunk_loss(
    model: FlowModel, cond: Conditioning, chunk: Sequence[TrainingSet], total: int
) -> tuple[Tensor, list[tuple[int, Metrics]]]:
    """The chunk's share of a mean over ``total`` entries; entries and metrics of its pieces."""
    shares, seen = [], []
    for rows, v in zip(chunk, _velocities(model, cond, chunk), strict=True):
        loss, metrics = rows.loss(v)
        shares.append(loss * (rows.entries / total))
        seen.append((rows.entries, metrics))
    return torch.stack(shares).sum(), seen


def _check_ratio(deviation: float, settings: TrainSettings) -> None:
    if settings.mixed_precision == "no" and not deviation <= settings.ratio_tolerance:
        raise InputError(
            f"the on-policy ratio is {deviation:.2e} away from 1, above train.ratio_tolerance"
            f" {settings.ratio_tolerance:g}: rollout and training do not see the same policy; check that the"
            " model is deterministic (no dropout) and computes in float32, or raise the tolerance"
        )


def _gathered(seen: Sequence[tuple[int, Metrics]]) -> dict[str, float]:
    """Means weighted by entries, and maxima, of metrics that every piece tells."""
    found = {}
    for name in seen[0][1]:
        values = [metrics[name] for _, metrics in seen]
        if name.endswith("max_deviation"):
            found[name] = max(values)
        else:
            weights = [entries for entries, _ in seen]
            found[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return found
