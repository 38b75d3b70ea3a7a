"""One policy update: sets of states and their losses to optimizer steps.

Axes: P prompts, B rows in a forward pass, S states of a row, *D latent dimensions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcredit.config import TrainSettings
from flowcredit.distributed import ALONE, World
from flowcredit.errors import InputError
from flowcredit.faults import Fault, NonFinite, batch_tensors
from flowcredit.interfaces import Conditioning, FlowModel
from flowcredit.objectives import Metrics, TrainingSet
from flowcredit.rollout import rows_of
from flowcredit.sharding import as_number, loss_scale, own_part

Reference = Callable[[], AbstractContextManager[None]]
"""Turns the model into the reference policy while entered."""

UpdateMetrics = dict[str, float]
"""What the objective told, over all entries of the update; ``loss``; ``grad_norm``, the mean norm before
clipping; and, where there is a ratio, ``on_policy_deviation``, the largest ``|ratio - 1|`` before the first
optimizer step; ``skipped_steps``, the optimizer steps left out. ``kl_reference`` is the KL divergence of the
steps from the reference policy's."""

RATIO = "ratio_max_deviation"

OnFault = Callable[[Fault | None], None]
"""Called in every process where a loss or a gradient is not finite, with the batch where it is this one's."""


def stopped(fault: Fault | None) -> None:
    """Raise `NonFinite` for any fault."""
    what = "the sum of the gradients is no finite number" if fault is None else fault.message
    raise NonFinite(what, fault)


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


@dataclass(frozen=True)
class _Rows:
    """The rows of a set that are evaluated: equally many in every process, of which ``real`` count here."""

    rows: TrainingSet
    real: int

    def part(self, first: int, last: int) -> "_Rows":
        return _Rows(self.rows.part(first, last), max(0, min(self.real, last) - first))


@dataclass
class _Asked:
    """The model, and how often its network was called: equally often in every process."""

    model: FlowModel
    calls: int = 0

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        self.calls += 1
        return self.model.velocity(x, sigma, cond)


def update_policy(
    model: FlowModel,
    cond: Conditioning,
    sets: Sequence[TrainingSet],
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    after_step: Callable[[], None],
    reference: Reference | None = None,
    world: World = ALONE,
    own: int | None = None,
    on_fault: OnFault = stopped,
) -> UpdateMetrics:
    """Train on a rollout: an optimizer step for each set ("per_step") or one for all ("accumulated").

    The loss is the mean over the entries of the sets of an optimizer step, over all processes. Rows that can
    teach nothing, since their advantages are 0, are left out before the network sees them, and so is an
    optimizer step that has no others; without any there are no metrics. ``after_step`` is called after each.
    ``reference`` turns the model into the policy that a KL or a preference is measured from. ``own``: how
    many prompts of ``cond`` are this process's; the others only fill up. ``on_fault`` is called, in every
    process, where a loss or a gradient is not finite; unless it raises, that optimizer step is left out and
    counted in ``skipped_steps``. Raises InputError where, in float32, the ratio strays from 1 before the
    first step.
    """
    size, asked = settings.micro_batch_size, _Asked(model)
    chosen, totals = _chosen(sets, world, own)
    chosen = [_with_reference(asked, cond, each, size, reference) for each in chosen]
    every = range(len(sets))
    scale = loss_scale(_parameters(optimizer), world)
    seen: list[tuple[int, Metrics]] = []
    norms: list[float] = []
    losses, spent, skipped = 0.0, 0, 0
    on_policy: float | None = None
    for together in [[n] for n in every] if settings.update == "per_step" else [list(every)]:
        if not any(len(chosen[n].rows.x) for n in together):
            continue
        total = sum(totals[n] for n in together)
        chunks = list(_chunks([chosen[n] for n in together], size))
        loss_here, seen_here = _gradients(asked, cond, chunks, total, scale)
        norm = _norm(optimizer, settings, world)
        if not math.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            on_fault(_found_fault(asked, cond, chunks, total, optimizer, world))
            skipped += 1
            continue
        losses, seen, spent = losses + loss_here, seen + seen_here, spent + total
        if not norms:
            on_policy = _deviation(seen, world)
            if on_policy is not None:
                _check_ratio(on_policy, settings)
        norms.append(norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step()
    found = _metrics(world, seen, losses, spent, norms, on_policy, asked.calls)
    return found | {"skipped_steps": skipped} if norms or skipped else found


def _gradients(
    model: _Asked, cond: Conditioning, chunks: Sequence[Sequence[_Rows]], total: int, scale: int
) -> tuple[float, list[tuple[int, Metrics]]]:
    """Add up this process's gradients of the chunks; the sum of the loss over entries, and what to watch."""
    loss_sum = 0.0
    seen: list[tuple[int, Metrics]] = []
    for chunk in chunks:
        loss, metrics = _chunk_loss(chunk, _velocities(model, cond, [each.rows for each in chunk]), total)
        value = loss.item()
        # A loss that is not finite may have a gradient that is: it must not pass for a good one.
        (loss * (scale if math.isfinite(value) else math.nan)).backward()
        loss_sum += value * total
        seen += metrics
    return loss_sum, seen


def _found_fault(
    model: _Asked,
    cond: Conditioning,
    chunks: Sequence[Sequence[_Rows]],
    total: int,
    optimizer: torch.optim.Optimizer,
    world: World,
) -> Fault | None:
    """The first chunk of this process that alone has a loss or a gradient that is not finite, found by going
    through them again; None where it is another process's, or where only their sum is not finite.

    Every process goes through all its chunks, as spread weights need.
    """
    parameters = _parameters(optimizer)
    found: Fault | None = None
    for chunk in chunks:
        velocities = _velocities(model, cond, [each.rows for each in chunk])
        for v in velocities:
            v.retain_grad()
        loss, _ = _chunk_loss(chunk, velocities, total)
        loss.backward()
        value = loss.item()
        bad = [p for p in parameters if p.grad is not None and not own_part(p.grad).isfinite().all()]
        if found is None and (bad or not math.isfinite(value)):
            kind = "gradient" if math.isfinite(value) else "loss"
            what = f"the loss is {value:g}" if kind == "loss" else f"the gradient of {len(bad)} tensors is"
            states = sum(len(v.flatten(0, 1)) for v in velocities)
            message = f"{what} no finite number" if kind == "gradient" else what
            found = Fault(
                kind,
                f"{message} in a batch of {states} states",
                _batch(cond, chunk, velocities),
                {"loss": value, "prompts": torch.cat([e.rows.prompts for e in chunk]).tolist()},
            )
        optimizer.zero_grad(set_to_none=True)
        if found is not None and world.size == 1:
            break
    return found


def _batch(cond: Conditioning, chunk: Sequence[_Rows], velocities: Sequence[Tensor]) -> dict[str, Tensor]:
    """The states of a chunk as the network saw them, their velocities, and the loss's gradient there."""
    x, sigma, prompts = _states([each.rows for each in chunk])
    v = torch.cat([each.detach().flatten(0, 1) for each in velocities])
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in velocities]
    tensors = batch_tensors(x, sigma, rows_of(cond, prompts), v)
    return tensors | {"grad_v": torch.cat([each.flatten(0, 1) for each in grads])}


def _chosen(sets: Sequence[TrainingSet], world: World, own: int | None) -> tuple[list[_Rows], list[int]]:
    """Of each set the rows that teach, filled up to as many as any process has; and its entries anywhere."""
    valid = [torch.ones_like(each.live) if own is None else each.prompts < own for each in sets]
    live = [each.live & there for each, there in zip(sets, valid, strict=True)]
    counted = [each.counted & there for each, there in zip(sets, valid, strict=True)]
    totals = world.summed([int(c.sum()) * each.terms for c, each in zip(counted, sets, strict=True)])
    found = [int(each.sum()) for each in live]
    chosen = []
    for each, teaches, real, count in zip(sets, live, found, world.largest(found), strict=True):
        order = torch.cat([teaches.nonzero().flatten(), (~teaches).nonzero().flatten()])
        assert count <= len(order), "processes hold sets of different sizes"
        rows = each if count == len(order) == real else each.only(order[:count])
        chosen.append(_Rows(rows, real))
    return chosen, totals


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _norm(optimizer: torch.optim.Optimizer, settings: TrainSettings, world: World) -> float:
    """Add up the gradients of all processes and scale them down; their norm before that."""
    parameters = _parameters(optimizer)
    world.sum_gradients(parameters)
    return as_number(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))


@torch.no_grad()
def _with_reference(
    model: _Asked, cond: Conditioning, chosen: _Rows, size: int, reference: Reference | None
) -> _Rows:
    if not chosen.rows.needs_reference or not len(chosen.rows.x):
        return chosen
    assert reference is not None, "an objective that needs a reference was given none"
    with reference():
        parts = [_velocities(model, cond, [p.rows for p in part])[0] for part in _chunks([chosen], size)]
    return _Rows(chosen.rows.with_reference(torch.cat(parts)), chosen.real)


def _velocities(model: _Asked, cond: Conditioning, chunk: Sequence[TrainingSet]) -> list[Tensor]:
    """Velocities of every set of the chunk in one evaluation, each [N, S, *D]."""
    x, sigma, prompts = _states(chunk)
    v = model.velocity(x, sigma, rows_of(cond, prompts))
    parts = v.split([rows.x.shape[0] * rows.x.shape[1] for rows in chunk])
    return [part.unflatten(0, rows.x.shape[:2]) for part, rows in zip(parts, chunk, strict=True)]


def _states(chunk: Sequence[TrainingSet]) -> tuple[Tensor, Tensor, Tensor]:
    """The states [B, *D] of a chunk, their sigmas [B] and the prompts [B] that they belong to."""
    x = torch.cat([rows.x.flatten(0, 1) for rows in chunk])
    sigma = torch.cat([rows.sigma.repeat_interleave(rows.x.shape[1]) for rows in chunk])
    return x, sigma, torch.cat([rows.prompts.repeat_interleave(rows.x.shape[1]) for rows in chunk])


def _chunks(sets: Sequence[_Rows], size: int) -> Iterator[list[_Rows]]:
    """Rows in order, ``size`` states to a chunk, across the bounds of sets; one row at least."""
    chunk: list[_Rows] = []
    room = size
    for each in sets:
        first, count, states = 0, len(each.rows.x), each.rows.x.shape[1]
        while first < count:
            if room < states and chunk:
                yield chunk
                chunk, room = [], size
            last = min(count, first + max(1, room // states))
            chunk.append(each.part(first, last))
            room -= (last - first) * states
            first = last
    if chunk:
        yield chunk


def _chunk_loss(
    chunk: Sequence[_Rows], velocities: Sequence[Tensor], total: int
) -> tuple[Tensor, list[tuple[int, Metrics]]]:
    """The chunk's share of a mean over ``total`` entries; entries and metrics of its pieces."""
    # Rows that only fill up keep their place in the graph: every process walks it backward alike.
    shares = [v[each.real :].sum() * 0 for each, v in zip(chunk, velocities, strict=True)]
    seen = []
    for each, v in zip(chunk, velocities, strict=True):
        if each.real == 0:
            continue
        rows = each.rows.part(0, each.real)
        loss, metrics = rows.loss(v[: each.real])
        entries = len(rows.x) * rows.terms
        shares.append(loss * (entries / total))
        seen.append((entries, metrics))
    return torch.stack(shares).sum(), seen


def _check_ratio(deviation: float, settings: TrainSettings) -> None:
    if settings.mixed_precision == "no" and not deviation <= settings.ratio_tolerance:
        raise InputError(
            f"the on-policy ratio is {deviation:.2e} away from 1, above train.ratio_tolerance"
            f" {settings.ratio_tolerance:g}: rollout and training do not see the same policy; check that the"
            " model is deterministic (no dropout) and computes in float32, or raise the tolerance"
        )


def _deviation(seen: Sequence[tuple[int, Metrics]], world: World) -> float | None:
    """The largest ``|ratio - 1|`` in any process; None where the objective has no ratio."""
    told = world.told(max((each[RATIO] for _, each in seen if RATIO in each), default=None))
    return max((each for each in told if each is not None), default=None)


def _metrics(
    world: World,
    seen: Sequence[tuple[int, Metrics]],
    losses: float,
    spent: int,
    norms: Sequence[float],
    on_policy: float | None,
    calls: int,
) -> UpdateMetrics:
    """Over all processes: means weighted by entries, and maxima. Nothing where there was no optimizer
    step."""
    if not norms:
        return {}
    weight = sum(entries for entries, _ in seen)
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for entries, metrics in seen:
        for name, value in metrics.items():
            if name.endswith("max_deviation"):
                maxima[name] = max(maxima.get(name, value), value)
            else:
                sums[name] = sums.get(name, 0.0) + entries * value
    told = world.told([losses, weight, sums, maxima, calls])
    assert all(each[4] == calls for each in told), "processes do not call the network equally often"
    whole = sum(each[1] for each in told)
    found = {
        "loss": sum(each[0] for each in told) / spent,
        "grad_norm": sum(norms) / len(norms),
    }
    for name in dict.fromkeys(name for each in told for name in each[2]):
        found[name] = sum(each[2].get(name, 0.0) for each in told) / whole
    for name in dict.fromkeys(name for each in told for name in each[3]):
        found[name] = max(each[3][name] for each in told if name in each[3])
    if on_policy is not None:
        found["on_policy_deviation"] = on_policy
    return found
