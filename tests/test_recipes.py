"""The recipes that are shipped: whole, and of the published cost."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flowcredit.algorithms import build
from flowcredit.assembly import build_grid
from flowcredit.config import Recipe
from flowcredit.interfaces import FlowModel
from flowcredit.methods import METHODS
from flowcredit.recipe_io import load_recipe, recipe_diff
from flowcredit.transition import make_kernel

RECIPES = Path(__file__).parent.parent / "recipes"
NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))


@cache
def shipped(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_are_whole(name: str) -> None:
    recipe = shipped(name)
    assert build(recipe.algorithm).plan.velocity_evaluations > 0


def _trial() -> list[str]:
    """The overrides of the small trial run that the README shows."""
    text = (RECIPES.parent / "README.md").read_text(encoding="utf-8")
    (command,) = (part for part in text.split("```") if "name=trial" in part)
    return [word for word in command.split() if "=" in word and not word.startswith("model.")]


@pytest.mark.parametrize("name", NAMES)
def test_the_small_trial_of_the_readme_fits_every_recipe(name: str) -> None:
    trial = load_recipe(RECIPES / f"{name}.yaml", _trial())
    assert trial.train.iterations * trial.train.prompts_per_iteration == 4
    assert trial.evaluation.prompts == 4


def test_there_is_the_demo_recipe() -> None:
    assert (RECIPES / "shapes_g2rpo.yaml").is_file()


def test_the_published_recipes_cost_what_the_paper_and_the_scripts_do() -> None:
    """Counted by hand: a trunk of 8 steps, and 12 branches at each of 8 steps to sigma 0."""
    for name in ("hps", "hps_clip", "lora"):
        plan = build(shipped(f"flux1_dev_g2rpo_{name}").algorithm).plan
        assert (plan.velocity_evaluations, plan.decodes) == (1904, 288)
    plan = build(shipped("flux1_dev_g2rpo_scripts").algorithm).plan
    fine = sum(16 - k for k in range(1, 9))
    # Of the path 1, 2, 4, 6, ..., 14, 16 the first two states are the fine path's too; and so on to 8, 9, 11.
    coarse_of_its_own = 6 + 5 + 5 + 4 + 4 + 3 + 3 + 2
    assert plan.velocity_evaluations == 8 + 12 * (fine + coarse_of_its_own)
    assert plan.decodes == 192


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_published_recipe_and_one_for_the_bundled_world(method: str) -> None:
    models = {recipe.model.path for recipe in map(shipped, NAMES) if recipe.algorithm.name == method}
    assert "bundled:shapes" in models
    assert models & {"FLUX.1-dev", "stable-diffusion-3.5-medium"}


BESIDE = {
    "flow_grpo_guard": {"train.ratio", "train.clip_range"},
    "tempflow_grpo": {"train.step_weights"},
    "dpo": {"train.learning_rate"},
}


@pytest.mark.parametrize("method", [*METHODS, "flow_grpo_guard"])
def test_recipes_of_the_bundled_world_are_alike_but_for_the_method(method: str) -> None:
    if method == "dense_grpo":
        return
    recipe = shipped(f"shapes_{method}")
    differ = {change.setting for change in recipe_diff(shipped("shapes_flow_grpo"), recipe)}
    others = {each for each in differ if not each.startswith(("algorithm.", "noise."))}
    assert others - BESIDE.get(method, set()) <= {"name"}
    assert recipe.name == f"shapes-{method.replace('_', '-')}"
    # The noise of the first step is about Flow-SDE's at 0.3, whatever its kind.
    grid = build_grid(recipe.grid, cast(FlowModel, None), recipe.algorithm.num_steps)
    x = torch.zeros(1, 1)
    std = float(make_kernel(recipe.noise.kind, grid, recipe.noise.eta)(x, x, 0, 1).std)
    assert recipe.algorithm.name in {"neighbor_grpo", "dpo"} or std == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flux1_dev_dance_grpo", {}),
        ("flux1_dev_mix_grpo", {}),
        ("flux1_dev_branch_grpo", {}),
        ("flux1_dev_neighbor_grpo", {}),
        ("sd35_medium_tempflow_grpo", {}),
        ("flux1_dev_tempflow_grpo", {}),
        ("sd35_medium_turning_point_grpo", {}),
        ("sd35_medium_coca", {}),
        ("sd35_medium_flow_grpo_fast", {"group_size": 18, "window_end": 5}),
        ("sd35_medium_flow_grpo", {"advantage_std": "batch"}),
        ("flux1_dev_flow_grpo", {"advantage_std": "batch", "num_steps": 6}),
        ("sd35_medium_stepwise_flow_grpo", {"probe_steps": 5}),
    ],
)
def test_published_recipes_and_the_methods_defaults_say_the_same(name: str, settings: dict[str, Any]) -> None:
    recipe = shipped(name)
    alone = METHODS[recipe.algorithm.name].model_validate(settings)
    assert recipe.algorithm == alone
    for section, defaults in alone.others.items():
        for setting, value in defaults.items():
            assert getattr(getattr(recipe, section), setting) == value


@pytest.mark.parametrize(
    ("name", "evaluations", "images", "trained"),
    [
        ("sd35_medium_flow_grpo", 24 * 10, 24, 24 * 9),
        ("flux1_dev_flow_grpo", 24 * 6, 24, 24 * 5),
        ("sd35_medium_flow_grpo_fast", 18 * 10, 18, 18 * 3),
        ("sd35_medium_flow_grpo_guard", 24 * 10, 24, 24 * 9),
        ("flux1_dev_mix_grpo", 1 + 12 * 24, 12, 1 + 12 * 3),
        ("sd35_medium_tempflow_grpo", 4 * 9 + 24 * 45, 24 * 9, 4 * 9),
        ("flux1_dev_tempflow_grpo", 4 * 9 + 24 * 45, 24 * 9, 4 * 9),
        ("flux1_dev_branch_grpo", 203, 16, 187),
        ("sd35_medium_stepwise_flow_grpo", 845, 1 + 24 * 9, 1 + 24 * 8),
        ("sd35_medium_turning_point_grpo", 24 * 55, 24 * 10, 24 * 9),
        ("flux1_dev_neighbor_grpo", 12 * 8, 12, 16),
        ("sd35_medium_coca", 24 * 10, 24, 24 * 9),
    ],
)
def test_published_recipes_cost_what_is_counted_by_hand(
    name: str, evaluations: int, images: int, trained: int
) -> None:
    recipe = shipped(name)
    method = build(recipe.algorithm, recipe.seed)
    plan = method.plan
    assert (plan.velocity_evaluations, plan.decodes, method.trained_states(plan)) == (
        evaluations,
        images,
        trained,
    )


def test_neighbor_grpo_trains_as_many_states_as_it_says() -> None:
    """B K / G, the trained evaluations for each image, is 1.33 in its table."""
    method = build(shipped("flux1_dev_neighbor_grpo").algorithm)
    assert method.trained_states(method.plan) / 12 == pytest.approx(1.33, abs=0.01)


def test_recipes_of_published_models_say_that_they_were_not_run() -> None:
    for file in RECIPES.glob("*.yaml"):
        if not file.name.startswith("shapes_"):
            assert "Not yet run" in file.read_text(encoding="utf-8"), file.name
