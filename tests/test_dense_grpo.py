"""DenseGRPO and Flow-GRPO: what they cost, what rewards a step, and the KL that holds them."""

import pytest
import torch
from torch import Tensor

from flowcredit.advantages import credit_steps, normalise
from flowcredit.algorithms import dense_grpo, flow_grpo, g2rpo
from flowcredit.config import TrainSettings
from flowcredit.credit import Credit
from flowcredit.methods import DenseGRPOSettings, FlowGRPOSettings, G2RPOSettings
from flowcredit.models.gaussian import GaussianMixtureFlow
from flowcredit.objectives import policy_sets
from flowcredit.plan import spread_path
from flowcredit.rollout import KeyedNoise, Rollout, rollout
from flowcredit.step_rewards import state_rewards
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import Gaussian, make_kernel
from flowcredit.update import UpdateMetrics, update_policy
from flowcredit.weights import reference_copy, weights_replaced

PROMPTS = ("one", "two", "three")
ONE = torch.ones(1)


def mixture() -> GaussianMixtureFlow:
    means = torch.tensor([[2.0, 0.0, -1.0], [-1.0, 1.5, 0.5]], dtype=torch.float64)
    variances, weights = torch.tensor([0.1, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    return GaussianMixtureFlow(means, variances, weights, prompt_spread=0.5, dtype=torch.float64)


def run(settings: DenseGRPOSettings | FlowGRPOSettings, batch_size: int = 64) -> Rollout:
    model = mixture()
    method = flow_grpo(settings) if isinstance(settings, FlowGRPOSettings) else dense_grpo(settings)
    grid = shifted_linear(settings.num_steps, 3.0)
    noise = KeyedNoise(model, 7, 3, range(len(PROMPTS)))
    kernel = make_kernel("flow_sde", grid, 0.7)
    return rollout(model, method.plan, model.encode(PROMPTS), grid, kernel, noise, batch_size)


def quadratic(done: Rollout) -> dict[int, Tensor]:
    """One reward, [1, P, W] for each scored segment."""
    return {leaf: -(states**2).sum(-1)[None] for leaf, states in done.leaves.items()}


@pytest.mark.parametrize("T", [2, 3, 6, 10])
def test_a_trajectory_pays_for_no_state_twice(T: int) -> None:
    trajectory = T + (T - 1) * (T - 2) // 2
    group = 5
    alone = DenseGRPOSettings(num_steps=T, group_size=group, initial_noise="separate", step_reward="state")
    assert dense_grpo(alone).plan.velocity_evaluations == group * trajectory
    assert dense_grpo(alone).plan.trajectory_evaluations == trajectory
    # A shared start is evaluated once for the whole group, and its reward is not asked for.
    shared = dense_grpo(DenseGRPOSettings(num_steps=T, group_size=group)).plan
    assert shared.velocity_evaluations == group * trajectory - (group - 1)
    assert shared.decodes == group * (T - 1)
    assert shared.trained_states == 1 + (T - 2) * group
    # With starts of their own the gains of the first step need the rewards of those starts.
    separate = dense_grpo(DenseGRPOSettings(num_steps=T, group_size=group, initial_noise="separate")).plan
    assert separate.velocity_evaluations == group * (trajectory + T - 1)
    done = run(DenseGRPOSettings(num_steps=T, group_size=group))
    assert done.velocity_evaluations == len(PROMPTS) * shared.velocity_evaluations


def test_flow_grpo_costs_its_trajectories() -> None:
    plan = flow_grpo(FlowGRPOSettings()).plan
    assert (plan.velocity_evaluations, plan.decodes, len(plan.transitions)) == (240, 24, 9)
    assert plan.trajectory_evaluations == 10
    assert g2rpo(G2RPOSettings()).plan.trajectory_evaluations is None


@pytest.mark.parametrize("batch_size", [1, 64])
def test_gains_of_a_trajectory_sum_to_what_the_whole_of_it_gained(batch_size: int) -> None:
    settings = DenseGRPOSettings(num_steps=6, group_size=4, initial_noise="separate")
    done = run(settings, batch_size)
    plan = dense_grpo(settings).plan
    rewards = quadratic(done)
    gains = state_rewards(plan, rewards, gain=True)
    first = next(leaf for leaf in plan.scored if plan.segments[leaf].parent is None)
    last = plan.scored[-1]
    assert plan.segments[last].path == (5, 6)
    total = torch.stack(list(gains.values())).sum(0)
    assert total.shape == (1, len(PROMPTS), 4)
    torch.testing.assert_close(total, rewards[last] - rewards[first], rtol=1e-12, atol=1e-12)
    assert float(torch.stack(list(gains.values())).abs().min()) > 1e-6


def test_a_probe_is_the_ode_from_the_state() -> None:
    settings = DenseGRPOSettings(num_steps=5, group_size=2)
    done, model, grid = run(settings), mixture(), shifted_linear(5, 3.0)
    plan, cond = dense_grpo(settings).plan, model.encode(PROMPTS)
    step = done.transitions[1]
    x = step.x_next[:, 0, 0]
    for k in range(2, 5):
        x = x + model.velocity(x, x.new_full((3,), float(grid[k])), cond) * float(grid[k + 1] - grid[k])
    probe = next(leaf for leaf in plan.scored if plan.segments[leaf].parent == step.segment)
    torch.testing.assert_close(done.leaves[probe][:, 0], x)


def test_credit_by_hand() -> None:
    settings = DenseGRPOSettings(num_steps=3, group_size=2)
    method = dense_grpo(settings)
    first, last = method.plan.scored
    rewards = {first: torch.tensor([[[1.0, 3.0]]]), last: torch.tensor([[[4.0, 5.0]]])}
    half = 0.5**0.5
    gains = credit_steps(method.plan, rewards, ONE, Credit("gain"))
    # Step 0 starts at one shared state: 1 and 3 are its gains but for a constant. Step 1 gains 3 and 2.
    torch.testing.assert_close(gains[0], torch.tensor([[-half, half]]))
    torch.testing.assert_close(gains[1], torch.tensor([[half, -half]]))
    states = credit_steps(method.plan, rewards, ONE, Credit("state"))
    torch.testing.assert_close(states[0], torch.tensor([[-half, half]]))
    torch.testing.assert_close(states[1], torch.tensor([[-half, half]]))
    both = {leaf: values.repeat(2, 1, 1) for leaf, values in rewards.items()}
    added = credit_steps(method.plan, both, torch.tensor([2.0, 1.0]), Credit("gain"))
    torch.testing.assert_close(added[1], torch.tensor([[3 * half, -3 * half]]))
    torch.testing.assert_close(
        credit_steps(method.plan, both, torch.tensor([9.0, 1.0]), Credit("gain"))[1],
        torch.tensor([[5.0, -5.0]]),
    )


def test_a_missing_score_leaves_both_steps_beside_it_without_credit() -> None:
    plan = dense_grpo(DenseGRPOSettings(num_steps=4, group_size=3)).plan
    rewards = {
        leaf: torch.tensor([[[0.1, 0.5, 0.9]]]) * (place + 1) for place, leaf in enumerate(plan.scored)
    }
    rewards[plan.scored[1]][0, 0, 2] = torch.nan
    credit = credit_steps(plan, rewards, ONE, Credit("gain"))
    assert [bool(credit[k][0, 2] == 0) for k in range(3)] == [False, True, True]
    assert all(bool((credit[k][0, :2] != 0).all()) for k in range(3))


def test_separate_starts_without_a_score_have_no_gain() -> None:
    plan = dense_grpo(
        DenseGRPOSettings(num_steps=3, group_size=2, initial_noise="separate", step_reward="state")
    ).plan
    with pytest.raises(ValueError, match="segment 0 starts at states that are not scored"):
        state_rewards(plan, {leaf: torch.zeros(1, 1, 2) for leaf in plan.scored}, gain=True)
    chain = flow_grpo(FlowGRPOSettings(num_steps=3, group_size=2)).plan
    with pytest.raises(ValueError, match="no scored segment of its own"):
        state_rewards(chain, {leaf: torch.zeros(1, 1, 2) for leaf in chain.scored}, gain=True)


@pytest.mark.parametrize(
    ("probe", "paths"),
    [
        ("all", [(1, 2, 3, 4, 5, 6), (2, 3, 4, 5, 6), (3, 4, 5, 6), (4, 5, 6), (5, 6)]),
        (1, [(1, 6), (2, 6), (3, 6), (4, 6), (5, 6)]),
        (2, [(1, 3, 6), (2, 4, 6), (3, 4, 6), (4, 5, 6), (5, 6)]),
        ("t/2", [(1, 2, 4, 6), (2, 4, 6), (3, 4, 6), (4, 6), (5, 6)]),
    ],
)
def test_probes_take_as_many_steps_as_they_are_told(probe: str | int, paths: list[tuple[int, ...]]) -> None:
    plan = dense_grpo(DenseGRPOSettings.model_validate({"num_steps": 6, "probe_steps": probe})).plan
    assert [plan.segments[leaf].path for leaf in plan.scored] == paths


@pytest.mark.parametrize("probe", [0, -1, "t/0", "t/2.5", "half", 1.5])
def test_a_probe_of_nothing_is_refused(probe: object) -> None:
    with pytest.raises(ValueError, match="probe_steps"):
        DenseGRPOSettings.model_validate({"probe_steps": probe})
    with pytest.raises(ValueError, match="expected 1 to 4"):
        spread_path(6, 2, 0)


def test_kl_is_that_of_normal_distributions() -> None:
    mean, other = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    std = torch.tensor(0.37, dtype=torch.float64)
    found = Gaussian(mean, std).kl_from(Gaussian(other, std), batch_dims=2)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(other, std)
    )
    torch.testing.assert_close(found, exact.mean(-1))


def kl_update(weight: float, moved: float, rate: float) -> tuple[UpdateMetrics, GaussianMixtureFlow]:
    """One accumulated update with advantages of 0, so that nothing but the KL acts, from moved weights."""
    settings = DenseGRPOSettings(num_steps=5, group_size=3)
    model, grid = mixture(), shifted_linear(5, 3.0)
    kernel, plan = make_kernel("flow_sde", grid, 0.7), dense_grpo(settings).plan
    before = reference_copy(model.network)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(moved)
    noise = KeyedNoise(model, 1, 0, range(len(PROMPTS)))
    done = rollout(model, plan, model.encode(PROMPTS), grid, kernel, noise, 50)
    updating = TrainSettings(
        update="accumulated", kl_weight=weight, mixed_precision="no", micro_batch_size=7, max_grad_norm=1e6
    )
    metrics = update_policy(
        model,
        model.encode(PROMPTS),
        policy_sets(
            done.transitions,
            {step: torch.zeros(len(PROMPTS), 3) for step in plan.transitions},
            kernel,
            updating,
        ),
        torch.optim.SGD(model.network.parameters(), lr=rate),
        updating,
        lambda: None,
        (lambda: weights_replaced(model.network, before)) if weight else None,
    )
    return metrics, model


def test_the_kl_pulls_back_to_the_reference_and_nothing_else_does() -> None:
    still, _ = kl_update(0.5, moved=0.0, rate=1.0)
    assert still["kl_reference"] == 0.0
    assert still["grad_norm"] == 0.0
    away, model = kl_update(0.5, moved=0.2, rate=0.05)
    assert away["kl_reference"] > 1e-4
    assert away["loss"] == pytest.approx(0.5 * away["kl_reference"])
    start = mixture().network.get_parameter("means")
    gone = (model.network.get_parameter("means") - start).norm()
    assert gone < (start + 0.2 - start).norm()
    none, _ = kl_update(0.0, moved=0.2, rate=0.05)
    assert none == {}, "without a KL there is nothing to do"
    half, _ = kl_update(0.25, moved=0.2, rate=0.05)
    assert half["grad_norm"] == pytest.approx(away["grad_norm"] / 2)


def test_state_credit_of_the_last_step_is_flow_grpos() -> None:
    """The last state's reward is the image's: there the dense baseline and the terminal advantage agree."""
    settings = DenseGRPOSettings(num_steps=4, group_size=3, step_reward="state")
    done = run(settings)
    plan = dense_grpo(settings).plan
    rewards = quadratic(done)
    credit = credit_steps(plan, rewards, ONE.double(), Credit("state", clamp=None))
    torch.testing.assert_close(credit[2], normalise(rewards[plan.scored[-1]])[0])
