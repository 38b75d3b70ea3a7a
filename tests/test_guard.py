"""A policy that collapses: seen, told, stopped or brought back; and the checkpoints that are kept for it."""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from flowcredit import cli, trainer
from flowcredit.checkpoint import kept_iterations, load_checkpoint
from flowcredit.comparison import Evaluation
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.evaluate import evaluate
from flowcredit.evaluation_files import save_evaluation
from flowcredit.guard import Collapse, Guard, guard_of
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder
from flowcredit.running import GuardSettings
from flowcredit.standing import best_iterations, standing
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)
PROMPTS = tuple(f"prompt {n}" for n in range(16))


def evaluation(iteration: int, *shifts: float, reward: str = "a") -> Evaluation:
    """Scores 0 to 15, moved by shifts in turn."""
    scores = tuple(n + shifts[n % len(shifts)] for n in range(16))
    return Evaluation(iteration, PROMPTS, {reward: scores})


def judged(settings: GuardSettings, *evaluations: Evaluation) -> list[str | None]:
    guard = Guard(settings, {"a": 1.0})
    return [guard.judge(each) for each in evaluations]


def test_a_reward_clearly_below_the_beginning_is_a_collapse() -> None:
    """By hand: changes of -1 ± 0.5 by turns have mean -1 and deviation 0.5 sqrt(16/15), so an error of 0.129:
    7.7 errors below; those of -1 ± 3 an error of 0.775, 1.3 below."""
    settings = GuardSettings()
    before = evaluation(0, 0.0)
    said = judged(settings, before, evaluation(10, -0.5, -1.5))
    assert said == [None, "held-out a has fallen by 1 ± 0.13 from what it was before training"]
    assert judged(settings, before, evaluation(10, 2.0, -4.0)) == [None, None]
    assert judged(GuardSettings(heldout_errors=8.0), before, evaluation(10, -0.5, -1.5)) == [None, None]


def test_a_gain_that_is_lost_again_is_a_collapse_where_more_than_half_is_gone() -> None:
    before, best = evaluation(0, 0.0), evaluation(10, 4.0)
    assert judged(GuardSettings(), before, best, evaluation(20, 1.9, 2.3))[2] is None
    said = judged(GuardSettings(), before, best, evaluation(20, 1.5, 1.9))[2]
    assert said is not None
    assert said.startswith("held-out a has fallen by 2.3")
    assert said.endswith("from what it was at iteration 10")
    # The best stays the measure: a slow decline is no way around it.
    slow = [evaluation(10 * n, 4.0 - 0.4 * n, 3.8 - 0.4 * n) for n in range(2, 7)]
    assert judged(GuardSettings(), before, best, *slow)[-1] is not None


def test_too_few_prompts_are_not_judged_by() -> None:
    few = [Evaluation(n, PROMPTS[:15], {"a": (s,) * 15}) for n, s in ((0, 1.0), (5, -50.0))]
    assert judged(GuardSettings(), *few) == [None, None]


def test_signs_of_iterations_count_in_a_row() -> None:
    settings = GuardSettings(kl=0.5, ratio=2.0, clip_fraction=0.9, patience=2, action="stop")

    def looked(*records: Mapping[str, Any]) -> list[str | None]:
        guard = Guard(settings, {"a": 1.0})
        return [guard.look(each) for each in records]

    high, low = {"kl_reference": 0.6}, {"kl_reference": 0.4}
    assert looked(high, low, high) == [None, None, None]
    assert looked(high, high, high)[1:] == [
        "the KL divergence from the reference is 0.6, above 0.5, in 2 iterations in a row",
        "the KL divergence from the reference is 0.6, above 0.5, in 3 iterations in a row",
    ]
    clipped = {"clip_fraction_low": 0.5, "clip_fraction_high": 0.45}
    assert (
        looked(clipped, clipped)[1]
        == "95% of the ratios are clipped, more than 90%, in 2 iterations in a row"
    )
    assert "strays from 1 by 3" in str(looked({"ratio_max_deviation": 3.0}, {"ratio_max_deviation": 3.0})[1])
    alike = [{"image_spread": value} for value in (0.2, 0.021, 0.019, 0.019)]
    assert looked(*alike)[:3] == [None] * 3
    assert "differ by 0.019, 0.2 at first" in str(looked(*alike)[3])
    lost = {"skipped_steps": 2}
    assert "every optimizer step was skipped" in str(looked(lost, lost)[1])
    assert looked({**lost, "grad_norm": 1.0}, {**lost, "grad_norm": 1.0}) == [None, None]
    assert Guard(GuardSettings(), {"a": 1.0}).look({"ratio_max_deviation": 1e9, "kl_reference": 1e9}) is None


def test_rollouts_far_below_the_first_are_a_sign() -> None:
    """By hand: 0 to 15 has the standard deviation sqrt(16 * 17 / 12) = 4.761, so the difference of two means
    of 8 prompts an error of 2.380, and four of them are 9.522."""

    def looked(base: Evaluation | None, *means: float | None) -> list[str | None]:
        guard = Guard(GuardSettings(patience=2, action="stop"), {"a": 1.0})
        if base is not None:
            guard.judge(base)
        return [guard.look({"prompts": 8, "reward/a": mean}) for mean in means]

    before = evaluation(0, 0.0)
    assert looked(before, None, 10.0, 0.47, 0.47)[:3] == [None] * 3
    assert (
        looked(before, None, 10.0, 0.47, 0.47)[3]
        == "a in rollouts is 0.47, 10 at first, in 2 iterations in a row"
    )
    assert looked(before, 10.0, 0.49, 0.49) == looked(None, 10.0, 0.0, 0.0) == [None] * 3
    assert looked(before, 10.0, 0.47, 10.0, 0.47) == [None] * 4


def test_a_reward_of_negative_weight_shall_fall() -> None:
    before, down, up = evaluation(0, 0.0), evaluation(10, -0.5, -1.5), evaluation(20, 0.5, 1.5)
    guard = Guard(GuardSettings(patience=1, action="stop"), {"a": -1.0, "b": 0.0})
    assert [guard.judge(before), guard.judge(down)] == [None, None]
    assert guard.judge(up) == "held-out a has risen by 1 ± 0.13 from what it was before training"
    first, fallen, risen = (guard.look({"prompts": 8, "reward/a": mean}) for mean in (10.0, 0.0, 20.0))
    assert (first, fallen) == (None, None)
    assert risen is not None


def test_a_warning_is_given_once() -> None:
    guard = Guard(GuardSettings(kl=0.5, patience=2, action="warn"), {"a": 1.0})
    said = [guard.look({"kl_reference": 0.6}) is not None for _ in range(5)]
    assert said == [False, True, False, False, False]


def test_the_standing_is_in_deviations_before_training() -> None:
    """By hand: 0 to 15 has the standard deviation sqrt(16 * 17 / 12); with a weight of 2, a change of 1."""
    found = standing(evaluation(0, 0.0), evaluation(1, 1.0), {"a": 2.0})
    assert found == pytest.approx(2 / math.sqrt(16 * 17 / 12))
    assert math.isnan(
        standing(evaluation(0, 0.0), Evaluation(1, PROMPTS, {"a": (math.nan,) * 16}), {"a": 1.0})
    )


def test_what_a_guard_knows_is_read_back_from_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for each in (evaluation(0, 0.0), evaluation(2, 4.0), evaluation(4, 3.0)):
        save_evaluation(each, tmp_path)
    for iteration, spread in enumerate((0.5, 0.01, 0.01, 0.01), start=1):
        folder.append_log(
            {"iteration": iteration, "image_spread": spread, "prompts": 8, "reward/a": -iteration}
        )
    guard = guard_of(folder, GuardSettings(action="stop"), {"a": 1.0}, 3)
    assert guard.best is not None
    assert (guard.best.iteration, guard.first_spread, guard.streaks["image_spread"]) == (2, 0.5, 2)
    assert guard.first_rewards == {"a": -1}
    assert guard.look({"image_spread": 0.01}) is not None
    assert best_iterations(folder, {"a": 1.0}, 1) == [2]
    assert best_iterations(folder, {"a": -1.0}, 5) == [4, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("guard")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("".join(f"a red circle, {n}\n" for n in range(16)))
    content = {
        "name": "tiny",
        "model": {"path": str(root / "pipeline"), "height": 16, "width": 16, "max_sequence_length": 8},
        "prompts": dict.fromkeys(("train", "heldout"), str(root / "prompts.txt")),
        "algorithm": {"name": "g2rpo", "num_steps": 2, "group_size": 3, "strides": [1]},
        "rewards": ["simple_rewards:brightness"],
        "train": {
            "iterations": 5,
            "prompts_per_iteration": 1,
            "mixed_precision": "no",
            "learning_rate": 1e-3,
        },
        "rollout": {"batch_size": 16},
        "evaluation": {"every": 1, "prompts": 16, "images": 0, "batch_size": 16},
        "checkpoint": {"keep_last": 1},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    return root


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "recipe.yaml", overrides)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def collapse_at(monkeypatch: pytest.MonkeyPatch, iterations: set[int]) -> list[int]:
    """Have evaluations of some iterations, once each, find everything far worse; returns those that were."""
    left, seen = set(iterations), []

    def worse(*args: Any, **keywords: Any) -> Evaluation:
        found = evaluate(*args, **keywords)
        seen.append(found.iteration)
        # Every evaluation is a little better than the one before, so that the newest good one is the best.
        shift = -9.0 if found.iteration in left else 0.01 * found.iteration
        left.discard(found.iteration)
        scores = {name: tuple(n / 100 + shift for n in range(16)) for name in found.scores}
        return Evaluation(found.iteration, found.prompts, scores)

    monkeypatch.setattr("flowcredit.trainer.evaluate", worse)
    return seen


def test_a_run_stops_and_says_why_and_may_go_on_regardless(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    collapse_at(monkeypatch, {3, 4})
    with pytest.raises(
        Collapse, match=r"collapsed at iteration 3: held-out .* has fallen by .*of iteration 2;"
    ):
        trainer.train(recipe_of(folder, "guard.action=stop", "checkpoint.keep_best=1"), run, QUIET)
    assert kept_iterations(run / "checkpoints") == [2, 3]
    assert not (run / "final").exists()
    # Given the same command it says the same, without another iteration.
    with pytest.raises(Collapse, match="collapsed at iteration 3"):
        trainer.resume(run, console=QUIET)
    assert len(log_of(run)) == 3
    said = io.StringIO()
    trainer.resume(run, ["guard.action=warn"], Console(file=said, width=300))
    assert "collapse at iteration 4" in said.getvalue()
    assert "; warned" in said.getvalue()
    assert (run / "final").is_dir()
    notes = [json.loads(line)["done"] for line in (run / "guard.jsonl").read_text().splitlines()]
    assert notes == ["stopped", "stopped", "warned", "warned"]
    assert "Collapse at iteration 4: held-out" in (run / "report.html").read_text()


def test_a_run_returns_to_its_best_checkpoint_at_a_lower_rate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain"
    recipe = recipe_of(folder, "guard.action=return", "guard.rate=0.25")
    seen = collapse_at(monkeypatch, set())
    trainer.train(recipe, plain, QUIET)
    assert seen == [0, 1, 2, 3, 4, 5]
    run, said = tmp_path / "run", io.StringIO()
    seen = collapse_at(monkeypatch, {3, 4})
    trainer.train(recipe, run, Console(file=said, width=300))
    assert "collapse at iteration 3" in said.getvalue()
    assert "; back to iteration 2" in said.getvalue()
    # Back from 3 to 2, then from 4 to 3.
    assert seen == [0, 1, 2, 3, 3, 4, 4, 5]
    assert [record["iteration"] for record in log_of(run)] == [1, 2, 3, 4, 5]
    rates = [record["learning_rate"] / recipe.train.learning_rate for record in log_of(run)]
    assert rates == pytest.approx([1, 1, 0.25, 0.0625, 0.0625])
    first, second = (load_file(each / "checkpoints/000005/weights.safetensors") for each in (plain, run))
    assert any(not torch.equal(value, second[name]) for name, value in first.items())
    state = load_checkpoint(run / "checkpoints/000005").state
    assert (state["returns"], state["rate_scale"]) == (2, 0.0625)
    assert sorted(int(file.stem) for file in (run / "evaluations").iterdir()) == [0, 1, 2, 3, 4, 5]


def test_a_sign_in_an_iteration_does_not_take_the_place_of_its_evaluation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every iteration looks like a collapse, the last included: all evaluations are made."""
    said = io.StringIO()
    monkeypatch.setattr(Guard, "look", lambda guard, record: "odd")
    recipe = recipe_of(folder, "train.iterations=2")
    trainer.train(recipe, tmp_path / "run", Console(file=said, width=300))
    assert "collapse at iteration 2: odd; warned" in said.getvalue()
    assert sorted(int(file.stem) for file in (tmp_path / "run/evaluations").iterdir()) == [0, 1, 2]


def test_returns_end_and_a_resumed_run_remembers_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    collapse_at(monkeypatch, {2, 3})
    recipe = recipe_of(folder, "guard.action=return", "guard.returns=1", "train.iterations=4")
    with pytest.raises(Collapse, match="collapsed at iteration 3"):
        trainer.train(recipe, run, QUIET)
    assert load_checkpoint(run / "checkpoints/000003").state["returns"] == 1
    with pytest.raises(Collapse, match="collapsed at iteration 3"):
        trainer.resume(run, console=QUIET)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", ["forget_after", "cut_log"])
def test_a_return_that_is_cut_short_comes_to_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Killed while later files are removed, or before the log is cut; the evaluation collapses again."""
    recipe = recipe_of(folder, "guard.action=return", "train.iterations=4")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with monkeypatch.context() as patch:
        collapse_at(patch, {3})
        trainer.train(recipe, whole, QUIET)
    with monkeypatch.context() as patch:
        collapse_at(patch, {3})

        def killed(self: RunFolder, iteration: int) -> None:
            if step == "forget_after":
                (self.evaluation(3)).unlink()
            raise Killed

        patch.setattr(RunFolder, step, killed)
        with pytest.raises(Killed):
            trainer.train(recipe, cut, QUIET)
    with monkeypatch.context() as patch:
        collapse_at(patch, {3} if step == "forget_after" else set())
        trainer.resume(cut, console=QUIET)
    weights = [load_file(run / "checkpoints/000004/weights.safetensors") for run in (whole, cut)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    logs = [[(r["iteration"], r["learning_rate"]) for r in log_of(run)] for run in (whole, cut)]
    assert logs[0] == logs[1]


def test_the_best_checkpoint_is_kept_and_exported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    collapse_at(monkeypatch, {4, 5})
    rarely = ("checkpoint.every=100", "checkpoint.keep_best=2", "evaluation.every=2")
    trainer.train(recipe_of(folder, *rarely), run, QUIET)
    # Written at evaluations, besides the last: 2 and 4, of which 2 is the better, and both are kept.
    assert kept_iterations(run / "checkpoints") == [2, 4, 5]

    def said(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["flowcredit", "export", str(run), *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out + err

    code, line = said("--best", "--out", str(tmp_path / "best"))
    assert code == 0
    assert line.startswith("iteration 2: ")
    exported = tmp_path / "best/transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(run / "checkpoints/000002/weights.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in load_file(exported).items())
    code, line = said("--iteration", "3", "--out", str(tmp_path / "other"))
    assert code == 2
    assert "no checkpoint of iteration 3; expected one of 2, 4, 5" in line
    assert said("--best", "--iteration", "2", "--out", str(tmp_path / "other"))[0] == 2


def test_a_collapse_ends_the_program_with_3(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collapse_at(monkeypatch, {1})
    words = ["train", str(folder / "recipe.yaml"), f"output={tmp_path}", "guard.action=stop"]
    monkeypatch.setattr("sys.argv", ["flowcredit", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 3
    line = capsys.readouterr().err.strip()
    assert "no better checkpoint is there" in line
    assert "--resume" in line


def test_a_guard_without_a_known_action_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"guard\.action"):
        recipe_of(folder, "guard.action=panic")
