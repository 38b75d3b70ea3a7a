"""Runs that are killed, damaged and left without room on the disk: `reliability/survival.py` in short."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from survival_lives import NOISES, RUN
from survival_sameness import differences
from survival_world import Cell, build_world, write_recipe

from flowcredit import report, trainer
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]


def survival(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, since it forks; ``before``: code that breaks something first."""
    code = f"import sys, survival; {before}; sys.exit(survival.main(sys.argv[1:]))"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "reliability")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def counted(told: str, what: str) -> dict[str, int]:
    (line,) = [line for line in told.splitlines() if line.startswith(f"{what}: ")]
    return {name.strip(): int(count) for name, count in re.findall(r"([a-z][a-z. ]*) (\d+)", line)}


def test_a_run_survives_kills_damage_and_full_disks() -> None:
    short = ("--kills", "4", "--trials", "5", "--fills", "3")
    ended = survival("kill,corrupt,full", *short, "--method", "g2rpo,dpo", "--lora", "yes", "--seed", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kills, damages, full = (counted(ended.stdout, what) for what in ("kill", "corrupt", "full"))
    assert kills["kills survived"] == 4
    assert (damages["trials"], full["trials"]) == (5, 3)
    assert damages["every checkpoint damaged"] == damages["log damaged"] == 1
    assert sum(count for name, count in full.items() if name.startswith("stopped at")) >= 3
    assert kills["mismatches"] == damages["mismatches"] == full["mismatches"] == 0


def test_a_resume_that_is_not_exact_is_found() -> None:
    """An optimizer that begins anew after a kill is what the comparison is there to see."""
    broken = "from flowcredit import progress; progress.restore_optimizer = lambda *_: None"
    ended = survival("corrupt", "--trials", "1", "--method", "flow_grpo", "--lora", "yes", before=broken)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "flow_grpo lora, trial 0: checkpoints/000005/optimizer.safetensors" in ended.stdout
    assert "flow_grpo lora, trial 0: final/pytorch_lora_weights.safetensors" in ended.stdout


@pytest.fixture
def alike(tmp_path: Path) -> tuple[Path, Path]:
    """Two working folders with what a run leaves in them, in small."""
    one, other = tmp_path / "one", tmp_path / "other"
    run = one / RUN
    for folder in ("evaluations", "checkpoints/000001", "final"):
        (run / folder).mkdir(parents=True)
    (run / "log.jsonl").write_text('{"iteration": 1, "loss": 0.5, "seconds": 1.0}\n')
    (run / "evaluations/000001.json").write_text('{"seconds": 2.0, "rewards": {"a": 1.0}}')
    state = {"iteration": 1, "sha256": {}, "state": {"totals": {"decodes": 2, "seconds": 3.0}}}
    (run / "checkpoints/000001/state.json").write_text(json.dumps({**state, "own_sha256": "x"}))
    (run / "final/weights").write_bytes(b"\x00\x01")
    (one / NOISES).write_text('["0/1/initial", "ab"]\n')
    shutil.copytree(one, other)
    return one, other


def test_runs_may_differ_in_their_clocks_alone(alike: tuple[Path, Path]) -> None:
    one, other = alike
    for name in ("log.jsonl", "evaluations/000001.json", "checkpoints/000001/state.json"):
        file = other / RUN / name
        file.write_text(re.sub(r'"seconds": [\d.]+', '"seconds": 9.5', file.read_text()))
    with (other / NOISES).open("a") as noises:
        noises.write('["0/1/initial", "ab"]\n["0/1/in')
    assert differences(one, other) == []


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("log.jsonl", "0.5", "0.25"),
        ("evaluations/000001.json", "1.0", "1.5"),
        ("checkpoints/000001/state.json", '"decodes": 2', '"decodes": 4'),
        ("final/weights", "\x01", "\x02"),
    ],
)
def test_any_other_difference_is_named(alike: tuple[Path, Path], name: str, before: str, after: str) -> None:
    one, other = alike
    file = other / RUN / name
    file.write_text(file.read_text().replace(before, after))
    assert differences(one, other) == [name]
    file.unlink()
    assert differences(one, other) == [name]


def test_other_noises_and_leftovers_are_named(alike: tuple[Path, Path]) -> None:
    one, other = alike
    with (other / NOISES).open("a") as noises:
        noises.write('["0/1/initial", "cd"]\n["0/2/initial", "ab"]\n')
    (other / RUN / "final.partial").mkdir()
    (left, *noise) = differences(one, other)
    assert left.startswith("left over: ")
    assert noise == ["noise 0/1/initial", "noise 0/2/initial"]


def test_iterations_leave_nothing_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live tensors, and objects of the project's types, after each of six iterations."""
    held: list[Counter[str]] = []
    append = RunFolder.append_log

    def noted(self: RunFolder, record: Mapping[str, Any]) -> None:
        append(self, record)
        gc.collect()
        kinds = [type(each) for each in gc.get_objects()]
        own = Counter(str(kind) for kind in kinds if str(kind.__module__).startswith("flowcredit."))
        own["tensors"] = sum(issubclass(kind, torch.Tensor) for kind in kinds)
        held.append(own)

    monkeypatch.setattr(RunFolder, "append_log", noted)
    monkeypatch.setattr(report, "build_report", lambda folder: folder)
    build_world(tmp_path)
    recipe = load_recipe(write_recipe(tmp_path, Cell("g2rpo", True), 6), ["evaluation.every=2"])
    trainer.train(recipe, tmp_path / "run", Console(quiet=True))
    assert len(held) == 6
    assert held[-1]["tensors"] > 50
    assert held[3] == held[5]
    assert held[2] == held[4]
