"""Noise: keyed, replayable, independent of everything but its keys; and the scales of each method."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcredit.noise import dance_sde_scale, draw, flow_sde_scale, generator, table_scale
from flowcredit.time_grid import shifted_linear

Key = tuple[int, int, int, str]
keys = st.tuples(
    st.integers(0, 2**40),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(["initial", "step/3"]),
)


def stream(key: Key, count: int = 16) -> torch.Tensor:
    return draw([generator(*key)], (count,))[0]


@given(keys, keys)
@settings(max_examples=100, deadline=None)
def test_equal_keys_draw_equal_noise_and_different_keys_do_not(one: Key, other: Key) -> None:
    assert torch.equal(stream(one), stream(one))
    assert torch.equal(stream(one), stream(other)) == (one == other)


@pytest.mark.parametrize(
    "other", [(1, 2, 3, "step/4"), (1, 2, 4, "step/3"), (1, 3, 3, "step/3"), (2, 2, 3, "step/3")]
)
def test_each_key_alone_changes_the_draw(other: Key) -> None:
    assert not torch.equal(stream((1, 2, 3, "step/3")), stream(other))


def test_keys_do_not_run_into_one_another() -> None:
    alike: list[Key] = [(1, 1, 11, "a"), (1, 11, 1, "a"), (11, 1, 1, "a"), (1, 1, 1, "1a"), (1, 1, 1, "a")]
    draws = {tuple(stream(key).tolist()) for key in alike}
    assert len(draws) == len(alike)


def test_streams_of_neighbouring_keys_are_uncorrelated() -> None:
    every = [
        (seed, iteration, prompt, role)
        for seed in (0, 1)
        for iteration in range(3)
        for prompt in range(3)
        for role in ("initial", "step/0", "step/1")
    ]
    count = 4000
    samples = torch.stack([stream(key, count) for key in every]).double()
    correlation = torch.corrcoef(samples) - torch.eye(len(every), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(count)
    assert float(samples.mean().abs()) < 5 / math.sqrt(samples.numel())
    assert float((samples.var() - 1).abs()) < 5 * math.sqrt(2 / samples.numel())


def test_draws_depend_neither_on_their_neighbours_nor_on_global_state() -> None:
    torch.manual_seed(0)
    together = draw([generator(5, 0, prompt, "initial") for prompt in range(3)], (2, 3))
    torch.manual_seed(1)
    alone = draw([generator(5, 0, 2, "initial")], (2, 3))
    assert together.dtype == torch.float32
    assert torch.equal(together[2], alone[0])


def test_drawing_for_no_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="one for each prompt"):
        draw([], (2,))


@pytest.mark.parametrize(("steps", "shift"), [(16, 3.0), (10, 1.0), (200, 1.0)])
def test_the_first_flow_sde_step_has_standard_deviation_eta(steps: int, shift: float) -> None:
    grid = shifted_linear(steps, shift)
    std = flow_sde_scale(grid, 0.7)[0] * torch.sqrt(grid[0] - grid[1])
    assert float(std) == pytest.approx(0.7, abs=1e-12)


def test_flow_sde_scale_by_hand() -> None:
    # sigmas 1, 0.8, 0.5, 0: s / (1 - s) is 1 / 0.2, 0.8 / 0.2, 0.5 / 0.5.
    grid = torch.tensor([1.0, 0.8, 0.5, 0.0], dtype=torch.float64)
    expected = torch.tensor([math.sqrt(5), 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(flow_sde_scale(grid, 1.0), expected)
    torch.testing.assert_close(flow_sde_scale(grid, 0.5), expected / 2)
    assert dance_sde_scale(grid, 0.3).tolist() == [0.3] * 3


def test_a_table_holds_a_level_a_step_and_may_leave_out_the_last() -> None:
    grid = shifted_linear(3)
    assert table_scale(grid, [0.5, 0.25, 0.125]).tolist() == [0.5, 0.25, 0.125]
    assert table_scale(grid, [0.5, 0.25]).tolist() == [0.5, 0.25, 0.0]
    for wrong in ([0.5], [0.5] * 4):
        with pytest.raises(ValueError, match="one for each of 3 steps"):
            table_scale(grid, wrong)


@pytest.mark.parametrize("level", [-0.1, math.nan, math.inf])
def test_broken_levels_are_refused(level: float) -> None:
    grid = shifted_linear(4)
    for scale in (flow_sde_scale, dance_sde_scale):
        with pytest.raises(ValueError, match="0 or more"):
            scale(grid, level)
    with pytest.raises(ValueError, match=r"step 1 is .* 0 or more"):
        table_scale(grid, [0.5, level, 0.5, 0.5])
