"""The wavefront against the naive schedule, its counter against the plan, its gradient against algebra."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import cast

import pytest
import torch
from torch import Tensor

from flowcredit.advantages import leaf_advantages
from flowcredit.algorithms import g2rpo
from flowcredit.config import TrainSettings
from flowcredit.interfaces import Reward
from flowcredit.leaf_scoring import score_leaves
from flowcredit.methods import G2RPOSettings
from flowcredit.models.gaussian import GaussianFlow, GaussianMixtureFlow, MixtureVelocity
from flowcredit.objectives import policy_sets
from flowcredit.plan import Anchor, Plan, Segment, strided_path
from flowcredit.rollout import KeyedNoise, Rollout, rollout
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import euler, flow_sde, make_kernel
from flowcredit.update import update_policy

PROMPTS = ("one", "two", "three")


class Watched(GaussianMixtureFlow):
    """Curved trajectories, so that every stride ends elsewhere; records the size of every batch."""

    def __init__(self) -> None:
        means = torch.tensor([[2.0, 0.0, -1.0, 1.0], [-1.0, 1.5, 0.5, -2.0]], dtype=torch.float64)
        variances, weights = torch.tensor([0.1, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
        super().__init__(means, variances, weights, prompt_spread=0.5, dtype=torch.float64)
        self.batches: list[int] = []

    def velocity(self, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.batches.append(len(x))
        return super().velocity(x, sigma, cond)


def means_of(model: GaussianMixtureFlow) -> Tensor:
    network = model.network
    assert isinstance(network, MixtureVelocity)
    return network.means


def run(
    settings: G2RPOSettings,
    batch_size: int,
    prompts: Sequence[str] = PROMPTS,
    dtype: torch.dtype | None = None,
) -> tuple[Rollout, Watched, Plan, Tensor]:
    model, plan = Watched(), g2rpo(settings).plan
    grid = shifted_linear(settings.num_steps, 3.0)
    noise = KeyedNoise(model, 7, 3, range(len(prompts)))
    kernel = make_kernel("flow_sde", grid, 0.7)
    done = rollout(model, plan, model.encode(prompts), grid, kernel, noise, batch_size, dtype)
    return done, model, plan, grid


@pytest.mark.parametrize(("anchor", "evaluations"), [("end", 1904), ("branch", 1700)])
def test_published_setting_costs_what_the_plan_says(anchor: Anchor, evaluations: int) -> None:
    """G2RPO on FLUX.1-dev: T = 16, M = 0..7, G = 12, strides 1, 2, 3; counted where the model is called."""
    done, model, plan, _ = run(G2RPOSettings(anchor=anchor), batch_size=100)
    assert sum(model.batches) == done.velocity_evaluations == len(PROMPTS) * evaluations
    assert plan.velocity_evaluations == evaluations

    def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
        scored.append(len(images))
        return images.mean((1, 2, 3))

    scored: list[int] = []
    scores, counts = score_leaves(
        model,
        done.leaves,
        PROMPTS,
        {},
        {"a": cast(Reward, brightness), "b": cast(Reward, brightness)},
        batch_size=64,
    )
    assert counts.decodes == len(PROMPTS) * 288
    assert sum(scored) == counts.reward_calls == 2 * len(PROMPTS) * 288
    assert {each.shape for each in scores.values()} == {(2, len(PROMPTS), 12)}


@cache
def naive(settings: G2RPOSettings, index: int) -> dict[tuple[int, int, int], Tensor]:
    """Public code's schedule for one prompt: every branch and stride for itself, one sample at a time.

    Returns the image of each (trained step, stride, branch); draws the noises of ``KeyedNoise``.
    """
    model, images = Watched(), {}
    cond = model.encode([PROMPTS[index]])
    plan = g2rpo(settings).plan
    noise = KeyedNoise(model, 7, 3, [index])
    sigmas = shifted_linear(settings.num_steps, 3.0).tolist()

    def velocity(x: Tensor, k: int) -> Tensor:
        return model.velocity(x, torch.full((1,), sigmas[k], dtype=x.dtype), cond)

    for segment in plan.transitions:
        k = plan.segments[segment].path[0]
        x = noise.initial(1)[0]
        for step in range(k):
            x = euler(x, velocity(x, step), sigmas[step], sigmas[step + 1])
        g = 0.7 * (sigmas[k] / (1 - (sigmas[1] if k == 0 else sigmas[k]))) ** 0.5
        for branch in range(settings.group_size):
            drawn = flow_sde(x, velocity(x, k), sigmas[k], sigmas[k + 1], g)
            start = drawn.draw(noise.step(segment, settings.group_size)[0, branch : branch + 1])
            for stride in settings.strides:
                y = start
                path = strided_path(settings.num_steps, k + 1, stride, settings.anchor)
                for a, b in itertools.pairwise(path):
                    y = euler(y, velocity(y, a), sigmas[a], sigmas[b])
                images[k, stride, branch] = y[0]
    return images


@pytest.mark.parametrize("anchor", ["end", "branch"])
@pytest.mark.parametrize("batch_size", [1, 5, 1000])
def test_same_states_as_the_naive_schedule(anchor: Anchor, batch_size: int) -> None:
    settings = G2RPOSettings(
        num_steps=9, group_size=3, strides=(1, 2, 4), anchor=anchor, train_steps=(0, 2, 5)
    )
    done, model, plan, _ = run(settings, batch_size)
    assert max(model.batches) <= batch_size
    compared = 0
    for index in range(len(PROMPTS)):
        expected = naive(settings, index)
        for segment in plan.transitions:
            k = plan.segments[segment].path[0]
            for stride, leaf in zip(settings.strides, plan.leaves_under(segment), strict=True):
                for branch in range(settings.group_size):
                    got = done.leaves[leaf][index, branch]
                    torch.testing.assert_close(got, expected[k, stride, branch], rtol=0, atol=1e-12)
                    compared += 1
    assert compared == 3 * 3 * 3 * 3


def test_strides_of_a_branch_end_in_different_images() -> None:
    """The comparison above would be empty if strides did not matter."""
    done, _, plan, _ = run(G2RPOSettings(num_steps=9, group_size=3, strides=(1, 2), train_steps=(1,)), 100)
    fine, coarse = (done.leaves[leaf] for leaf in plan.leaves_under(plan.transitions[0]))
    assert (fine - coarse).abs().max() > 1e-3


def test_a_prompt_draws_the_same_whatever_runs_beside_it() -> None:
    settings = G2RPOSettings(num_steps=6, group_size=4, strides=(1, 2))
    together, _, plan, grid = run(settings, 64)
    model = Watched()
    noise = KeyedNoise(model, 7, 3, [1])
    kernel = make_kernel("flow_sde", grid, 0.7)
    alone = rollout(model, plan, model.encode([PROMPTS[1]]), grid, kernel, noise, 7)
    for leaf, states in alone.leaves.items():
        torch.testing.assert_close(states[0], together.leaves[leaf][1], rtol=0, atol=1e-12)


def test_separate_initial_noises_give_every_branch_its_own_trunk() -> None:
    settings = G2RPOSettings(num_steps=6, group_size=4, strides=(1,), initial_noise="separate")
    done, _, _plan, _ = run(settings, 64)
    for step in done.transitions:
        assert step.x.shape[1] == 4
        assert step.x_next.shape[2] == 1
        assert (step.x[:, 0] - step.x[:, 1]).abs().min() > 1e-6
    shared, _, _, _ = run(settings.model_copy(update={"initial_noise": "shared"}), 64)
    for step in shared.transitions:
        assert step.x.shape[1] == 1
        assert step.x_next.shape[2] == 4


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_on_policy_ratio_is_one_also_for_states_stored_in_less_precision(dtype: torch.dtype | None) -> None:
    settings = G2RPOSettings(num_steps=8, group_size=5, strides=(1, 2))
    done, model, plan, grid = run(settings, 13, dtype=dtype)
    rewards = {leaf: torch.randn(1, len(PROMPTS), 5, dtype=torch.float64) for leaf in plan.scored}
    optimizer = torch.optim.SGD(model.network.parameters(), lr=0.0)
    updating = TrainSettings(update="accumulated", micro_batch_size=4, mixed_precision="no")
    metrics = update_policy(
        model,
        model.encode(PROMPTS),
        policy_sets(
            done.transitions,
            leaf_advantages(plan, rewards, torch.ones(1)),
            make_kernel("flow_sde", grid, 0.7),
            updating,
        ),
        optimizer,
        updating,
        lambda: None,
    )
    assert metrics["ratio_max_deviation"] < 1e-12
    assert metrics["on_policy_deviation"] < 1e-12


def test_policy_gradient_of_a_linear_case_is_the_analytic_one() -> None:
    """x_1 ~ N(mean(theta), std^2), reward w . x_0, x_0 affine in x_1: E[A grad log p] is known.

    With data N(m, c I) and one noisy step from sigma 1, v = x - m, so d mean / d m = -(1 + pull) dt I with
    pull = g^2 / 2 (1 - s) / s = 0 at s = 1. The reward's deviation over the group is std |a| e for a unit
    normal e along a = J^T w, so E[A (x_1 - mean)] = std a / |a|, and the gradient of -mean(ratio A) is
    dt a / |a| / (std N).
    """
    size, group, eta = 3, 40_000, 0.7
    m = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    model = GaussianFlow(m, torch.full((size,), 0.25, dtype=torch.float64), dtype=torch.float64)
    grid = shifted_linear(4, 1.0)
    settings = G2RPOSettings(num_steps=4, train_steps=(0,), group_size=2, strides=(1,))
    plan = Plan(
        4, (Segment(None, (0, 1), fan_out=group, stochastic=True), Segment(0, (1, 2, 3, 4), scored=True))
    )
    assert g2rpo(settings).plan.segments[1].path == plan.segments[1].path
    cond, kernel = model.encode(["p"]), make_kernel("flow_sde", grid, eta)
    done = rollout(model, plan, cond, grid, kernel, KeyedNoise(model, 0, 0, [0]), group)
    w = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    reward = (done.leaves[1] @ w).unsqueeze(0)
    optimizer = torch.optim.SGD(model.network.parameters(), lr=1.0)
    before = means_of(model).detach().clone()
    updating = TrainSettings(update="accumulated", mixed_precision="no", max_grad_norm=1e6)
    update_policy(
        model,
        cond,
        policy_sets(
            done.transitions,
            leaf_advantages(plan, {1: reward}, torch.ones(1), clamp=None),
            kernel,
            updating,
        ),
        optimizer,
        updating,
        lambda: None,
    )
    gradient = (before - means_of(model).detach()).squeeze(0)
    dt = float(grid[1] - grid[0])
    # The ODE scales x_1 - mean isotropically here, so a is parallel to w.
    expected = dt * (w / w.norm()) / (eta * size)
    assert gradient.norm() > 0.05
    torch.testing.assert_close(gradient, expected, rtol=0, atol=4 * abs(dt) / (eta * size) / group**0.5)


def test_grid_and_batch_size_are_checked() -> None:
    model, plan = Watched(), g2rpo(G2RPOSettings(num_steps=4, strides=(1,), group_size=2)).plan
    grid = shifted_linear(5)
    noise, kernel = KeyedNoise(model, 0, 0, [0]), make_kernel("flow_sde", grid, 0.7)
    with pytest.raises(ValueError, match="plan of 4 steps over a grid of 5"):
        rollout(model, plan, model.encode(["p"]), grid, kernel, noise, 4)
    with pytest.raises(ValueError, match="batch size is 0"):
        rollout(model, plan, model.encode(["p"]), shifted_linear(4), kernel, noise, 0)
