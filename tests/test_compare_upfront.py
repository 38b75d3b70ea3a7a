"""What cannot run in a comparison is told before anything runs, and what failed with its reason."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flowcredit.compare import processes
from flowcredit.compare.arms import from_words
from flowcredit.compare.command import adjusted, compare_command
from flowcredit.compare.processes import Process
from flowcredit.errors import InputError

RECIPE = {
    "name": "small",
    "model": {"path": "bundled:shapes", "height": 32, "width": 32, "max_sequence_length": 12},
    "prompts": {"train": "bundled:shapes/train", "heldout": "bundled:shapes/heldout"},
    "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 2, "strides": [1]},
    "rewards": ["shapes"],
    "train": {"prompts_per_iteration": 1},
}


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "TICK_S", 0.0)
    monkeypatch.setattr("flowcredit.compare.page.write_page", lambda *arguments: arguments[-1])
    Path("small.yaml").write_text(yaml.safe_dump(RECIPE))


def refuse(words: Sequence[str], console_file: Path) -> Process:
    raise AssertionError(f"was started: {words}")


def compared(*arms: str, budget: str = "nfe=100", start: processes.Start = refuse, out: str = "out") -> str:
    comparison, amount = adjusted(from_words(["small.yaml"], arms), budget, seeds=1)
    said = io.StringIO()
    compare_command(comparison, amount, Path(out), 1, start, Console(file=said, width=300))
    return said.getvalue()


def test_a_budget_that_ends_within_the_warmup_says_so() -> None:
    """Three evaluations and a trained state an iteration: the budget is what is too small, not the recipe."""
    with pytest.raises(InputError, match=r"nfe=100|velocity evaluations") as caught:
        compared("warm: small.yaml train.warmup_iterations=90", budget="nfe=100")
    assert "and the learning rate rises over 90 (train.warmup_iterations); raise it, or" in str(caught.value)
    assert "arm 'warm'" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("model.path=/nowhere", "model.path /nowhere: no such folder"),
        ("prompts.train=absent.txt", "prompts.train absent.txt: no such file"),
        ("prompts.heldout=absent.parquet", "prompts.heldout absent.parquet: no such file"),
        ("model.lora=absent", "model.lora absent: nothing there"),
        ("noise={table: psi.json}", "noise.table psi.json: no such file"),
        ("model.height=37", "height is 37 pixels; this model makes multiples of"),
        ("watch=[{name: clip, options: {path: absent}}]", "reward clip, path absent: nothing there"),
        ("watch=[clip]", "reward 'clip' needs the option 'path'"),
        ("rewards=[clop]", "unknown reward 'clop'"),
        ("watch=['my_absent_rewards:f']", "No module named 'my_absent_rewards'"),
        ("watch=[http]", "reward 'http'"),
    ],
)
@pytest.mark.parametrize("budget", ["nfe=100", "seconds=5"])
def test_an_arm_that_cannot_run_is_told_before_any_runs(change: str, reason: str, budget: str) -> None:
    with pytest.raises(InputError, match=r"^--arm .*: arm 'bad': ") as caught:
        compared(f'bad: small.yaml "{change}"', budget=budget)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("out").exists()


class Failed:
    """A command that has ended badly."""

    code = 2

    def __init__(self, words: Sequence[str], console_file: Path) -> None:
        console_file.parent.mkdir(parents=True, exist_ok=True)
        with console_file.open("a") as file:
            file.write("$ flowcredit train before\nflowcredit: an old error\n$ flowcredit train\nloading\n")
            file.write("flowcredit: model.device is 'cuda', which cannot be used\n")

    def poll(self) -> int:
        return self.code

    def peak(self) -> int:
        return 0

    def send(self, kind: object) -> None:
        raise AssertionError("nothing is left to stop")


def test_a_failure_is_told_with_the_childs_own_line() -> None:
    said = compared(start=Failed)
    line = next(line for line in said.splitlines() if "FAILED" in line)
    assert "small, seed 0: exit code 2, model.device is 'cuda', which cannot be used; see out/" in line
    # On the page too.
    assert "small, seed 0 failed: exit code 2, model.device is 'cuda', which" in said.splitlines()[-1]
    with pytest.raises(InputError, match=r"small, its pace, could not be measured: exit code 2, model\.dev"):
        compared(start=Failed, budget="seconds=5", out="other")


def test_a_stack_trace_is_told_by_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("$ flowcredit train\nTraceback (most recent call last):\n  File ...\nMemoryError: all\n")
    assert processes._reason(1, file) == ", MemoryError: all"
    assert processes._reason(-9, file) == processes._reason(1, tmp_path / "absent") == ""


def test_fewer_iterations_than_points_are_told() -> None:
    Path("one.yaml").write_text(
        yaml.safe_dump({"points": 50, "arms": [{"name": "a", "recipe": "small.yaml"}]})
    )
    comparison, amount = adjusted(from_words(["one.yaml"], []), "nfe=100", seeds=1)
    said = io.StringIO()
    compare_command(comparison, amount, Path("out"), 1, Failed, Console(file=said, width=300))
    assert "fewer than the 50 points that were asked for: it is evaluated after each" in said.getvalue()
    assert "points that were asked for" not in compared(start=Failed, out="other", budget="nfe=400")


def test_a_place_that_cannot_be_written_is_told_with_its_option() -> None:
    Path("taken").write_text("")
    with pytest.raises(InputError, match=r"^--out taken: is a file; expected a folder"):
        compared(out="taken")
    with pytest.raises(InputError, match=r"^--out taken/below: \S*taken is no folder; choose another place"):
        compared(out="taken/below")
