"""Where randomness comes from, and how much of it each step takes.

Axes: P prompts, T steps of the grid.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowcredit.time_grid import check_grid


def generator(seed: int, iteration: int, prompt_index: int, role: str) -> torch.Generator:
    """A CPU generator that depends on nothing but its four keys.

    ``role`` names the use of the draw: "initial", "step/3". Ranks never enter, so a run draws the same
    noises on any number of processes. The generator of torch keeps 32 bits of its seed; unrelated keys
    share a stream with probability 2**-32.
    """
    key = "\x1f".join((str(int(seed)), str(int(iteration)), str(int(prompt_index)), role))
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def draw(generators: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    """Standard normal noise, one generator for each prompt: [P, *shape] float32 on the CPU."""
    if not generators:
        raise ValueError("no generators to draw noise from: expected one for each prompt")
    return torch.stack(
        [torch.randn(tuple(shape), generator=each, dtype=torch.float32) for each in generators]
    )


def flow_sde_scale(grid: Tensor, eta: float) -> Tensor:
    """Flow-GRPO's ``g = eta sqrt(s / (1 - s))`` for each step of a [T+1] grid: [T] float64.

    At s = 1 the denominator uses the next sigma, so that the first step's standard deviation is ``eta``
    however short the step (arXiv 2505.05470 and its released code). That step's own excess of variance,
    ``eta**4 / 4``, therefore does not vanish with more steps; the steps after it wear it off.
    """
    sigmas = check_grid(grid)
    s = sigmas[:-1]
    held = torch.where(s == 1, sigmas[1], s)
    return _check_scale(_check_level("eta", eta) * torch.sqrt(s / (1 - held)))


def dance_sde_scale(grid: Tensor, eta: float) -> Tensor:
    """DanceGRPO's constant ``g = eta`` for each step of a [T+1] grid: [T] float64 (arXiv 2505.07818)."""
    steps = len(check_grid(grid)) - 1
    return torch.full((steps,), _check_level("eta", eta), dtype=torch.float64)


def table_scale(grid: Tensor, psi: Sequence[float] | Tensor) -> Tensor:
    """A level for each step, ``g = psi[k]``, as DenseGRPO calibrates it: [T] float64 (arXiv 2601.20218).

    ``psi`` holds T levels, or T - 1: the last step takes no noise, its level is then 0.
    """
    steps = len(check_grid(grid)) - 1
    levels = [float(level) for level in psi]
    if len(levels) == steps - 1:
        levels.append(0.0)
    if len(levels) != steps:
        raise ValueError(f"a noise table has {len(levels)} levels: expected one for each of {steps} steps")
    return _check_scale(torch.tensor(levels, dtype=torch.float64))


def _check_level(name: str, level: float) -> float:
    if not (math.isfinite(level) and level >= 0):
        raise ValueError(f"the noise level {name} is {level}: expected a finite number, 0 or more")
    return float(level)


def _check_scale(scale: Tensor) -> Tensor:
    bad = torch.nonzero(~(torch.isfinite(scale) & (scale >= 0))).flatten()
    if len(bad) > 0:
        at = int(bad[0])
        raise ValueError(f"the noise scale of step {at} is {float(scale[at])}: expected finite, 0 or more")
    return scale
