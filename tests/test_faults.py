"""Numbers that are not finite, rewards that fail: caught where they arise, kept, and brought about again."""

import io
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcredit import cli, trainer
from flowcredit.checkpoint import load_checkpoint, save_checkpoint
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.faults import KEPT, WEIGHTS, NonFinite, keep_fault, read_faults
from flowcredit.policy_loss import clipped_loss
from flowcredit.recipe_io import load_recipe
from flowcredit.scoring import RewardError
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)


def infinite_for_blue(images: Tensor, prompts: Sequence[str]) -> Tensor:
    scores = images.mean((1, 2, 3))
    scores[["blue" in prompt for prompt in prompts]] = torch.inf
    return scores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\n")
    content = {
        "name": "tiny",
        "model": {"path": str(root / "pipeline"), "height": 16, "width": 16, "max_sequence_length": 8},
        "prompts": dict.fromkeys(("train", "heldout"), str(root / "prompts.txt")),
        "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 3, "strides": [1]},
        "rewards": ["simple_rewards:brightness"],
        "train": {
            "iterations": 3,
            "prompts_per_iteration": 2,
            "mixed_precision": "no",
            "update": "accumulated",
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
        },
        "checkpoint": {"keep_last": 5},
        "evaluation": {"every": 0, "prompts": 2, "images": 0},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    return root


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "recipe.yaml", overrides)


def weights_after(run: Path, iteration: int) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/{iteration:06d}/weights.safetensors")


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def replay(place: Path, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    from flowcredit.replay import replay_command

    capsys.readouterr()
    again = replay_command(place)
    return again, capsys.readouterr().out


CHUNKS = 2
"""Batches of an iteration: each of its two prompts has one state to train on, whose images share it."""


def break_losses(monkeypatch: pytest.MonkeyPatch, calls: Collection[int]) -> list[int]:
    """Make no number of the clipped loss in some of its calls, counted from 1; returns what counts them."""
    made = [0]

    def broken(*args: Any) -> tuple[Tensor, dict[str, float]]:
        made[0] += 1
        loss, metrics = clipped_loss(*args)
        return (loss * torch.nan if made[0] in calls else loss), metrics

    monkeypatch.setattr("flowcredit.objectives.clipped_loss", broken)
    return made


def test_a_loss_that_is_no_number_stops_the_run_before_weights_move(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The last batch of the second iteration, and again where all are gone through to find it.
    break_losses(monkeypatch, {2 * CHUNKS, 3 * CHUNKS})
    run = tmp_path / "run"
    with pytest.raises(
        InputError, match=r"iteration 2: the loss is nan .*training has diverged.*replay"
    ) as caught:
        trainer.train(recipe_of(folder), run, QUIET)
    assert str(run / "faults/000001-loss") in str(caught.value)
    assert [record["iteration"] for record in log_of(run)] == [1]
    (kept,) = read_faults(run / "faults/000001-loss")
    assert kept.fault.tensors["x"].shape[0] == 1
    assert all(torch.equal(v, kept.weights[name]) for name, v in weights_after(run, 1).items())
    again, said = replay(run / "faults/000001-loss", capsys)
    assert again
    assert "the loss is at fault" in said
    monkeypatch.undo()
    trainer.resume(run, console=QUIET)
    assert [record["iteration"] for record in log_of(run)] == [1, 2, 3]


def test_skipped_steps_change_nothing_and_are_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of the second iteration, and the first of them again.
    break_losses(monkeypatch, range(CHUNKS + 1, 2 * CHUNKS + 2))
    run, said = tmp_path / "run", io.StringIO()
    trainer.train(recipe_of(folder, "train.on_nonfinite=skip"), run, Console(file=said, width=300))
    assert "iteration 2: the loss is nan" in said.getvalue()
    assert "optimizer step skipped" in said.getvalue()
    assert [record["skipped_steps"] for record in log_of(run)] == [0, 1, 0]
    assert "grad_norm" not in log_of(run)[1]
    one, two, three = (weights_after(run, iteration) for iteration in (1, 2, 3))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert any(not torch.equal(value, three[name]) for name, value in two.items())


@pytest.mark.parametrize("where", ["proj_out.weight", "x_embedder.weight"])
def test_velocities_that_are_no_numbers_are_found_where_they_arise(
    folder: Path, tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is stopped, its weights are damaged and it is resumed: as after a broken update."""
    run = tmp_path / "run"
    trainer.train(recipe_of(folder, "train.iterations=1"), run, QUIET)
    left = load_checkpoint(run / "checkpoints/000001")
    weights = left.groups["weights"]
    weights[where].fill_(3e38)
    save_checkpoint(run / "checkpoints", 1, left.groups, left.state, keep_last=5)
    with pytest.raises(NonFinite, match=r"velocities at sigma 1 contain NaN or infinity.*flowcredit replay"):
        trainer.resume(run, ["train.iterations=2"], QUIET)
    again, said = replay(run / "faults/000001-velocity", capsys)
    assert again
    assert f"the velocity is not finite, first in {where.removesuffix('.weight')}\n" in said
    # With other weights it does not come again, and the exit code says so.
    save_file(
        weights_after(run, 1) | {where: torch.zeros_like(weights[where])},
        run / "faults/000001-velocity/weights.safetensors",
    )
    assert replay(run / "faults/000001-velocity", capsys)[0] is False


def test_gradients_that_are_no_numbers_name_their_tensor(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    break_losses(monkeypatch, {1, CHUNKS + 1})
    with pytest.raises(InputError, match="the loss is nan"):
        trainer.train(recipe_of(folder), run, QUIET)
    place = run / "faults/000000-loss"
    batch = load_file(place / "batch-0.safetensors")
    save_file({**batch, "grad_v": torch.full_like(batch["grad_v"], 3e38)}, place / "batch-0.safetensors")
    again, said = replay(place, capsys)
    assert again
    assert "first on the way back proj_out." in said
    save_file({**batch, "grad_v": torch.ones_like(batch["grad_v"])}, place / "batch-0.safetensors")
    assert replay(place, capsys)[0] is False


def test_an_infinite_reward_is_kept_with_its_image_and_prompt(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = "rewards=['test_faults:infinite_for_blue']"
    run = tmp_path / "run"
    with pytest.raises(RewardError, match=r"'a blue square'.*it returned inf.*flowcredit replay"):
        trainer.train(recipe_of(folder, rewards, "evaluation.prompts=1"), run, QUIET)
    (kept,) = read_faults(run / "faults/000000-reward")
    assert kept.fault.details["prompts"] == ["a blue square"]
    assert kept.fault.tensors["images"].shape == (1, 3, 16, 16)
    assert not kept.weights
    again, said = replay(run / "faults/000000-reward", capsys)
    assert again
    assert "it returned inf" in said
    skipping = tmp_path / "skipping"
    trainer.train(recipe_of(folder, rewards, "scoring.on_error=skip"), skipping, QUIET)
    assert sum(record["failed/test_faults:infinite_for_blue"] for record in log_of(skipping)) > 0
    assert 1 <= len(list((skipping / "faults").iterdir())) <= KEPT


def test_a_fault_that_the_disk_refuses_names_its_place(tmp_path: Path) -> None:
    recipe = load_recipe(Path(__file__).parents[1] / "recipes" / "shapes_g2rpo.yaml")
    place = tmp_path / "000003-loss"
    (place / WEIGHTS).mkdir(parents=True)
    with pytest.raises(InputError, match=f"{place}: cannot be written"):
        keep_fault(place, None, 3, 0, recipe, {"w": torch.ones(2)})


def test_a_folder_without_a_fault_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fault-0.json").write_text('{"kind": "loss"}')
    for place, told in ((tmp_path / "none", "holds no fault-"), (tmp_path, "cannot be read as a fault")):
        monkeypatch.setattr("sys.argv", ["flowcredit", "replay", str(place)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        line = capsys.readouterr().err
        assert told in line
        assert line.count("\n") == 1
