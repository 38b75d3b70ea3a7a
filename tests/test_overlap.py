"""Rewards that are called while the next prompts are rolled out: the same results, errors and interrupts."""

import io
import json
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from flowcredit import trainer
from flowcredit.background import WAITING, beside
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.evaluation_files import load_evaluation
from flowcredit.recipe_io import load_recipe
from flowcredit.rollout import rollout
from flowcredit.scoring import RewardError
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)
SECOND_PART_BEGAN = threading.Event()
PATIENCE_S = 20.0


def moody(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward with draws of its own, so that the order of its calls matters."""
    return images.mean((1, 2, 3)) + 0.01 * torch.rand(len(images))


def patient(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Has no answer before the second part of the prompts is rolled out."""
    if not SECOND_PART_BEGAN.wait(PATIENCE_S):
        raise RuntimeError("the second part has not begun")
    return images.mean((1, 2, 3))


def refuses_blue(images: Tensor, prompts: Sequence[str]) -> Tensor:
    if any("blue" in prompt for prompt in prompts):
        raise ValueError("no blue")
    return images.mean((1, 2, 3))


def never(images: Tensor, prompts: Sequence[str]) -> Tensor:
    threading.Event().wait()
    raise AssertionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overlap")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\na green cross\na white star\n")
    content = {
        "name": "tiny",
        "model": {"path": str(root / "pipeline"), "height": 16, "width": 16, "max_sequence_length": 8},
        "prompts": dict.fromkeys(("train", "heldout"), str(root / "prompts.txt")),
        "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 3, "strides": [1, 2]},
        "rewards": ["test_overlap:moody"],
        "rollout": {"prompts": 1},
        "train": {
            "iterations": 2,
            "prompts_per_iteration": 3,
            "mixed_precision": "no",
            "micro_batch_size": 8,
            "learning_rate": 1e-3,
        },
        "scoring": {"batch_size": 2, "overlap": True},
        "evaluation": {"every": 0, "prompts": 3, "images": 3, "batch_size": 1},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    return root


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "recipe.yaml", overrides)


def left_by(run: Path) -> dict[str, Any]:
    """What a run leaves, without its seconds."""
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    weights = max(run.glob("checkpoints/*")) / "weights.safetensors"
    records = [{key: value for key, value in each.items() if key != "seconds"} for each in log]
    scores = [load_evaluation(file)[0].scores for file in sorted(run.glob("evaluations/*.json"))]
    return {"log": records, "scores": scores, "weights": weights.read_bytes(), "tensors": load_file(weights)}


def test_a_run_is_the_same_to_the_last_bit_with_and_without(folder: Path, tmp_path: Path) -> None:
    left = []
    for overlap in ("true", "false"):
        torch.manual_seed(0)
        trainer.train(recipe_of(folder, f"scoring.overlap={overlap}"), tmp_path / overlap, QUIET)
        left.append(left_by(tmp_path / overlap))
    for name in ("log", "scores", "weights"):
        assert left[0][name] == left[1][name]
    assert left[0]["log"][0]["image_spread"] > 0


@pytest.mark.parametrize("method", ["g2rpo", "coca", "neighbor_grpo", "dpo"])
def test_parts_of_the_prompts_change_nothing_but_rounding(folder: Path, tmp_path: Path, method: str) -> None:
    """Methods that keep transitions, leaves, recorded steps and pairs of the parts."""
    changes = ["rewards=['simple_rewards:brightness']", "train.iterations=1"]
    if method != "g2rpo":
        changes.append(f"algorithm={{name: {method}, num_steps: 4, group_size: 4}}")
    for prompts in ("2", "null"):
        trainer.train(recipe_of(folder, *changes, f"rollout.prompts={prompts}"), tmp_path / prompts, QUIET)
    two, every = (left_by(tmp_path / name) for name in ("2", "null"))
    assert two["log"][0].keys() == every["log"][0].keys()
    assert two["log"][0] == pytest.approx(every["log"][0], rel=1e-3, abs=1e-5)
    assert two["scores"][0] == every["scores"][0]
    assert all(
        torch.allclose(value, every["tensors"][name], atol=1e-5) for name, value in two["tensors"].items()
    )


def test_a_reward_is_asked_while_the_next_prompts_are_rolled_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the other: the reward answers once the second part runs, and that runs before."""
    parts = []

    def counting(*args: Any, **keywords: Any) -> Any:
        parts.append(1)
        if len(parts) == 2:
            SECOND_PART_BEGAN.set()
        return rollout(*args, **keywords)

    monkeypatch.setattr("flowcredit.sampling.rollout", counting)
    monkeypatch.setattr(trainer, "_evaluate_if_due", lambda *_: None)
    monkeypatch.setattr(trainer, "_finish", lambda *_: None)
    # A part has one batch then, and so the main thread does not wait before the second part.
    changes = ("rewards=['test_overlap:patient']", "scoring.batch_size=32", "train.iterations=1")
    SECOND_PART_BEGAN.clear()
    trainer.train(recipe_of(folder, *changes), tmp_path / "run", QUIET)
    assert len(parts) == 3
    parts.clear()
    SECOND_PART_BEGAN.clear()
    monkeypatch.setattr("test_overlap.PATIENCE_S", 0.0)
    with pytest.raises(RewardError, match="the second part has not begun"):
        trainer.train(recipe_of(folder, *changes, "scoring.overlap=false"), tmp_path / "waiting", QUIET)


def test_a_failing_reward_is_told_as_without(folder: Path, tmp_path: Path) -> None:
    told = []
    for overlap in ("true", "false"):
        recipe = recipe_of(folder, "rewards=['test_overlap:refuses_blue']", f"scoring.overlap={overlap}")
        with pytest.raises(RewardError) as caught:
            trainer.train(recipe, tmp_path / overlap, QUIET)
        told.append(str(caught.value).replace(str(tmp_path / overlap), "RUN"))
    assert told[0] == told[1]
    assert "'a blue square'" in told[0]
    assert "no blue" in told[0]
    skipping = recipe_of(folder, "rewards=['test_overlap:refuses_blue']", "scoring.on_error=skip")
    console = Console(file=io.StringIO(), width=200)
    trainer.train(skipping, tmp_path / "skipping", console)
    failed = [each["failed/test_overlap:refuses_blue"] for each in left_by(tmp_path / "skipping")["log"]]
    assert sum(failed) > 0


def test_interrupts_do_not_wait_for_a_reward_that_hangs() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    def hang() -> None:
        threading.Event().wait()

    with beside(stop) as submit:
        for _ in range(WAITING):
            submit(hang)
        with pytest.raises(Stop):
            # One of them runs, so there is room for one more, and not for two.
            [submit(hang) for _ in range(2)]


def test_after_a_failure_nothing_is_begun() -> None:
    begun = []

    def fail() -> None:
        raise ValueError("first")

    with beside(lambda: None) as submit:
        first = submit(fail)
        with pytest.raises(ValueError, match="first"):
            first.result(timeout=10)
        with pytest.raises(ValueError, match="first"):
            submit(lambda: begun.append(1))
    assert not begun


def test_calls_keep_their_order_and_this_thread_of_kernels() -> None:
    told: list[int] = []
    with beside(lambda: None) as submit:
        threads = submit(torch.get_num_threads)
        done = [submit(partial(told.append, n)) for n in range(20)]
        for each in done:
            each.result(timeout=10)
        assert threads.result(timeout=10) == torch.get_num_threads()
    assert told == list(range(20))


def test_overlap_and_offload_exclude_each_other(folder: Path) -> None:
    with pytest.raises(InputError, match=r"scoring\.overlap.*scoring\.offload.*one of the two"):
        recipe_of(folder, "scoring.offload=true")
