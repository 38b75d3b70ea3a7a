"""The wavefront: runs a plan over a flow model. The only loop over time in the whole project.

At each grid index, from sigma 1 to 0, every distinct state that needs a velocity there is gathered over all
prompts, branches, strides and probes and evaluated in batches of one size; every child then takes its step.

Axes: P prompts, W samples of a prompt at a state, F fan-out of a transition, B rows in a batch, *D latent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flowcredit import noise
from flowcredit.faults import velocity_fault
from flowcredit.interfaces import Conditioning, FlowModel
from flowcredit.plan import Plan, Segment
from flowcredit.time_grid import check_grid
from flowcredit.transition import Kernel, euler


class NoiseSource(Protocol):
    """Every random draw of a rollout, so that any of them can be replayed."""

    def initial(self, width: int) -> Tensor:
        """[P, width, *D] float32 states at sigma 1."""
        ...

    def step(self, segment: int, width: int) -> Tensor:
        """[P, width, *D] standard normal noise of a stochastic segment."""
        ...

    def common(self, segment: int | None, width: int) -> Tensor:
        """[P, width, *D]: the part of their noise that siblings share; None: that of the initial states."""
        ...


@dataclass(frozen=True)
class KeyedNoise:
    """Draws keyed by run seed, iteration, prompt and role: the same on any number of processes.

    ``prompt_indices`` are the prompts' places in the whole iteration, over all processes.
    """

    model: FlowModel
    seed: int
    iteration: int
    prompt_indices: Sequence[int]

    def initial(self, width: int) -> Tensor:
        return self._initial("initial", width)

    def _initial(self, role: str, width: int) -> Tensor:
        keyed = [noise.generator(self.seed, self.iteration, index, role) for index in self.prompt_indices]
        return torch.stack([self.model.initial_noise(width, each) for each in keyed])

    def common(self, segment: int | None, width: int) -> Tensor:
        if segment is None:
            return self._initial("common", width)
        return self._drawn(f"common/{segment}", width)

    def step(self, segment: int, width: int) -> Tensor:
        return self._drawn(f"segment/{segment}", width)

    def _drawn(self, role: str, width: int) -> Tensor:
        keyed = [noise.generator(self.seed, self.iteration, index, role) for index in self.prompt_indices]
        # One sample has the shape of an initial state; drawing it costs nothing beside a velocity.
        shape = self.model.initial_noise(1, torch.Generator()).shape[1:]
        return noise.draw(keyed, (width, *shape))


@dataclass(frozen=True)
class Transition:
    """What training needs of a stochastic step: one ``x`` for the whole fan-out below it.

    ``x`` and its velocity ``v`` [P, W, *D], ``x_next`` [P, W, F, *D] as stored, ``log_prob`` [P, W, F]
    float32 of ``x_next``.
    """

    segment: int
    k: int
    k_next: int
    sigma: float
    sigma_next: float
    x: Tensor
    v: Tensor
    x_next: Tensor
    log_prob: Tensor


@dataclass(frozen=True)
class Rollout:
    """Transitions in the order of the grid; leaves by scored segment, [P, W, *D].

    Segments that end in the same leaf hold the same tensor. ``velocity_evaluations`` counts the rows that
    the model was given, over all prompts. ``recorded`` holds the start and the end state, [P, W, *D] each, of
    every segment that asks for it.
    """

    transitions: tuple[Transition, ...]
    leaves: dict[int, Tensor]
    velocity_evaluations: int
    recorded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def rows_of(cond: Conditioning, rows: Tensor) -> Conditioning:
    """The conditioning of some prompts, repeated as ``rows`` [B] says."""
    return {name: tensor.index_select(0, rows.to(tensor.device)) for name, tensor in cond.items()}


def _count_prompts(cond: Conditioning) -> int:
    counts = {len(tensor) for tensor in cond.values()}
    if len(counts) != 1:
        raise ValueError(
            f"conditioning has {sorted(counts)} rows: expected one for each prompt in each tensor"
        )
    return counts.pop()


class _Velocities:
    """Batched evaluation of the states at one grid index, counting rows."""

    def __init__(
        self,
        model: FlowModel,
        cond: Conditioning,
        batch_size: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.model, self.cond, self.batch_size, self.progress = model, cond, batch_size, progress
        self.rows = 0

    def __call__(self, states: Sequence[Tensor], sigma: float) -> list[Tensor]:
        """[P, W, *D] states to their velocities, shape for shape."""
        flat = torch.cat([state.flatten(0, 1) for state in states])
        prompts = torch.cat(
            [torch.arange(len(state)).repeat_interleave(state.shape[1]) for state in states]
        ).to(flat.device)
        parts = []
        batches = list(zip(flat.split(self.batch_size), prompts.split(self.batch_size), strict=True))
        for x, rows in batches:
            at = torch.full((len(x),), sigma, dtype=x.dtype, device=x.device)
            parts.append(self.model.velocity(x, at, rows_of(self.cond, rows)))
            self.rows += len(x)
            if self.progress is not None:
                self.progress(len(x))
        sizes = [state.shape[0] * state.shape[1] for state in states]
        velocities = torch.cat(parts)
        if not velocities.isfinite().all():
            x, rows, v = next(
                (*batch, v) for batch, v in zip(batches, parts, strict=True) if not v.isfinite().all()
            )
            raise velocity_fault(x, sigma, rows_of(self.cond, rows), v)
        pieces = velocities.split(sizes)
        return [piece.view_as(state) for piece, state in zip(pieces, states, strict=True)]


@torch.no_grad()
def rollout(
    model: FlowModel,
    plan: Plan,
    cond: Conditioning,
    grid: Tensor,
    kernel: Kernel,
    noise_source: NoiseSource,
    batch_size: int,
    storage_dtype: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> Rollout:
    """Run ``plan`` for every prompt of ``cond`` (P rows) over ``grid`` [T+1].

    A stochastic state is rounded to ``storage_dtype`` (None: as computed) before it is scored, and its
    log-prob is that of the rounded state, so that training finds a ratio of 1. ``progress`` is told the
    rows of each batch.
    Raises NonFinite where a velocity is no finite number, and ValueError where the grid has not
    ``plan.num_steps`` steps or the batch size is below 1.
    """
    sigmas = check_grid(grid).tolist()
    if len(sigmas) != plan.num_steps + 1:
        raise ValueError(
            f"a plan of {plan.num_steps} steps over a grid of {len(sigmas) - 1}: expected the same"
        )
    if batch_size < 1:
        raise ValueError(f"the rollout batch size is {batch_size}: expected 1 or more")
    prompts = _count_prompts(cond)
    velocities = _Velocities(model, cond, batch_size, progress)
    segment_of = {plan.segment_end[i]: (i, plan.segments[i]) for i in plan.transitions}
    initial = _initial(plan, noise_source).to(model.device)
    assert initial.shape[:2] == (prompts, plan.root_width), "noise source and conditioning disagree"
    states: dict[int, Tensor] = {0: initial}
    asked = {plan.segment_nodes[i]: i for i, each in enumerate(plan.segments) if each.recorded}
    recorded: dict[int, tuple[Tensor, Tensor]] = {}
    transitions = []
    for k in range(plan.num_steps):
        here = [n for n, node in enumerate(plan.nodes) if node.index == k and plan.children[n]]
        if not here:
            continue
        for n, v in zip(here, velocities([states[n] for n in here], sigmas[k]), strict=True):
            for child in plan.children[n]:
                node = plan.nodes[child]
                if node.stochastic:
                    number, segment = segment_of[child]
                    drawn = _noise(noise_source, number, segment, states[n].shape[1])
                    step = _step(states[n], v, number, segment, sigmas, kernel, drawn, storage_dtype)
                    transitions.append(step)
                    states[child] = step.x_next.flatten(1, 2).to(initial.dtype)
                else:
                    states[child] = euler(states[n], v, sigmas[k], sigmas[node.index])
                    if (n, child) in asked:
                        recorded[asked[n, child]] = (states[n], states[child])
            del states[n]
    leaves = {i: states[plan.segment_end[i]] for i in plan.scored}
    return Rollout(tuple(transitions), leaves, velocities.rows, recorded)


def _initial(plan: Plan, noise_source: NoiseSource) -> Tensor:
    own = noise_source.initial(plan.root_width)
    return _correlated(own, plan.root_correlation, lambda: noise_source.common(None, 1))


def _noise(noise_source: NoiseSource, number: int, segment: Segment, width: int) -> Tensor:
    """[P, W, F, *D] standard normal noise of a stochastic segment below W states."""
    own = noise_source.step(number, width * segment.fan_out).unflatten(1, (width, segment.fan_out))
    return _correlated(own, segment.correlation, lambda: noise_source.common(number, width).unsqueeze(2))


def _correlated(own: Tensor, correlation: float, common: Callable[[], Tensor]) -> Tensor:
    """Standard normal noises of siblings that have ``common`` noise in them."""
    if correlation == 0:
        return own
    return math.sqrt(1 - correlation) * own + math.sqrt(correlation) * common()


def _step(
    x: Tensor,
    v: Tensor,
    number: int,
    segment: Segment,
    sigmas: Sequence[float],
    kernel: Kernel,
    drawn: Tensor,
    storage_dtype: torch.dtype | None,
) -> Transition:
    k, k_next = segment.path
    step = kernel(x.unsqueeze(2), v.unsqueeze(2), k, k_next)
    x_next = step.draw(drawn.to(x.device))
    if storage_dtype is not None:
        x_next = x_next.to(storage_dtype)
    log_prob = step.log_prob(x_next, batch_dims=3)
    return Transition(number, k, k_next, sigmas[k], sigmas[k_next], x, v, x_next, log_prob)
