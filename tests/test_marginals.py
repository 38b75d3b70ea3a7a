"""Samplers on flows with known velocity: every SDE keeps the marginal of the ODE, at its measured order.

On normal data each step is affine, so means and covariances are carried exactly, without sampling; on a
mixture samples are drawn and compared within their sampling error. Each check is also run on drifts that
are wrong by one factor, and must tell them.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flowcredit.interfaces import FlowModel
from flowcredit.models.gaussian import GaussianFlow, GaussianMixtureFlow, MixtureVelocity
from flowcredit.noise import dance_sde_scale, flow_sde_scale
from flowcredit.time_grid import from_sigmas, shifted_linear
from flowcredit.transition import Gaussian, Kernel, euler, flow_sde, make_kernel

DOUBLE = torch.float64
ETA = 0.7


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def normal_flow() -> GaussianFlow:
    return GaussianFlow(double([1.0, -0.5]), double([[0.5, 0.2], [0.2, 0.15]]), dtype=DOUBLE)


def mixture_flow() -> GaussianMixtureFlow:
    return GaussianMixtureFlow(
        double([[1.5, 0.0], [-1.0, 0.8]]),
        double([[[0.2, 0.1], [0.1, 0.3]], [[0.4, -0.1], [-0.1, 0.1]]]),
        double([0.35, 0.65]),
        dtype=DOUBLE,
    )


def mixture_of(flow: GaussianMixtureFlow) -> MixtureVelocity:
    assert isinstance(flow.network, MixtureVelocity)
    return flow.network


def velocity(flow: GaussianMixtureFlow, x: Tensor, sigma: Tensor | float) -> Tensor:
    cond = {"offset": torch.zeros(len(x), 2, dtype=DOUBLE)}
    return flow.velocity(x, torch.full((len(x),), float(sigma), dtype=DOUBLE), cond).detach()


def table_levels(grid: Tensor) -> list[float]:
    return [0.4 + 0.3 * math.sin(5 * float(s)) for s in grid[:-1]]


def kernel_for(kind: str, grid: Tensor) -> Kernel:
    """The kernels under test; CPS with a level that shrinks with the step, where it is an SDE."""
    if kind == "ode":
        return make_kernel("dance_sde", grid, 0.0)
    if kind == "table":
        return make_kernel("table", grid, table_levels(grid))
    if kind == "cps":
        return make_kernel("cps", grid, 0.6 / math.sqrt(len(grid) - 1))
    return make_kernel(kind, grid, ETA)  # type: ignore[arg-type]


WrongMean = Callable[[Tensor, Tensor, float, float, float], Tensor]
"""(x, v, s, dt, g) to a mean whose drift is not that of Flow-SDE."""

WRONG_DRIFTS: dict[str, WrongMean] = {
    "half dropped": lambda x, v, s, dt, g: x + (v + g**2 / s * (x + (1 - s) * v)) * dt,
    "velocity term dropped": lambda x, v, s, dt, g: x + (v + g**2 / (2 * s) * x) * dt,
    "state term dropped": lambda x, v, s, dt, g: x + (v + g**2 / (2 * s) * (1 - s) * v) * dt,
    "no correction": lambda x, v, s, dt, g: x + v * dt,
    "sign turned": lambda x, v, s, dt, g: x + (v - g**2 / (2 * s) * (x + (1 - s) * v)) * dt,
    "sigma for 1 - sigma": lambda x, v, s, dt, g: x + (v + g**2 / (2 * s) * (x + s * v)) * dt,
}


def wrong_kernel(name: str, grid: Tensor, scale: Tensor) -> Kernel:
    def kernel(x: Tensor, v: Tensor, k: int, k_next: int) -> Gaussian:
        dt = float(grid[k_next] - grid[k])
        mean = WRONG_DRIFTS[name](x, v, float(grid[k]), dt, float(scale[k]))
        return Gaussian(mean, scale[k] * math.sqrt(-dt))

    return kernel


def step(kernel: Kernel, grid: Tensor, x: Tensor, v: Tensor, k: int) -> Gaussian:
    """The kernel's step, or into sigma 0 the ODE's."""
    if k + 2 < len(grid):
        return kernel(x, v, k, k + 1)
    return Gaussian(euler(x, v, grid[k], grid[k + 1]), torch.zeros((), dtype=DOUBLE))


def moment_errors(flow: GaussianFlow, kernel: Kernel, grid: Tensor, start: int) -> list[float]:
    """Largest error of mean and covariance after each step from the exact marginal at ``start``.

    An affine step is known by its values at the origin and at the unit vectors.
    """
    mean, covariance = flow.moments(float(grid[start]))
    size = len(mean)
    eye = torch.eye(size, dtype=DOUBLE)
    probes = torch.cat([torch.zeros(1, size, dtype=DOUBLE), eye])
    errors = []
    for k in range(start, len(grid) - 1):
        out = step(kernel, grid, probes, velocity(flow, probes, grid[k]), k)
        constant, matrix = out.mean[0], (out.mean[1:] - out.mean[0]).T
        mean = matrix @ mean + constant
        covariance = matrix @ covariance @ matrix.T + out.std**2 * eye
        exact_mean, exact_covariance = flow.moments(float(grid[k + 1]))
        worst = max((mean - exact_mean).abs().max(), (covariance - exact_covariance).abs().max())
        errors.append(float(worst))
    return errors


def observed_order(errors: Sequence[float]) -> list[float]:
    """Orders of convergence from errors at step counts that double."""
    return [math.log2(a / b) for a, b in pairwise(errors)]


# Flow-SDE's g grows without bound towards sigma 1, where refining the grid does not make its first step
# small; away from it the general statements hold. The first step has tests of its own below.
START = {"flow_sde": 0.1, "dance_sde": 0.0, "table": 0.0, "cps": 0.0, "ode": 0.0}


@pytest.mark.parametrize("sigma", [1.0, 0.8, 0.4, 0.05])
@pytest.mark.parametrize("flow", [normal_flow(), mixture_flow()], ids=["normal", "mixture"])
def test_velocities_are_conditional_expectations(flow: GaussianMixtureFlow, sigma: float) -> None:
    """E[eps - x_0 | x_s = x] by summing Bayes' rule over a fine lattice of x_0."""
    line = torch.linspace(-6, 6, 601, dtype=DOUBLE)
    lattice = torch.cartesian_prod(line, line)
    network = mixture_of(flow)
    covariances = network.axes @ torch.diag_embed(network.variances) @ network.axes.mT
    data = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=network.logits.detach()),
        torch.distributions.MultivariateNormal(network.means.detach(), covariances),
    )
    prior = data.log_prob(lattice)
    x = double([[0.4, -0.2], [-1.2, 0.9], [2.0, 1.0]])
    got = velocity(flow, x, sigma)
    for row in range(len(x)):
        eps = (x[row] - (1 - sigma) * lattice) / sigma
        posterior = torch.softmax(prior - (eps**2).sum(1) / 2, 0)
        expected = posterior @ (eps - lattice)
        torch.testing.assert_close(got[row], expected, atol=1e-6, rtol=1e-6)


def test_moments_are_those_of_drawn_data() -> None:
    flow = mixture_flow()
    mean, covariance = flow.moments(0.0)
    by_hand = 0.35 * double([1.5, 0.0]) + 0.65 * double([-1.0, 0.8])
    torch.testing.assert_close(mean, by_hand)
    # Variance of the first coordinate: within 0.35 * 0.2 + 0.65 * 0.4, between 0.35 * 0.65 * 2.5^2.
    assert float(covariance[0, 0]) == pytest.approx(0.07 + 0.26 + 0.2275 * 6.25)
    assert float(covariance[0, 1]) == pytest.approx(0.035 - 0.065 + 0.2275 * 2.5 * -0.8)
    mean, covariance = flow.moments(1.0)
    torch.testing.assert_close(covariance, torch.eye(2, dtype=DOUBLE))
    assert mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["ode", "flow_sde", "dance_sde", "table", "cps"])
def test_normal_marginals_are_kept_with_weak_order_one(kind: str) -> None:
    flow, errors = normal_flow(), []
    for steps in (50, 100, 200):
        grid = shifted_linear(steps)
        start = round(START[kind] * steps)
        errors.append(max(moment_errors(flow, kernel_for(kind, grid), grid, start)))
    assert errors[-1] < 8e-3
    assert all(0.9 < order < 1.1 for order in observed_order(errors))


@pytest.mark.parametrize("name", WRONG_DRIFTS)
@pytest.mark.parametrize("scale", [flow_sde_scale, dance_sde_scale])
def test_wrong_drifts_do_not_keep_normal_marginals(name: str, scale: Callable[..., Tensor]) -> None:
    flow, errors = normal_flow(), []
    for steps in (100, 200):
        grid = shifted_linear(steps)
        kernel = wrong_kernel(name, grid, scale(grid, ETA))
        errors.append(max(moment_errors(flow, kernel, grid, steps // 10)))
    assert errors[-1] > 5e-2
    # Smaller steps do not help.
    assert errors[1] > 0.8 * errors[0]


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [8, 64])
def test_the_first_flow_sde_step_has_its_own_excess_of_variance(steps: int, shift: float) -> None:
    """Mean (1 - eta^2 / 2) x + ..., std eta: variance 1 + eta^4 / 4 along a point mass, at any step."""
    flow = GaussianFlow(double([1.0, -0.5]), double(1e-14), dtype=DOUBLE)
    grid = shifted_linear(steps, shift)
    got = moment_errors(flow, kernel_for("flow_sde", grid), grid, 0)[0]
    s = float(grid[1])
    # At the first step v = x - m: the state keeps 1 - eta^2 / 2 - (1 - s), where s alone would be right.
    assert got == pytest.approx((s - ETA**2 / 2) ** 2 + ETA**2 - s**2, rel=1e-6)


def test_flow_sde_from_pure_noise_converges_as_the_grid_refines_at_the_noise() -> None:
    flow, errors = normal_flow(), []
    for steps in (50, 100, 200):
        near_noise = 1 - torch.logspace(-12, -1.3, steps, dtype=DOUBLE)
        rest = torch.linspace(float(near_noise[-1]), 0, steps + 1, dtype=DOUBLE)[1:]
        grid = from_sigmas([1.0, *near_noise.tolist(), *rest.tolist()])
        every = moment_errors(flow, kernel_for("flow_sde", grid), grid, 0)
        assert every[0] == pytest.approx(ETA**4 / 4, abs=1e-6)
        errors.append(max(every[steps:]))
    assert errors[-1] < 2e-2
    assert all(order > 0.7 for order in observed_order(errors))


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_cps_keeps_the_noise_level_exactly_in_coarse_steps(eta: float) -> None:
    """Where the image is certain CPS has the ODE's marginal in 8 steps, Flow-SDE an excess of noise."""
    flow = GaussianFlow(double([1.0, -0.5]), double(1e-14), dtype=DOUBLE)
    grid = shifted_linear(8)
    assert max(moment_errors(flow, make_kernel("cps", grid, eta), grid, 0)) < 1e-12
    assert max(moment_errors(flow, make_kernel("flow_sde", grid, eta), grid, 0)) > 5e-3


def test_cps_with_eta_held_loses_the_variance_that_theory_says() -> None:
    """One step from the exact marginal, with 1 - s' = 1 - s: var falls by s^2 (1 - c)^2 (1 - Var eps_hat)."""
    variance, s = 0.4, 0.6
    flow = GaussianFlow(double([0.0, 0.0]), double(variance), dtype=DOUBLE)
    grid = from_sigmas([1.0, s, s - 1e-9, 0.0])
    lost = moment_errors(flow, make_kernel("cps", grid, ETA), grid, 1)[0]
    c = math.cos(ETA * math.pi / 2)
    known_noise = s**2 / ((1 - s) ** 2 * variance + s**2)
    assert lost == pytest.approx(s**2 * (1 - c) ** 2 * (1 - known_noise), rel=1e-6)


def largest_deviation(flow: GaussianMixtureFlow, kernel: Kernel, grid: Tensor, start: int) -> float:
    """Largest deviation of sampled means and second moments, in standard errors, over the grid."""
    source = torch.Generator().manual_seed(11)
    count = 6_000
    x = flow.initial_noise(count, source)
    if start > 0:
        x = exact_samples(flow, count, float(grid[start]), source)
    worst = 0.0
    for k in range(start, len(grid) - 1):
        noise = torch.randn(count, 2, generator=source, dtype=DOUBLE)
        x = step(kernel, grid, x, velocity(flow, x, grid[k]), k).draw(noise)
        if k % 10 != 9 and k + 2 < len(grid):
            continue
        mean, covariance = flow.moments(float(grid[k + 1]))
        centred = x - mean
        products = centred[:, [0, 0, 1]] * centred[:, [0, 1, 1]]
        observed = torch.cat([centred, products - covariance[[0, 0, 1], [0, 1, 1]]], 1)
        deviation = observed.mean(0).abs() / (observed.std(0) / math.sqrt(count))
        worst = max(worst, float(deviation.max()))
    return worst


def exact_samples(flow: GaussianMixtureFlow, count: int, sigma: float, source: torch.Generator) -> Tensor:
    network = mixture_of(flow)
    weights = torch.softmax(network.logits.detach(), 0)
    which = torch.multinomial(weights, count, True, generator=source)
    z = torch.randn(count, 2, generator=source, dtype=DOUBLE)
    spread = network.axes[which] @ (torch.sqrt(network.variances[which]) * z).unsqueeze(-1)
    data = network.means.detach()[which] + spread.squeeze(-1)
    return (1 - sigma) * data + sigma * torch.randn(count, 2, generator=source, dtype=DOUBLE)


@pytest.mark.parametrize("kind", ["ode", "flow_sde", "dance_sde", "table", "cps"])
def test_mixture_marginals_are_kept_within_sampling_error(kind: str) -> None:
    grid = shifted_linear(150)
    start = round(START[kind] * 150)
    assert largest_deviation(mixture_flow(), kernel_for(kind, grid), grid, start) < 4.5


@pytest.mark.parametrize("name", WRONG_DRIFTS)
def test_wrong_drifts_do_not_keep_mixture_marginals(name: str) -> None:
    grid = shifted_linear(150)
    kernel = wrong_kernel(name, grid, dance_sde_scale(grid, ETA))
    assert largest_deviation(mixture_flow(), kernel, grid, 0) > 15


def test_the_right_drift_written_out_passes_where_the_wrong_ones_fail() -> None:
    grid = shifted_linear(150)
    scale = dance_sde_scale(grid, ETA)
    x, v = double([[0.3, -1.0]]), double([[0.7, 0.2]])
    by_name = kernel_for("dance_sde", grid)(x, v, 40, 41)
    written = flow_sde(x, v, grid[40], grid[41], scale[40])
    assert torch.equal(by_name.mean, written.mean)
    for name in WRONG_DRIFTS:
        assert not torch.allclose(wrong_kernel(name, grid, scale)(x, v, 40, 41).mean, written.mean)


def test_the_euler_ode_has_order_one_against_the_exact_map() -> None:
    flow = normal_flow()
    x = flow.initial_noise(64, torch.Generator().manual_seed(2))
    exact, errors = flow.transport(x, 1.0, 0.0), []
    for steps in (20, 40, 80, 160):
        grid, state = shifted_linear(steps, 2.0), x
        for k in range(steps):
            state = euler(state, velocity(flow, state, grid[k]), grid[k], grid[k + 1])
        errors.append(float((state - exact).norm(dim=1).mean()))
    assert errors[-1] < 2e-2
    assert all(0.9 < order < 1.1 for order in observed_order(errors))


def test_the_exact_map_carries_the_marginal_and_composes() -> None:
    flow = normal_flow()
    x = double([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    moved = flow.transport(x, 1.0, 0.3)
    matrix = (moved[1:] - moved[0]).T
    mean, covariance = flow.moments(0.3)
    torch.testing.assert_close(moved[0], mean)
    torch.testing.assert_close(matrix @ matrix.T, covariance)
    torch.testing.assert_close(flow.transport(flow.transport(x, 1.0, 0.6), 0.6, 0.3), moved)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde"])
def test_sdes_have_strong_order_one_along_one_noise_path(kind: str) -> None:
    """The noise does not multiply the state: Euler-Maruyama follows one Brownian path with order 1."""
    flow, finest = normal_flow(), 1024
    source = torch.Generator().manual_seed(4)
    start = exact_samples(flow, 200, 0.75, source)
    increments = torch.randn(finest, 200, 2, generator=source, dtype=DOUBLE)

    def follow(steps: int) -> Tensor:
        grid = shifted_linear(steps)
        kernel, x, merged = make_kernel(kind, grid, ETA), start, finest // steps  # type: ignore[arg-type]
        for k in range(steps // 4, 3 * steps // 4):
            noise = increments[k * merged : (k + 1) * merged].sum(0) / math.sqrt(merged)
            x = kernel(x, velocity(flow, x, grid[k]), k, k + 1).draw(noise)
        return x

    reference = follow(finest)
    errors = [float((follow(steps) - reference).norm(dim=1).mean()) for steps in (16, 32, 64)]
    assert errors[-1] < 2e-2
    assert all(0.85 < order < 1.2 for order in observed_order(errors))


def test_a_prompt_moves_the_data_of_its_own_rows() -> None:
    mean, variance = torch.tensor([[0.5, -1.0, 0.2], [0.1, 0.0, 2.0]]), torch.tensor(0.3)
    model: FlowModel = GaussianFlow(mean, variance, prompt_spread=1.5)
    cond = model.encode(["a red circle", "a blue square", "a red circle"])
    x = model.initial_noise(3, torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.5, 0.9])
    got = model.velocity(x, sigma, cond)
    assert (x.shape, got.dtype) == ((3, 2, 3), torch.float32)
    for row in range(3):
        moved = GaussianFlow(mean + cond["offset"][row].view(2, 3), variance)
        alone = moved.velocity(x[row : row + 1], sigma[row : row + 1], moved.encode([""]))
        torch.testing.assert_close(got[row], alone[0])
    assert torch.equal(cond["offset"][0], cond["offset"][2])
    assert not torch.equal(cond["offset"][0], cond["offset"][1])


def test_images_hold_every_latent() -> None:
    model = GaussianFlow(torch.zeros(2, 3), torch.tensor(0.3))
    x0 = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    images = model.decode(x0)
    assert images.shape == (4, 3, 1, 6)
    for channel in range(3):
        torch.testing.assert_close(torch.logit(images[:, channel, 0]), x0.flatten(1))


@pytest.mark.parametrize("covariance", [0.0, -1.0, [1.0, 0.0], [[1.0, 1.0], [1.0, 1.0]]])
def test_degenerate_covariances_are_refused(covariance: object) -> None:
    with pytest.raises(ValueError, match="not positive definite"):
        GaussianFlow(double([0.0, 0.0]), double(covariance), dtype=DOUBLE)


def test_shapes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[K, \*D\] and K positive weights"):
        GaussianMixtureFlow(torch.zeros(2, 3), torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="K positive weights"):
        GaussianMixtureFlow(torch.zeros(2, 3), torch.ones(2), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"shape \(3,\): expected \[2\], \[2, 3\] or \[2, 3, 3\]"):
        GaussianMixtureFlow(torch.zeros(2, 3), torch.ones(3), torch.ones(2))
