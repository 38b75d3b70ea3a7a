"""Flows whose velocity is known in closed form: data that are normal, or a mixture of normals.

They obey the FlowModel protocol, so whatever runs on an image model can be checked here against exact
answers. With x_s = (1 - s) x_0 + s eps and x_0 ~ N(m, C), the velocity E[eps - x_0 | x_s = x] is
``-m + (s I - (1 - s) C) S^-1 (x - (1 - s) m)`` with ``S = (1 - s)^2 C + s^2 I`` (conditional mean of
joint normals; flow matching: arXiv 2210.02747); a mixture weighs its components' velocities by their
posterior probabilities.

Axes: B samples, K mixture components, *D latent dimensions, N = their product.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flowcredit.noise import generator as keyed_generator
from flowcredit.time_grid import shifted_linear


class MixtureVelocity(nn.Module):
    """The exact velocity of a mixture of K normals, [B, N] and [B] to [B, N].

    Trainable: ``means`` [K, N] and ``logits`` [K]. The covariances are fixed, held as ``variances``
    [K, N] along the columns of ``axes`` [K, N, N].
    """

    variances: Tensor
    axes: Tensor

    def __init__(self, means: Tensor, covariances: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.means = nn.Parameter(means.clone())
        self.logits = nn.Parameter(torch.log(weights / weights.sum()))
        variances, axes = torch.linalg.eigh(covariances)
        if bool((variances <= 0).any()):
            raise ValueError("a covariance is not positive definite: expected variances above 0")
        self.register_buffer("variances", variances)
        self.register_buffer("axes", axes)

    def forward(self, x: Tensor, sigma: Tensor, offset: Tensor) -> Tensor:
        """Velocity at states ``x`` and ``sigma`` where ``offset`` [B, N] moves every mean."""
        s = sigma.view(-1, 1, 1)
        means = self.means + offset.unsqueeze(1)
        centred = torch.einsum("kna,bkn->bka", self.axes, x.unsqueeze(1) - (1 - s) * means)
        spread = (1 - s) ** 2 * self.variances + s**2
        gain = (s - (1 - s) * self.variances) / spread
        velocities = torch.einsum("kna,bka->bkn", self.axes, gain * centred) - means
        log_density = -(centred**2 / spread + torch.log(spread)).sum(-1) / 2
        share = torch.softmax(self.logits + log_density, dim=-1)
        return (share.unsqueeze(-1) * velocities).sum(1)


class GaussianMixtureFlow:
    """A FlowModel over a mixture of K normals.

    ``means`` is [K, *D]; ``covariances`` is [K] (isotropic variances), [K, N] (diagonals) or [K, N, N];
    ``weights`` is [K]. A prompt moves all means by a fixed pattern of its own, ``prompt_spread`` times
    standard normal. With ``dtype`` float64 states and velocities are float64. ValueError where shapes do
    not agree, weights are not positive or a covariance is not positive definite.
    """

    def __init__(
        self,
        means: Tensor,
        covariances: Tensor,
        weights: Tensor,
        *,
        prompt_spread: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if means.dim() < 2 or weights.shape != means.shape[:1] or bool((weights <= 0).any()):
            raise ValueError(
                f"means have shape {tuple(means.shape)}, weights {tuple(weights.shape)}: expected [K, *D] and"
                " K positive weights"
            )
        self.shape = tuple(means.shape[1:])
        self.dtype = dtype
        self.prompt_spread = prompt_spread
        components, size = len(means), math.prod(self.shape)
        full = _full_covariances(covariances.to(dtype), components, size)
        self.network: nn.Module = MixtureVelocity(
            means.to(dtype).reshape(components, size), full, weights.to(dtype)
        )

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.network.parameters()).device

    @property
    def image_tokens(self) -> int:
        """One token a latent dimension."""
        return math.prod(self.shape)

    def encode(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """``{"offset": [B, N]}``: what each prompt adds to the means; equal prompts, equal rows."""
        size = math.prod(self.shape)
        rows = [torch.randn(size, generator=keyed_generator(0, 0, 0, f"prompt/{each}")) for each in prompts]
        offset = self.prompt_spread * torch.stack(rows)
        return {"offset": offset.to(self.device, self.dtype)}

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Standard normal states at sigma 1, [B, *D] in the flow's dtype, on the generator's device."""
        return torch.randn(
            (count, *self.shape), generator=generator, device=generator.device, dtype=self.dtype
        )

    def velocity(self, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        """The exact velocity, [B, *D] and [B] to [B, *D]; differentiable in means and weights."""
        flat = x.to(self.dtype).flatten(1)
        out: Tensor = self.network(flat, sigma.to(flat), cond["offset"].to(flat))
        return out.view(x.shape)

    def decode(self, x0: Tensor) -> Tensor:
        """[B, *D] to grey images [B, 3, 1, N] float32: one pixel a latent, its logistic function."""
        pixels = torch.sigmoid(x0.detach().flatten(1)).to(torch.float32)
        return pixels[:, None, None, :].expand(-1, 3, 1, -1)

    def time_grid(self, num_steps: int) -> Tensor:
        """The linear grid, [num_steps + 1] float64 from 1 to 0."""
        return shifted_linear(num_steps)

    def moments(self, sigma: float) -> tuple[Tensor, Tensor]:
        """Mean [N] and covariance [N, N] of x_s at ``sigma`` for a prompt that moves nothing."""
        network = self.network
        assert isinstance(network, MixtureVelocity)
        share = torch.softmax(network.logits.detach(), 0)
        means = network.means.detach()
        mean = share @ means
        within = torch.einsum("k,kna,ka,kma->nm", share, network.axes, network.variances, network.axes)
        between = torch.einsum("k,kn,km->nm", share, means - mean, means - mean)
        eye = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        return (1 - sigma) * mean, (1 - sigma) ** 2 * (within + between) + sigma**2 * eye


class GaussianFlow(GaussianMixtureFlow):
    """A FlowModel over data N(mean, covariance): ``mean`` [*D]; ``covariance`` [] , [N] or [N, N]."""

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor,
        *,
        prompt_spread: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            mean.unsqueeze(0),
            covariance.unsqueeze(0),
            torch.ones(1),
            prompt_spread=prompt_spread,
            dtype=dtype,
        )

    def transport(self, x: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """The exact solution of the flow ODE from ``sigma`` to ``sigma_next``, [B, *D] to [B, *D].

        Along every axis of the covariance the deviation from the mean keeps its size in units of the
        marginal's standard deviation. For a prompt that moves nothing.
        """
        network = self.network
        assert isinstance(network, MixtureVelocity)
        mean, axes, variance = network.means.detach()[0], network.axes[0], network.variances[0]
        before = torch.sqrt((1 - sigma) ** 2 * variance + sigma**2)
        after = torch.sqrt((1 - sigma_next) ** 2 * variance + sigma_next**2)
        deviation = (x.flatten(1) - (1 - sigma) * mean) @ axes
        return ((deviation * (after / before)) @ axes.T + (1 - sigma_next) * mean).view(x.shape)


def _full_covariances(covariances: Tensor, components: int, size: int) -> Tensor:
    eye = torch.eye(size, dtype=covariances.dtype)
    if covariances.shape == (components,):
        return covariances.view(-1, 1, 1) * eye
    if covariances.shape == (components, size):
        return torch.diag_embed(covariances)
    if covariances.shape == (components, size, size):
        return covariances
    raise ValueError(
        f"covariances have shape {tuple(covariances.shape)}: expected [{components}], [{components}, {size}]"
        f" or [{components}, {size}, {size}]"
    )
