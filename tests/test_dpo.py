"""Diffusion-DPO in the whole loop, on tiny genuine pipelines: pairs of a group, and pairs of files."""

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from flowcredit import algorithms, trainer
from flowcredit.assembly import assemble
from flowcredit.check import check_command, first_update
from flowcredit.cli import app
from flowcredit.config import Recipe
from flowcredit.diagnostics import diagnose
from flowcredit.errors import InputError
from flowcredit.evaluation_files import load_evaluation
from flowcredit.experience import collect
from flowcredit.recipe_io import load_recipe
from flowcredit.report import build_report, figures
from flowcredit.report.run_data import read_run
from flowcredit.weights import trainable_parameters
from tiny_flux import build_tiny_flux
from tiny_sd3 import build_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)
REWARD = "simple_rewards:redness"
PROMPTS = ("a red circle", "a blue square", "a green cross")


def draw_pairs(folder: Path) -> None:
    """Red against blue for every prompt, as PNG files; and the file that names them."""
    rows = []
    for row, prompt in enumerate(PROMPTS):
        names = {}
        for place, column in enumerate(("chosen", "rejected")):
            pixels = np.random.default_rng(row).integers(0, 60, (40, 32, 3), np.uint8)
            pixels[..., 2 * place] += 180
            names[column] = f"{row}-{column}.png"
            Image.fromarray(pixels).save(folder / names[column])
        rows.append(json.dumps({"prompt": prompt, **names}))
    (folder / "pairs.jsonl").write_text("\n".join(rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dpo")
    build_tiny_flux(root / "pipeline")
    draw_pairs(root)
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    recipe = {
        "name": "tiny",
        "model": {
            "path": str(root / "pipeline"),
            "height": 32,
            "width": 32,
            "max_sequence_length": 12,
            "dtype": "float32",
        },
        "prompts": {"train": str(root / "pairs.jsonl"), "heldout": str(root / "prompts.txt")},
        "algorithm": {"name": "dpo", "num_steps": 4, "group_size": 4, "draws": 3, "beta": 50.0},
        "rewards": [REWARD],
        "train": {
            "iterations": 4,
            "prompts_per_iteration": 2,
            "learning_rate": 1e-3,
            "mixed_precision": "no",
            "micro_batch_size": 2,
        },
        "rollout": {"batch_size": 8},
        "evaluation": {"every": 0, "images": 2},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


FROM_FILE = ("algorithm.pairs=file", "rewards=[]", f"watch=[{REWARD}]")
LORA = ("weights.method=lora", "weights.rank=4", "weights.alpha=8")


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "recipe.yaml", overrides)


def log_of(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


VARIANTS = {
    "group, full": (),
    "group, lora, bf16": (*LORA, "train.mixed_precision=bf16", "train.ema_decay=0.9"),
    "file, full, a step for each draw": (*FROM_FILE, "train.update=per_step"),
    "file, lora": (*FROM_FILE, *LORA),
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_four_iterations_are_two_and_two(folder: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """The reference of a resumed run is the model before training, too."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trainer.train(recipe_of(folder, *overrides), whole, QUIET)
    trainer.train(recipe_of(folder, *overrides, "train.iterations=2"), halves, QUIET)
    trainer.resume(halves, ["train.iterations=4"], QUIET)
    for file in (whole / "checkpoints/000004").glob("*.safetensors"):
        left, right = load_file(file), load_file(halves / "checkpoints/000004" / file.name)
        assert left.keys() == right.keys()
        assert all(torch.equal(value, right[name]) for name, value in left.items())
    log = log_of(whole)
    assert log == log_of(halves)
    if "train.update=per_step" not in overrides:
        assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
        assert log[0]["implicit_margin"] == 0
    assert log[3]["implicit_margin"] != 0
    assert all("ratio_mean" not in record for record in log)
    from_file = "algorithm.pairs=file" in overrides
    for record in log:
        assert record["velocity_evaluations"] == (0 if from_file else record["iteration"] * 2 * 4 * 4)
        assert (f"reward/{REWARD}" in record) is not from_file


def test_a_model_learns_the_preference_of_a_file(folder: Path, tmp_path: Path) -> None:
    """Chosen images are red: the margin grows, and so does the redness that was never a reward."""
    recipe = recipe_of(
        folder,
        *FROM_FILE,
        "train.iterations=30",
        "train.learning_rate=3e-3",
        "train.micro_batch_size=12",
        "algorithm.draws=4",
        "algorithm.beta=20",
        "train.prompts_per_iteration=3",
    )
    out = io.StringIO()
    trainer.train(recipe, tmp_path / "run", Console(file=out, width=300))
    log = log_of(tmp_path / "run")
    assert log[-1]["implicit_margin"] > 1
    assert log[-1]["loss"] < 0.5
    assert log[-1]["implicit_accuracy"] > 0.8
    before, after = (
        np.mean(load_evaluation(tmp_path / f"run/evaluations/{at:06d}.json")[0].scores[REWARD])
        for at in (0, 30)
    )
    assert after > before + 0.02
    said = out.getvalue()
    assert "an iteration: 3 pairs of images, read from files" in said
    assert "iteration 1/30  loss 0.6931  margin +0.0000, above 0 in 0% of pairs  gradient" in said
    assert "on the pairs of images in" in (tmp_path / "run/final/README.md").read_text(), (
        "the card tells what was trained on"
    )
    assert "Rewards trained" not in build_report(tmp_path / "run").read_text()
    # Loss, margin and accuracy, the gradient and the learning rate; nothing of ratios or rollouts.
    curves = figures.training_curves(read_run(tmp_path / "run"))
    assert len(curves) == 5


def test_the_pairs_of_a_group_are_its_best_and_its_worst(folder: Path) -> None:
    setup = assemble(recipe_of(folder, "algorithm.draws=2"))
    found = collect(setup, setup.train_prompts.take([2, 0]), 0, _Silent())
    (scores,) = found.scores.values()
    first, second = found.sets
    for step in (first, second):
        assert step.prompts.tolist() == [0, 1]
        sigma = step.sigma.view(-1, 1, 1, 1)
        # x - s v, with v the target: the images themselves.
        images = step.x - sigma * step.target  # type: ignore[attr-defined]
        decoded = setup.model.decode(images.flatten(0, 1)).unflatten(0, (2, 2))
        redness = (decoded[:, :, 0] - decoded[:, :, 1]).mean((-1, -2))
        torch.testing.assert_close(redness[:, 0], scores[0].amax(-1), atol=1e-5, rtol=0)
        torch.testing.assert_close(redness[:, 1], scores[0].amin(-1), atol=1e-5, rtol=0)
        # One noise for both images of a pair.
        noise = step.x + (1 - sigma) * step.target  # type: ignore[attr-defined]
        torch.testing.assert_close(noise[:, 0], noise[:, 1], atol=1e-5, rtol=0)
    assert not torch.isclose(first.sigma, second.sigma).any()


def reds_alone(images: torch.Tensor, prompts: list[str]) -> list[float]:
    """Tells images apart for one prompt only."""
    return [
        float(image[0].mean()) if "red" in prompt else 0.5
        for image, prompt in zip(images, prompts, strict=True)
    ]


def all_alike(images: torch.Tensor, prompts: list[str]) -> list[float]:
    return [0.5] * len(images)


def test_groups_without_a_difference_make_no_pair(folder: Path, tmp_path: Path) -> None:
    setup = assemble(recipe_of(folder, "rewards=[test_dpo:reds_alone]"))
    found = collect(setup, setup.train_prompts, 0, _Silent())
    assert [step.prompts[step.live].tolist() for step in found.sets] == [[0]] * 3
    assert found.teaches
    out = io.StringIO()
    alike = recipe_of(folder, "rewards=[test_dpo:all_alike]", "train.weight_decay=0.5", "train.iterations=3")
    trainer.train(alike, tmp_path / "run", Console(file=out, width=300))
    assert out.getvalue().count("nothing was learned in this iteration") == 3
    assert out.getvalue().count("test_dpo:all_alike 0.5000  no update") == 3
    assert [record["dead_groups"] for record in log_of(tmp_path / "run")] == [1, 1, 1]
    end = load_file(tmp_path / "run/checkpoints/000003/weights.safetensors")
    start = trainable_parameters(assemble(alike).model.network)
    assert all(torch.equal(value, start[name]) for name, value in end.items())
    with pytest.raises(InputError, match="the first 5 iterations taught nothing"):
        trainer.train(recipe_of(folder, "rewards=[test_dpo:all_alike]", "train.iterations=6"), tmp_path / "b")


class _Silent:
    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, units: int) -> None:
        pass


CHECKED = {"group": (), "file": FROM_FILE, "lora": (*LORA, "train.update=per_step")}


@pytest.mark.parametrize("overrides", CHECKED.values(), ids=CHECKED)
@pytest.mark.parametrize("build", [build_tiny_flux, build_tiny_sd3])
def test_a_sound_recipe_passes_its_check(
    folder: Path, build: Callable[[Path], Path], overrides: tuple[str, ...]
) -> None:
    model = folder / build.__name__
    if not model.exists():
        build(model)
    out = io.StringIO()
    recipe = recipe_of(folder, f"model.path={model}", *overrides)
    assert check_command(recipe, Console(file=out, width=300)), out.getvalue()
    # As near as float32 comes to it.
    assert re.search(r"loss of a pair before the first update: off log 2 by \d\.\de-0[89]", out.getvalue())
    assert "in training and as many of the reference" in out.getvalue()


def test_a_check_finds_that_there_is_no_pair(folder: Path) -> None:
    setup = assemble(recipe_of(folder, "rewards=[test_dpo:all_alike]"))
    assert not any(finding.holds for finding in first_update(setup))


def test_the_error_is_that_of_the_model_without_guidance(folder: Path) -> None:
    model = folder / build_tiny_sd3.__name__
    if not model.exists():
        build_tiny_sd3(model)
    path = f"model.path={model}"
    setup = assemble(recipe_of(folder, path))
    assert setup.model.settings.guided
    x = setup.model.initial_noise(1, torch.Generator().manual_seed(0))
    sigma, cond = torch.tensor([0.5]), setup.model.encode(PROMPTS[:1])
    bare = setup.trained_flow.velocity(x, sigma, cond)
    assert not torch.allclose(bare, setup.model.velocity(x, sigma, cond))
    alone = assemble(recipe_of(folder, path, "model.guidance_scale=1")).model.velocity(x, sigma, cond)
    torch.testing.assert_close(bare, alone, atol=1e-6, rtol=0)
    guided = assemble(recipe_of(folder, path, "algorithm={name: flow_grpo, num_steps: 4}"))
    assert guided.trained_flow is guided.model


def test_costs_count_both_states_of_every_draw(folder: Path) -> None:
    for overrides, nfe in (((), 16), (FROM_FILE, 0)):
        recipe = recipe_of(folder, *overrides)
        method = algorithms.build(recipe.algorithm)
        assert method.plan.velocity_evaluations == nfe
        assert method.plan.decodes == nfe // 4
        assert method.trained_states(method.plan) == 6
    told = CliRunner().invoke(app, ["plan", str(folder / "recipe.yaml")]).stdout
    costs = {line[:24].strip(): line[24:37].strip() for line in told.splitlines() if line.startswith("  ")}
    assert costs["and by the reference"] == "6"
    published = load_recipe(Path(__file__).parents[1] / "recipes" / "sd35_medium_dpo.yaml")
    method = algorithms.build(published.algorithm)
    assert (method.plan.velocity_evaluations, method.plan.decodes) == (24 * 40, 24)
    assert method.trained_states(method.plan) == 2 * 39
    assert published.train.update == "accumulated"
    result = CliRunner().invoke(app, ["plan", str(folder / "recipe.yaml"), *FROM_FILE])
    assert result.exit_code == 0
    assert result.stdout.startswith("nothing is sampled for training")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (FROM_FILE[:1], r"rewards: pairs from a file train no reward; expected \[\], with what is to be"),
        (("rewards=[]",), "rewards: there is none to train; expected at least 1"),
        (("train.kl_weight=0.1",), "train.kl_weight: 0.1, which algorithm dpo does not read; expected 0.0"),
        (("algorithm.draws=0",), "algorithm.draws is 0; expected at least 1"),
        (("algorithm.beta=0",), "algorithm.beta is 0; expected more than 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe_of(folder, *overrides)


def test_a_run_needs_no_reward_at_all_and_a_diagnosis_does(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder, *FROM_FILE[:2], "train.iterations=1")
    trainer.train(recipe, tmp_path / "run", QUIET)
    assert (tmp_path / "run/images/000001.png").is_file()
    build_report(tmp_path / "run")
    with pytest.raises(InputError, match=r"rewards is \[\], and a diagnosis measures the first"):
        diagnose(assemble(recipe), 1)


def test_files_are_looked_at_before_a_run_begins(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    for name in ("0-chosen", "0-rejected", "1-chosen", "1-rejected", "2-chosen"):
        (tmp_path / f"{name}.png").symlink_to(folder / f"{name}.png")
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    changed: list[Any] = [*FROM_FILE, f"prompts.train={tmp_path / 'pairs.jsonl'}"]
    with pytest.raises(InputError, match=r'pairs\.jsonl:3: "rejected" \S*2-rejected\.png: no such file'):
        trainer.train(recipe_of(folder, *changed), tmp_path / "run", QUIET)
    with pytest.raises(InputError, match=r'pairs\.jsonl:1: "chosen" \S* 32 x 40 pixels, smaller than'):
        trainer.train(recipe_of(folder, *changed, "model.height=48"), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


def test_a_damaged_image_loses_no_finished_iteration(folder: Path, tmp_path: Path) -> None:
    draw_pairs(tmp_path)
    recipe = recipe_of(
        folder,
        *FROM_FILE,
        f"prompts.train={tmp_path / 'pairs.jsonl'}",
        "checkpoint.every=100",
        "train.prompts_per_iteration=1",
    )
    last = assemble(recipe).train_prompts
    from flowcredit.prompts import iteration_prompts

    (row,) = iteration_prompts(len(last), recipe.seed, 2, 1)
    file = tmp_path / f"{row}-chosen.png"
    file.write_bytes(file.read_bytes()[:600])
    with pytest.raises(InputError, match=rf"pairs\.jsonl:{row + 1}: .*not readable as an image"):
        trainer.train(recipe, tmp_path / "run", QUIET)
    assert (tmp_path / "run/checkpoints/000002/weights.safetensors").is_file()
