"""Where each method puts noise, what it trains and what it costs, against hand-made counts."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcredit import algorithms
from flowcredit.methods import (
    METHODS,
    BranchGRPOSettings,
    DanceGRPOSettings,
    StepwiseFlowGRPOSettings,
)
from flowcredit.plan import Plan
from method_world import PROMPTS, CountingMixture, gather, learn, world


def noisy(plan: Plan) -> list[int]:
    """The grid steps that take noise."""
    return [plan.segments[i].path[0] for i in plan.transitions]


def trained(plan: Plan) -> list[int]:
    return [plan.segments[i].path[0] for i in plan.transitions if plan.segments[i].trained]


def method(name: str, seed: int = 0, **settings: Any) -> algorithms.Algorithm:
    return algorithms.build(METHODS[name].model_validate(settings), seed)  # type: ignore[arg-type]


def costs(name: str, iteration: int = 0, **settings: Any) -> tuple[int, int, int]:
    """Velocity evaluations, decodes and trained states of a prompt."""
    built = method(name, **settings)
    plan = built.plan_at(iteration)
    return plan.velocity_evaluations, plan.decodes, built.trained_states(plan)


T, G = 10, 6


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("flow_grpo", {}, (G * T, G, G * (T - 1))),
        ("coca", {}, (G * T, G, G * (T - 1))),
        # A shared start is one state until the first noise.
        ("flow_grpo", {"initial_noise": "shared"}, (1 + G * (T - 1), G, 1 + G * (T - 2))),
        ("dance_grpo", {"step_share": 1.0}, (1 + G * (T - 1), G, 1 + G * (T - 2))),
        ("dance_grpo", {"step_share": 1.0, "initial_noise": "separate"}, (G * T, G, G * (T - 1))),
        ("mix_grpo", {"window_size": 3}, (1 + G * (T - 1), G, 1 + 2 * G)),
        ("mix_grpo", {"window_size": 3, "initial_noise": "separate"}, (G * T, G, 3 * G)),
        # Three steps of the window, of 7 that remain a share of a half: 4.
        ("mix_grpo", {"window_size": 3, "finish_steps": "t/2"}, (1 + G * (2 + 4), G, 1 + 2 * G)),
        ("flow_grpo_fast", {"window_size": 3}, (G * T, G, 3 * G)),
        # The probe of one step has the velocity of the step beside it.
        ("stepwise_flow_grpo", {}, (1 + G * (T - 1), 1 + G * (T - 1), 1 + G * (T - 2))),
        # Probes of 5 steps: 4 states of their own from steps 0 to 5, then 3, 2, 1 and none.
        (
            "stepwise_flow_grpo",
            {"probe_steps": 5},
            (1 + G * 9 + 4 + G * (4 * 5 + 3 + 2 + 1), 1 + G * 9, 1 + G * 8),
        ),
        # Every state finished: 9 states of their own from step 0, 8 from step 1, ... 0 from step 9.
        ("turning_point_grpo", {}, (G * (T + sum(range(10))), G * T, G * (T - 1))),
        ("neighbor_grpo", {"anchors": 2, "train_steps": [0, 4, 9]}, (G * T, G, 2 * 3)),
    ],
)
def test_costs_by_hand(name: str, settings: Mapping[str, Any], expected: tuple[int, int, int]) -> None:
    assert costs(name, num_steps=T, group_size=G, **settings) == expected


def test_a_later_window_shares_more_of_the_way() -> None:
    for position in range(6):
        found = costs(
            "mix_grpo", position, num_steps=T, group_size=G, window_size=4, iterations_per_position=1
        )
        # States 0 to the window's start once, the others for each of the group.
        assert found == (position + 1 + G * (T - 1 - position), G, 1 + 3 * G)


def test_tempflow_by_hand() -> None:
    built = method("tempflow_grpo", num_steps=10)
    plan = built.plan
    # Four trunks to step 8, and 24 branches at each of 9 steps, finished by 9, 8, ..., 1 steps.
    assert plan.velocity_evaluations == 4 * 9 + 24 * 45
    assert (plan.decodes, built.trained_states(plan)) == (216, 36)
    assert noisy(plan) == trained(plan) == list(range(9))
    for step in plan.transitions:
        (leaf,) = plan.leaves_under(step)
        k = plan.segments[step].path[0]
        assert plan.segments[leaf].path == tuple(range(k + 1, 11))
        assert (plan.width(step), plan.segments[step].fan_out) == (24, 6)
        # Each branch leaves the trunk, which no noise has touched.
        above = plan.segments[step].parent
        while above is not None:
            assert not plan.segments[above].stochastic
            above = plan.segments[above].parent


def test_branch_grpo_is_the_published_tree() -> None:
    """BranchGRPO's table: 13.68 velocity evaluations a leaf, of 218 edges and the root; 8.625 when pruned."""
    plan = algorithms.branch_grpo(BranchGRPOSettings()).plan
    widths = [2] * 3 + [4] * 3 + [8] * 3 + [16] * 10
    assert [plan.width(i) for i in plan.transitions] == widths
    assert sum(widths) + 16 == 218 == plan.naive_velocity_evaluations
    assert pytest.approx(13.68, abs=0.01) == (218 + 1) / 16
    # A split needs one velocity for its children.
    assert plan.velocity_evaluations == 1 + sum(widths) == 203
    assert (plan.decodes, plan.trained_states) == (16, 203 - 16)
    correlations = {plan.segments[i].correlation for i in plan.transitions if plan.segments[i].fan_out == 2}
    assert correlations == {1 / 17}
    assert all(plan.segments[i].correlation == 0 for i in plan.transitions if plan.segments[i].fan_out == 1)
    # The published pruning leaves out half of the late edges in the backward pass alone.
    for settings in ({"pruned_depths": 5}, {"kept_leaves": 8}):
        built = method("branch_grpo", **settings)
        pruned = built.plan
        assert (pruned.velocity_evaluations, pruned.decodes) == (203, 16)
        late = built.trained_states(plan) - built.trained_states(pruned)
        assert late == (5 * 16 if "pruned_depths" in settings else 9 * 8)


def test_pruned_depths_move_up_and_stop_below_the_last_split() -> None:
    built = method(
        "branch_grpo",
        num_steps=12,
        group_size=4,
        split_steps=[0, 2],
        pruned_depths=3,
        iterations_per_depth=5,
    )
    left_out = [sorted(set(range(11)) - set(trained(built.plan_at(i)))) for i in range(60)]
    for iteration, steps in enumerate(left_out):
        moved = min(iteration // 5, 5)
        assert steps == [8 - moved, 9 - moved, 10 - moved]
    assert left_out[-1] == [3, 4, 5]
    everything = method("branch_grpo", num_steps=12, group_size=4, split_steps=[0, 2], pruned_depths=8)
    assert {tuple(trained(everything.plan_at(i))) for i in range(0, 500, 25)} == {(0, 1, 2)}


def test_a_state_with_no_other_beside_it_is_not_trained() -> None:
    plan = method("branch_grpo", num_steps=8, group_size=4, split_steps=[2, 4]).plan
    assert noisy(plan) == list(range(7))
    assert trained(plan) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("at_end", ["wrap", "stay"])
@pytest.mark.parametrize(("stride", "positions"), [(1, [0, 1, 2, 3, 4]), (3, [0, 3, 4]), (9, [0, 4])])
def test_a_progressive_window_by_hand(at_end: str, stride: int, positions: list[int]) -> None:
    built = method(
        "mix_grpo",
        num_steps=8,
        group_size=2,
        window_size=3,
        window_stride=stride,
        iterations_per_position=2,
        at_end=at_end,
    )
    starts = [noisy(built.plan_at(i))[0] for i in range(30)]
    twice = [p for p in positions for _ in range(2)]
    more = twice * 15 if at_end == "wrap" else twice + [positions[-1]] * 30
    assert starts == more[:30]


@given(
    steps=st.integers(2, 30),
    data=st.data(),
    name=st.sampled_from(["mix_grpo", "flow_grpo_fast"]),
    order=st.sampled_from(["progressive", "random"]),
    stride=st.integers(1, 7),
    iteration=st.integers(0, 10**6),
    seed=st.integers(0, 9),
)
def test_a_window_is_whole_and_never_reaches_the_last_step(
    steps: int, data: st.DataObject, name: str, order: str, stride: int, iteration: int, seed: int
) -> None:
    size = data.draw(st.integers(1, steps - 1))
    settings: dict[str, Any] = {"num_steps": steps, "window_size": size, "group_size": 2}
    if name == "mix_grpo":
        settings |= {"window_order": order, "window_stride": stride, "iterations_per_position": 3}
    elif data.draw(st.booleans()):
        settings["window_end"] = data.draw(st.integers(size, steps - 1))
    plan = method(name, seed, **settings).plan_at(iteration)
    window = noisy(plan)
    assert window == trained(plan) == list(range(window[0], window[0] + size))
    assert window[-1] <= steps - 2
    if name == "flow_grpo_fast":
        assert window[-1] < max(settings.get("window_end", steps // 2), size)


def test_a_random_window_is_even_over_its_places_and_keyed_by_seed_and_iteration() -> None:
    settings: dict[str, Any] = {"num_steps": 9, "window_size": 4, "window_order": "random", "group_size": 2}

    def starts(seed: int) -> list[int]:
        built = method("mix_grpo", seed, **settings)
        return [noisy(built.plan_at(i))[0] for i in range(1000)]

    random.seed(1)
    once = starts(0)
    random.seed(2)
    assert starts(0) == once
    assert starts(1) != once
    counts = Counter(once)
    assert sorted(counts) == [0, 1, 2, 3, 4]
    # Of 1000 draws over 5 places: 200 each, with a deviation of 13.
    assert all(150 < count < 250 for count in counts.values())
    alone = method("mix_grpo", 0, **settings)
    assert noisy(alone.plan_at(777))[0] == once[777]


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        # SD3.5-M and FLUX.1-dev as in Flow-GRPO's fast runs: the range (0, T/2), a window of 3.
        ({"num_steps": 10}, {0, 1, 2}),
        ({"num_steps": 6}, {0}),
        ({"num_steps": 10, "window_end": 9}, set(range(7))),
        ({"num_steps": 10, "window_size": 6}, {0}),
        ({"num_steps": 10, "window_size": 1}, set(range(5))),
    ],
)
def test_the_fast_window_lies_where_the_published_runs_have_it(
    settings: dict[str, Any], starts: set[int]
) -> None:
    built = method("flow_grpo_fast", **settings)
    assert {noisy(built.plan_at(i))[0] for i in range(300)} == starts


def test_dance_grpo_trains_a_share_that_seed_and_iteration_decide() -> None:
    def drawn(seed: int) -> list[tuple[int, ...]]:
        built = method("dance_grpo", seed)
        return [tuple(trained(built.plan_at(i))) for i in range(400)]

    once = drawn(3)
    assert all(len(steps) == 9 and set(steps) <= set(range(15)) for steps in once)
    assert drawn(3) == once
    assert drawn(4) != once
    counts = Counter(step for steps in once for step in steps)
    # 400 draws with a chance of 0.6: 240, with a deviation of 10.
    assert all(190 < counts[step] < 290 for step in range(15))
    assert noisy(method("dance_grpo").plan) == list(range(15))
    assert [DanceGRPOSettings(num_steps=t, step_share=0.6).trained_steps for t in (2, 3, 6, 11)] == [
        1,
        1,
        3,
        6,
    ]
    # 57 % of 100 steps, though 100 * 0.57 is 56.99999999999999 in floating point.
    assert DanceGRPOSettings(num_steps=101, step_share=0.57).trained_steps == 57


def test_stepwise_probes_by_hand() -> None:
    plan = algorithms.stepwise_flow_grpo(
        StepwiseFlowGRPOSettings(num_steps=6, group_size=2, probe_steps=3)
    ).plan
    assert [plan.segments[i].path for i in plan.scored] == [
        (0, 2, 4, 6),
        (1, 2, 4, 6),
        (2, 3, 4, 6),
        (3, 4, 5, 6),
        (4, 5, 6),
        (5, 6),
    ]
    assert plan.segments[plan.scored[0]].parent is None


SMALL: Mapping[str, Mapping[str, Any]] = {
    "g2rpo": {"num_steps": 5, "group_size": 3, "strides": [1, 2], "initial_noise": "separate"},
    "dense_grpo": {"num_steps": 5, "group_size": 3},
    "flow_grpo": {"num_steps": 5, "group_size": 3},
    "flow_grpo_fast": {"num_steps": 6, "group_size": 3, "window_size": 2},
    "dance_grpo": {"num_steps": 6, "group_size": 3},
    "mix_grpo": {"num_steps": 6, "group_size": 3, "window_size": 2, "iterations_per_position": 1},
    "tempflow_grpo": {"num_steps": 4, "seeds": 2, "group_size": 3},
    "branch_grpo": {
        "num_steps": 7,
        "group_size": 8,
        "split_steps": [0, 1, 2],
        "pruned_depths": 1,
        "kept_leaves": 5,
        "iterations_per_depth": 1,
    },
    "stepwise_flow_grpo": {"num_steps": 5, "group_size": 3, "probe_steps": 2},
    "turning_point_grpo": {"num_steps": 4, "group_size": 3},
    "coca": {"num_steps": 5, "group_size": 3},
    "neighbor_grpo": {"num_steps": 5, "group_size": 4, "anchors": 2, "train_steps": [0, 3]},
    "dpo": {"num_steps": 5, "group_size": 4, "draws": 3},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("iteration", [0, 3])
def test_rollout_and_update_evaluate_what_the_plan_says(name: str, iteration: int) -> None:
    """Counted at the model's door."""
    setup = world({"name": name, **SMALL[name]})
    model = setup.model
    assert isinstance(model, CountingMixture)
    found = gather(setup, iteration)
    plan = setup.algorithm.plan_at(iteration)
    assert sum(model.rows) == len(PROMPTS) * plan.velocity_evaluations == found.velocity_evaluations
    assert found.counts.decodes == len(PROMPTS) * plan.decodes
    model.rows.clear()
    learn(setup, found, torch.optim.SGD(model.network.parameters(), lr=0.0))
    evaluated = 2 if setup.algorithm.needs_reference else 1
    assert sum(model.rows) == evaluated * len(PROMPTS) * setup.algorithm.trained_states(plan)
    assert max(model.rows) <= setup.recipe.train.micro_batch_size
