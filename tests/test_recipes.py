"""The recipes that are shipped: whole, and of the published cost."""

from pathlib import Path

import pytest

from flowcredit.algorithms import build
from flowcredit.recipe_io import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_recipes_are_whole(file: Path) -> None:
    recipe = load_recipe(file)
    assert build(recipe.algorithm).plan.velocity_evaluations > 0


def test_there_is_the_demo_recipe() -> None:
    assert (RECIPES / "shapes_g2rpo.yaml").is_file()


def test_the_published_recipes_cost_what_the_paper_and_the_scripts_do() -> None:
    """Counted by hand: a trunk of 8 steps, and 12 branches at each of 8 steps to sigma 0."""
    for name in ("hps", "hps_clip", "lora"):
        plan = build(load_recipe(RECIPES / f"flux1_dev_g2rpo_{name}.yaml").algorithm).plan
        assert (plan.velocity_evaluations, plan.decodes) == (1904, 288)
    plan = build(load_recipe(RECIPES / "flux1_dev_g2rpo_scripts.yaml").algorithm).plan
    fine = sum(16 - k for k in range(1, 9))
    # Of the path 1, 2, 4, 6, ..., 14, 16 the first two states are the fine path's too; and so on to 8, 9, 11.
    coarse_of_its_own = 6 + 5 + 5 + 4 + 4 + 3 + 3 + 2
    assert plan.velocity_evaluations == 8 + 12 * (fine + coarse_of_its_own)
    assert plan.decodes == 192
