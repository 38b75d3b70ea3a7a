"""What training asks of the network: states, and a loss of the velocities that it gives them.

Axes: N rows, S states of a row, P prompts, W samples of a prompt at a state, F fan-out, *D latent dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from flowcredit.config import TrainSettings
from flowcredit.policy_loss import clipped_loss, guarded_log_ratio
from flowcredit.rollout import Transition
from flowcredit.transition import Kernel

Metrics = Mapping[str, float]
"""Means over entries by name; names that end in ``max_deviation`` are maxima."""


class TrainingSet(Protocol):
    """Rows that are trained together; ``x`` [N, S, *D], ``sigma`` [N], ``prompts`` [N] of whole numbers."""

    @property
    def x(self) -> Tensor: ...

    @property
    def sigma(self) -> Tensor: ...

    @property
    def prompts(self) -> Tensor:
        """The rows of the conditioning."""
        ...

    @property
    def terms(self) -> int:
        """Entries of a row in the mean that the loss is."""
        ...

    @property
    def counted(self) -> Tensor:
        """[N] bool: the rows over which the loss is a mean."""
        ...

    @property
    def live(self) -> Tensor:
        """[N] bool: those of them that can move the policy."""
        ...

    def only(self, rows: Tensor) -> Self:
        """Some of the rows, by their places."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether ``loss`` reads the reference policy's velocities."""
        ...

    def part(self, first: int, last: int) -> Self:
        """The rows from ``first`` to before ``last``."""
        ...

    def with_reference(self, v: Tensor) -> Self:
        """The same with the reference policy's velocities [N, S, *D]."""
        ...

    def loss(self, v: Tensor) -> tuple[Tensor, Metrics]:
        """Scalar mean over entries, to minimise, of velocities [N, S, *D]; and what to watch."""
        ...


@dataclass(frozen=True)
class PolicyOptions:
    """``clip_range`` of the ratio, ``kl_weight`` of the divergence from the reference, whether the ratio is
    ``guarded`` (GRPO-Guard), and the ``weight`` of the clipped term."""

    clip_range: float
    kl_weight: float = 0.0
    guarded: bool = False
    weight: float = 1.0


@dataclass(frozen=True)
class PolicyStep:
    """One transition under the clipped objective: ``x`` [N, 1, *D], ``x_next`` [N, F, *D],
    ``v_rollout`` [N, 1, *D], ``log_prob`` and ``advantages`` [N, F]; ``v_reference`` as ``v_rollout``."""

    kernel: Kernel
    k: int
    k_next: int
    options: PolicyOptions
    x: Tensor
    sigma: Tensor
    prompts: Tensor
    x_next: Tensor
    v_rollout: Tensor
    log_prob: Tensor
    advantages: Tensor
    v_reference: Tensor | None = None

    @property
    def terms(self) -> int:
        return self.advantages.shape[1]

    @property
    def counted(self) -> Tensor:
        return torch.ones_like(self.prompts, dtype=torch.bool)

    @property
    def live(self) -> Tensor:
        return self.counted if self.needs_reference else (self.advantages != 0).any(1)

    @property
    def needs_reference(self) -> bool:
        return self.options.kl_weight > 0

    def part(self, first: int, last: int) -> "PolicyStep":
        return self.only(slice(first, last))

    def only(self, cut: slice | Tensor) -> "PolicyStep":
        """Some of the rows."""
        return replace(
            self,
            x=self.x[cut],
            sigma=self.sigma[cut],
            prompts=self.prompts[cut],
            x_next=self.x_next[cut],
            v_rollout=self.v_rollout[cut],
            log_prob=self.log_prob[cut],
            advantages=self.advantages[cut],
            v_reference=None if self.v_reference is None else self.v_reference[cut],
        )

    def with_reference(self, v: Tensor) -> "PolicyStep":
        return replace(self, v_reference=v)

    def loss(self, v: Tensor) -> tuple[Tensor, Metrics]:
        step = self.kernel(self.x, v, self.k, self.k_next)
        log_ratio = step.log_prob(self.x_next, batch_dims=2) - self.log_prob
        if self.options.guarded:
            before = self.kernel(self.x, self.v_rollout, self.k, self.k_next)
            log_ratio = guarded_log_ratio(log_ratio, step, before)
        loss, metrics = clipped_loss(log_ratio, self.advantages, self.options.clip_range)
        loss = loss * self.options.weight
        if self.v_reference is None:
            return loss, metrics
        reference = self.kernel(self.x, self.v_reference, self.k, self.k_next)
        divergence = step.kl_from(reference, batch_dims=2).mean()
        loss = loss + self.options.kl_weight * divergence
        return loss, {**metrics, "kl_reference": divergence.item()}


def policy_sets(
    transitions: Sequence[Transition],
    advantages: Mapping[int, Tensor],
    kernel: Kernel,
    settings: TrainSettings,
    kept: Mapping[int, int | None] | None = None,
) -> tuple[PolicyStep, ...]:
    """Transitions of a rollout under the clipped objective; ``advantages`` [P, W F] by segment.

    ``kept``: by segment, of how many of a prompt's samples the extremes are trained; None for all.
    """
    weights = _weights(transitions, kernel, settings)
    return tuple(
        _policy_step(
            step,
            advantages[step.segment],
            kernel,
            PolicyOptions(
                clip_range=settings.clip_range,
                kl_weight=settings.kl_weight,
                guarded=settings.ratio == "guarded",
                weight=weight,
            ),
            None if kept is None else kept.get(step.segment),
        )
        for step, weight in zip(transitions, weights, strict=True)
    )


def _weights(transitions: Sequence[Transition], kernel: Kernel, settings: TrainSettings) -> list[float]:
    weights = [1.0 for _ in transitions]
    if settings.step_weights == "noise":
        # The deviation of a step is the same for every state.
        stds = [
            float(kernel(step.x[:1, :1], step.v[:1, :1], step.k, step.k_next).std) for step in transitions
        ]
        weights = [std * len(stds) / sum(stds) for std in stds]
    if settings.ratio == "guarded":
        # The gradient of a guarded log-ratio is as large as the step is long.
        lengths = [step.sigma - step.sigma_next for step in transitions]
        weights = [weight / length for weight, length in zip(weights, lengths, strict=True)]
    return weights


def _policy_step(
    transition: Transition, advantages: Tensor, kernel: Kernel, options: PolicyOptions, kept: int | None
) -> PolicyStep:
    """A transition of a rollout and its advantages [P, W F] as rows to train on."""
    prompts, width, fan_out = transition.log_prob.shape
    assert advantages.shape == (prompts, width * fan_out), "advantages do not match the transition"
    x = transition.x.flatten(0, 1)
    whole = PolicyStep(
        kernel,
        transition.k,
        transition.k_next,
        options,
        x=x.unsqueeze(1),
        sigma=x.new_full((len(x),), transition.sigma),
        prompts=torch.arange(prompts, device=x.device).repeat_interleave(width),
        x_next=transition.x_next.flatten(0, 1),
        v_rollout=transition.v.flatten(0, 1).unsqueeze(1),
        log_prob=transition.log_prob.flatten(0, 1),
        advantages=advantages.to(x.device).unflatten(1, (width, fan_out)).flatten(0, 1),
    )
    if kept is None or kept >= width:
        return whole
    assert fan_out == 1, "samples are picked where each is a row"
    return whole.only(_extremes(advantages, kept).to(x.device))


def _extremes(advantages: Tensor, kept: int) -> Tensor:
    """The rows, of [P, W] flattened, of each prompt's highest and lowest advantages, in order."""
    order = advantages.argsort(dim=1, stable=True)
    low, high = kept // 2, kept - kept // 2
    places = torch.cat([order[:, :low], order[:, order.shape[1] - high :]], 1)
    rows = places + torch.arange(len(order)).unsqueeze(1) * order.shape[1]
    return rows.flatten().sort().values
