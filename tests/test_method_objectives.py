"""Noise that siblings share, the policy of neighbours, the guarded ratio, weights of steps."""

import math
from typing import Any, cast

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from flowcredit.config import TrainSettings
from flowcredit.credit import Neighbours
from flowcredit.models.gaussian import GaussianMixtureFlow
from flowcredit.neighbours import NeighbourStep, leaping_log_prob, neighbour_sets
from flowcredit.objectives import PolicyStep, policy_sets
from flowcredit.plan import Plan, Segment
from flowcredit.policy_loss import guarded_log_ratio
from flowcredit.rollout import KeyedNoise, Rollout, Transition, rollout
from flowcredit.time_grid import from_sigmas, shifted_linear
from flowcredit.transition import Gaussian, Kernel, KernelKind, make_kernel
from method_world import gather, world

MANY = tuple(f"prompt {i}" for i in range(40))


def wide(plan: Plan, grid: Tensor, kernel: Kernel, seed: int = 11) -> Rollout:
    """A rollout over many prompts of 250 dimensions: 10 000 draws for each sample of a prompt."""
    means = torch.linspace(-2, 2, 250, dtype=torch.float64).unsqueeze(0)
    model = GaussianMixtureFlow(means, torch.tensor([0.2]), torch.ones(1), dtype=torch.float64)
    noise = KeyedNoise(model, seed, 0, range(len(MANY)))
    return rollout(model, plan, model.encode(MANY), grid, kernel, noise, 200)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_siblings_share_noise_and_each_is_standard_normal(scale: float) -> None:
    shared = 1 / (1 + scale**2)
    plan = Plan(
        3,
        (
            Segment(None, (0, 1), fan_out=2, stochastic=True, correlation=shared),
            Segment(0, (1, 2), fan_out=2, stochastic=True, correlation=shared),
            Segment(1, (2, 3), scored=True),
        ),
    )
    grid = shifted_linear(3, 3.0)
    kernel = make_kernel("dance_sde", grid, 0.3)
    done = wide(plan, grid, kernel)
    by_step = []
    for step in done.transitions:
        # The mean of the step, written out: drift v + g^2/(2 s) (x + (1 - s) v), deviation g sqrt(-dt).
        s, dt = step.sigma, step.sigma_next - step.sigma
        drift = step.v + 0.3**2 / (2 * s) * (step.x + (1 - s) * step.v)
        mean, std = (step.x + drift * dt).unsqueeze(2), 0.3 * math.sqrt(-dt)
        noise = (step.x_next - mean) / std
        assert float(noise.mean()) == pytest.approx(0, abs=0.02)
        assert noise.std(correction=0).item() == pytest.approx(1, abs=0.02)
        assert correlation(noise[:, :, 0], noise[:, :, 1]) == pytest.approx(shared, abs=0.03)
        # What training needs is the density of each sample by itself.
        density = torch.distributions.Normal(mean.expand_as(step.x_next), std).log_prob(step.x_next)
        torch.testing.assert_close(step.log_prob.double(), density.mean(-1), rtol=1e-5, atol=1e-5)
        by_step.append(noise)
    # Of one step to the next, and between children of different states, nothing is shared.
    assert correlation(by_step[0][:, 0, 0], by_step[1][:, 0, 0]) == pytest.approx(0, abs=0.04)
    assert correlation(by_step[1][:, 0], by_step[1][:, 1]) == pytest.approx(0, abs=0.03)


def test_neighbours_begin_around_one_noise() -> None:
    sigma = 0.3
    plan = Plan(
        2,
        (Segment(None, (0, 1), recorded=True), Segment(0, (1, 2), scored=True)),
        root_width=3,
        root_correlation=1 - sigma**2,
    )
    grid = shifted_linear(2)
    start, _ = wide(plan, grid, make_kernel("flow_sde", grid, 0.7)).recorded[0]
    assert start.std(correction=0).item() == pytest.approx(1, abs=0.02)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert correlation(start[:, a], start[:, b]) == pytest.approx(0.91, abs=0.01)
        # Equation 7: they differ by sigma times two draws.
        assert (start[:, a] - start[:, b]).std().item() == pytest.approx(sigma * math.sqrt(2), rel=0.03)


def test_leaping_by_hand() -> None:
    stepped = torch.tensor([[[1.0, 1.0]]], dtype=torch.float64)
    neighbours = torch.tensor([[[1.0, 1.0], [1.0, 3.0], [0.0, 0.0]]], dtype=torch.float64)
    # Squared distances 0, 4, 2, means over two dimensions 0, 2, 1; over a temperature of 0.5: 0, 4, 2.
    total = 1 + math.exp(-4) + math.exp(-2)
    found = leaping_log_prob(stepped, neighbours, 0.5)
    expected = [-math.log(total), -4 - math.log(total), -2 - math.log(total)]
    assert found[0].tolist() == pytest.approx(expected)


def neighbour_step(advantages: list[float], anchor: int = 0) -> tuple[NeighbourStep, Tensor]:
    """One anchor of three neighbours, stepped from sigma 0.8 to 0.5; and the velocity of its rollout."""
    start = torch.tensor([[[0.0, 0.0], [1.0, 0.5], [-1.0, 2.0]]], dtype=torch.float64)
    velocity = torch.tensor([[[1.0, 2.0], [-1.0, 0.3], [0.5, 0.5]]], dtype=torch.float64)
    end = start + velocity * (0.5 - 0.8)
    (found,) = neighbour_sets(
        [(start, end)],
        [(0.8, 0.5)],
        torch.tensor([advantages], dtype=torch.float64),
        torch.tensor([[anchor]]),
        Neighbours(anchors=1, temperature=1.0, quasi_norm=0.8),
        clip_range=0.2,
    )
    return found, velocity[:, anchor : anchor + 1]


@pytest.mark.parametrize("anchor", [0, 1, 2])
@pytest.mark.parametrize("favoured", [0, 1, 2])
def test_the_anchor_is_pulled_to_the_favoured_neighbour_and_pushed_from_the_poor(
    anchor: int, favoured: int
) -> None:
    for sign in (1.0, -1.0):
        advantages = [0.0, 0.0, 0.0]
        advantages[favoured] = sign
        step, velocity = neighbour_step(advantages, anchor)
        v = velocity.clone().requires_grad_()
        loss, metrics = step.loss(v)
        assert metrics["ratio_max_deviation"] < 1e-12
        assert float(loss.detach()) == pytest.approx(-sign / 3)
        loss.backward()
        assert v.grad is not None
        if favoured == anchor:
            continue

        def distances(at: Tensor, among: NeighbourStep = step) -> Tensor:
            return ((among.x_next - (among.x + at * (0.5 - 0.8))) ** 2).sum(-1)[0]

        before, after = distances(velocity), distances(velocity - 0.05 * v.grad)
        # The policy's own sense: the favoured becomes more probable against the others.
        gained = torch.log_softmax(-after / 2, 0) - torch.log_softmax(-before / 2, 0)
        assert float(gained[favoured]) * sign > 0
        assert float(after[favoured] - before[favoured]) * sign < 0


def test_every_anchor_is_compared_with_all_neighbours_of_its_prompt() -> None:
    generator = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 2, 4, 3, generator=generator, dtype=torch.float64)
    advantages = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    anchors = torch.tensor([[2, 0], [1, 3]])
    objective = Neighbours(anchors=2, temperature=0.7, quasi_norm=0.8)
    (step,) = neighbour_sets([(start, end)], [(1.0, 0.6)], advantages, anchors, objective, 1e-4)
    v = torch.randn(4, 1, 3, generator=generator, dtype=torch.float64) * 1e-3
    v += (end[[0, 0, 1, 1], [2, 0, 1, 3]] - start[[0, 0, 1, 1], [2, 0, 1, 3]]).unsqueeze(1) / (0.6 - 1.0)
    loss, _ = step.loss(v)
    total = 0.0
    for row, (prompt, anchor) in enumerate([(0, 2), (0, 0), (1, 1), (1, 3)]):
        assert int(step.prompts[row]) == prompt
        new = start[prompt, anchor] + v[row, 0] * (0.6 - 1.0)
        weights = [math.exp(-float(((new - e) ** 2).mean()) / 0.7) for e in end[prompt]]
        old = [math.exp(-float(((end[prompt, anchor] - e) ** 2).mean()) / 0.7) for e in end[prompt]]
        for neighbour in range(4):
            ratio = (weights[neighbour] / sum(weights)) / (old[neighbour] / sum(old))
            a = float(advantages[prompt, neighbour])
            total -= min(ratio * a, min(max(ratio, 1 - 1e-4), 1 + 1e-4) * a) / 16
    assert float(loss) == pytest.approx(total, abs=1e-9)


def test_anchors_are_drawn_for_each_prompt_and_iteration() -> None:
    setup = world(
        {"name": "neighbor_grpo", "num_steps": 5, "group_size": 6, "anchors": 2, "train_steps": [0, 3]}
    )
    seen = set()
    for iteration in range(12):
        found = gather(setup, iteration)
        first, second = cast("tuple[NeighbourStep, NeighbourStep]", found.sets)
        # On policy an anchor's own end is where it steps to: its log-probability is the largest of its row.
        drawn = first.log_prob.argmax(1).tolist()
        assert drawn == second.log_prob.argmax(1).tolist()
        for prompt in range(3):
            pair = tuple(drawn[2 * prompt : 2 * prompt + 2])
            assert len(set(pair)) == 2
            seen.add((prompt, pair))
    assert len(seen) > 24


def gaussians(k: int, kernel: Kernel, sigmas: list[float]) -> tuple[Gaussian, Gaussian, Tensor]:
    """A step by an old and by a new velocity, and the new less the old mean by hand."""
    generator = torch.Generator().manual_seed(3)
    x, v, change = torch.randn(3, 1, 1, 64, generator=generator, dtype=torch.float64)
    before, after = kernel(x, v, k, k + 1), kernel(x, v + change, k, k + 1)
    return before, after, after.mean - before.mean


@pytest.mark.parametrize("k", [0, 3, 8])
def test_the_guarded_ratio_has_neither_drift_nor_unit(k: int) -> None:
    grid = shifted_linear(10, 3.0)
    before, after, moved = gaussians(k, make_kernel("flow_sde", grid, 0.7), grid.tolist())
    noise = torch.randn(1, 4000, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x_next = before.draw(noise)
    plain = after.log_prob(x_next, 2) - before.log_prob(x_next, 2)
    guarded = guarded_log_ratio(plain, after, before)
    torch.testing.assert_close(guarded, (moved * noise).mean(-1), rtol=1e-9, atol=1e-12)
    # Its mean is 0 and its spread that of the moved mean; of the plain one both hang on the deviation.
    spread = float((moved**2).mean() / 64) ** 0.5
    assert float(guarded.mean()) == pytest.approx(0, abs=4 * spread / math.sqrt(4000))
    assert float(guarded.std()) == pytest.approx(spread, rel=0.05)
    std = float(before.std)
    drift = -float((moved**2).mean()) / (2 * std**2)
    assert float(plain.mean()) == pytest.approx(drift, abs=4 * spread / std / math.sqrt(4000))
    assert drift < -6 * spread / std / math.sqrt(4000)
    assert float(plain.std()) == pytest.approx(spread / std, rel=0.05)


def steps_of(
    kind: KernelKind, eta: float, grid: Tensor, noise: Tensor, **train: Any
) -> list[tuple[PolicyStep, Tensor]]:
    """Every step but the last from one state, one velocity and one noise, as training sees it."""
    generator = torch.Generator().manual_seed(6)
    x, v = torch.randn(2, 1, 1, noise.shape[-1], generator=generator, dtype=torch.float64)
    kernel, sigmas = make_kernel(kind, grid, eta), grid.tolist()
    transitions, advantages = [], {}
    for k in range(len(sigmas) - 2):
        step = kernel(x.unsqueeze(2), v.unsqueeze(2), k, k + 1)
        x_next = step.draw(noise)
        log_prob = step.log_prob(x_next, 3)
        transitions.append(Transition(k, k, k + 1, sigmas[k], sigmas[k + 1], x, v, x_next, log_prob))
        advantages[k] = torch.ones(1, noise.shape[2])
    settings = TrainSettings(mixed_precision="no", **train)
    sets = policy_sets(transitions, advantages, kernel, settings)
    return [(each, v.clone()) for each in sets]


def gradient(step: PolicyStep, v: Tensor) -> Tensor:
    at = v.clone().requires_grad_()
    loss, _ = step.loss(at)
    loss.backward()
    assert at.grad is not None
    return at.grad


NOISE = torch.randn(1, 1, 3, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def test_a_guarded_step_teaches_as_much_as_any_other() -> None:
    """The mean moves by dt (1 + eta^2 / 2) for each velocity (dt alone at sigma 1), the loss is over -dt."""
    grid = shifted_linear(10, 3.0)
    guarded = [gradient(*each) for each in steps_of("flow_sde", 0.7, grid, NOISE, ratio="guarded")]
    # The mean over 3 samples and 5 dimensions of minus the ratio; of the ratio, noise dm/dv.
    unit = NOISE.mean(2) / 5
    torch.testing.assert_close(guarded[0], unit)
    for each in guarded[1:]:
        torch.testing.assert_close(each, unit * (1 + 0.7**2 / 2))
    plain = [float(gradient(*each).norm()) for each in steps_of("flow_sde", 0.7, grid, NOISE)]
    assert max(plain) / min(plain) > 1.5


def test_a_plain_steps_gradient_is_as_large_as_its_length_over_its_noise() -> None:
    grid = shifted_linear(10, 3.0)
    sigmas = grid.tolist()
    for k, each in enumerate(steps_of("flow_sde", 0.7, grid, NOISE)):
        s, dt = sigmas[k], sigmas[k + 1] - sigmas[k]
        std = 0.7 * math.sqrt(s / (1 - (sigmas[1] if k == 0 else s))) * math.sqrt(-dt)
        reach = -dt * (1 if k == 0 else 1 + 0.7**2 / 2) / std
        torch.testing.assert_close(gradient(*each), NOISE.mean(2) / 5 * reach)


def scheduled(**settings: Any) -> Tensor:
    """Ten steps of diffusers' scheduler for flows, as the pipeline of the model asks for them."""
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    if settings.get("use_dynamic_shifting"):
        scheduler.set_timesteps(sigmas=[1 - i / 10 for i in range(10)], mu=1.15)
    else:
        scheduler.set_timesteps(10)
    return from_sigmas(scheduler.sigmas.tolist())


@pytest.mark.parametrize(
    ("grid", "eta", "published"),
    [(scheduled(shift=3.0), 0.7, 2.25), (scheduled(use_dynamic_shifting=True), 0.9, 1.73)],
)
def test_weights_by_noise_are_tempflows_constants(grid: Tensor, eta: float, published: float) -> None:
    """Its code multiplies each term by std and 2.25 on SD3.5-M, 1.73 on FLUX.1-dev at 1024 pixels."""
    weights = [
        each.options.weight for each, _ in steps_of("flow_sde", eta, grid, NOISE, step_weights="noise")
    ]
    assert sum(weights) / len(weights) == pytest.approx(1)
    sigmas = grid.tolist()
    for k, weight in enumerate(weights):
        s = sigmas[k]
        std = eta * math.sqrt(s / (1 - (sigmas[1] if k == 0 else s))) * math.sqrt(s - sigmas[k + 1])
        assert weight / std == pytest.approx(published, abs=0.005)


def test_both_weights_multiply() -> None:
    grid = shifted_linear(6, 3.0)

    def weights(**train: Any) -> list[float]:
        return [each.options.weight for each, _ in steps_of("flow_sde", 0.7, grid, NOISE, **train)]

    noise, guard = weights(step_weights="noise"), weights(ratio="guarded")
    assert guard == pytest.approx([1 / float(grid[k] - grid[k + 1]) for k in range(5)])
    both = weights(step_weights="noise", ratio="guarded")
    assert both == pytest.approx([a * b for a, b in zip(noise, guard, strict=True)])
    assert weights() == [1.0] * 5


@pytest.mark.parametrize("options", [{"step_weights": "noise"}, {"ratio": "guarded"}])
def test_weights_leave_the_kl_alone(options: dict[str, str]) -> None:
    grid = shifted_linear(6, 3.0)
    for with_kl, without in zip(
        steps_of("flow_sde", 0.7, grid, NOISE, kl_weight=0.5, **options),
        steps_of("flow_sde", 0.7, grid, NOISE, **options),
        strict=True,
    ):
        step, v = with_kl
        step = step.with_reference(v + 0.2)
        loss, metrics = step.loss(v)
        bare, _ = without[0].loss(v)
        s, dt = float(step.sigma[0]), float(grid[step.k + 1] - grid[step.k])
        std = 0.7 * math.sqrt(s / (1 - (float(grid[1]) if step.k == 0 else s)) * -dt)
        moved = 0.2 * dt * (1 if step.k == 0 else 1 + 0.7**2 / 2)
        assert metrics["kl_reference"] == pytest.approx(moved**2 / (2 * std**2))
        assert float(loss - bare) == pytest.approx(0.5 * moved**2 / (2 * std**2))


def test_kept_samples_are_the_best_and_the_worst_of_each_prompt() -> None:
    plan_steps = {"num_steps": 5, "group_size": 4, "split_steps": [0, 1], "kept_leaves": 3}
    setup = world({"name": "branch_grpo", **plan_steps})
    found = gather(setup)
    late = [each for each in found.sets if isinstance(each, PolicyStep) and each.k >= 2]
    assert [each.k for each in late] == [2, 3]
    leaf = setup.algorithm.plan.scored[0]
    for step in late:
        assert step.advantages.shape == (9, 1)
        for prompt in range(3):
            rows = step.advantages[step.prompts == prompt].flatten()
            everything = found.advantages[setup.algorithm.plan.transitions[step.k]][prompt].sort().values
            # Of four, the worst one and the best two.
            assert sorted(rows.tolist()) == pytest.approx(everything[[0, 2, 3]].tolist())
    assert found.scores[leaf].shape == (2, 3, 4)
