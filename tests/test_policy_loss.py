"""The clipped loss: hand-computed values, where its gradient is cut, and an exact policy gradient."""

import math

import pytest
import torch
from torch import Tensor

from flowcredit.models.gaussian import GaussianFlow, MixtureVelocity
from flowcredit.policy_loss import clipped_loss
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import make_kernel


def evaluate(ratios: list[float], advantages: list[float], clip_range: float) -> tuple[float, Tensor]:
    new = torch.log(torch.tensor(ratios, dtype=torch.float64)).requires_grad_()
    loss, _ = clipped_loss(new, torch.tensor(advantages), clip_range)
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # The policy moved the right way beyond the range: capped, no gradient.
        (1.5, 2.0, -2.4, 0.0),
        (0.5, -2.0, 1.6, 0.0),
        # It moved the wrong way: never capped. The gradient of -r A in log r is -r A.
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        # Inside the range.
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        (1.0, 3.0, -3.0, -3.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_one_entry_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    got, slope = evaluate([ratio], [advantage], 0.2)
    assert got == pytest.approx(loss)
    assert float(slope) == pytest.approx(gradient)


def test_the_loss_is_the_mean_over_all_entries() -> None:
    got, slope = evaluate([1.5, 0.5, 1.0, 1.0], [2.0, 2.0, -1.0, 0.0], 0.2)
    assert got == pytest.approx((-2.4 - 1.0 + 1.0) / 4)
    assert slope.tolist() == pytest.approx([0.0, -0.25, 0.25, 0.0])


def test_a_step_against_the_gradient_follows_the_advantages() -> None:
    advantages = [1.0, -1.0, 0.5, -0.5]
    _, slope = evaluate([1.0] * 4, advantages, 1e-4)
    assert (-slope).sign().tolist() == torch.tensor(advantages).sign().tolist()


def test_the_cut_stands_at_the_clip_range() -> None:
    _, slope = evaluate([1 + 0.9e-4, 1 + 1.1e-4, 1 - 0.9e-4, 1 - 1.1e-4], [1.0, 1.0, -1.0, -1.0], 1e-4)
    assert [each == 0 for each in slope.tolist()] == [False, True, False, True]


def test_metrics_by_hand() -> None:
    ratios = torch.tensor([[1.5, 1.0, 0.5], [1.0, 1.0, 1.1]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    _, metrics = clipped_loss(torch.log(ratios), advantages, 0.2)
    assert metrics["ratio_mean"] == pytest.approx(6.1 / 6)
    assert metrics["ratio_max_deviation"] == pytest.approx(0.5)
    assert metrics["clip_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 6)
    kl = (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5)) + (0.1 - math.log(1.1))
    assert metrics["approx_kl"] == pytest.approx(kl / 6)


def test_on_policy_nothing_is_clipped() -> None:
    log_prob = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 3
    advantages = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    loss, metrics = clipped_loss(log_prob - log_prob.clone(), advantages, 1e-4)
    assert float(loss) == pytest.approx(-float(advantages.mean()), abs=1e-7)
    assert (metrics["ratio_mean"], metrics["ratio_max_deviation"], metrics["approx_kl"]) == (1.0, 0.0, 0.0)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.0, 0.0)


def test_only_the_new_policy_learns() -> None:
    new, advantages = (torch.full((2,), value, requires_grad=True) for value in (0.1, 1.0))
    loss, _ = clipped_loss(new, advantages, 0.5)
    loss.backward()
    assert new.grad is not None
    assert advantages.grad is None


@pytest.mark.parametrize("clip_range", [0.0, 1.0, -0.1, math.nan])
def test_broken_clip_ranges_are_refused(clip_range: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        clipped_loss(torch.zeros(2), torch.zeros(2), clip_range)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1\), \(2, 3\): expected one shape"):
        clipped_loss(torch.zeros(2, 1), torch.zeros(2, 3), 0.1)
    with pytest.raises(ValueError, match="expected one shape"):
        clipped_loss(torch.zeros(0), torch.zeros(0), 0.1)


@pytest.mark.parametrize("k", [0, 2, 4])
def test_the_gradient_on_a_linear_reward_is_the_exact_policy_gradient(k: int) -> None:
    """One transition, reward c . x_next: d E[reward] / d m = (d mean / d v)(d v / d m) c, all known.

    The noises +-sqrt(D) e_i have mean 0 and covariance I, so that the average over them is no estimate.
    """
    dims, variance, eta = 3, 0.3, 0.7
    mean, covariance = torch.tensor([0.5, -1.0, 2.0]), torch.tensor(variance, dtype=torch.float64)
    flow = GaussianFlow(mean, covariance, dtype=torch.float64)
    assert isinstance(flow.network, MixtureVelocity)
    grid = shifted_linear(6, 3.0)
    s, dt = float(grid[k]), float(grid[k + 1] - grid[k])
    c = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    x = torch.tensor([[0.3, 1.1, -0.4]], dtype=torch.float64)
    velocity = flow.velocity(x, grid[k : k + 1], flow.encode(["any"]))
    policy = make_kernel("flow_sde", grid, eta)(x, velocity, k, k + 1)
    axes = math.sqrt(dims) * torch.eye(dims, dtype=torch.float64)
    x_next = policy.draw(torch.cat([axes, -axes])).detach()
    log_prob = policy.log_prob(x_next, 1)
    loss, _ = clipped_loss(log_prob - log_prob.detach(), x_next @ c, 1e-4)
    loss.backward()

    held = 1 - float(grid[1]) if k == 0 else 1 - s
    g_squared = eta**2 * s / held
    mean_by_velocity = (1 + g_squared * (1 - s) / (2 * s)) * dt
    spread = (1 - s) ** 2 * variance + s**2
    velocity_by_mean = -1 - (1 - s) * (s - (1 - s) * variance) / spread
    # The log-prob is a mean over dimensions, hence 1 / D; the loss is minimised, hence the minus.
    expected = -c * mean_by_velocity * velocity_by_mean / dims
    assert flow.network.means.grad is not None
    torch.testing.assert_close(flow.network.means.grad[0], expected, atol=1e-12, rtol=1e-9)
