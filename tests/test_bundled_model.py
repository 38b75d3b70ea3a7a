"""The bundled flow model: genuine, as good and as bad as it is meant to be, and the adapter's equal."""

import json

import pytest
import torch
from diffusers import FluxPipeline

from flowcredit.assembly import build_grid, build_model, build_rewards
from flowcredit.comparison import Evaluation, group_means, summarise
from flowcredit.evaluate import evaluate
from flowcredit.models.loading import PipelineFlow
from flowcredit.prompts import load_prompts
from flowcredit.quiet import quiet_libraries
from flowcredit.recipe_io import load_recipe
from flowcredit.rollout import KeyedNoise
from flowcredit.shapes import bundled_path
from flowcredit.transition import euler

RECIPE = "recipes/shapes_g2rpo.yaml"


@pytest.fixture(scope="module")
def model() -> PipelineFlow:
    return build_model(load_recipe(RECIPE, ["train.mixed_precision=no", "model.dtype=float32"]))


@pytest.fixture(scope="module")
def evaluation(model: PipelineFlow) -> Evaluation:
    recipe = load_recipe(RECIPE)
    heldout = load_prompts(recipe.prompts.heldout)
    settings = recipe.evaluation.model_copy(update={"prompts": 384})
    grid = build_grid(recipe.grid, model, recipe.algorithm.num_steps)
    rewards = build_rewards(recipe, (*recipe.rewards, *recipe.watch), model.device)
    return evaluate(model, heldout, rewards, settings, grid, scoring=recipe.scoring)


def test_good_enough_to_recognise_and_bad_enough_to_align(evaluation: Evaluation) -> None:
    """At the demo's own number of steps: the base that every run starts from."""
    exact = summarise(evaluation.scores["shapes_exact"]).mean
    assert 0.3 <= exact <= 0.75
    by_task = {task: summary.mean for task, summary in group_means(evaluation, "shapes_exact").items()}
    assert by_task["single_object"] == max(by_task.values())
    # A model that draws the caption's words in any pairing gets about one in twenty of these.
    assert min(by_task["position"], by_task["attribute_binding"]) > 0.3
    hard = min(by_task, key=lambda task: by_task[task])
    assert hard in ("position", "attribute_binding", "counting")


def test_the_second_opinion_agrees_with_the_checker(evaluation: Evaluation) -> None:
    """CLIP never saw the checker; over the model's own images the two must rank alike."""
    graded = torch.tensor(evaluation.scores["shapes"])
    clip = torch.tensor(evaluation.scores["clip"])
    assert torch.corrcoef(torch.stack([graded, clip]))[0, 1] > 0.3
    exact = torch.tensor(evaluation.scores["shapes_exact"]) == 1
    assert clip[exact].mean() > clip[~exact].mean()


def test_plain_diffusers_draws_the_same_image(model: PipelineFlow) -> None:
    with quiet_libraries():
        pipeline = FluxPipeline.from_pretrained(bundled_path("bundled:shapes"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    theirs = pipeline(
        "a red circle left of a blue square",
        height=32,
        width=32,
        num_inference_steps=6,
        max_sequence_length=12,
        generator=generator,
        output_type="np",
    ).images
    grid = model.time_grid(6)
    cond = model.encode(["a red circle left of a blue square"])
    x = model.initial_noise(1, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for k in range(6):
            x = euler(x, model.velocity(x, grid[k].float().expand(1), cond), grid[k], grid[k + 1])
    ours = model.decode(x).permute(0, 2, 3, 1)
    assert ours.std() > 0.02
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-4)


def test_no_prompt_of_the_world_is_cut(model: PipelineFlow) -> None:
    for name in ("bundled:shapes/train", "bundled:shapes/heldout"):
        assert model.truncated(load_prompts(name).prompts) == {"clip": 0, "t5": 0}


def test_the_pipeline_says_what_it_is() -> None:
    index = json.loads((bundled_path("bundled:shapes") / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline"
    assert {"transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "scheduler"} <= index.keys()


def test_evaluation_noise_is_not_that_of_training(model: PipelineFlow) -> None:
    trained = KeyedNoise(model, 0, 0, [0]).initial(1)
    assert not torch.equal(trained, KeyedNoise(model, 0, -1, [0]).initial(1))
