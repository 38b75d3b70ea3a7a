"""One step from sigma to sigma_next, as a Gaussian that can be drawn from and scored.

States are x_s = (1 - s) x_0 + s eps, velocities v = eps - x_0, dt = s' - s < 0.
Axes: *B any leading batch dimensions, *D latent dimensions; noise levels and sigmas are scalars or
broadcast against [*B, *D]. Work is done in float32, or in float64 where the state is float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowcredit.noise import dance_sde_scale, flow_sde_scale, table_scale
from flowcredit.time_grid import check_grid

Scalar = float | Tensor
KernelKind = Literal["flow_sde", "dance_sde", "table", "cps", "cps_squared_error"]
Level = float | Sequence[float] | Tensor
KERNEL_KINDS: tuple[KernelKind, ...] = ("flow_sde", "dance_sde", "table", "cps", "cps_squared_error")


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution with independent dimensions: ``mean`` [*B, *D], ``std`` broadcast against it.

    ``score`` says what :meth:`log_prob` returns: "density", or "squared_error", the form in which the
    authors of Flow-CPS score their steps: ``-(x_next - mean)**2``, without variance and constants.
    """

    mean: Tensor
    std: Tensor
    score: Literal["density", "squared_error"] = "density"

    def draw(self, noise: Tensor) -> Tensor:
        """``mean + std * noise``; standard normal ``noise`` that broadcasts against the mean."""
        return self.mean + self.std * noise.to(self.mean.dtype)

    def log_prob(self, x_next: Tensor, batch_dims: int) -> Tensor:
        """Log-density of ``x_next``, the mean over all dimensions after the first ``batch_dims``.

        The mean in place of the sum is what public implementations use; it fixes the meaning of a clip
        range. ``x_next`` and ``mean`` broadcast, so that one mean serves a fan-out. ValueError where the
        standard deviation is 0.
        """
        error = x_next.to(self.mean.dtype) - self.mean
        dims = tuple(range(batch_dims, error.dim()))
        if self.score == "squared_error":
            return -(error**2).mean(dims)
        if bool((self.std <= 0).any()):
            raise ValueError("a transition with standard deviation 0 has no density: raise its noise level")
        density = -(error**2) / (2 * self.std**2) - torch.log(self.std) - math.log(2 * math.pi) / 2
        return density.mean(dims)

    def kl_from(self, reference: "Gaussian", batch_dims: int) -> Tensor:
        """KL divergence of this step from a reference's with the same standard deviation.

        ``(mean - mean_ref)^2 / (2 std^2)``, the mean over all dimensions after the first ``batch_dims``, as
        the log-density's (Flow-GRPO, arXiv 2505.05470, with the step's true deviation).
        """
        difference = self.mean - reference.mean
        dims = tuple(range(batch_dims, difference.dim()))
        return (difference**2 / (2 * self.std**2)).mean(dims)


Kernel = Callable[[Tensor, Tensor, int, int], Gaussian]
"""(x [*B, *D], v [*B, *D], k, k_next) to the distribution of the state at grid index k_next."""


def _working(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _scalar(value: Scalar, like: Tensor) -> Tensor:
    """Zero-dimensional values keep float64: they do not widen a product, and stay on the CPU."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return value.to(like.device, like.dtype)
    return torch.as_tensor(value, dtype=torch.float64)


def euler(x: Tensor, v: Tensor, sigma: Scalar, sigma_next: Scalar) -> Tensor:
    """A deterministic step of the flow ODE: ``x + v dt``."""
    x, v = _working(x), _working(v)
    return x + v * (_scalar(sigma_next, x) - _scalar(sigma, x))


def flow_sde(x: Tensor, v: Tensor, sigma: Scalar, sigma_next: Scalar, g: Scalar) -> Gaussian:
    """Euler-Maruyama on the SDE that keeps the marginals of the flow ODE, with diffusion ``g``.

    Drift ``v + g^2 / (2 s) (x + (1 - s) v)``, standard deviation ``g sqrt(-dt)``
    (Flow-GRPO, arXiv 2505.05470; DanceGRPO, arXiv 2505.07818, with a constant g).
    """
    x, v = _working(x), _working(v)
    s, s_next, scale = _scalar(sigma, x), _scalar(sigma_next, x), _scalar(g, x)
    dt = s_next - s
    pull = scale**2 / (2 * s)
    mean = x * (1 + pull * dt) + v * ((1 + pull * (1 - s)) * dt)
    return Gaussian(mean, scale * torch.sqrt(-dt))


def cps(
    x: Tensor,
    v: Tensor,
    sigma: Scalar,
    sigma_next: Scalar,
    eta: float,
    score: Literal["density", "squared_error"] = "density",
) -> Gaussian:
    """Coefficients-preserving sampling: noise replaced, not added (Flow-CPS, arXiv 2509.05952).

    With ``q = s' sin(eta pi / 2)``: mean ``(1 - s') x0_hat + sqrt(s'^2 - q^2) eps_hat``, standard
    deviation ``q``, where ``x0_hat = x - s v`` and ``eps_hat = x + (1 - s) v``. ``eta`` in [0, 1].
    The noise level is exact at any step size where ``x0_hat`` is the true image; elsewhere a step with
    ``eta`` held fixed keeps the ODE's marginal only as ``eta**2`` shrinks with the step.
    """
    x, v = _working(x), _working(v)
    s, s_next = _scalar(sigma, x), _scalar(sigma_next, x)
    image, noise = x - v * s, x + v * (1 - s)
    mean = image * (1 - s_next) + noise * (s_next * math.cos(eta * math.pi / 2))
    return Gaussian(mean, s_next * math.sin(eta * math.pi / 2), score)


def make_kernel(kind: KernelKind, grid: Tensor, level: Level) -> Kernel:
    """The transition of a method over a [T+1] grid.

    ``level`` is eta for "flow_sde", "dance_sde", "cps" and "cps_squared_error" (CPS scored without
    variance), and a sequence of levels, one a step, for "table". The kernel refuses a step to sigma 0:
    noise there stays in the image.
    """
    sigmas = check_grid(grid)
    last = len(sigmas) - 1
    if kind in ("cps", "cps_squared_error"):
        eta = _single_level(kind, level)
        if not 0 <= eta <= 1:
            raise ValueError(f"the noise level eta of {kind} is {eta}: expected 0 to 1")
        score: Literal["density", "squared_error"] = "density" if kind == "cps" else "squared_error"

        def cps_kernel(x: Tensor, v: Tensor, k: int, k_next: int) -> Gaussian:
            _check_step(k, k_next, last)
            return cps(x, v, sigmas[k], sigmas[k_next], eta, score)

        return cps_kernel

    scales = _scales(kind, sigmas, level)

    def sde_kernel(x: Tensor, v: Tensor, k: int, k_next: int) -> Gaussian:
        _check_step(k, k_next, last)
        return flow_sde(x, v, sigmas[k], sigmas[k_next], scales[k])

    return sde_kernel


def _scales(kind: str, sigmas: Tensor, level: Level) -> Tensor:
    if kind == "flow_sde":
        return flow_sde_scale(sigmas, _single_level(kind, level))
    if kind == "dance_sde":
        return dance_sde_scale(sigmas, _single_level(kind, level))
    if kind == "table":
        if isinstance(level, float | int):
            raise ValueError(f"the noise level of table is {level}: expected a sequence, one level a step")
        return table_scale(sigmas, level)
    raise ValueError(f"no transition is named {kind!r}: expected one of {', '.join(KERNEL_KINDS)}")


def _single_level(kind: str, level: Level) -> float:
    if isinstance(level, float | int):
        return float(level)
    if isinstance(level, Tensor) and level.dim() == 0:
        return float(level)
    raise ValueError(f"the noise level of {kind} is {level!r}: expected one number")


def _check_step(k: int, k_next: int, last: int) -> None:
    if not 0 <= k < k_next <= last:
        raise ValueError(f"a step from grid index {k} to {k_next}: expected 0 <= k < k_next <= {last}")
    if k_next == last:
        raise ValueError(
            f"a stochastic step from grid index {k} to {last}, sigma 0: its noise would stay in the image;"
            " take that step with the ODE"
        )
