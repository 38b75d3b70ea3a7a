"""What a method brings to other sections, and which settings of methods are refused, in one clear line."""

from pathlib import Path
from typing import Any

import pytest

from flowcredit.algorithms import build
from flowcredit.errors import InputError
from flowcredit.methods import METHODS
from flowcredit.recipe_io import dump_recipe, load_recipe

RECIPE = """\
name: demo
model: {path: "bundled:shapes"}
prompts: {train: "bundled:shapes/train", heldout: "bundled:shapes/heldout"}
rewards: [shapes]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert overrides[-1].split("=")[0].split(".")[0] in message
    return message


EXPECTED: dict[str, tuple[str, float, str]] = {
    "g2rpo": ("flow_sde", 0.7, "equal"),
    "dense_grpo": ("flow_sde", 0.7, "equal"),
    "flow_grpo": ("flow_sde", 0.7, "equal"),
    "flow_grpo_fast": ("cps_squared_error", 0.8, "equal"),
    "dance_grpo": ("dance_sde", 0.3, "equal"),
    "mix_grpo": ("flow_sde", 0.7, "equal"),
    "tempflow_grpo": ("flow_sde", 0.7, "noise"),
    "branch_grpo": ("dance_sde", 0.3, "equal"),
    "stepwise_flow_grpo": ("flow_sde", 0.7, "equal"),
    "turning_point_grpo": ("cps_squared_error", 0.7, "equal"),
    "coca": ("flow_sde", 0.7, "equal"),
    "neighbor_grpo": ("flow_sde", 0.7, "equal"),
    "dpo": ("flow_sde", 0.7, "equal"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_by_its_name_alone_is_its_published_one(recipe: Path, name: str, tmp_path: Path) -> None:
    read = load_recipe(recipe, [f"algorithm={name}"])
    assert (read.noise.kind, read.noise.eta, read.train.step_weights) == EXPECTED[name]
    # The same by its full form, and read back from what a run writes down.
    assert load_recipe(recipe, [f"algorithm={{name: {name}}}"]) == read
    written = tmp_path / "written.yaml"
    written.write_text(dump_recipe(read), encoding="utf-8")
    assert load_recipe(written) == read
    assert build(read.algorithm, 1).name == name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # A level alone is one of the method's kind.
        (["noise.eta=0.5"], ("dance_sde", 0.5)),
        (["noise={eta: 0.5}"], ("dance_sde", 0.5)),
        # A kind brings its own usual level: 0.3 would be the method's, of another kind.
        (["noise.kind=flow_sde"], ("flow_sde", 0.7)),
        (["noise={kind: cps, eta: 0.2}"], ("cps", 0.2)),
        (["noise={table: psi.json}"], ("table", 0.7)),
        (["noise={}"], ("dance_sde", 0.3)),
    ],
)
def test_what_the_recipe_says_of_noise_wins(
    recipe: Path, overrides: list[str], expected: tuple[str, float]
) -> None:
    read = load_recipe(recipe, ["algorithm=dance_grpo", *overrides])
    assert (read.noise.kind, read.noise.eta) == expected


def test_what_the_recipe_says_of_training_wins(recipe: Path) -> None:
    read = load_recipe(recipe, ["algorithm=tempflow_grpo", "train.iterations=7"])
    assert (read.train.step_weights, read.train.iterations) == ("noise", 7)
    equal = load_recipe(recipe, ["algorithm=tempflow_grpo", "train.step_weights=equal"])
    assert equal.train.step_weights == "equal"
    # And another method takes nothing of it.
    assert load_recipe(recipe, ["algorithm=flow_grpo"]).train.step_weights == "equal"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("flow_gpro", "flow_grpo"),
        ("mixgrpo", "mix_grpo"),
        ("dance", "dance_grpo"),
        ("turning_point", "turning_point_grpo"),
        ("neighbour_grpo", "neighbor_grpo"),
        ("stepwise_grpo", "stepwise_flow_grpo"),
        ("Coca", "coca"),
    ],
)
def test_an_unknown_method_is_offered_the_nearest(recipe: Path, name: str, nearest: str) -> None:
    for override in (f"algorithm={name}", f"algorithm={{name: {name}}}"):
        message = refusal(recipe, override)
        assert f'algorithm is "{name}"' in message
        assert message.endswith(f"did you mean '{nearest}'?")


@pytest.mark.parametrize("name", METHODS)
def test_no_group_is_smaller_than_two(recipe: Path, name: str) -> None:
    for size in (1, 0, -3):
        message = refusal(recipe, f"algorithm={{name: {name}, group_size: {size}}}")
        assert f"algorithm.group_size is {size}; expected at least 2" in message


@pytest.mark.parametrize("name", METHODS)
def test_a_setting_of_another_method_is_refused(recipe: Path, name: str) -> None:
    message = refusal(recipe, f"algorithm={{name: {name}, no_such_setting: 1}}")
    assert f"unknown setting 'algorithm.no_such_setting' of algorithm {name}" in message


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        # A window that would reach the last step, or is larger than the grid.
        (
            "mix_grpo, num_steps: 6, window_size: 6",
            "window_size: 6 steps on a grid of 6, whose last takes no",
        ),
        ("mix_grpo, num_steps: 6, window_size: 9", "9 steps on a grid of 6, whose last takes no noise"),
        ("mix_grpo, num_steps: 4, window_size: 4", "expected at most 3"),
        ("mix_grpo, num_steps: 4", "4 steps on a grid of 4, whose last takes no noise"),
        ("flow_grpo_fast, num_steps: 3", "window_size: 3 steps on a grid of 3"),
        ("flow_grpo_fast, num_steps: 10, window_size: 11", "expected at most 9"),
        (
            "flow_grpo_fast, num_steps: 10, window_end: 10",
            "window_end: a window of 3 steps cannot end at 10 on a grid of 10; expected 3 to 9",
        ),
        ("flow_grpo_fast, window_end: 2", "a window of 3 steps cannot end at 2 on a grid of 10"),
        ("flow_grpo_fast, window_end: 40", "expected 3 to 9"),
        ("mix_grpo, window_size: 0", "algorithm.window_size is 0; expected at least 1"),
        ("mix_grpo, window_stride: 0", "algorithm.window_stride is 0; expected at least 1"),
        ("mix_grpo, iterations_per_position: 0", "expected at least 1"),
        ("mix_grpo, window_order: reversed", "expected 'progressive' or 'random'"),
        ("mix_grpo, at_end: stop", "expected 'wrap' or 'stay'"),
        ("mix_grpo, finish_steps: 0", "algorithm.finish_steps is 0"),
        ("dance_grpo, step_share: 0.0", "algorithm.step_share is 0.0; expected more than 0"),
        ("dance_grpo, step_share: 1.5", "algorithm.step_share is 1.5; expected at most 1"),
        ("dance_grpo, num_steps: 1", "algorithm.num_steps is 1; expected at least 2"),
        (
            "branch_grpo, num_steps: 10",
            "split_steps: step 9 of 10 cannot split (its noise would stay in the image); expected 0 to 8",
        ),
        ("branch_grpo, num_steps: 8", "split_steps: step 9 of 8 cannot split; expected 0 to 6"),
        ("branch_grpo, split_steps: [0, 3, 3, 9]", "split_steps: 3 stands there more than once"),
        ("branch_grpo, split_steps: []", "at least 1 in the list"),
        ("branch_grpo, group_size: 12", "12, but 4 splits into 2 make 16; expected 16, or other splits"),
        ("branch_grpo, fan_out: 1", "algorithm.fan_out is 1; expected at least 2"),
        ("branch_grpo, pruned_depths: 10", "pruned_depths: 10, but 9 steps follow the last split"),
        ("branch_grpo, kept_leaves: 17", "kept_leaves: 17 of 16 images; expected 2 to 16"),
        ("branch_grpo, kept_leaves: 1", "kept_leaves: 1 of 16 images; expected 2 to 16"),
        # Siblings that share all of their noise are copies.
        ("branch_grpo, split_scale: 0", "algorithm.split_scale is 0; expected at least 0.01"),
        ("branch_grpo, split_scale: 1.0e-12", "expected at least 0.01"),
        ("neighbor_grpo, perturbation: 0.0", "algorithm.perturbation is 0.0; expected at least 0.001"),
        ("neighbor_grpo, perturbation: 1.0", "algorithm.perturbation is 1.0; expected less than 1"),
        ("neighbor_grpo, train_steps: [8]", "train_steps: step 8 is not on a grid of 8; expected 0 to 7"),
        ("neighbor_grpo, num_steps: 3", "train_steps: step 3 is not on a grid of 3"),
        ("neighbor_grpo, train_steps: [1, 1]", "train_steps: 1 stands there more than once"),
        ("neighbor_grpo, anchors: 13", "anchors: 13 of 12 neighbours; expected 1 to 12"),
        ("neighbor_grpo, temperature: 0", "algorithm.temperature is 0; expected more than 0"),
        ("neighbor_grpo, quasi_norm: 0", "algorithm.quasi_norm is 0; expected more than 0"),
        ("tempflow_grpo, seeds: 0", "algorithm.seeds is 0; expected at least 1"),
        ("tempflow_grpo, compare: group", "expected 'seed' or 'prompt'"),
        ("stepwise_flow_grpo, compare: seed", "expected 'trajectory' or 'step'"),
        ("stepwise_flow_grpo, probe_steps: 0", "algorithm.probe_steps is 0"),
        ("flow_grpo, advantage_std: global", "expected 'group' or 'batch'"),
    ],
)
def test_what_a_method_cannot_do_is_refused(recipe: Path, settings: str, told: str) -> None:
    assert told in refusal(recipe, f"algorithm={{name: {settings}}}")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["algorithm=neighbor_grpo", "train.kl_weight=0.1"],
            "which algorithm neighbor_grpo does not read; expected 0.0",
        ),
        (
            ["algorithm=neighbor_grpo", "train.ratio=guarded"],
            "which algorithm neighbor_grpo does not read; expected 'plain'",
        ),
        (
            ["algorithm=neighbor_grpo", "train.step_weights=noise"],
            "neighbor_grpo does not read; expected 'equal'",
        ),
        (
            ["algorithm=turning_point_grpo", "train.ratio=guarded"],
            "'guarded' mends a ratio of densities, but noise kind 'cps_squared_error' has none",
        ),
        (["noise.kind=cps_squared_error", "train.ratio=guarded"], "expected plain, or noise.kind cps"),
        (["algorithm=dance_grpo", "noise={kind: cps, eta: 1.2}"], "Flow-CPS cannot use a level of 1.2"),
        # A level of the method's own kind.
        (["algorithm=flow_grpo_fast", "noise.eta=1.2"], "Flow-CPS cannot use a level of 1.2"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe: Path, overrides: list[str], told: str) -> None:
    assert told in refusal(recipe, *overrides)


def test_refusals_point_at_the_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE + "algorithm:\n  name: mix_grpo\n  num_steps: 4\n  window_size: 7\n")
    with pytest.raises(InputError, match=rf"^{file}:8: algorithm.window_size: 7 steps on a grid of 4"):
        load_recipe(file)


def extremes() -> list[tuple[str, dict[str, Any]]]:
    """Settings at the ends of what is allowed."""
    return [
        ("mix_grpo", {"num_steps": 2, "window_size": 1}),
        ("mix_grpo", {"num_steps": 5, "window_size": 4, "window_stride": 1000}),
        ("mix_grpo", {"num_steps": 5, "window_size": 4, "finish_steps": 1000}),
        ("flow_grpo_fast", {"num_steps": 4, "window_size": 3}),
        ("dance_grpo", {"num_steps": 2, "step_share": 1e-9}),
        ("branch_grpo", {"num_steps": 2, "group_size": 2, "split_steps": (0,), "split_scale": 0.01}),
        ("branch_grpo", {"num_steps": 3, "group_size": 64, "split_steps": (1,), "fan_out": 64}),
        ("branch_grpo", {"split_scale": 1000.0, "pruned_depths": 9, "kept_leaves": 16}),
        ("tempflow_grpo", {"num_steps": 2, "seeds": 1, "group_size": 2}),
        ("stepwise_flow_grpo", {"num_steps": 2, "group_size": 2, "probe_steps": 1000}),
        ("turning_point_grpo", {"num_steps": 2, "group_size": 2, "initial_noise": "shared"}),
        ("coca", {"num_steps": 2, "group_size": 2, "initial_noise": "shared"}),
        ("neighbor_grpo", {"num_steps": 2, "train_steps": (1,), "anchors": 12, "perturbation": 0.001}),
    ]


@pytest.mark.parametrize(("name", "settings"), extremes())
def test_whatever_is_let_in_makes_plans(name: str, settings: dict[str, Any]) -> None:
    read: Any = METHODS[name].model_validate(settings)
    built = build(read, 5)
    for iteration in (0, 1, 29, 10**6):
        plan = built.plan_at(iteration)
        assert plan.decodes >= 2
        assert built.trained_states(plan) > 0
