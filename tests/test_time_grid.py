"""Time grids against published sigmas and the schedulers of diffusers."""

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from flowcredit.time_grid import check_grid, from_sigmas, resolution_shift, shifted_linear

CASES = json.loads((Path(__file__).parent / "golden" / "step_kernels.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"T{c['num_steps']}")
def test_shifted_grids_are_the_published_ones(case: dict) -> None:
    grid = shifted_linear(case["num_steps"], case["shift"])
    assert grid.dtype == torch.float64
    torch.testing.assert_close(grid.float(), torch.tensor(case["sigmas"]), atol=1e-7, rtol=0)


@pytest.mark.parametrize("tokens", [256, 1024, 2025, 4096])
@pytest.mark.parametrize("num_steps", [4, 28])
def test_resolution_shift_is_that_of_the_flux_pipeline(tokens: int, num_steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigmas = torch.linspace(1, 1 / num_steps, num_steps).tolist()
    scheduler.set_timesteps(sigmas=sigmas, mu=calculate_shift(tokens, 256, 4096, 0.5, 1.15))
    ours = shifted_linear(num_steps, resolution_shift(tokens))
    torch.testing.assert_close(ours.float(), scheduler.sigmas, atol=1e-6, rtol=0)


def test_resolution_shift_takes_other_schedulers_settings() -> None:
    ours = resolution_shift(1024, base_tokens=256, max_tokens=8192, base_shift=0.5, max_shift=0.9)
    assert ours == pytest.approx(math.exp(calculate_shift(1024, 256, 8192, 0.5, 0.9)))


@given(st.integers(1, 60), st.floats(0.05, 20))
def test_every_shifted_grid_is_valid_and_a_shift_above_one_stays_near_the_noise(T: int, shift: float) -> None:
    grid = shifted_linear(T, shift)
    assert len(grid) == T + 1
    assert torch.equal(check_grid(grid), grid)
    linear = shifted_linear(T)
    assert bool((grid >= linear - 1e-12).all() if shift >= 1 else (grid <= linear + 1e-12).all())


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([1.0], "shape"),
        ([[1.0, 0.0]], "shape"),
        ([1.0, 0.5, 0.5, 0.0], "does not fall at index 1: 0.5 then 0.5"),
        ([1.0, 0.2, 0.6, 0.0], "does not fall at index 1"),
        ([0.9, 0.5, 0.0], "runs from 0.9"),
        ([1.0, 0.5, 0.1], "to 0.1"),
        ([0.0, 0.5, 1.0], "runs from 0.0"),
        ([1.0, math.nan, 0.0], "not finite"),
    ],
)
def test_broken_grids_are_refused(sigmas: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_grid(torch.tensor(sigmas, dtype=torch.float64))


def test_grids_from_sigmas_keep_their_values() -> None:
    assert from_sigmas([1, 0.7, 0.1, 0]).tolist() == [1.0, 0.7, 0.1, 0.0]
    with pytest.raises(ValueError, match="does not fall"):
        from_sigmas([1, 0.7, 0.8, 0])


@pytest.mark.parametrize("shift", [0.0, -1.0, math.inf, math.nan])
def test_broken_shifts_are_refused(shift: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        shifted_linear(4, shift)


def test_broken_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        shifted_linear(0)
    with pytest.raises(ValueError, match="0 tokens"):
        resolution_shift(0)
    with pytest.raises(ValueError, match="different"):
        resolution_shift(10, base_tokens=64, max_tokens=64)
