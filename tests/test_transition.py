"""Step kernels against the outputs of public reference implementations, and against exact identities."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowcredit.time_grid import from_sigmas, shifted_linear
from flowcredit.transition import Gaussian, KernelKind, cps, euler, flow_sde, make_kernel

CASES = json.loads((Path(__file__).parent / "golden" / "step_kernels.json").read_text())["cases"]
STEPS = [
    pytest.param(case, step, id=f"T{case['num_steps']}-{step['step']}")
    for case in CASES
    for step in case["steps"]
]
GOLDEN_NAME: dict[KernelKind, str] = {"flow_sde": "flow", "dance_sde": "dance", "cps_squared_error": "cps"}


def random_pair(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    return torch.randn(2, 3, 4, generator=source, dtype=dtype), torch.randn(
        2, 3, 4, generator=source, dtype=dtype
    )


@pytest.mark.parametrize(("case", "step"), STEPS)
@pytest.mark.parametrize("kind", list(GOLDEN_NAME))
def test_kernels_agree_with_public_code(kind: KernelKind, case: dict[str, Any], step: dict[str, Any]) -> None:
    kernel = make_kernel(kind, from_sigmas(case["sigmas"]), case["eta"])
    k, expected = step["step"], step[GOLDEN_NAME[kind]]
    x, v, x_next = (torch.tensor(step[name]) for name in ("x", "v", "x_next"))
    got = kernel(x, v, k, k + 1)
    assert got.mean.dtype == torch.float32
    assert float(got.std) == pytest.approx(expected["std"], abs=1e-5)
    torch.testing.assert_close(got.log_prob(x_next, 1), torch.tensor(expected["log_prob"]), atol=1e-5, rtol=0)
    if "mean" in expected:
        torch.testing.assert_close(got.mean, torch.tensor(expected["mean"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
def test_log_prob_is_the_mean_log_density(kind: KernelKind) -> None:
    x, v = random_pair()
    got = make_kernel(kind, shifted_linear(6, 3.0), 0.6)(x, v, 2, 3)
    x_next = got.draw(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)))
    reference = torch.distributions.Normal(got.mean, got.std.expand_as(got.mean)).log_prob(x_next)
    torch.testing.assert_close(got.log_prob(x_next, 1), reference.mean((1, 2)))
    torch.testing.assert_close(got.log_prob(x_next, 2), reference.mean(2))


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
def test_draws_have_the_mean_and_spread_they_claim(kind: KernelKind) -> None:
    x, v = random_pair()
    got = make_kernel(kind, shifted_linear(6, 3.0), 0.6)(x, v, 1, 3)
    assert torch.equal(got.draw(torch.zeros_like(x)), got.mean)
    noise = torch.ones_like(x)
    torch.testing.assert_close(got.draw(noise) - got.draw(-noise), 2 * got.std * noise)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps", "cps_squared_error"])
def test_without_noise_every_kernel_is_the_ode(kind: KernelKind) -> None:
    x, v = random_pair()
    grid = shifted_linear(5, 3.0)
    got = make_kernel(kind, grid, 0.0)(x, v, 1, 3)
    assert float(got.std) == 0
    torch.testing.assert_close(got.draw(torch.ones_like(x)), euler(x, v, grid[1], grid[3]))


def test_a_density_without_noise_is_refused() -> None:
    x, v = random_pair()
    kernel = make_kernel("table", shifted_linear(4), [0.5, 0.0, 0.5])
    kernel(x, v, 0, 1).log_prob(x, 1)
    with pytest.raises(ValueError, match="standard deviation 0 has no density"):
        kernel(x, v, 1, 2).log_prob(x, 1)


def test_cps_replaces_all_noise_at_eta_one() -> None:
    # x = 0.5, v = 2 at s = 0.75: x0_hat = -1, eps_hat = 1; to s' = 0.5.
    x, v = torch.tensor([[0.5]]), torch.tensor([[2.0]])
    full = cps(x, v, 0.75, 0.5, 1.0)
    assert float(full.mean) == pytest.approx(0.5 * -1.0, abs=1e-7)
    assert float(full.std) == pytest.approx(0.5)
    third = cps(x, v, 0.75, 0.5, 1 / 3)
    assert float(third.std) == pytest.approx(0.25)
    assert float(third.mean) == pytest.approx(-0.5 + math.sqrt(0.25 - 0.0625), abs=1e-7)


def test_flow_sde_by_hand() -> None:
    # s = 0.5, s' = 0.25, g = 1: drift 2 + 1 / (2 * 0.5) (1 + 0.5 * 2) = 4, dt = -0.25.
    got = flow_sde(torch.tensor([1.0]), torch.tensor([2.0]), 0.5, 0.25, 1.0)
    assert float(got.mean) == pytest.approx(1 - 0.25 * 4)
    assert float(got.std) == pytest.approx(0.5)


def test_a_table_is_flow_sde_with_its_own_level_each_step() -> None:
    x, v = random_pair()
    grid = shifted_linear(4, 2.0)
    kernel = make_kernel("table", grid, [0.2, 0.9, 0.4])
    for k, level in enumerate([0.2, 0.9, 0.4]):
        expected = flow_sde(x, v, grid[k], grid[k + 1], level)
        got = kernel(x, v, k, k + 1)
        assert torch.equal(got.mean, expected.mean)
        assert torch.equal(got.std, expected.std)


def test_one_mean_serves_a_fan_out() -> None:
    x, v = random_pair(torch.float32)
    kernel = make_kernel("flow_sde", shifted_linear(8), 0.7)
    x_next = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    shared = kernel(x.unsqueeze(1), v.unsqueeze(1), 2, 3).log_prob(x_next, 2)
    assert shared.shape == (2, 5)
    for branch in range(5):
        alone = kernel(x, v, 2, 3).log_prob(x_next[:, branch], 1)
        torch.testing.assert_close(shared[:, branch], alone, atol=1e-6, rtol=0)


def test_sigmas_and_levels_may_differ_by_row() -> None:
    x, v = random_pair(torch.float32)
    s, s_next, g = (torch.tensor(pair).view(2, 1, 1) for pair in ([0.9, 0.5], [0.8, 0.2], [0.3, 0.6]))
    together = flow_sde(x, v, s, s_next, g)
    stepped = euler(x, v, s, s_next)
    for row in range(2):
        alone = flow_sde(x[row], v[row], float(s[row]), float(s_next[row]), float(g[row]))
        torch.testing.assert_close(together.mean[row], alone.mean)
        torch.testing.assert_close(together.std[row].squeeze(), alone.std.float())
        torch.testing.assert_close(stepped[row], euler(x[row], v[row], float(s[row]), float(s_next[row])))


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
def test_arithmetic_is_single_precision_or_better(kind: KernelKind) -> None:
    x, v = random_pair()
    kernel = make_kernel(kind, shifted_linear(8, 3.0), 0.7)
    exact = kernel(x, v, 1, 2)
    assert exact.mean.dtype == torch.float64
    single = kernel(x.float(), v.float(), 1, 2)
    torch.testing.assert_close(single.mean.double(), exact.mean, atol=1e-6, rtol=0)
    half = kernel(x.bfloat16(), v.bfloat16(), 1, 2)
    assert half.mean.dtype == torch.float32
    assert torch.equal(half.mean, kernel(x.bfloat16().float(), v.bfloat16().float(), 1, 2).mean)
    assert half.log_prob(x.bfloat16(), 1).dtype == torch.float32


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps", "cps_squared_error"])
def test_noise_into_sigma_zero_is_refused(kind: KernelKind) -> None:
    x, v = random_pair()
    kernel = make_kernel(kind, shifted_linear(4), 0.5)
    kernel(x, v, 2, 3)
    with pytest.raises(ValueError, match="sigma 0: its noise would stay in the image"):
        kernel(x, v, 3, 4)
    for k, k_next in ((2, 2), (3, 2), (-1, 2), (0, 5)):
        with pytest.raises(ValueError, match="expected 0 <= k < k_next"):
            kernel(x, v, k, k_next)


def test_broken_levels_and_names_are_refused() -> None:
    grid = shifted_linear(4)
    with pytest.raises(ValueError, match="no transition is named 'sde'"):
        make_kernel("sde", grid, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 0 to 1"):
        make_kernel("cps", grid, 1.5)
    with pytest.raises(ValueError, match="expected one number"):
        make_kernel("flow_sde", grid, [0.5, 0.5])
    with pytest.raises(ValueError, match="one level a step"):
        make_kernel("table", grid, 0.5)
    with pytest.raises(ValueError, match="0 or more"):
        make_kernel("dance_sde", grid, -0.5)


def test_squared_error_scores_leave_out_the_variance() -> None:
    wide = Gaussian(torch.zeros(1, 4), torch.tensor(3.0), score="squared_error")
    narrow = Gaussian(torch.zeros(1, 4), torch.tensor(0.1), score="squared_error")
    x_next = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert float(wide.log_prob(x_next, 1)) == float(narrow.log_prob(x_next, 1)) == -7.5
