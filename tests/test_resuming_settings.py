"""Every setting of a recipe: refused where a resumed run would be another by it, or listed as free."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import load_file

from flowcredit import report, trainer
from flowcredit.checkpoint import save_checkpoint
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.methods import METHODS
from flowcredit.recipe_io import list_settings, load_recipe, recipe_diff
from flowcredit.resuming import read_back
from flowcredit.run_folder import RunFolder
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)
FREE = {
    "train.iterations",
    "checkpoint.every",
    "checkpoint.keep_last",
    "checkpoint.keep_best",
    "train.on_nonfinite",
    "guard.action",
    "guard.heldout_errors",
    "guard.heldout_lost",
    "guard.image_spread",
    "guard.kl",
    "guard.ratio",
    "guard.clip_fraction",
    "guard.patience",
    "guard.returns",
    "guard.rate",
    "rollout.prompts",
    "scoring.overlap",
    "evaluation.every",
    "logging.every",
    "logging.trackers",
    "logging.project",
    "model.offload",
    "rollout.batch_size",
    "scoring.batch_size",
    "scoring.on_error",
    "scoring.timeout_s",
    "scoring.offload",
    "parallel.sharding",
    "parallel.timeout_s",
}
"""What a run may change as it goes on. A new setting that is free by its section's name fails here first."""


TOGETHER = {
    # Settings that a valid recipe of the test cannot change without another one.
    "algorithm.fan_out": ["algorithm={name: branch_grpo, fan_out: 3, split_steps: [0], group_size: 3}"],
    "noise.table": ["noise={kind: table, table: psi.json}"],
    "algorithm.pairs": ["algorithm={name: dpo, pairs: file}", "rewards=[]"],
    "algorithm.name": ["algorithm={name: dense_grpo}"],
    "weights.rank": ["weights={method: lora, rank: 3}"],
    "weights.alpha": ["weights={method: lora, alpha: 3}"],
}


def content(method: str, root: Path) -> dict[str, Any]:
    tree = {"split_steps": [0], "fan_out": 4, "group_size": 4} if method == "branch_grpo" else {}
    return {
        "name": "walked",
        "model": {"path": str(root / "pipeline")},
        "prompts": dict.fromkeys(("train", "heldout"), "prompts.txt"),
        "algorithm": {"name": method, **tree},
        "rewards": [{"name": "simple_rewards:redness", "options": {}}],
        "watch": [{"name": "simple_rewards:brightness", "options": {}}],
    }


def run_of(method: str, root: Path) -> Path:
    """The folder of a run that has finished an iteration, as far as `read_back` looks."""
    folder = RunFolder(root / method)
    folder.path.mkdir()
    folder.recipe.write_text(yaml.safe_dump(content(method, root)))
    folder.append_log({"iteration": 1})
    state = {"totals": {}, "recipe": load_recipe(folder.recipe).model_dump(mode="json")}
    save_checkpoint(folder.checkpoints, 1, {"weights": {"a": torch.zeros(1)}}, state, 1)
    return folder.path


CANDIDATES: tuple[Any, ...] = (
    *(True, False, 7, 2, 1, 3, 4, 5, 6, 8, 24, 64, 0.5, 0.25, 0.9, 1.5, [1], [0], [2], [0.5, 0.5]),
    *(
        "other",
        "other:place",
        "t/2",
        ["vae"],
        ["to_q"],
        ["trackio"],
        {"a": 1},
        "lora",
        "guarded",
        "noise",
        "rewards",
    ),
    *("no", "skip", "sharded", "scheduler", "cps", "float32", "linear", "accumulated", "per_step", "state"),
    *(
        "stop",
        "step",
        "branch",
        "mean",
        "separate",
        "shared",
        "prompt",
        "random",
        "stay",
        "batch",
        "group",
        "file",
    ),
)


def changed(began: Recipe, setting: str) -> Any:
    """A value that changes this setting alone, and is valid; None where there is no such value here."""
    for value in CANDIDATES:
        data = began.model_dump(mode="json")
        *above, last = setting.split(".")
        target: Any = data
        for key in above:
            target = target[int(key)] if isinstance(target, list) else target[key]
        target[last] = value
        try:
            found = Recipe.model_validate(data)
        except ValidationError:
            continue
        if [each.setting for each in recipe_diff(began, found)] == [setting]:
            return value
    return None


def all_settings() -> Iterator[tuple[str, str]]:
    """Every setting with a method that has it."""
    for each in list_settings():
        if not each.setting.startswith("algorithm."):
            yield "g2rpo", each.setting
    for method, kind in METHODS.items():
        for name in kind.model_fields:
            yield method, f"algorithm.{name}"


def test_every_setting_is_refused_or_free(tmp_path: Path) -> None:
    runs = {method: run_of(method, tmp_path) for method in METHODS}
    accepted, tried, without = set(), set(), set()
    for method, setting in all_settings():
        value = changed(load_recipe(runs[method] / "recipe.yaml"), setting)
        if value is None:
            without.add(setting)
            continue
        tried.add(setting)
        override = f"{setting}={json.dumps(value)}"
        try:
            read_back(runs[method], [override])
        except InputError as error:
            assert f"cannot change {setting}" in str(error), (override, error)  # noqa: PT017
            assert "->" in str(error)  # noqa: PT017
            assert "may change: train.iterations, checkpoint.*" in str(error)  # noqa: PT017
        else:
            accepted.add(setting)
    assert accepted == FREE
    assert sorted(without - tried) == sorted(TOGETHER)


@pytest.mark.parametrize("setting", TOGETHER)
def test_what_cannot_change_alone_is_refused_with_another(setting: str, tmp_path: Path) -> None:
    method = {"algorithm.fan_out": "branch_grpo", "algorithm.pairs": "dpo"}.get(setting, "g2rpo")
    with pytest.raises(InputError, match="a resumed run cannot change"):
        read_back(run_of(method, tmp_path), TOGETHER[setting])


def test_iterations_are_not_free_where_the_rate_falls_over_them(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "recipe.yaml"
    file.write_text(yaml.safe_dump({**content("g2rpo", tmp_path), "train": {"lr_schedule": "linear"}}))
    with pytest.raises(InputError, match="the linear learning rate falls over all iterations"):
        read_back(tmp_path / "run", ["train.iterations=301"])


BITWISE = {
    "what is kept and told": (
        "checkpoint.every=3",
        "checkpoint.keep_last=1",
        "evaluation.every=1",
        "logging.every=2",
        "logging.trackers=[]",
        "logging.project=other",
        "train.on_nonfinite=skip",
        "guard.action=stop",
    ),
    "what waits": (
        "checkpoint.keep_best=1",
        "model.offload=[text_encoders, vae]",
        "scoring.offload=true",
        "scoring.on_error=skip",
        "parallel.timeout_s=60",
    ),
    "what overlaps": ("scoring.overlap=true", "scoring.timeout_s=60"),
}
BY_ROUNDING = {"batches": ("rollout.prompts=1", "rollout.batch_size=1", "scoring.batch_size=1")}
CHANGES = {**BITWISE, **BY_ROUNDING}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    root = tmp_path_factory.mktemp("settings")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\n")
    tiny = content("g2rpo", root)
    tiny["model"] |= {"height": 16, "width": 16, "max_sequence_length": 8, "dtype": "float32"}
    tiny["prompts"] = dict.fromkeys(("train", "heldout"), str(root / "prompts.txt"))
    tiny["algorithm"] |= {"num_steps": 3, "group_size": 2, "strides": [1], "train_steps": [0, 1]}
    tiny["train"] = {"iterations": 2, "prompts_per_iteration": 2, "mixed_precision": "no"}
    tiny["train"] |= {"learning_rate": 1e-3, "micro_batch_size": 8}
    tiny["evaluation"] = {"every": 0, "prompts": 2, "images": 0}
    return Recipe.model_validate(tiny)


@pytest.fixture(scope="module")
def ends(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of 2 iterations, and the weights of one of 4."""
    root = tmp_path_factory.mktemp("ends")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "build_report", lambda folder: folder)
        trainer.train(recipe, root / "two", QUIET)
        longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"iterations": 4})})
        trainer.train(longer, root / "four", QUIET)
    return root / "two", load_file(root / "four/checkpoints/000004/weights.safetensors")


@pytest.mark.parametrize("changes", CHANGES)
def test_what_is_free_alters_no_weight(
    changes: str,
    ends: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "build_report", lambda folder: folder)
    run = Path(shutil.copytree(ends[0], tmp_path / "run"))
    began = load_file(run / "checkpoints/000002/weights.safetensors")
    trainer.resume(run, ["train.iterations=4", *CHANGES[changes]], QUIET)
    found = load_file(run / "checkpoints/000004/weights.safetensors")
    assert found.keys() == ends[1].keys()
    assert any(not torch.equal(value, began[key]) for key, value in found.items())
    for key, value in found.items():
        if changes in BITWISE:
            assert torch.equal(value, ends[1][key]), key
        else:
            # A few roundings of a gradient, which AdamW divides by its own size.
            torch.testing.assert_close(value, ends[1][key], rtol=0, atol=1e-4)


def test_each_free_setting_is_tried_or_cannot_be_here() -> None:
    tried = {override.partition("=")[0] for override in itertools.chain(*CHANGES.values())}
    untried = {each for each in FREE - tried if not each.startswith("guard.")}
    assert untried == {"train.iterations", "parallel.sharding"}
