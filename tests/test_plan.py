"""Plans: the costs that papers and released code state, and a brute-force count of distinct states."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcredit.plan import Anchor, Plan, Segment, strided_path
from flowcredit.plan_picture import describe

GOLDEN = json.loads((Path(__file__).parent / "golden" / "granular_paths.json").read_text())["paths"]


def trunk_and_branches(
    num_steps: int, steps: range, group: int, strides: tuple[int, ...], anchor: Anchor, root_width: int = 1
) -> Plan:
    """G2RPO: a trunk, at each step of ``steps`` a noisy branch, under it one finish for each stride."""
    segments: list[Segment] = []
    end_at: dict[int, int | None] = {0: None}
    for k in range(max(steps)):
        segments.append(Segment(end_at[k], (k, k + 1)))
        end_at[k + 1] = len(segments) - 1
    for k in steps:
        segments.append(Segment(end_at[k], (k, k + 1), fan_out=group, stochastic=True))
        branch = len(segments) - 1
        for stride in strides:
            segments.append(Segment(branch, strided_path(num_steps, k + 1, stride, anchor), scored=True))
    return Plan(num_steps, tuple(segments), root_width)


def chain(num_steps: int, noisy: range, group: int, root_width: int) -> list[Segment]:
    """Flow-GRPO and its relatives: one trajectory, stochastic on the steps of ``noisy``, not yet scored."""
    fan_out = group // root_width
    segments: list[Segment] = []
    for k in range(num_steps):
        parent = k - 1 if k > 0 else None
        first = k == noisy.start
        segments.append(
            Segment(
                parent,
                (k, k + 1),
                fan_out=fan_out if first else 1,
                stochastic=k in noisy,
                scored=k == num_steps - 1,
            )
        )
    return segments


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"T{c['num_steps']}k{c['noise_step']}x{c['stride']}")
def test_strided_paths_are_the_published_ones(case: dict) -> None:
    start = case["noise_step"] + 1
    assert strided_path(case["num_steps"], start, case["stride"]) == tuple(case["end_anchored"])
    assert strided_path(case["num_steps"], start, case["stride"], "branch") == tuple(case["start_anchored"])


@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 9), st.sampled_from(["end", "branch"]))
def test_strided_paths_rise_from_start_to_the_image(T: int, start: int, stride: int, anchor: Anchor) -> None:
    if start >= T:
        with pytest.raises(ValueError, match="cannot start"):
            strided_path(T, start, stride, anchor)
        return
    path = strided_path(T, start, stride, anchor)
    assert path[0] == start
    assert path[-1] == T
    assert all(a < b for a, b in pairwise(path))
    jumps = [b - a for a, b in pairwise(path)]
    if anchor == "end":
        assert jumps[-1] == 1
        assert max(jumps) <= stride
        assert all(jump == stride for jump in jumps[1:-1])
    else:
        assert jumps[0] == 1 or len(jumps) == 1
        assert all(jump == stride for jump in jumps[1:-1])
        assert jumps[-1] < 2 * stride or len(jumps) == 1


@pytest.mark.parametrize(("anchor", "nfe", "naive"), [("end", 1904, 2308), ("branch", 1700, 2188)])
def test_the_published_g2rpo_run_costs_what_is_known(anchor: Anchor, nfe: int, naive: int) -> None:
    plan = trunk_and_branches(16, range(8), 12, (1, 2, 3), anchor)
    assert plan.velocity_evaluations == nfe
    assert plan.naive_velocity_evaluations == naive
    assert plan.decodes == 288
    assert plan.scores == 288
    assert [plan.width(i) for i in plan.transitions] == [12] * 8
    # Twelve branches learn from the one velocity of the trunk state that they leave.
    assert plan.trained_states == 8


def test_a_trunk_that_is_scored_itself_is_not_finished_twice() -> None:
    plain = trunk_and_branches(16, range(8), 12, (1, 2, 3), "end")
    trunk_end = next(i for i, each in enumerate(plain.segments) if each.path == (6, 7))
    finish = Segment(trunk_end, tuple(range(7, 17)), scored=True)
    scored = Plan(16, (*plain.segments, finish))
    assert scored.decodes == 289
    assert scored.velocity_evaluations == 1904 + 8
    assert scored.naive_velocity_evaluations == 2308


def test_separate_initial_noises_cost_a_trunk_each() -> None:
    plan = trunk_and_branches(16, range(8), 1, (1, 2, 3), "end", root_width=12)
    assert plan.velocity_evaluations == 1904 + 11 * 8
    assert plan.decodes == 288


@pytest.mark.parametrize("T", [3, 6, 10])
def test_densegrpo_probes_share_the_chain(T: int) -> None:
    group = 5
    segments = chain(T, range(T - 1), group, root_width=group)
    for k in range(1, T):
        segments.append(Segment(k - 1, tuple(range(k, T + 1)), scored=True))
    plan = Plan(T, tuple(segments), root_width=group)
    assert plan.velocity_evaluations == group * (T + (T - 1) * (T - 2) // 2)
    assert plan.naive_velocity_evaluations == group * T * (T + 1) // 2
    # The probe of the last state is the trajectory's own last step: one image, two segments.
    assert plan.decodes == group * (T - 1)
    assert plan.segment_end[len(segments) - 1] == plan.segment_end[T - 1]


def test_one_step_estimates_of_every_state_cost_no_evaluation() -> None:
    segments = chain(8, range(7), 4, root_width=4)
    bare = Plan(8, tuple(segments), root_width=4)
    segments += [Segment(k - 1, (k, 8), scored=True) for k in range(1, 8)]
    stepwise = Plan(8, tuple(segments), root_width=4)
    assert stepwise.velocity_evaluations == bare.velocity_evaluations == 4 * 8
    assert stepwise.decodes == 4 * 7


def test_flow_grpo_dance_grpo_and_mix_grpo_are_chains() -> None:
    flow = Plan(10, tuple(chain(10, range(9), 24, root_width=24)), root_width=24)
    assert (flow.velocity_evaluations, flow.naive_velocity_evaluations) == (240, 240)
    assert (flow.decodes, len(flow.transitions)) == (24, 9)
    dance = Plan(16, tuple(chain(16, range(15), 12, root_width=1)))
    assert (dance.velocity_evaluations, dance.naive_velocity_evaluations) == (1 + 15 * 12, 16 * 12)
    mix = Plan(25, tuple(chain(25, range(4, 8), 12, root_width=1)))
    assert mix.velocity_evaluations == 5 + 20 * 12
    assert mix.transitions == (4, 5, 6, 7)
    assert all(mix.leaves_under(k) == (24,) for k in mix.transitions)


def test_branch_grpo_widens_at_its_splits() -> None:
    fans = {0: 4, 3: 2, 6: 2}
    segments = [
        Segment(k - 1 if k > 0 else None, (k, k + 1), fan_out=fans.get(k, 1), stochastic=True)
        for k in range(9)
    ]
    segments.append(Segment(8, (9, 10), scored=True))
    plan = Plan(10, tuple(segments))
    assert [plan.width(k) for k in range(10)] == [4, 4, 4, 8, 8, 8, 16, 16, 16, 16]
    assert plan.velocity_evaluations == 1 + 3 * 4 + 3 * 8 + 3 * 16


def test_tempflow_branches_at_every_step_of_four_trunks() -> None:
    plan = trunk_and_branches(10, range(9), 6, (1,), "end", root_width=4)
    assert all(plan.width(k) == 24 for k in plan.transitions)
    assert plan.velocity_evaluations == 4 * 9 + 24 * sum(10 - k - 1 for k in range(9))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid tree: random segments, each dead end then carried to sigma 0 and scored."""
    T = draw(st.integers(1, 7))
    segments: list[Segment] = []
    for _ in range(draw(st.integers(0, 8))):
        open_ends = [None, *(i for i, each in enumerate(segments) if each.path[-1] < T)]
        parent = draw(st.sampled_from(open_ends))
        start = 0 if parent is None else segments[parent].path[-1]
        stochastic = start < T - 1 and draw(st.booleans())
        if stochastic:
            end = draw(st.integers(start + 1, T - 1))
            segments.append(Segment(parent, (start, end), draw(st.integers(1, 3)), stochastic=True))
        else:
            rest = draw(st.sets(st.integers(start + 1, T), min_size=1))
            path = (start, *sorted(rest))
            segments.append(Segment(parent, path, scored=path[-1] == T))
    parents = {each.parent for each in segments}
    for i, each in enumerate(tuple(segments)):
        if each.path[-1] < T and i not in parents:
            stride = draw(st.integers(1, 3))
            segments.append(Segment(i, strided_path(T, each.path[-1], stride), scored=True))
    if not segments:
        segments.append(Segment(None, tuple(range(T + 1)), scored=True))
    return Plan(T, tuple(segments), root_width=draw(st.integers(1, 3)))


History = tuple[tuple[int, ...], ...]


def histories(plan: Plan) -> tuple[list[list[History]], set[History]]:
    """Every sample of every segment as what it lived through, and all states a velocity is needed at."""
    ends: list[list[History]] = []
    evaluated: set[History] = set()
    for position, segment in enumerate(plan.segments):
        roots: list[History] = [((0, i),) for i in range(plan.root_width)]
        samples = roots if segment.parent is None else ends[segment.parent]
        for index in segment.path[1:]:
            evaluated.update(samples)
            if segment.stochastic:
                samples = [(*past, (index, position, j)) for past in samples for j in range(segment.fan_out)]
            else:
                samples = [(*past, (index,)) for past in samples]
        ends.append(samples)
    return ends, evaluated


@given(plans())
@settings(max_examples=200, deadline=None)
def test_costs_equal_a_count_of_distinct_sample_histories(plan: Plan) -> None:
    ends, evaluated = histories(plan)
    assert plan.velocity_evaluations == len(evaluated)
    assert [plan.width(i) for i in range(len(plan.segments))] == [len(each) for each in ends]
    images = {past for i in plan.scored for past in ends[i]}
    assert plan.decodes == plan.scores == len(images)
    assert plan.velocity_evaluations <= plan.naive_velocity_evaluations


@given(plans())
@settings(max_examples=100, deadline=None)
def test_compiled_nodes_follow_the_segments(plan: Plan) -> None:
    assert plan.nodes[0].parent is None
    for position, node in enumerate(plan.nodes[1:], start=1):
        assert node.parent is not None
        assert node.parent < position
        above = plan.nodes[node.parent]
        assert node.index > above.index
        assert node.width == above.width * node.fan_out
        assert position in plan.children[node.parent]
        # Whatever is reached is carried on to the image.
        assert plan.children[position] or node.index == plan.num_steps
    for segment, passed in zip(plan.segments, plan.segment_nodes, strict=True):
        assert tuple(plan.nodes[node].index for node in passed) == segment.path
        assert all(plan.nodes[b].parent == a for a, b in pairwise(passed))
    for segment_index in plan.transitions:
        leaves = plan.leaves_under(segment_index)
        assert leaves
        assert all(plan.width(leaf) % plan.width(segment_index) == 0 for leaf in leaves)


@given(plans())
@settings(max_examples=50, deadline=None)
def test_the_picture_shows_every_visited_index(plan: Plan) -> None:
    picture = describe(plan)
    assert f"velocity evaluations for a prompt: {plan.velocity_evaluations} " in picture
    assert f"decodes: {plan.decodes} " in picture
    rows = picture.splitlines()[2:-2]
    drawn = sorted(column // 2 for row in rows for column, sign in enumerate(row) if sign == "●")
    visited = sorted([0, *(index for each in plan.segments for index in each.path[1:])])
    assert drawn == visited


def test_a_picture_in_full() -> None:
    plan = trunk_and_branches(5, range(2), 3, (1, 2), "end")
    assert describe(plan).splitlines()[1:] == [
        "0 1 2 3 4 5",
        "●─●          ×1",
        "│ └~●─●─●─●  ×3 trained scored",
        "│   └───●─●  ×3 scored",
        "└~●─●─●─●─●  ×3 trained scored",
        "  └─●───●─●  ×3 scored",
        "velocity evaluations for a prompt: 29 (nothing shared: 47)",
        "decodes: 12   scores for each reward: 12   transitions: 2",
    ]


def test_a_picture_of_probes_keeps_the_trajectory_in_one_row() -> None:
    segments = (
        Segment(None, (0, 1), stochastic=True),
        Segment(0, (1, 4), scored=True),
        Segment(0, (1, 2, 4), scored=True),
        Segment(0, (1, 2), stochastic=True),
        Segment(3, (2, 3), fan_out=2, stochastic=True, trained=False),
        Segment(4, (3, 4), scored=True),
        Segment(3, (2, 3, 4), scored=True),
        Segment(None, (0, 4), scored=True),
        Segment(None, (0, 2, 4), scored=True),
    )
    assert describe(Plan(4, segments, root_width=3)).splitlines()[1:-2] == [
        "0 1 2 3 4",
        "●~●~●─●─●  ×3 trained scored",
        "│ │ └~●─●  ×6 untrained scored",
        "│ ├─────●  ×3 scored",
        "│ └─●───●  ×3 scored",
        "├───────●  ×3 scored",
        "└───●───●  ×3 scored",
    ]


def test_a_picture_gives_the_row_to_the_first_that_goes_on() -> None:
    segments = (
        Segment(None, (0, 1)),
        Segment(0, (1, 2), stochastic=True),
        Segment(0, (1, 3), stochastic=True),
        Segment(1, (2, 4), scored=True),
        Segment(2, (3, 4), scored=True),
    )
    assert describe(Plan(4, segments)).splitlines()[2:-2] == [
        "●─●~●───●  ×1 trained scored",
        "  └~~~●─●  ×1 trained scored",
    ]


OK = Segment(None, (0, 1, 2, 3), scored=True)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((Segment(None, (0, 3), stochastic=True),), "puts noise into the last step"),
        ((Segment(None, (0, 2), stochastic=True), Segment(0, (2, 3), 2, True)), "last step"),
        ((Segment(None, (0, 1, 2), stochastic=True), OK), "one step, two indices"),
        ((Segment(None, (1, 2, 3), scored=True),), "starts at 1: expected 0"),
        ((Segment(None, (0,), scored=True),), "two or more increasing"),
        ((Segment(None, (0, 2, 2, 3), scored=True),), "two or more increasing"),
        ((Segment(None, (0, 4), scored=True),), "the grid ends at 3"),
        ((Segment(None, (0, 2), scored=True), OK), "scored at index 2"),
        ((OK, Segment(None, (0, 1))), "segment 1 leads to no scored segment"),
        ((OK, Segment(None, (0, 1), stochastic=True)), "segment 1 leads to no scored segment"),
        ((Segment(None, (0, 1), 2), Segment(0, (1, 3), scored=True)), "would be copies"),
        ((Segment(None, (0, 1), 0, True), Segment(0, (1, 3), scored=True)), "fan_out 0"),
        ((Segment(1, (0, 3), scored=True), OK), "names parent 1"),
        ((Segment(None, (0, 1)), Segment(0, (2, 3), scored=True)), "starts at 2, its parent 0 ends at 1"),
    ],
)
def test_broken_plans_are_refused(segments: tuple[Segment, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan(3, segments)


def test_broken_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        Plan(0, (OK,))
    with pytest.raises(ValueError, match="0 initial noises"):
        Plan(3, (OK,), root_width=0)
    with pytest.raises(ValueError, match="stride is 0"):
        strided_path(8, 1, 0)
    with pytest.raises(ValueError, match="'end' or 'branch'"):
        strided_path(8, 1, 2, "start")  # type: ignore[arg-type]


def test_plans_need_no_torch() -> None:
    code = "import sys, flowcredit.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
