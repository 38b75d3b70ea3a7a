"""Time grids: sigma[0] = 1 (noise) down to sigma[T] = 0 (image), float64, one for each number of steps T."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_grid(grid: Tensor) -> Tensor:
    """The grid as a [T+1] float64 tensor on the CPU; ValueError unless it falls strictly from 1 to 0."""
    sigmas = grid.detach().to("cpu", torch.float64)
    if sigmas.dim() != 1 or len(sigmas) < 2:
        raise ValueError(f"a time grid has shape {tuple(grid.shape)}: expected [T+1] with T of 1 or more")
    if not bool(torch.isfinite(sigmas).all()):
        raise ValueError("a time grid holds values that are not finite: expected sigmas between 1 and 0")
    if float(sigmas[0]) != 1.0 or float(sigmas[-1]) != 0.0:
        raise ValueError(
            f"a time grid runs from {float(sigmas[0])} to {float(sigmas[-1])}:"
            " expected from 1 (noise) to 0 (image)"
        )
    rises = torch.nonzero(sigmas[1:] >= sigmas[:-1]).flatten()
    if len(rises) > 0:
        at = int(rises[0])
        raise ValueError(
            f"a time grid does not fall at index {at}: {float(sigmas[at])} then {float(sigmas[at + 1])};"
            " expected strictly decreasing sigmas"
        )
    return sigmas


def from_sigmas(sigmas: Sequence[float]) -> Tensor:
    """A grid from given sigmas, [T+1] float64; ValueError unless they fall strictly from 1 to 0."""
    return check_grid(torch.tensor([float(sigma) for sigma in sigmas], dtype=torch.float64))


def shifted_linear(num_steps: int, shift: float = 1.0) -> Tensor:
    """``shift u / (1 + (shift - 1) u)`` over ``u = linspace(1, 0, num_steps + 1)``: [T+1] float64.

    A shift above 1 spends more steps near the noise (SD3, arXiv 2403.03206, section 5.3.2). DanceGRPO and
    G2RPO train FLUX.1-dev with shift 3.
    """
    if num_steps < 1:
        raise ValueError(f"a time grid of {num_steps} steps: expected 1 or more")
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"the shift of a time grid is {shift}: expected a finite number above 0")
    u = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    # Written so that u = 1 gives exactly 1.
    return check_grid(shift * u / (shift * u + (1 - u)))


def resolution_shift(
    image_tokens: int,
    *,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """The shift for an image of so many tokens: exp(mu), mu linear in the tokens.

    The line passes through (``base_tokens``, ``base_shift``) and (``max_tokens``, ``max_shift``); the
    defaults are those of FLUX.1-dev's scheduler. Give the result to :func:`shifted_linear`.
    """
    if image_tokens < 1:
        raise ValueError(f"an image of {image_tokens} tokens: expected 1 or more")
    if base_tokens == max_tokens:
        raise ValueError(f"base_tokens and max_tokens are both {base_tokens}: expected two different sizes")
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (image_tokens - base_tokens))
