"""A small comparison from its file to its page: equal budgets, exact resuming, refusals, and the numbers."""

import contextlib
import io
import json
import math
import shutil
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from flowcredit import cli
from flowcredit.compare import processes
from flowcredit.compare.arms import from_words
from flowcredit.compare.command import adjusted, compare_command
from flowcredit.compare.runs import plan_runs
from flowcredit.errors import InputError
from flowcredit.progress import save
from test_report import Page, panels
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread", "in_this_process")

REDNESS, BRIGHTNESS = "simple_rewards:redness", "simple_rewards:brightness"
ODD = "<script>alert('x')</script> | *b*"
ODD_METHOD = {"name": "mix_grpo", "num_steps": 3, "group_size": 2, "window_size": 1}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the trainer's own runs after it."""


class Done:
    """A command of flowcredit that has already run, in this process."""

    def __init__(self, words: Sequence[str], console_file: Path) -> None:
        self.code = 0
        said = io.StringIO()
        before = sys.argv
        sys.argv = ["flowcredit", *words]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                cli.main()
        except SystemExit as end:
            self.code = int(end.code or 0)
        except Killed:
            self.code = -signal.SIGKILL
        finally:
            sys.argv = before
        console_file.parent.mkdir(parents=True, exist_ok=True)
        with console_file.open("a") as file:
            file.write(said.getvalue())

    def poll(self) -> int | None:
        return self.code

    def peak(self) -> int:
        return 3 * 2**29

    def send(self, kind: signal.Signals) -> None:
        raise AssertionError("nothing is left to stop")


@pytest.fixture(scope="module")
def in_this_process() -> Iterator[None]:
    """Processes that load torch take seconds each; and the runs' own reports take longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "TICK_S", 0.0)
        patch.setattr("flowcredit.report.build_report", lambda path: path / "report.html")
        patch.setattr(processes, "start_flowcredit", lambda threads: Done)
        yield


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of other parts: the curves are what takes the time."""
    monkeypatch.setattr("flowcredit.compare.figures.learning_curves", lambda results: None)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compare")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na <b>blue</b> square\na green cross\n")
    recipe = {
        "name": "tiny",
        "model": {
            "path": str(root / "pipeline"),
            "height": 16,
            "width": 16,
            "max_sequence_length": 8,
            "dtype": "float32",
        },
        "prompts": dict.fromkeys(("train", "heldout"), str(root / "prompts.txt")),
        "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 2, "strides": [1]},
        "rewards": [REDNESS],
        "watch": [BRIGHTNESS],
        "train": {
            "prompts_per_iteration": 1,
            "learning_rate": 3e-3,
            "mixed_precision": "no",
            "lr_schedule": "linear",
        },
        "evaluation": {"prompts": 3, "images": 3},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arms = [
        {"name": "G²RPO"},
        {"name": ODD, "set": {"algorithm": ODD_METHOD | {"iterations_per_position": 1}}},
    ]
    content = {
        "recipe": str(root / "recipe.yaml"),
        "budget": "nfe=24",
        "seeds": 2,
        "points": 2,
        "steps": [2, 3],
        "beside": ["g2rpo_steps"],
        "arms": arms,
    }
    (root / "table.yaml").write_text(yaml.safe_dump(content, allow_unicode=True, sort_keys=False))
    return root / "table.yaml"


def run(file: Path, out: Path, **options: Any) -> bool:
    comparison, budget = adjusted(from_words([str(file)], []), **options)
    return compare_command(comparison, budget, out, 2, Done, Console(quiet=True))


@pytest.fixture(scope="module")
def whole(file: Path, tmp_path_factory: pytest.TempPathFactory, in_this_process: None) -> Path:
    """A comparison that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run(file, out)
    return out


def results(out: Path) -> dict[str, Any]:
    """``results.json`` without what differs from one time to another."""
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    for arm in found["arms"]:
        for each in arm["runs"]:
            each["folder"] = Path(each["folder"]).name
            for point in each["points"]:
                point["seconds"] = None
    return found


def test_budgets_are_equal_and_rates_end_with_the_runs(whole: Path) -> None:
    """By hand: 1 + 2 x 2 evaluations and one trained state, 6 an iteration; so for a window at the first of
    three steps, and at the second 2 + 2 and one."""
    found = results(whole)
    runs = {arm["name"]: arm["runs"] for arm in found["arms"]}
    assert [[run["iterations"] for run in each] for each in runs.values()] == [[4, 4], [4, 4]]
    first, mixed = (each[0]["points"][-1]["velocity_evaluations"] for each in runs.values())
    assert (first, mixed) == (24, 6 + 5 + 6 + 5)
    for folder in whole.glob("*/seed-?"):
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [line["learning_rate"] for line in lines] == pytest.approx([3e-3, 2.25e-3, 1.5e-3, 0.75e-3])
    assert [point["iteration"] for point in runs["G²RPO"][0]["points"]] == [0, 2, 4]


def test_scores_are_those_of_the_runs(whole: Path) -> None:
    found = results(whole)
    first, other = found["arms"]
    for arm in (first, other):
        for reward in (REDNESS, BRIGHTNESS):
            values = [run["points"][-1]["scores"][reward] for run in arm["runs"]]
            assert arm["scores"][reward]["mean"] == pytest.approx(statistics.mean(values))
            assert [run["steps"]["3"][reward] for run in arm["runs"]] == values
            # Student's t at one degree of freedom: 12.706 times the standard error.
            half = 12.7062 * abs(values[0] - values[1]) / 2
            assert arm["scores"][reward]["interval_95"] == pytest.approx(half, rel=1e-4)
    evaluated = json.loads((whole / "g-rpo" / "seed-1" / "evaluations" / "000004.json").read_text())
    last = first["runs"][1]["points"][-1]["scores"]
    assert last[REDNESS] == pytest.approx(evaluated["rewards"][REDNESS]["mean"])
    pairs = [
        b["points"][-1]["scores"][REDNESS] - a["points"][-1]["scores"][REDNESS]
        for a, b in zip(first["runs"], other["runs"], strict=True)
    ]
    assert other["scores"][REDNESS]["difference_from_first"]["mean"] == pytest.approx(statistics.mean(pairs))
    assert first["scores"][REDNESS]["difference_from_first"] is None
    assert set(found["before"]) == {"2", "3"}
    assert found["before"]["3"] == first["runs"][0]["points"][0]["scores"]
    assert found["before"]["2"] != found["before"]["3"]


def test_the_page_needs_nothing_from_outside_and_escapes_names(whole: Path) -> None:
    page = Page((whole / "comparison.html").read_text())
    assert not page._stack
    assert "<script" not in page.source
    assert all(address.startswith("data:image/") for address in page.addresses)
    for outside in ("@import", "url(", "http:", "https:", "<link"):
        assert outside not in page.source
    assert ODD in page.texts
    # The curves; three prompts before training and of two arms.
    assert len(page.addresses) == 1 + 3 * 3
    assert "a <b>blue</b> square" in page.texts


def test_the_page_tells_scores_costs_and_settings(whole: Path) -> None:
    page = Page((whole / "comparison.html").read_text())
    heads = [row for row in page.rows if len(row) == 3 and row[1].startswith(REDNESS)]
    assert heads[0] == ["", f"{REDNESS}trained on", f"{BRIGHTNESS}held out"]
    # Scores and differences at 3 and at 2 steps.
    assert len(heads) == 4
    assert page.source.count('class=" trained"') >= 4
    costs = page.rows[next(i for i, row in enumerate(page.rows) if row and "iterations" in row) + 1]
    assert costs[:5] == ["G²RPO", "4", "24", "20", "8"]
    assert costs[6] == "1.50 GiB"
    assert page.row("algorithm.name") == ["algorithm.name", "g2rpo", "mix_grpo"]
    assert page.row("algorithm.strides") == ["algorithm.strides", "1", "–"]
    names = [row[0] for row in page.rows if row]
    assert not {"name", "seed", "output", "train.iterations"} & set(names)
    assert page.row("G²RPO, 10 steps")[1] == "0.378"
    text = (whole / "results.md").read_text()
    assert "| &lt;script>alert('x')&lt;/script> \\| \\*b\\* |" in text
    assert f"{REDNESS} (trained on)" in text


def test_curves_are_drawn_for_each_reward_against_each_cost(whole: Path) -> None:
    page = Page((whole / "comparison.html").read_text())
    assert len(panels(page, "Held-out rewards")) == 2 * 3


@pytest.mark.usefixtures("no_curves")
def test_a_score_that_is_missing_is_told_and_counts_as_none(file: Path, whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    for seed in (0, 1):
        path = out / "g-rpo" / f"seed-{seed}" / "evaluations" / "000004.json"
        content = json.loads(path.read_text())
        content["rewards"][BRIGHTNESS]["scores"] = [None] * 3
        if seed == 0:
            content["rewards"][REDNESS]["scores"] = [0.25, None, 0.75]
        path.write_text(json.dumps(content))
    comparison, budget = adjusted(from_words([str(file)], []))
    assert compare_command(comparison, budget, out, 1, Done, Console(quiet=True), run=False)
    page = Page((out / "comparison.html").read_text())
    assert f"G²RPO, seed 0: 1 of 3 held-out images have no score by {REDNESS}" in page.texts
    assert f"G²RPO, seed 1: 3 of 3 held-out images have no score by {BRIGHTNESS}" in page.texts
    assert page.row("G²RPO")[2] == "no score"
    first, other = results(out)["arms"]
    assert first["runs"][0]["points"][-1]["scores"] == {REDNESS: 0.5, BRIGHTNESS: None}
    none = {"mean": None, "interval_95": None, "seeds": 0, "difference_from_first": None}
    assert first["scores"][BRIGHTNESS] == none
    assert other["scores"][BRIGHTNESS]["difference_from_first"]["mean"] is None
    # Beside the changed run the other arm's images are there still.
    assert len(page.pictures) == 3 * 3


@pytest.mark.usefixtures("no_curves")
def test_what_is_damaged_is_named(file: Path, whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "g-rpo" / "seed-0.memory.json").write_text("{")
    (out / "g-rpo" / "seed-0" / "log.jsonl").write_text("")
    comparison, budget = adjusted(from_words([str(file)], []))
    assert compare_command(comparison, budget, out, 1, Done, Console(quiet=True), run=False)
    assert "G²RPO, seed 0: its log has lines of 0 of 4" in (out / "comparison.html").read_text()
    (out / "g-rpo" / "seed-0" / "evaluations" / "000004.json").write_text("{")
    with pytest.raises(InputError, match=r"000004\.json: is no whole evaluation; remove it"):
        compare_command(comparison, budget, out, 1, Done, Console(quiet=True), run=False)


def test_again_runs_nothing_and_gives_the_same_page(file: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*/seed-*/**/*")}
    page = (whole / "comparison.html").read_text()
    assert run(file, whole)
    assert before == {path: path.stat().st_mtime_ns for path in whole.glob("*/seed-*/**/*")}
    assert (whole / "comparison.html").read_text() == page


@pytest.mark.usefixtures("no_curves")
def test_a_killed_run_is_told_then_resumed_to_the_same_results(
    file: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    shutil.rmtree(out / "g-rpo" / "seed-1")
    (out / "g-rpo" / "seed-1.steps-2.json").unlink()
    (out / "results.json").unlink()

    def killed(folder: Any, progress: Any, recipe: Any) -> None:
        if folder.path.parent.name == "g-rpo" and recipe.seed == 1 and progress.iteration == 3:
            raise Killed
        save(folder, progress, recipe)

    monkeypatch.setattr("flowcredit.trainer.save", killed)
    said = io.StringIO()
    comparison, budget = adjusted(from_words([str(file)], []))
    assert not compare_command(comparison, budget, out, 2, Done, Console(file=said, width=200))
    assert "FAILED G²RPO, seed 1: was ended by SIGKILL" in said.getvalue()
    assert "5/5" not in said.getvalue()
    page = Page((out / "comparison.html").read_text())
    assert any("G²RPO, seed 1 is not finished: 3 of 4 iterations" in text for text in page.texts)
    assert page.row("G²RPO")[1].endswith("(1 of 2 seeds)")
    assert len(results(out)["arms"][1]["runs"]) == 2
    monkeypatch.setattr("flowcredit.trainer.save", save)
    assert run(file, out)
    assert "resuming" in (out / "g-rpo" / "seed-1.log").read_text()
    assert results(out) == results(whole)


@pytest.mark.usefixtures("no_curves")
def test_a_run_that_cannot_begin_is_told_and_ends_with_code_1(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(file.with_name("recipe.yaml"))
    words = [
        "compare",
        recipe,
        "--arm",
        f"broken: {recipe} rewards.0.name=simple_rewards:no",
        "--budget",
        "nfe=6",
    ]
    monkeypatch.setattr(sys, "argv", ["flowcredit", *words, "--seeds", "1", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "FAILED broken, seed 0: exit code 2, reward 'simple_rewards:no': module" in out
    assert "\n    flowcredit: " in out
    assert "| broken | not there yet | not there yet |" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "nfe=50"}, "holds a comparison at a budget of nfe=24, asked for nfe=50"),
        (
            {"changes": ["train.learning_rate=0.5"]},
            r"G²RPO, seed 0 was asked for with other settings before \(train.learning_rate: 0.003 -> 0.5\)",
        ),
        ({"budget": "nfe=3"}, r"arm 'G²RPO': one iteration costs 6 velocity evaluations, .* budget of 3;"),
        ({"changes": ["evaluation.nothing=1"]}, "arm 'G²RPO': override 'evaluation.nothing=1': unknown"),
    ],
)
def test_another_comparison_in_the_same_folder_is_refused(
    file: Path, whole: Path, options: dict[str, Any], message: str
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*"))
    with pytest.raises(InputError, match=message):
        run(file, whole, **options)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*"))


def test_a_budget_of_seconds_is_measured_once_and_kept(file: Path, tmp_path: Path) -> None:
    comparison, budget = adjusted(from_words([str(file.with_name("recipe.yaml"))], []), "seconds=1", seeds=1)
    started: list[list[str]] = []

    def start(words: Sequence[str], console_file: Path) -> Done:
        started.append(list(words))
        if words[0] == "train" and "pace" not in words[1]:
            raise Killed
        return Done(words, console_file)

    out = tmp_path / "out"
    console = Console(record=True, width=200, file=io.StringIO())
    with pytest.raises(Killed):
        compare_command(comparison, budget, out, 1, start, console)
    assert "one arm has nothing beside it" in console.export_text()
    (pace,) = json.loads((out / "plan.json").read_text())["paces"].values()
    lines = [json.loads(line) for line in (out / "tiny/pace/log.jsonl").read_text().splitlines()]
    assert pace == pytest.approx((lines[3]["seconds"] - lines[0]["seconds"]) / (3 * 6))
    (planned,) = plan_runs(comparison, budget, out, {"tiny": pace})
    assert planned.iterations == math.floor(1 / (pace * 6))
    assert [words[1] for words in started] == [str(out / "tiny/pace.yaml"), str(planned.recipe_file)]
    with pytest.raises(Killed):
        compare_command(comparison, budget, out, 1, start, Console(quiet=True))
    assert len(started) == 3


def test_nothing_is_drawn_of_a_comparison_that_has_not_begun(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["flowcredit", "compare", str(file), "--out", str(tmp_path / "none"), "--page-only"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "there is no such comparison yet" in capsys.readouterr().err


def test_two_commands_do_not_work_in_one_folder(file: Path, whole: Path) -> None:
    comparison, budget = adjusted(from_words([str(file)], []))

    def start(words: Sequence[str], console_file: Path) -> Done:
        with pytest.raises(InputError, match="another comparison is at work there"):
            run(file, whole.parent / "busy")
        raise Killed

    with pytest.raises(Killed):
        compare_command(comparison, budget, whole.parent / "busy", 1, start, Console(quiet=True))
