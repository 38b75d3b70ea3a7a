"""What a model and a reward must offer; everything slow or stateful is written against these alone.

Axes: B samples, P prompts, *D latent dimensions, H and W image height and width in pixels.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Conditioning = Mapping[str, Tensor]
"""Tensors whose first dimension follows the prompts."""


class FlowModel(Protocol):
    """A flow-matching model: x_s = (1 - s) x_0 + s eps, velocity dx/ds = eps - x_0, s from 1 to 0.

    Guidance, embedded or classifier-free, is inside ``velocity``: rollout, training and evaluation
    see one function.
    """

    network: torch.nn.Module
    """The module that is trained; ``velocity`` runs it."""

    @property
    def device(self) -> torch.device:
        """Where ``velocity`` and ``decode`` compute and return their results."""
        ...

    @property
    def image_tokens(self) -> int:
        """Tokens of an image of this size, on which a resolution-dependent shift depends."""
        ...

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Text to conditioning, row i for prompt i; no gradient."""
        ...

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Standard normal states at sigma 1, [B, *D] float32, drawn on the generator's device."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """[B, *D] states and [B] sigmas to [B, *D] float32 velocities; differentiable in the weights."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """[B, *D] states at sigma 0 to [B, 3, H, W] float32 images in [0, 1]; no gradient."""
        ...

    def time_grid(self, num_steps: int) -> Tensor:
        """The scheduler's own sigmas, [num_steps + 1] float64 from 1 to 0."""
        ...


class Reward(Protocol):
    """A scorer of images; further columns of the prompt file arrive as keyword arguments."""

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32; higher is better, NaN: no score."""
        ...


@runtime_checkable
class ReadsLimitedText(Protocol):
    """A reward whose text encoder has a length: what a user is told before a run begins."""

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many prompts lose words to it."""
        ...


@runtime_checkable
class HoldsModules(Protocol):
    """A reward that computes with networks of torch: what can be moved off the device while it waits.

    A reward that is a ``torch.nn.Module`` itself is one.
    """

    def modules(self) -> Iterable[torch.nn.Module]:
        """The networks, with all their weights; frozen."""
        ...


@runtime_checkable
class ChecksPrompts(Protocol):
    """A reward that cannot score every prompt, and can tell before anything is drawn."""

    def refusal(self, prompt: str, columns: Mapping[str, Any]) -> str | None:
        """Why a prompt, with the values of its row's other columns, cannot be scored; None if it can."""
        ...
