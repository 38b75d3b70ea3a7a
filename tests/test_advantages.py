"""Advantages: hand-computed groups, exact zeros, missing scores, and the gathering over leaves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowcredit.advantages import credit_steps, leaf_advantages, normalise
from flowcredit.credit import Credit, WeightsOn
from flowcredit.plan import Plan, Segment

NAN = math.nan


def ulps_away(value: float, steps: list[int]) -> Tensor:
    """float32 numbers so many representable steps from a value."""
    bits = torch.full((len(steps),), value, dtype=torch.float32).view(torch.int32)
    return (bits + torch.tensor(steps, dtype=torch.int32)).view(torch.float32)


def test_groups_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]])
    third = 1 / math.sqrt(3)
    expected = torch.tensor([[-1.0, 0.0, 1.0], [-third, -third, 2 * third]])
    torch.testing.assert_close(normalise(rewards), expected)


@given(
    st.lists(st.integers(-50, 50), min_size=2, max_size=24),
    st.sampled_from([1e-3, 1.0, 1e4]),
    st.sampled_from([0.0, -3.0, 70.0]),
)
@settings(deadline=None)
def test_scale_and_origin_of_a_reward_do_not_matter(points: list[int], scale: float, origin: float) -> None:
    rewards = torch.tensor(points, dtype=torch.float64)
    plain = normalise(rewards)
    moved = normalise(rewards * scale + origin)
    torch.testing.assert_close(moved, plain, atol=1e-7, rtol=0)
    if len(set(points)) > 1:
        assert float(plain.mean()) == pytest.approx(0, abs=1e-12)
        assert float(plain.std()) == pytest.approx(1)
        assert plain.argsort(stable=True).tolist() == rewards.argsort(stable=True).tolist()


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 1.0, 1e6, -1e6, 1e-12, 3e30])
@pytest.mark.parametrize("group", [2, 12])
def test_equal_rewards_give_exactly_zero(value: float, group: int) -> None:
    assert torch.equal(normalise(torch.full((3, group), value)), torch.zeros(3, group))


@pytest.mark.parametrize("value", [0.3, -0.3, 0.999999, 1.0, 22.7, 1e6, -1e6, 1e-30])
@pytest.mark.parametrize("steps", [[0, 1, 0, 0], [-4, 3, 0, 4, -2, 1], [0, 8]])
def test_rewards_equal_up_to_rounding_give_exactly_zero(value: float, steps: list[int]) -> None:
    rewards = ulps_away(value, steps)
    assert len(set(rewards.tolist())) > 1
    assert torch.equal(normalise(rewards), torch.zeros(len(steps)))
    assert torch.equal(normalise(rewards.double()), torch.zeros(len(steps), dtype=torch.float64))


def test_what_is_left_where_numbers_of_order_one_cancel_gives_exactly_zero() -> None:
    rewards = 1 - ulps_away(1.0, [-1, 0, 0, -1])
    assert float(rewards.max()) > 0
    assert torch.equal(normalise(rewards), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_judged_in_the_precision_of_the_rewards(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    assert torch.equal(normalise(torch.tensor([1.0, 1.0 + step, 1.0], dtype=dtype)), torch.zeros(3))
    real = normalise(torch.tensor([1.0, 1.0 + 16 * step, 1.0 + 32 * step], dtype=dtype))
    assert real.dtype == torch.float32
    assert real.tolist() == [-1.0, 0.0, 1.0]


def test_small_but_real_differences_count() -> None:
    rewards = torch.tensor([0.3, 0.30001, 0.30002], dtype=torch.float64)
    torch.testing.assert_close(normalise(rewards), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
    far = torch.tensor([1e6, 1e6 + 100, 1e6 + 200])
    torch.testing.assert_close(normalise(far), torch.tensor([-1.0, 0.0, 1.0]))


def test_a_missing_score_changes_nothing_for_the_others() -> None:
    whole = torch.tensor([0.2, 0.9, 0.4, 0.5])
    holed = torch.tensor([0.2, NAN, 0.9, 0.4, 0.5])
    got = normalise(holed)
    assert float(got[1]) == 0
    assert torch.equal(got[[0, 2, 3, 4]], normalise(whole))


@pytest.mark.parametrize(
    "rewards", [[0.7], [NAN], [NAN, NAN, NAN], [NAN, 0.4, NAN], [0.4, 0.4, NAN]], ids=str
)
def test_groups_without_two_different_scores_give_exactly_zero(rewards: list[float]) -> None:
    assert torch.equal(normalise(torch.tensor(rewards)), torch.zeros(len(rewards)))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_rewards_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="infinite"):
        normalise(torch.tensor([0.1, value, 0.2]))


def two_strides() -> Plan:
    return Plan(
        4,
        (
            Segment(None, (0, 1), fan_out=3, stochastic=True),
            Segment(0, (1, 2, 3, 4), scored=True),
            Segment(0, (1, 3, 4), scored=True),
        ),
    )


SPREAD, FLAT, BACK = [1.0, 2.0, 3.0], [0.5, 0.5, 0.5], [6.0, 4.0, 2.0]
UP, NONE, DOWN = [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, -1.0]


def one_prompt(rewards: list[list[float]]) -> Tensor:
    """[R, 1, W]"""
    return torch.tensor(rewards).unsqueeze(1)


@pytest.mark.parametrize(
    ("fine", "coarse", "combine", "expected"),
    [
        (SPREAD, SPREAD, "sum", [-2.0, 0.0, 2.0]),
        (SPREAD, SPREAD, "mean", UP),
        (SPREAD, FLAT, "sum", UP),
        (SPREAD, FLAT, "mean", [-0.5, 0.0, 0.5]),
        (SPREAD, BACK, "sum", NONE),
        (FLAT, BACK, "sum", DOWN),
        (SPREAD, [1.0, NAN, 3.0], "sum", [-1 - 1 / math.sqrt(2), 0.0, 1 + 1 / math.sqrt(2)]),
    ],
)
def test_strides_are_normalised_alone_then_combined(
    fine: list[float], coarse: list[float], combine: str, expected: list[float]
) -> None:
    rewards = {1: one_prompt([fine]), 2: one_prompt([coarse])}
    got = leaf_advantages(two_strides(), rewards, torch.ones(1), combine, None)  # type: ignore[arg-type]
    assert list(got) == [0]
    torch.testing.assert_close(got[0], torch.tensor([expected]))


def test_rewards_are_normalised_alone_then_added_by_weight() -> None:
    rewards = {leaf: one_prompt([SPREAD, [300.0, 200.0, 100.0]]) for leaf in (1, 2)}
    got = leaf_advantages(two_strides(), rewards, torch.tensor([1.0, 0.25]), "mean")
    torch.testing.assert_close(got[0], torch.tensor([[-0.75, 0.0, 0.75]]))


def test_weights_on_rewards_let_the_larger_unit_decide() -> None:
    rewards = {leaf: one_prompt([SPREAD, [300.0, 200.0, 100.0]]) for leaf in (1, 2)}

    def credit(*weights: float, on: WeightsOn = "rewards") -> list[float]:
        return credit_steps(two_strides(), rewards, torch.tensor(weights), Credit(combine="mean"), on)[
            0
        ].tolist()[0]

    assert credit(1.0, 0.25) == DOWN
    assert credit(1.0, 0.001) == pytest.approx(UP, abs=1e-6)
    assert credit(1.0, 0.01) == NONE
    assert credit(1.0, 0.25, on="advantages") == [-0.75, 0.0, 0.75]
    # Without one of its rewards an image has no sum, unless that reward counts for nothing.
    rewards[1] = rewards[2] = one_prompt([SPREAD, [300.0, NAN, 100.0]])
    assert credit(1.0, 0.25) == pytest.approx([1 / math.sqrt(2), 0.0, -1 / math.sqrt(2)])
    assert credit(1.0, 0.0) == UP


def test_advantages_are_clamped_after_they_are_gathered() -> None:
    rewards = {1: one_prompt([SPREAD]), 2: one_prompt([SPREAD])}
    clamped = leaf_advantages(two_strides(), rewards, torch.ones(1), "sum", 1.5)
    torch.testing.assert_close(clamped[0], torch.tensor([[-1.5, 0.0, 1.5]]))
    default = leaf_advantages(two_strides(), rewards, torch.tensor([10.0]))
    torch.testing.assert_close(default[0], torch.tensor([[-5.0, 0.0, 5.0]]))


def test_prompts_are_separate_groups() -> None:
    rewards = torch.tensor([[SPREAD, [30.0, 20.0, 10.0], FLAT]])
    got = leaf_advantages(two_strides(), {1: rewards, 2: rewards}, torch.ones(1), "mean")
    torch.testing.assert_close(got[0], torch.tensor([UP, DOWN, NONE]))


def test_a_chain_gives_every_step_its_terminal_advantage() -> None:
    segments = [Segment(k - 1 if k else None, (k, k + 1), stochastic=True) for k in range(3)]
    plan = Plan(4, (*segments, Segment(2, (3, 4), scored=True)), root_width=3)
    got = leaf_advantages(plan, {3: one_prompt([BACK])}, torch.ones(1))
    assert list(got) == [0, 1, 2]
    for each in got.values():
        torch.testing.assert_close(each, torch.tensor([DOWN]))


def test_a_transition_gets_the_mean_of_the_leaves_that_fan_out_from_it() -> None:
    plan = Plan(
        4,
        (
            Segment(None, (0, 1), fan_out=2, stochastic=True),
            Segment(0, (1, 2), fan_out=2, stochastic=True),
            Segment(1, (2, 3, 4), scored=True),
        ),
    )
    # Over all four leaves: mean 2.5, unbiased std sqrt(5 / 3). Samples 0 and 1 descend from branch 0.
    got = leaf_advantages(plan, {2: one_prompt([[1.0, 2.0, 3.0, 4.0]])}, torch.ones(1))
    unit = math.sqrt(5 / 3)
    torch.testing.assert_close(got[1], torch.tensor([[-1.5, -0.5, 0.5, 1.5]]) / unit)
    torch.testing.assert_close(got[0], torch.tensor([[-1.0, 1.0]]) / unit)


def test_a_transition_answers_only_for_its_own_leaves() -> None:
    plan = Plan(
        4,
        (
            Segment(None, (0, 1)),
            Segment(None, (0, 1), fan_out=3, stochastic=True),
            Segment(1, (1, 2, 3, 4), scored=True),
            Segment(0, (1, 2), fan_out=3, stochastic=True),
            Segment(3, (2, 3, 4), scored=True),
        ),
    )
    got = leaf_advantages(plan, {2: one_prompt([SPREAD]), 4: one_prompt([BACK])}, torch.ones(1))
    torch.testing.assert_close(got[1], torch.tensor([UP]))
    torch.testing.assert_close(got[3], torch.tensor([DOWN]))


def test_wrong_inputs_are_refused() -> None:
    plan, weights = two_strides(), torch.ones(1)
    good = one_prompt([SPREAD])
    with pytest.raises(ValueError, match=r"segment 2 has no rewards: got those of \[1\]"):
        leaf_advantages(plan, {1: good}, weights)
    with pytest.raises(ValueError, match=r"shape \(1, 1, 2\): expected \[1 rewards, prompts, 3 samples\]"):
        leaf_advantages(plan, {1: good, 2: good[..., :2]}, weights)
    with pytest.raises(ValueError, match="2 rewards"):
        leaf_advantages(plan, {1: good, 2: good}, torch.ones(2))
    with pytest.raises(ValueError, match="'sum' or 'mean'"):
        leaf_advantages(plan, {1: good, 2: good}, weights, "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above 0"):
        leaf_advantages(plan, {1: good, 2: good}, weights, "sum", 0.0)
