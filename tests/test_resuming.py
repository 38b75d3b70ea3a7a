"""What a run's folder must still hold to go on, and what is said of what is gone."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from flowcredit import trainer
from flowcredit.errors import InputError
from flowcredit.recipe_io import load_recipe
from flowcredit.resuming import read_back
from flowcredit.run_folder import RunFolder
from flowcredit.scoring import RewardError
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resuming")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\n")
    content = {
        "name": "tiny",
        "model": {
            "path": str(root / "pipeline"),
            "height": 16,
            "width": 16,
            "max_sequence_length": 8,
            "dtype": "float32",
        },
        "prompts": dict.fromkeys(("train", "heldout"), str(root / "prompts.txt")),
        "algorithm": {"name": "g2rpo", "num_steps": 2, "group_size": 2, "strides": [1]},
        "rewards": ["simple_rewards:redness"],
        "train": {"iterations": 2, "prompts_per_iteration": 1, "mixed_precision": "no"},
        "checkpoint": {"keep_last": 1},
        "evaluation": {"every": 0, "prompts": 2, "images": 0},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    return root / "recipe.yaml"


@pytest.fixture(scope="module")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    trainer.train(load_recipe(recipe), run, QUIET)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_recipe_edited_by_hand_is_refused_unless_it_may_change(run: Path) -> None:
    assert read_back(run).checkpoint is not None
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("seed: 0", "seed: 5", 1))
    with pytest.raises(
        InputError, match=r"recipe\.yaml: was changed .*\(seed: 0 -> 5\): it would be another run"
    ):
        read_back(run)
    (run / "recipe.yaml").write_text(text.replace("iterations: 2", "iterations: 3", 1))
    assert read_back(run).recipe.train.iterations == 3


def test_where_the_run_lies_is_no_setting_of_a_resumed_one(run: Path) -> None:
    with pytest.raises(InputError, match='cannot change output: "runs" -> "elsewhere"'):
        read_back(run, ["output=elsewhere"])


def test_a_refusal_tells_all_that_differs(run: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_back(run, ["seed=5", "noise.eta=0.5", "train.iterations=9", "watch=[sharpness]"])
    assert "cannot change seed: 0 -> 5; noise.eta: 0.7 -> 0.5; watch.0.name: null" in str(caught.value)
    assert "train.iterations: " not in str(caught.value)


def test_finished_iterations_without_a_checkpoint_are_not_begun_anew(run: Path) -> None:
    weights = run / "checkpoints" / "000002" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    told = r"tells of 2 finished iterations, but no checkpoint is whole \(.*SHA-256 differs"
    with pytest.raises(InputError, match=told):
        read_back(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match=r"2 finished iterations, .* \(nothing in "):
        read_back(run)
    # Of the first iteration a line may be there, and its checkpoint not yet.
    (run / "log.jsonl").write_text('{"iteration": 1, "seconds": 1.0}\n')
    left = read_back(run)
    assert left.checkpoint is None
    assert left.notes == ("the run was stopped before its first checkpoint: it begins again",)
    # A run that was stopped before its first iteration has nothing to lose.
    (run / "log.jsonl").unlink()
    assert read_back(run).checkpoint is None


def test_what_else_is_gone_is_told_and_the_run_goes_on(run: Path) -> None:
    (run / "log.jsonl").write_text('{"iteration": 2, "seconds": 1.0}\n')
    (run / "evaluations" / "000000.json").unlink()
    out = io.StringIO()
    trainer.resume(run, ["train.iterations=3"], Console(file=out, width=300))
    said = out.getvalue()
    assert "log.jsonl has no line on 1 of the finished iterations, first 1" in said
    assert "000000.json is missing: there will be no comparison" in said
    assert "after 3 iterations" in said
    iterations = [json.loads(line)["iteration"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert iterations == [2, 3]
    assert "all 3 iterations are finished" in read_back(run).notes[-1]


def test_lines_of_the_log_that_are_none_are_passed_over(run: Path) -> None:
    with (run / "log.jsonl").open("a") as log:
        log.write('{"itgration": 2}\n7\n[1]\n{"iteration": "2"}\n{"iteration": 2, "los')
    assert RunFolder(run).logged_iterations() == {1, 2}
    RunFolder(run).cut_log(2)
    assert len((run / "log.jsonl").read_text().splitlines()) == 2


def test_a_run_killed_as_its_folder_was_made_can_begin_again(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / ".run.partial").mkdir()
    (tmp_path / ".run.partial" / "recipe.yaml.partial").write_text("nam")
    RunFolder(tmp_path / "run").create(load_recipe(recipe), {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    made = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert made == {"recipe.yaml", "environment.json", "inputs.json"}


def test_one_process_at_a_time_works_in_a_run(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flowcredit import trainer;"
        " trainer.resume(Path(sys.argv[1]), ['train.iterations=3'])"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    with RunFolder(run).owned():
        other = subprocess.run(
            [sys.executable, "-c", code, str(run)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
    assert other.returncode != 0
    assert "another process is at work in this run" in other.stderr
    trainer.resume(run, ["train.iterations=3"], QUIET)


def failing(images: torch.Tensor, prompts: list[str]) -> list[float]:
    """Fails from its fourth call on: an evaluation and two iterations come before."""
    CALLS.append(len(images))
    if len(CALLS) >= 4:
        raise RuntimeError("no more")
    return images.mean((1, 2, 3)).tolist()


CALLS: list[int] = []


def test_a_reward_that_fails_loses_no_finished_iteration(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    CALLS.clear()
    rare = ["rewards=[test_resuming:failing]", "checkpoint.every=100", "train.iterations=4"]
    with pytest.raises(RewardError, match=r"no more .* set scoring\.on_error=skip"):
        trainer.train(load_recipe(recipe, rare), run, QUIET)
    left = read_back(run).checkpoint
    assert left is not None
    assert left.iteration == 2


def constant(images: torch.Tensor, prompts: list[str]) -> list[float]:
    return [0.5] * len(images)


def test_a_run_that_learns_nothing_says_so_and_stops(recipe: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    silent = ["rewards=[test_resuming:constant]", "train.iterations=9"]
    with pytest.raises(InputError, match="the first 5 iterations taught nothing: no group had two images"):
        trainer.train(load_recipe(recipe, silent), tmp_path / "run", Console(file=out, width=300))
    assert out.getvalue().count("nothing was learned in this iteration") == 4


def test_skipped_failures_are_told_with_their_reason(recipe: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    overrides = ["rewards=[simple_rewards:redness, test_resuming:leaving]", "scoring.on_error=skip"]
    trainer.train(load_recipe(recipe, overrides), tmp_path / "run", Console(file=out, width=300))
    told = "reward test_resuming:leaving failed on 2 images, which are skipped; the first said: SystemExit: 3"
    assert told in out.getvalue()
    assert "2 of 2 held-out prompts are also trained on" in out.getvalue()


def leaving(images: torch.Tensor, prompts: list[str]) -> list[float]:
    sys.exit(3)
