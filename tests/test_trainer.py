"""The whole loop on a tiny genuine pipeline: it learns, it resumes exactly, it survives being killed."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from flowcredit import trainer
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.evaluate import summarise
from flowcredit.evaluation_files import load_evaluation
from flowcredit.recipe_io import load_recipe
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pipeline, prompts and a recipe."""
    root = tmp_path_factory.mktemp("trainer")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\na green cross\n")
    recipe = {
        "name": "tiny",
        "model": {
            "path": str(root / "pipeline"),
            "height": 32,
            "width": 32,
            "max_sequence_length": 12,
            "dtype": "float32",
        },
        "prompts": {"train": str(root / "prompts.txt"), "heldout": str(root / "prompts.txt")},
        "algorithm": {"name": "g2rpo", "num_steps": 4, "group_size": 4, "strides": [1, 2]},
        "rewards": [{"name": "simple_rewards:redness"}],
        "watch": [{"name": "simple_rewards:brightness"}],
        "train": {
            "iterations": 4,
            "prompts_per_iteration": 2,
            "learning_rate": 1e-3,
            "mixed_precision": "no",
            "micro_batch_size": 8,
        },
        "rollout": {"batch_size": 32},
        "scoring": {"batch_size": 32},
        "evaluation": {"every": 2, "prompts": 3, "images": 3},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "recipe.yaml", overrides)


def same_tensors(a: Path, b: Path) -> None:
    names = sorted(file.name for file in a.glob("*.safetensors"))
    assert names == sorted(file.name for file in b.glob("*.safetensors"))
    assert names
    for name in names:
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert torch.equal(value, right[key]), (name, key)


def log_of(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


VARIANTS = {
    "full": (),
    "per_step": ("train.update=per_step",),
    "lora, ema": ("weights.method=lora", "weights.rank=4", "weights.alpha=8", "train.ema_decay=0.9"),
    "accumulated, bf16": ("train.update=accumulated", "train.mixed_precision=bf16"),
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_four_iterations_are_two_and_two(folder: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trainer.train(recipe_of(folder, *overrides), whole, QUIET)
    trainer.train(recipe_of(folder, *overrides, "train.iterations=2"), halves, QUIET)
    middle = load_file(halves / "checkpoints/000002/weights.safetensors")
    trainer.resume(halves, ["train.iterations=4"], QUIET)
    same_tensors(whole / "checkpoints/000004", halves / "checkpoints/000004")
    assert log_of(whole) == log_of(halves)
    assert [record["iteration"] for record in log_of(whole)] == [1, 2, 3, 4]
    scores = [load_evaluation(run / "evaluations/000004.json")[0].scores for run in (whole, halves)]
    assert scores[0] == scores[1]
    end = load_file(halves / "checkpoints/000004/weights.safetensors")
    assert any(not torch.equal(value, middle[key]) for key, value in end.items())


def test_on_policy_ratio_is_logged_and_one(folder: Path, tmp_path: Path) -> None:
    trainer.train(recipe_of(folder), tmp_path / "run", QUIET)
    for record in log_of(tmp_path / "run"):
        assert record["on_policy_deviation"] < 1e-5
        # With one optimizer step for each trained grid step, the later ratios have moved.
        assert record["ratio_max_deviation"] > record["on_policy_deviation"]
        # By hand, a prompt: 2 of the trunk; 4 branches of step 0 with 3 fine states and 1 coarse one; 4 of
        # step 1 with 2, whose coarse path is the fine one.
        assert record["velocity_evaluations"] == record["iteration"] * 2 * (2 + 4 * 4 + 4 * 2)


def test_the_reward_goes_up(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(
        folder,
        "train.iterations=25",
        "train.learning_rate=3e-3",
        "evaluation.every=0",
        "train.update=accumulated",
    )
    trainer.train(recipe, tmp_path / "run", QUIET)
    before, after = (
        load_evaluation(tmp_path / f"run/evaluations/{iteration:06d}.json")[0] for iteration in (0, 25)
    )
    reward = "simple_rewards:redness"
    gain = summarise(after.scores[reward]).mean - summarise(before.scores[reward]).mean
    assert gain > 0.02
    assert (tmp_path / "run/final/model_index.json").is_file()


HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])


def start(folder: Path, run: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    command = [sys.executable, "-m", "flowcredit", "train", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_lines(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_process_loses_no_finished_iteration(
    folder: Path, tmp_path: Path, kind: signal.Signals
) -> None:
    run = tmp_path / "runs/tiny"
    rare = ("checkpoint.every=100",) if kind == signal.SIGTERM else ()
    process = start(folder, run, "recipe.yaml", f"output={tmp_path / 'runs'}", "train.iterations=200", *rare)
    wait_for_lines(run / "log.jsonl", 3, process)
    process.send_signal(kind)
    _, errors = process.communicate(timeout=60)
    if kind != signal.SIGKILL:
        assert process.returncode == 128 + kind, errors
        assert "--resume" in errors
    finished = len(log_of(run)) if kind != signal.SIGKILL else 2
    assert int(max((run / "checkpoints").glob("0*")).name) >= finished
    # Goes on exactly: as a run of that many iterations that was never stopped.
    total = max(len(log_of(run)), 4) + 1
    trainer.resume(run, [f"train.iterations={total}"], QUIET)
    trainer.train(recipe_of(folder, f"train.iterations={total}"), tmp_path / "whole", QUIET)
    same_tensors(run / f"checkpoints/{total:06d}", tmp_path / f"whole/checkpoints/{total:06d}")
    assert log_of(run) == log_of(tmp_path / "whole")


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(folder: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    trainer.train(recipe_of(folder), whole, QUIET)
    trainer.train(recipe_of(folder, "train.iterations=3"), run, QUIET)
    file = run / "checkpoints/000003/weights.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with (run / "log.jsonl").open("a") as log:
        log.write('{"iteration": 4, "rew')
    console = Console(record=True, width=200, file=io.StringIO())
    trainer.resume(run, ["train.iterations=4"], console)
    text = console.export_text()
    assert "000003/weights.safetensors" in text
    assert "SHA-256" in text
    assert "after iteration 2" in text
    same_tensors(run / "checkpoints/000004", whole / "checkpoints/000004")
    assert log_of(run) == log_of(whole)


def test_a_resumed_run_may_not_become_another(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer.train(recipe_of(folder, "train.iterations=1"), run, QUIET)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    with pytest.raises(InputError, match=r"train.learning_rate: 0.001 -> 0.01.*another run"):
        trainer.resume(run, ["train.learning_rate=0.01"], QUIET)
    with pytest.raises(InputError, match="exists already"):
        trainer.train(recipe_of(folder), run, QUIET)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    with pytest.raises(InputError, match="no run to resume"):
        trainer.resume(tmp_path / "nowhere", [], QUIET)


def test_nothing_is_made_where_a_part_cannot_be_had(folder: Path, tmp_path: Path) -> None:
    for override, message in [
        ("rewards.0.name=shapes", "needs the column"),
        ("model.path=nowhere", "nowhere"),
        ("model.height=33", "height is 33"),
        ("model.device=nonsense", "model.device"),
        ("weights={method: lora, targets: [nothing]}", "nothing"),
    ]:
        with pytest.raises(InputError, match=message):
            trainer.train(recipe_of(folder, override), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()
