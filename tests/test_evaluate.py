"""Evaluation: the same noises at any batch size and before and after, and the numbers told about it."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from scipy import stats
from torch import Tensor, nn

from flowcredit import noise
from flowcredit.assembly import build_model
from flowcredit.checkpoint import save_checkpoint
from flowcredit.comparison import (
    Evaluation,
    alarms,
    compare,
    evaluation_table,
    group_means,
    paired_change,
    summarise,
)
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.evaluate import evaluate, evaluate_command, sample, sample_command
from flowcredit.evaluation_files import load_evaluation, save_evaluation
from flowcredit.image_grid import save_grid, tile_box, to_pixels
from flowcredit.interfaces import Conditioning
from flowcredit.prompts import PromptSet
from flowcredit.run_folder import RunFolder
from flowcredit.running import EvaluationSettings, ScoringSettings
from flowcredit.time_grid import shifted_linear
from flowcredit.weights import trainable_parameters
from tiny_flux import build_tiny_flux


@dataclass
class Drift:
    """A model whose velocity is constant along the path, so that Euler is exact: x0 = noise - drift.

    The drift is the prompt's length plus the one trained weight; the image is a squashed x0.
    """

    weight: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.zeros(1)))
    network: nn.Module = field(default_factory=nn.Identity)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    image_tokens: int = 1
    evaluations: int = 0

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return {"length": torch.tensor([[float(len(prompt))] for prompt in prompts])}

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, 3, 4, 4, generator=generator)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        self.evaluations += len(x)
        drift = cond["length"] + self.weight
        return drift[:, :, None, None].expand_as(x).contiguous()

    def decode(self, x0: Tensor) -> Tensor:
        return torch.sigmoid(x0 / 4)

    def time_grid(self, num_steps: int) -> Tensor:
        return shifted_linear(num_steps, 1.0)


PROMPTS = PromptSet(
    prompts=("a", "bb", "ccc", "dddd", "eeeee"),
    columns={"task": ("one", "two", "one", "two", "one"), "level": (0.5, 0.4, 0.5, 0.3, 0.2)},
    source="prompts.jsonl",
)
SCORING = ScoringSettings(batch_size=2)


def read_png(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image)


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.mean(dim=(1, 2, 3))


def dark_enough(images: Tensor, prompts: Sequence[str], level: Sequence[float]) -> Tensor:
    return (brightness(images, prompts) < torch.tensor(level)).float()


REWARDS: dict[str, Any] = {"brightness": brightness, "dark_enough": dark_enough}


def settings(**changes: Any) -> EvaluationSettings:
    return EvaluationSettings(**{"prompts": 5, "images": 3, "seed": 7, "batch_size": 2, **changes})


def run(model: Drift, **changes: Any) -> Evaluation:
    grid = shifted_linear(6, 3.0)
    return evaluate(model, PROMPTS, REWARDS, settings(**changes), grid, scoring=SCORING)


def expected_images(seed: int, weight: float = 0.0) -> Tensor:
    """The closed form: noise keyed by prompt, minus the constant drift, squashed."""
    draws = [
        torch.randn(3, 4, 4, generator=noise.generator(seed, -1, place, "initial"))
        for place in range(len(PROMPTS))
    ]
    drifts = [len(prompt) + weight for prompt in PROMPTS.prompts]
    return torch.stack([torch.sigmoid((x - d) / 4) for x, d in zip(draws, drifts, strict=True)])


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_sampling_follows_the_ode_from_each_prompts_own_noise(batch_size: int) -> None:
    model = Drift()
    told: list[int] = []
    grid = shifted_linear(6, 3.0)
    batches = list(sample(model, PROMPTS.prompts, grid, seed=7, batch_size=batch_size, progress=told.append))
    torch.testing.assert_close(torch.cat(batches), expected_images(7))
    assert max(len(batch) for batch in batches) == min(batch_size, 5)
    assert sum(told) == model.evaluations == 5 * 6


def test_before_and_after_start_from_the_same_noise() -> None:
    """Only the weight differs, so the images are those of the closed form with the other weight."""
    model = Drift()
    before = run(model)
    nn.init.constant_(model.weight, 2.0)
    after = run(model)
    assert before.images is not None
    assert after.images is not None
    torch.testing.assert_close(before.images, expected_images(7)[:3])
    torch.testing.assert_close(after.images, expected_images(7, weight=2.0)[:3])


def test_each_prompt_is_scored_with_its_own_image_and_columns() -> None:
    found = run(Drift())
    levels = expected_images(7).mean(dim=(1, 2, 3))
    assert found.scores["brightness"] == pytest.approx(levels.tolist())
    assert found.scores["dark_enough"] == tuple(
        float(mean < level) for mean, level in zip(levels.tolist(), PROMPTS.columns["level"], strict=True)
    )
    assert set(found.scores["dark_enough"]) == {0.0, 1.0}


def test_the_seed_and_the_number_of_prompts_are_settings() -> None:
    assert run(Drift(), batch_size=64) == run(Drift())
    assert run(Drift(), seed=8).scores != run(Drift()).scores
    few = run(Drift(), prompts=2, images=0)
    assert few.prompts == ("a", "bb")
    assert few.scores["brightness"] == pytest.approx(run(Drift()).scores["brightness"][:2])
    assert few.images is not None
    assert len(few.images) == 0


def test_groups_come_from_the_column() -> None:
    found = run(Drift(), group_by="task")
    scores = found.scores["brightness"]
    means = group_means(found, "brightness")
    assert list(means) == ["one", "two"]
    assert means["one"].mean == pytest.approx((scores[0] + scores[2] + scores[4]) / 3)
    assert (means["one"].count, means["two"].count) == (3, 2)


def test_missing_columns_are_refused_before_anything_runs() -> None:
    model = Drift()
    with pytest.raises(InputError, match=r"prompts\.jsonl: .*'kind'.*prompt, level, task"):
        run(model, group_by="kind")
    bare = replace(PROMPTS, columns={"task": PROMPTS.columns["task"]})
    with pytest.raises(InputError, match=r"'dark_enough' needs the column 'level'"):
        evaluate(model, bare, REWARDS, settings(), shifted_linear(6, 3.0), scoring=SCORING)
    assert model.evaluations == 0


def test_summary_against_scipy_and_without_the_missing() -> None:
    scores = [0.2, 0.9, math.nan, 0.4, 0.7, 0.1]
    found = summarise(scores)
    there = [score for score in scores if not math.isnan(score)]
    assert found.mean == pytest.approx(np.mean(there))
    assert found.standard_error == pytest.approx(stats.sem(there))
    assert (found.count, found.missing) == (5, 1)
    assert math.isnan(summarise([0.5]).standard_error)
    assert math.isnan(summarise([math.nan]).mean)


def made(iteration: int, **scores: tuple[float, ...]) -> Evaluation:
    count = len(next(iter(scores.values())))
    prompts = tuple(f"prompt {i}" for i in range(count))
    groups = tuple("easy" if i % 2 else "hard" for i in range(count))
    return Evaluation(iteration, prompts, scores, "task", groups)


BEFORE = made(0, graded=(0.2, 0.5, 0.4, 0.6), exact=(0.0, 1.0, 0.0, 0.0))
AFTER = made(30, graded=(0.4, 0.6, 0.7, 0.6), exact=(1.0, 1.0, 0.0, 1.0))


def test_change_is_paired() -> None:
    """Its mean over its error is the paired t statistic."""
    change = paired_change(BEFORE, AFTER, "graded")
    expected = stats.ttest_rel(AFTER.scores["graded"], BEFORE.scores["graded"])
    assert change.mean / change.standard_error == pytest.approx(expected.statistic)
    lost = replace(AFTER, scores={"graded": (0.4, math.nan, 0.7, 0.6)})
    assert paired_change(BEFORE, lost, "graded").mean == pytest.approx((0.2 + 0.3 + 0.0) / 3)
    with pytest.raises(ValueError, match="different prompts"):
        paired_change(BEFORE, replace(AFTER, prompts=("x",) * 4), "graded")


def test_comparison_splits_rates_by_group() -> None:
    lines = {(line.reward, line.group): line for line in compare(BEFORE, AFTER)}
    assert list(lines) == [("graded", None), ("exact", None), ("exact", "hard"), ("exact", "easy")]
    hard, easy = lines["exact", "hard"], lines["exact", "easy"]
    assert hard.after is not None
    assert hard.change is not None
    assert easy.change is not None
    assert (hard.before.mean, hard.after.mean, hard.change.mean) == (0.0, 0.5, 0.5)
    assert (easy.before.mean, easy.change.mean) == (0.5, 0.5)
    only_graded = [replace(e, scores={"graded": e.scores["graded"]}) for e in (BEFORE, AFTER)]
    assert [line.group for line in compare(*only_graded)] == [None, "hard", "easy"]


def test_an_alarm_where_a_watched_reward_falls_while_a_trained_one_rises() -> None:
    def with_watched(*watched: float) -> Evaluation:
        return replace(AFTER, scores={**AFTER.scores, "clip": watched})

    before = replace(BEFORE, scores={**BEFORE.scores, "clip": (0.5, 0.5, 0.5, 0.5)})
    fallen = with_watched(0.4, 0.3, 0.4, 0.3)
    (line,) = alarms(before, fallen, ("graded",))
    assert "held-out clip, not trained, fell by 0.150 ± 0.029 while graded rose" in line
    assert alarms(before, with_watched(0.4, 0.5, 0.6, 0.4), ("graded",)) == []
    assert alarms(before, fallen, ("graded", "clip")) == []
    assert alarms(fallen, before, ("graded",)) == []
    # Nothing that was trained has risen: a fall of the watched reward is no sign of hacking.
    assert alarms(before, replace(fallen, scores={**fallen.scores, **BEFORE.scores}), ("graded",)) == []


def rendered(*evaluations: Evaluation) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(evaluation_table(*evaluations))
    return console.export_text()


def test_table_shows_before_after_and_change() -> None:
    lines = [line.split() for line in rendered(BEFORE, AFTER).splitlines()]
    graded = next(line for line in lines if "graded" in line)
    assert {"0.425", "0.575", "+0.150", "0.065"} <= set(graded)
    hard = next(line for line in lines if "hard" in line)
    assert {"0.000", "0.500", "+0.500"} <= set(hard)
    alone = next(line for line in rendered(BEFORE).splitlines() if "graded" in line)
    assert "0.425 ± 0.085" in alone
    lost = replace(BEFORE, scores={"graded": (0.2, math.nan, math.nan, 0.6)}, groups=())
    assert "(2 missing)" in rendered(lost)


def test_files_bring_back_the_evaluation(tmp_path: Path) -> None:
    evaluation = replace(run(Drift(), group_by="task"), iteration=12)
    evaluation = replace(evaluation, scores={**evaluation.scores, "odd": (math.nan, 1.0, 2.0, 3.0, 4.0)})
    path = save_evaluation(evaluation, tmp_path)
    assert path == tmp_path / "evaluations" / "000012.json"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    assert content["rewards"]["odd"]["mean"] == pytest.approx(2.5)
    assert content["rewards"]["brightness"]["groups"]["one"]["count"] == 3
    back, layout = load_evaluation(path)
    assert math.isnan(back.scores["odd"][0])
    without_nan = {name: row for name, row in back.scores.items() if name != "odd"}
    assert replace(back, scores=without_nan) == replace(
        evaluation, scores={name: evaluation.scores[name] for name in without_nan}
    )
    assert back.images is None
    assert layout is not None
    assert evaluation.images is not None
    picture = read_png(tmp_path / "images" / "000012.png")
    for index, image in enumerate(to_pixels(evaluation.images)):
        left, top, right, bottom = tile_box(layout, index)
        tile = picture[top:bottom, left:right]
        enlarged = layout.enlarged
        assert tile.shape == (4 * enlarged, 4 * enlarged, 3)
        np.testing.assert_array_equal(tile[enlarged // 2 :: enlarged, enlarged // 2 :: enlarged], image)


def test_grid_enlarges_small_images_by_whole_pixels_and_leaves_large_ones(tmp_path: Path) -> None:
    small = torch.rand(5, 3, 6, 10, generator=torch.Generator().manual_seed(0))
    layout = save_grid(small, tmp_path / "small.png", columns=3, smallest_tile=20)
    assert (layout.tile_height, layout.tile_width, layout.enlarged) == (24, 40, 4)
    picture = read_png(tmp_path / "small.png")
    left, top, right, bottom = tile_box(layout, 4)
    tile = picture[top:bottom, left:right]
    np.testing.assert_array_equal(tile, to_pixels(small)[4].repeat(4, axis=0).repeat(4, axis=1))
    assert (picture[: layout.gap] == 255).all()
    large = save_grid(torch.rand(1, 3, 24, 24), tmp_path / "large.png", smallest_tile=20)
    assert (large.tile_height, large.enlarged) == (24, 1)
    with pytest.raises(ValueError, match="N at least 1"):
        save_grid(torch.rand(0, 3, 4, 4), tmp_path / "none.png")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {
                "path": str(build_tiny_flux(folder / "model")),
                "height": 16,
                "width": 16,
                "max_sequence_length": 8,
                "dtype": "float32",
                "device": "cpu",
            },
            "prompts": {"train": str(folder / "prompts.txt"), "heldout": str(folder / "prompts.txt")},
            "algorithm": {"num_steps": 2, "train_steps": [0], "group_size": 2, "strides": [1]},
            "rewards": ["test_evaluate:brightness"],
            "train": {"mixed_precision": "no"},
            "evaluation": {"batch_size": 3},
        }
    )


def finished_run(recipe: Recipe, run_dir: Path) -> Path:
    """A run whose only checkpoint holds half of the trained weights' values."""
    halved = {
        name: value.detach() * 0.5
        for name, value in trainable_parameters(build_model(recipe).network).items()
    }
    RunFolder(run_dir).create(recipe, {})
    save_checkpoint(RunFolder(run_dir).checkpoints, 5, {"weights": halved}, {}, keep_last=1)
    return run_dir


def test_evaluate_command_scores_a_recipe_and_a_run(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate_command(recipe, None, tmp_path / "base.json")
    run_dir = finished_run(recipe, tmp_path / "run")
    evaluate_command(recipe, run_dir, tmp_path / "trained.json")
    base, _ = load_evaluation(tmp_path / "base.json")
    trained, _ = load_evaluation(tmp_path / "trained.json")
    assert (base.iteration, trained.iteration) == (0, 5)
    assert base.prompts == ("a red circle", "a blue square")
    name = "test_evaluate:brightness"
    assert base.scores[name] != trained.scores[name]
    printed = capsys.readouterr().out
    assert f"{summarise(trained.scores[name]).mean:.3f}" in printed
    evaluate_command(recipe, run_dir, tmp_path / "steps.json", num_steps=(2, 5, 2))
    by_steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert list(by_steps) == ["2", "5"]
    assert by_steps["2"]["rewards"][name]["scores"] == pytest.approx(trained.scores[name], abs=1e-6)
    assert by_steps["5"]["rewards"][name]["mean"] != by_steps["2"]["rewards"][name]["mean"]
    header = next(line for line in capsys.readouterr().out.splitlines() if "5 steps" in line)
    assert header.split() == ["reward", "2", "steps", "5", "steps"]
    (run_dir / "checkpoints" / "000005" / "weights.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"run: no whole checkpoint; .*weights\.safetensors"):
        evaluate_command(recipe, run_dir, None)


def test_sample_command_writes_each_image_by_prompt_and_seed(recipe: Recipe, tmp_path: Path) -> None:
    prompts = PromptSet(("a red circle", "a/blue: square!"))
    sample_command(recipe, None, prompts, tmp_path / "two", count=2, seed=3)
    listed = [json.loads(line) for line in (tmp_path / "two" / "images.jsonl").read_text().splitlines()]
    assert sorted((entry["prompt"], entry["seed"]) for entry in listed) == [
        ("a red circle", 3),
        ("a red circle", 4),
        ("a/blue: square!", 3),
        ("a/blue: square!", 4),
    ]
    files = {(entry["prompt"], entry["seed"]): tmp_path / "two" / entry["file"] for entry in listed}
    pictures = {key: read_png(file) for key, file in files.items()}
    assert pictures["a red circle", 3].shape == (16, 16, 3)
    assert (pictures["a red circle", 3] != pictures["a red circle", 4]).any()
    # The same prompt and seed give the same image, however many are drawn.
    sample_command(recipe, None, prompts, tmp_path / "one", count=1, seed=4)
    again = next((tmp_path / "one").glob("0001-*.png"))
    assert again.name == "0001-a-blue-square-4.png"
    np.testing.assert_allclose(
        read_png(again).astype(int), pictures["a/blue: square!", 4].astype(int), atol=1
    )
    assert read_png(tmp_path / "two" / "grid.png").shape[1] > 2 * 16
