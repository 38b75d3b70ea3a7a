"""The card beside exported weights: its own code loads them, its numbers are the evaluations'."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowcredit.assembly import build_model
from flowcredit.comparison import Evaluation
from flowcredit.config import Recipe
from flowcredit.export import export_weights
from flowcredit.model_card import model_card, write_model_card
from tiny_flux import build_tiny_flux

BEFORE = Evaluation(0, ("a", "b"), {"redness": (0.25, 0.5), "clip": (0.125, 0.375)})
AFTER = replace(BEFORE, iteration=7, scores={"redness": (0.5, 0.75), "clip": (0.125, 0.125)})


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    root = build_tiny_flux(tmp_path_factory.mktemp("card") / "pipeline")

    def make(**weights: Any) -> Recipe:
        return Recipe.model_validate(
            {
                "name": "tiny",
                "model": {"path": str(root), "height": 32, "width": 32, "max_sequence_length": 12},
                "prompts": {"train": "train.txt", "heldout": "test.txt"},
                "rewards": [{"name": "redness", "weight": 0.5}],
                "watch": ["clip"],
                "weights": weights,
            }
        )

    return make


@pytest.mark.parametrize("weights", [{}, {"method": "lora", "rank": 4, "alpha": 10}], ids=["full", "lora"])
def test_the_cards_code_loads_what_lies_beside_it(
    recipe_of: Callable[..., Recipe], tmp_path: Path, weights: dict[str, Any]
) -> None:
    recipe = recipe_of(**weights)
    model = build_model(recipe)
    folder = export_weights(model, tmp_path / "final")
    text = write_model_card(folder, recipe, "FluxPipeline", BEFORE, AFTER).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    names: dict[str, Any] = {}
    exec(code.replace("THIS_FOLDER", str(folder)), names)
    loaded = names["pipeline"].transformer.state_dict()
    assert ({name for name in loaded if ".lora_A" in name} != set()) is bool(weights)
    assert all(value.dtype == torch.bfloat16 for value in loaded.values())


def test_numbers_recipe_and_roles_stand_there(recipe_of: Callable[..., Recipe]) -> None:
    recipe = recipe_of(method="lora")
    text = model_card(recipe, "FluxPipeline", BEFORE, AFTER)
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == recipe.model.path
    assert head["tags"] == ["flowcredit", "g2rpo", "lora"]
    assert "arXiv 2510.01982, 7 iterations of 16 prompts, rewards: redness (weight 0.5)" in text
    assert "| redness | trained | 0.375 ± 0.125 | 0.625 ± 0.125 | +0.250 ± 0.000 |" in text
    assert "| clip | watched | 0.250 ± 0.125 | 0.125 ± 0.000 | -0.125 ± 0.125 |" in text
    (written,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    assert Recipe.model_validate(yaml.safe_load(written)) == recipe
    assert "| redness | trained | 0.625 ± 0.125 |" in model_card(recipe, "FluxPipeline", None, AFTER)
