"""Credit of each method against loops and numbers made by hand."""

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowcredit import algorithms
from flowcredit.advantages import credit_steps, normalise, quasi_normalised
from flowcredit.credit import Credit
from flowcredit.methods import (
    BranchGRPOSettings,
    CoCASettings,
    StepwiseFlowGRPOSettings,
    TempFlowGRPOSettings,
    TurningPointGRPOSettings,
)
from flowcredit.step_rewards import remaining_similarity, turning_rewards

NAN = math.nan
ONE = torch.ones(1)


class PublicTracker:
    """Flow-GRPO's released tracker as it describes itself: rewards by prompt, one deviation for all."""

    def __init__(self, of_all: bool, ddof: int, eps: float) -> None:
        self.of_all, self.ddof, self.eps = of_all, ddof, eps

    def __call__(self, prompts: list[str], rewards: list[float]) -> list[float]:
        everything = np.std(np.array(rewards), ddof=self.ddof)
        result = []
        for prompt, reward in zip(prompts, rewards, strict=True):
            own = [r for p, r in zip(prompts, rewards, strict=True) if p == prompt]
            deviation = everything if self.of_all else np.std(own, ddof=self.ddof)
            result.append(float((reward - np.mean(own)) / (deviation + self.eps)))
        return result


@pytest.mark.parametrize("of_all", [True, False])
def test_flow_grpos_two_deviations(of_all: bool) -> None:
    rewards = torch.tensor(
        [[0.9, 0.1, 0.4, 0.35], [20.0, 26.5, 21.0, 23.0], [0.2, 0.2, 0.2, 0.2]], dtype=torch.float64
    )
    prompts = [f"prompt {p}" for p in range(3) for _ in range(4)]
    ours = normalise(rewards, "batch" if of_all else "group")
    unbiased = PublicTracker(of_all, ddof=1, eps=0.0 if of_all else 1e-30)(
        prompts, rewards.flatten().tolist()
    )
    torch.testing.assert_close(ours.flatten(), torch.tensor(unbiased, dtype=torch.float64))
    # The released code divides by the population's deviation and 1e-4: larger by a known factor alone.
    public = PublicTracker(of_all, ddof=0, eps=1e-4)(prompts, rewards.flatten().tolist())
    counted = 12 if of_all else 4
    factor = math.sqrt(counted / (counted - 1))
    for mine, theirs, spread in zip(
        ours.flatten().tolist(), public, rewards.std(1).repeat_interleave(4).tolist(), strict=True
    ):
        slack = 1e-4 / (rewards.std() if of_all else max(spread, 1e-9))
        assert theirs == pytest.approx(mine * factor, rel=2 * float(slack) + 1e-9)


def test_the_batch_deviation_skips_what_has_no_score() -> None:
    rewards = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN], [2.0, 2.0, 8.0]])
    found = normalise(rewards, "batch")
    deviation = float(np.std([1, 3, 5, 2, 2, 8], ddof=1))
    expected = torch.tensor([[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-2.0, -2.0, 4.0]]) / deviation
    torch.testing.assert_close(found, expected)


def test_a_branch_is_compared_with_those_of_its_seed() -> None:
    settings = TempFlowGRPOSettings(num_steps=3, seeds=2, group_size=3)
    method = algorithms.tempflow_grpo(settings)
    first, second = method.plan.scored
    rewards = {
        first: torch.tensor([[[1.0, 2.0, 3.0, 10.0, 10.0, 40.0]]]),
        second: torch.tensor([[[0.0, 0.0, 0.0, 5.0, 7.0, 6.0]]]),
    }
    found = credit_steps(method.plan, rewards, ONE, method.credit)
    at = dict(zip([0, 1], method.plan.transitions, strict=True))
    a = 1 / math.sqrt(3)
    torch.testing.assert_close(found[at[0]], torch.tensor([[-1.0, 0.0, 1.0, -a, -a, 2 * a]]))
    torch.testing.assert_close(found[at[1]], torch.tensor([[0.0, 0.0, 0.0, -1.0, 1.0, 0.0]]))
    pooled = algorithms.tempflow_grpo(settings.model_copy(update={"compare": "prompt"}))
    together = credit_steps(pooled.plan, rewards, ONE, pooled.credit)[at[0]][0]
    values = np.array([1, 2, 3, 10, 10, 40.0])
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose(together.numpy(), expected, rtol=1e-5)


def test_stepwise_gains_are_compared_over_steps_and_trajectories() -> None:
    method = algorithms.stepwise_flow_grpo(StepwiseFlowGRPOSettings(num_steps=4, group_size=2))
    states = [[[0.5]], [[0.7, 0.4]], [[1.5, 0.9]], [[1.6, 0.8]]]  # shared start, then after steps 0, 1, 2
    rewards = {leaf: torch.tensor([state]) for leaf, state in zip(method.plan.scored, states, strict=True)}
    found = credit_steps(method.plan, rewards, ONE, method.credit)
    gains = np.array([[0.2, -0.1], [0.8, 0.5], [0.1, -0.1]])
    expected = (gains - gains.mean()) / gains.std(ddof=1)
    for step, row in zip(method.plan.transitions, expected, strict=True):
        np.testing.assert_allclose(found[step][0].numpy(), row, rtol=1e-5)
    # The early step keeps its size: normalised alone, each step's two would be +-0.707.
    alone = credit_steps(method.plan, rewards, ONE, Credit("gain"))
    assert all(abs(float(alone[step][0, 0])) == pytest.approx(math.sqrt(0.5)) for step in alone)


def test_a_states_reward_is_the_mean_of_the_leaves_below_it() -> None:
    settings = BranchGRPOSettings(num_steps=5, group_size=8, split_steps=(0, 2, 3))
    method = algorithms.branch_grpo(settings)
    plan = method.plan
    generator = torch.Generator().manual_seed(5)
    leaf_rewards = torch.rand(1, 2, 8, generator=generator, dtype=torch.float64)
    leaf_rewards[0, 1, 3] = NAN
    found = credit_steps(plan, {plan.scored[0]: leaf_rewards}, ONE, method.credit)

    def below(width: int, sample: int) -> list[int]:
        """Leaves of a sample, by halving: a state's children lie beside each other."""
        return [leaf for leaf in range(8) if leaf * width // 8 == sample]

    for k, step in enumerate(plan.transitions):
        width = [2, 2, 4, 8][k]
        for prompt in range(2):
            means: list[float | None] = []
            for sample in range(width):
                scores = [float(leaf_rewards[0, prompt, leaf]) for leaf in below(width, sample)]
                scores = [score for score in scores if not math.isnan(score)]
                means.append(sum(scores) / len(scores) if scores else None)
            known = np.array([mean for mean in means if mean is not None])
            middle, spread = float(known.mean()), float(known.std(ddof=1))
            expected = [0.0 if mean is None else (mean - middle) / spread for mean in means]
            np.testing.assert_allclose(found[step][prompt].numpy(), expected, atol=1e-6)
    assert float(found[plan.transitions[3]][1, 3]) == 0.0


def turning_points(states: list[float]) -> list[bool]:
    """Definition 5.1 for one trajectory, R[0] to R[n]: which steps are turning points."""

    def sign(x: float) -> int:
        return (x > 0) - (x < 0)

    gains = [b - a for a, b in pairwise(states)]
    overall = sign(states[-1] - states[0])
    found = []
    for k, gain in enumerate(gains):
        rest = sign(states[-1] - states[k + 1])
        goes_on = sign(gain) * rest > 0
        if k == 0:
            found.append(goes_on)
            continue
        against = sign(gains[k - 1]) * overall < 0
        along = sign(gain) * overall > 0
        found.append(against and along and goes_on)
    return found


def turning_by_loops(table: list[list[float]]) -> list[list[float]]:
    """Appendix D over trajectories [N][n+1]: rewards of steps [N][n]."""
    marks = [
        (abs(states[-1] - states[0]), states[-1] > states[0], k, row)
        for row, states in enumerate(table)
        for k, turns in enumerate(turning_points(states))
        if turns
    ]
    # By step, then by trajectory, as equal sizes are broken.
    marks.sort(key=lambda mark: (mark[2], mark[3]))
    rising, falling = [m for m in marks if m[1]], [m for m in marks if not m[1]]
    keep = min(len(rising), len(falling))
    if keep > 0:
        rising = sorted(rising, key=lambda m: -m[0])[:keep]
        falling = sorted(falling, key=lambda m: -m[0])[:keep]
    kept = {(row, k) for _, _, k, row in rising + falling}
    return [
        [
            states[-1] - states[k] if (row, k) in kept else states[k + 1] - states[k]
            for k in range(len(states) - 1)
        ]
        for row, states in enumerate(table)
    ]


def as_rewards(tables: list[list[list[float]]], steps: int) -> tuple[dict[int, Tensor], algorithms.Algorithm]:
    """Tables [R][N][n+1] as scores of one prompt's N separate trajectories."""
    count = len(tables[0])
    method = algorithms.turning_point_grpo(TurningPointGRPOSettings(num_steps=steps + 1, group_size=count))
    values = torch.tensor(tables, dtype=torch.float64)
    leaves = method.plan.scored
    assert [method.plan.segments[leaf].path[0] for leaf in leaves] == list(range(steps + 1))
    return {leaf: values[:, None, :, k] for k, leaf in enumerate(leaves)}, method


def test_turning_points_of_three_trajectories_by_hand() -> None:
    # Up overall: down, up, up: the second step turns; its reward is 4 - (-1). The first goes against.
    # Up overall: up, up: the first step counts from the start to the end.
    # Down overall: up, down, down: the second turns: -3 - 1.
    table = [[0.0, -1.0, 2.0, 4.0], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, -1.0, -3.0]]
    assert [turning_points(row) for row in table] == [
        [False, True, False],
        [True, False, False],
        [False, True, False],
    ]
    rewards, method = as_rewards([table], 3)
    found = torch.stack(list(turning_rewards(method.plan, rewards).values()))[:, 0, 0].T
    # Two rise, one falls: of the rising the one with the larger gain of 4 is kept.
    expected = [[-1.0, 5.0, 2.0], [1.0, 1.0, 1.0], [1.0, -4.0, -2.0]]
    assert found.tolist() == expected == turning_by_loops(table)


def test_a_first_step_against_the_trend_does_not_turn() -> None:
    """It falls, all that follows rises: the rest goes with the trend, the step itself does not."""
    rewards, method = as_rewards([[[0.0, -1.0, 5.0], [0.0, -1.0, 5.0]]], 2)
    found = list(turning_rewards(method.plan, rewards).values())
    assert found[0].flatten().tolist() == [-1.0, -1.0]


def test_rounding_makes_no_turning_point_of_the_last_step() -> None:
    """Start and gain of a last step add up to a little less than its end; nothing follows it all the same."""
    low, high = -6.0, -1.9
    assert low + (high - low) < high
    # The first falls and then rises; it must not take the place of the second, whose first step turns.
    table = [[high - 2, low, high], [0.0, 0.5, 1.0], [0.0, -1.0, -2.0]]
    rewards, method = as_rewards([table], 2)
    found = torch.stack(list(turning_rewards(method.plan, rewards).values()))[:, 0, 0].T
    np.testing.assert_allclose(found.numpy(), turning_by_loops(table), rtol=1e-12)
    assert found[1].tolist() == [1.0, 0.5]


@given(
    st.lists(st.lists(st.integers(-4, 4), min_size=5, max_size=5), min_size=2, max_size=7),
    st.lists(
        st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.1]), min_size=5, max_size=5), min_size=7, max_size=7
    ),
)
def test_turning_points_are_those_of_the_loops(whole: list[list[int]], tenths: list[list[float]]) -> None:
    tables = [[[float(x) for x in row] for row in whole], tenths[: len(whole)]]
    rewards, method = as_rewards(tables, 4)
    found = torch.stack(list(turning_rewards(method.plan, rewards).values()))
    for reward, table in enumerate(tables):
        np.testing.assert_allclose(
            found[:, reward, 0].T.numpy(), turning_by_loops(table), rtol=1e-12, atol=1e-15
        )


def test_balance_is_over_the_prompts() -> None:
    """Two prompts of one trend each are balanced against each other."""
    method = algorithms.turning_point_grpo(TurningPointGRPOSettings(num_steps=3, group_size=2))
    tables = [[[0.0, 1.0, 3.0], [0.0, 1.0, 2.0]], [[0.0, -1.0, -5.0], [0.0, 1.0, 0.0]]]
    values = torch.tensor(tables, dtype=torch.float64)
    rewards = {leaf: values[None, :, :, k] for k, leaf in enumerate(method.plan.scored)}
    found = list(turning_rewards(method.plan, rewards).values())
    # The first steps of the first three turn; of the two that rise the larger is kept.
    assert found[0].tolist() == [[[3.0, 1.0], [-5.0, 1.0]]]
    assert found[1].tolist() == [[[2.0, 1.0], [-4.0, -1.0]]]


def test_turning_points_with_missing_scores() -> None:
    table = [[0.0, 1.0, NAN, 3.0], [0.0, 1.0, 2.0, NAN], [NAN, 1.0, 2.0, 3.0], [0.0, 2.0, 3.0, 4.0]]
    rewards, method = as_rewards([table], 3)
    found = torch.stack(list(turning_rewards(method.plan, rewards).values()))[:, 0, 0].T.tolist()
    # The first knows its ends and step 0: it turns there. The second has no end, the third no start.
    expected = [[3.0, NAN, NAN], [1.0, 1.0, NAN], [NAN, 1.0, 1.0], [4.0, 1.0, 1.0]]
    np.testing.assert_array_equal(found, expected)
    credit = credit_steps(method.plan, rewards, ONE, method.credit)
    assert all(bool(torch.isfinite(each).all()) for each in credit.values())


def coca_world() -> tuple[algorithms.Algorithm, dict[int, Tensor], dict[int, Tensor]]:
    """Three trajectories of two trained steps in the plane; the images predicted at their starts."""
    method = algorithms.coca(CoCASettings(num_steps=3, group_size=3))
    first, second = method.plan.transitions
    turn = [math.radians(angle) for angle in (90, 60, 0)]
    later = [math.radians(angle) for angle in (60, 90, 0)]
    ends = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [5.0, 0.0]]], dtype=torch.float64)
    predicted = {
        first: torch.tensor([[[3 * math.cos(a), 3 * math.sin(a)] for a in turn]], dtype=torch.float64),
        second: torch.tensor([[[math.cos(a), math.sin(a)] for a in later]], dtype=torch.float64),
    }
    return method, predicted, {method.plan.scored[0]: ends}


def test_similarity_still_to_come_by_hand() -> None:
    method, predicted, ends = coca_world()
    found = remaining_similarity(method.plan, predicted, ends)
    first, second = method.plan.transitions
    # Cosines with the image: 0, 0.5, 1 and then 0.5, 0, 1. The third has nothing to come: every step has 1.
    torch.testing.assert_close(found[first], torch.ones(1, 3, dtype=torch.float64))
    torch.testing.assert_close(found[second], torch.tensor([[0.5, 2.0, 1.0]], dtype=torch.float64))


def test_coca_shares_out_the_image_and_compares_over_the_whole_trajectory() -> None:
    method, predicted, ends = coca_world()
    leaf = method.plan.scored[0]
    rewards = {leaf: torch.tensor([[[1.0, 2.0, 6.0]]], dtype=torch.float64)}
    found = credit_steps(
        method.plan, rewards, ONE, method.credit, shares=remaining_similarity(method.plan, predicted, ends)
    )
    image = (np.array([1.0, 2.0, 6.0]) - 3) / math.sqrt((4 + 1 + 9) / 2)
    steps = np.stack([image, image * [0.5, 2.0, 1.0]])
    expected = (steps - steps.mean()) / steps.std(ddof=1)
    for step, row in zip(method.plan.transitions, expected, strict=True):
        np.testing.assert_allclose(found[step][0].numpy(), row, rtol=1e-6)


def test_coca_gives_no_credit_without_a_score() -> None:
    method, predicted, ends = coca_world()
    rewards = {method.plan.scored[0]: torch.tensor([[[1.0, 2.0, NAN]], [[NAN, 4.0, NAN]]])}
    found = credit_steps(
        method.plan,
        rewards,
        torch.tensor([1.0, 0.0]),
        method.credit,
        shares=remaining_similarity(method.plan, predicted, ends),
    )
    for step in method.plan.transitions:
        assert float(found[step][0, 2]) == 0.0
    pair = np.array([[-1, 1], [-0.5, 2]]) * math.sqrt(0.5)
    expected = (pair - pair.mean()) / pair.std(ddof=1)
    for step, row in zip(method.plan.transitions, expected, strict=True):
        np.testing.assert_allclose(found[step][0, :2].numpy(), row, rtol=1e-5)
    dead = {method.plan.scored[0]: torch.tensor([[[2.0, 2.0, 2.0]]])}
    still = credit_steps(
        method.plan, dead, ONE, method.credit, shares=remaining_similarity(method.plan, predicted, ends)
    )
    assert not any(bool(each.any()) for each in still.values())


def test_the_quasi_norm_by_hand() -> None:
    rewards = torch.tensor([[[1.0, 2.0, 6.0]]], dtype=torch.float64)
    centred = [-2.0, -1.0, 3.0]
    for order in (0.8, 1.0, 2.0):
        size = sum(abs(a) ** order for a in centred) ** (1 / order)
        found = quasi_normalised(rewards, ONE, order)
        assert found[0].tolist() == pytest.approx([a / size for a in centred])
        # Unit and origin of a reward do not matter.
        torch.testing.assert_close(quasi_normalised(rewards * 100 - 7, ONE, order), found)
    # Twelve that are alike moved: 1/12^(1/0.8) each, as the paper means them to count less.
    flat = torch.tensor([[[1.0, -1.0] * 6]])
    assert quasi_normalised(flat, ONE, 0.8)[0, 0].item() == pytest.approx(12 ** (-1 / 0.8))
    spike = torch.tensor([[[12.0] + [0.0] * 11]])
    assert quasi_normalised(spike, ONE, 0.8)[0, 0].item() > 3 * 12 ** (-1 / 0.8)


def test_the_quasi_norm_adds_rewards_by_weight_and_skips_what_has_no_score() -> None:
    rewards: Mapping[str, list[float]] = {"a": [1.0, 3.0, NAN], "b": [4.0, 4.0, 4.0], "c": [0.0, 1.0, 5.0]}
    stacked = torch.tensor([[values] for values in rewards.values()])
    found = quasi_normalised(stacked, torch.tensor([2.0, 1.0, -1.0]), 1.0)[0]
    a, c = [-0.5, 0.5, 0.0], [-2 / 6, -1 / 6, 3 / 6]
    assert found.tolist() == pytest.approx([2 * x - z for x, z in zip(a, c, strict=True)])
    summed = quasi_normalised(stacked, torch.tensor([2.0, 1.0, -1.0]), 1.0, "rewards")[0]
    # 2 * 1 + 4 - 0 = 6 and 6 + 4 - 1 = 9; the third lacks one of its scores.
    assert summed.tolist() == pytest.approx([-0.5, 0.5, 0.0])
