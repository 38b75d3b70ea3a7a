"""The commands: what they hand on, what they print, how they end."""

import errno
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowcredit import cli
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.prompts import PromptSet
from flowcredit.recipe_io import dump_recipe, load_recipe

RECIPE = """\
name: small
output: out
model: {path: "bundled:shapes"}
prompts: {train: "bundled:shapes/train", heldout: "bundled:shapes/heldout"}
rewards: [shapes, clip]
train: {prompts_per_iteration: 3}
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls the program in a folder with ``small.yaml``; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("small.yaml").write_text(RECIPE, encoding="utf-8")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flowcredit", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return call


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """Puts a function in the place of a room's; the returned list fills with the calls' arguments."""

    def place(room: str, name: str, act: Callable[..., Any] = lambda *_: None) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def record(*arguments: Any) -> Any:
            calls.append(arguments)
            return act(*arguments)

        module = ModuleType(f"flowcredit.{room}")
        setattr(module, name, record)
        monkeypatch.setitem(sys.modules, f"flowcredit.{room}", module)
        monkeypatch.setattr(f"flowcredit.{room}", module, raising=False)
        return calls

    return place


def make_run(folder: str, *overrides: str) -> Path:
    run_dir = Path(folder)
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(dump_recipe(load_recipe("small.yaml", overrides)), encoding="utf-8")
    return run_dir


def test_train_hands_on_the_changed_recipe_and_the_folder(run: Run, stub: Any) -> None:
    calls = stub("trainer", "train")
    assert run("train", "small.yaml", "name=other", "algorithm.strides=[1, 2]")[0] == 0
    [(recipe, run_dir)] = calls
    assert recipe == load_recipe("small.yaml", ["name=other", "algorithm.strides=[1, 2]"])
    assert run_dir == Path("out/other")


def test_a_run_that_exists_is_not_written_over(run: Run, stub: Any) -> None:
    calls = stub("trainer", "train")
    make_run("out/small")
    code, out, err = run("train", "small.yaml")
    assert (code, out, calls) == (2, "", [])
    assert err.startswith("flowcredit: out/small exists already")
    assert "flowcredit train --resume out/small" in err
    assert "name=" in err
    assert err.count("\n") == 1
    assert run("train", "small.yaml", "name=small2")[0] == 0


def test_only_the_first_of_several_processes_refuses(
    run: Run, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may have made the folder before the others look."""
    calls = stub("trainer", "train")
    make_run("out/small")
    monkeypatch.setenv("RANK", "1")
    assert run("train", "small.yaml")[0] == 0
    assert len(calls) == 1


def test_resume_takes_overrides_and_no_recipe(run: Run, stub: Any) -> None:
    calls = stub("trainer", "resume")
    make_run("out/small")
    assert run("train", "--resume", "out/small")[0] == 0
    assert run("train", "--resume", "out/small", "train.iterations=9", "logging.every=2")[0] == 0
    assert calls == [
        (Path("out/small"), []),
        (Path("out/small"), ["train.iterations=9", "logging.every=2"]),
    ]
    code, _, err = run("train", "small.yaml", "--resume", "out/small")
    assert code == 2
    assert "leave out 'small.yaml'" in err


@pytest.mark.parametrize("command", [["train", "--resume"], ["report"]])
def test_a_folder_that_is_no_run_is_refused(run: Run, command: list[str]) -> None:
    Path("pipeline").mkdir()
    code, _, err = run(*command, "pipeline")
    assert code == 2
    assert "pipeline is no run: it holds no recipe.yaml" in err
    code, _, err = run(*command, "nowhere")
    assert code == 2
    assert "nowhere is no run: there is no such folder" in err


def test_interrupting_says_how_to_go_on(run: Run, stub: Any) -> None:
    def begin_and_stop(recipe: Recipe, run_dir: Path) -> None:
        run_dir.mkdir(parents=True)
        raise KeyboardInterrupt

    stub("trainer", "train", begin_and_stop)
    code, _, err = run("train", "small.yaml", "output=my runs")
    assert code == 130
    assert err.strip() == (
        "Interrupted; no finished iteration is lost; go on with: flowcredit train --resume 'my runs/small'"
    )


def test_interrupting_before_the_folder_is_made_promises_nothing(run: Run, stub: Any) -> None:
    def stop(recipe: Recipe, run_dir: Path) -> None:
        raise KeyboardInterrupt

    stub("trainer", "train", stop)
    code, _, err = run("train", "small.yaml")
    assert code == 130
    assert "had not begun" in err
    assert "--resume" not in err


def test_bad_input_from_any_depth_is_one_line_and_exit_2(run: Run, stub: Any) -> None:
    def refuse(recipe: Recipe, run_dir: Path) -> None:
        raise InputError("model.path is wrong; expected a folder")

    stub("trainer", "train", refuse)
    assert run("train", "small.yaml") == (2, "", "flowcredit: model.path is wrong; expected a folder\n")
    code, _, err = run("train", "small.yaml", "train.learning_rat=1e-5")
    assert code == 2
    assert "did you mean 'train.learning_rate'?" in err
    assert run("train")[0] == 2
    code, _, err = run("train", "absent.yaml")
    assert code == 2
    assert "absent.yaml: no such file" in err


def test_a_disk_that_refuses_is_one_line(
    run: Run, stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(recipe: Recipe, run_dir: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_folder(recipe: Recipe, run_dir: Path) -> None:
        Path("small.yaml", "below").mkdir()

    for fault, told in ((full, "writing: No space left"), (no_folder, "small.yaml/below: Not a directory")):
        stub("trainer", "train", fault)
        monkeypatch.setattr(sys, "argv", ["flowcredit", "train", "small.yaml"])
        with pytest.raises(SystemExit) as exit_code:
            cli.main()
        assert exit_code.value.code == 2
        assert f"flowcredit: {told}" in capsys.readouterr().err


def test_a_stopped_run_is_told_how_to_go_on(run: Run, stub: Any) -> None:
    def stops(recipe: Recipe, run_dir: Path) -> None:
        run_dir.mkdir(parents=True)
        (run_dir / "recipe.yaml").write_text("")
        raise InputError("reward 'x' failed")

    stub("trainer", "train", stops)
    code, _, err = run("train", "small.yaml")
    assert code == 2
    assert "reward 'x' failed; then: flowcredit train --resume out/small" in err


def test_faults_of_our_own_keep_their_trace(run: Run, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: Recipe, run_dir: Path) -> None:
        raise RuntimeError("a fault")

    stub("trainer", "train", fail)
    monkeypatch.setattr(sys, "argv", ["flowcredit", "train", "small.yaml"])
    with pytest.raises(RuntimeError, match="a fault"):
        cli.main()


def test_evaluate_takes_a_recipe_or_a_run(run: Run, stub: Any) -> None:
    calls = stub("evaluate", "evaluate_command")
    run_dir = make_run("out/small", "seed=5")
    assert run("evaluate", "small.yaml")[0] == 0
    assert run("evaluate", "out/small", "evaluation.prompts=7", "--out", "scores.json")[0] == 0
    code, out, _ = run("evaluate", "small.yaml", "--steps", "10", "--steps", "20", "--beside", "g2rpo_steps")
    assert code == 0
    row = next(line.split() for line in out.splitlines() if "G²RPO, 10 steps" in line)
    assert row[-5:] == ["0.378", "0.408", "0.235", "1.519", "3.805"]
    assert calls == [
        (load_recipe("small.yaml"), None, None, ()),
        (load_recipe("small.yaml", ["seed=5", "evaluation.prompts=7"]), run_dir, Path("scores.json"), ()),
        (load_recipe("small.yaml"), None, None, [10, 20]),
    ]
    code, _, err = run("evaluate", "small.yaml", "--beside", "g3rpo")
    assert code == 2
    assert "--beside g3rpo: no such table; expected one of g2rpo, " in err
    Path("scores.json").write_text("{}", encoding="utf-8")
    code, _, err = run("evaluate", "small.yaml", "--out", "scores.json")
    assert code == 2
    assert "scores.json exists already" in err


def test_sample_takes_prompts_from_words_or_a_file(run: Run, stub: Any) -> None:
    calls = stub("evaluate", "sample_command")
    Path("two.txt").write_text("a red circle\n\na blue square\n", encoding="utf-8")
    words = ["--prompt", "a red circle", "--prompt", " two dots "]
    assert run("sample", "small.yaml", *words, "--count", "4", "--seed", "9")[0] == 0
    code, out, _ = run("sample", "small.yaml", "--prompts", "two.txt", "--out", "images")
    assert code == 0
    assert out == "2 prompts from two.txt (1 blank line skipped)\n"
    recipe = load_recipe("small.yaml")
    assert calls == [
        (recipe, None, PromptSet(("a red circle", "two dots")), Path("samples"), 4, 9),
        (recipe, None, PromptSet(("a red circle", "a blue square"), {}, "two.txt", 1), Path("images"), 1, 0),
    ]


@pytest.mark.parametrize("words", [[], ["--prompt", "  "], ["--prompt", "a", "--prompts", "two.txt"]])
def test_sample_refuses_no_or_two_kinds_of_prompts(run: Run, stub: Any, words: list[str]) -> None:
    calls = stub("evaluate", "sample_command")
    code, _, err = run("sample", "small.yaml", *words)
    assert (code, calls) == (2, [])
    assert ("given both --prompt and --prompts" if len(words) == 4 else "--prompts FILE") in err


def test_sample_does_not_write_over_a_folder(run: Run, stub: Any) -> None:
    calls = stub("evaluate", "sample_command")
    Path("samples").mkdir()
    code, _, err = run("sample", "small.yaml", "--prompt", "a")
    assert (code, calls) == (2, [])
    assert "samples exists already" in err


def test_report_prints_where_the_page_is(run: Run, stub: Any) -> None:
    calls = stub("report", "build_report", lambda run_dir: run_dir / "report.html")
    make_run("out/small")
    assert run("report", "out/small")[1] == "out/small/report.html\n"
    assert calls == [(Path("out/small"),)]


def _costs(out: str) -> dict[str, list[int]]:
    """The numbers of the table under the picture, by the row's name."""
    table = out.split("\ncost ")[1].split("\n\n")[0].splitlines()[1:]
    rows = [row.strip().rsplit(maxsplit=2) for row in table]
    return {name.strip(): [int(a.replace(",", "")), int(b.replace(",", ""))] for name, a, b in rows}


def test_plan_prints_the_picture_and_the_published_cost(run: Run) -> None:
    code, out, _ = run("plan", "small.yaml")
    assert code == 0
    assert "~~" in out
    assert _costs(out) == {
        "velocity evaluations": [1904, 3 * 1904],
        "if nothing were shared": [2308, 3 * 2308],
        "decodes": [288, 3 * 288],
        "scores (2 x 288)": [2 * 288, 3 * 2 * 288],
        "states trained on": [8, 3 * 8],
    }


def test_plan_follows_overrides_and_reads_runs(run: Run) -> None:
    make_run("out/small", "algorithm.anchor=branch")
    costs = _costs(run("plan", "out/small")[1])
    assert costs["velocity evaluations"][0] == 1700
    assert costs["if nothing were shared"][0] == 2188
    costs = _costs(run("plan", "small.yaml", "algorithm.initial_noise=separate")[1])
    assert costs["states trained on"][0] == 8 * 12


def test_plan_tells_parameters_and_memory_or_what_it_lacks(run: Run) -> None:
    out = run("plan", "small.yaml")[1]
    assert re.search(r"parameters: 4,065,539 +trained: 3,233,440 \(all weights\)", out)
    assert re.search(r"\npeak +\d+\.\d+ +of tensors", out)
    assert "rows of the network" not in out
    out = run("plan", "small.yaml", "model.path=/models/stable-diffusion-3.5-medium")[1]
    assert "/models/stable-diffusion-3.5-medium is not there: reckoned from the published config" in out
    assert "each velocity evaluation is 2 rows of the network (classifier-free guidance)" in out
    assert (
        "rows of the network"
        not in run("plan", "small.yaml", "model.path=SD3.5-M", "model.guidance_scale=1")[1]
    )
    out = run("plan", "small.yaml", "model.path=nowhere")[1]
    assert "parameters and memory need the model's folder: nowhere holds no known pipeline" in out
    out = run("plan", "small.yaml", "rewards=[my_rewards:f]")[1]
    assert "not in any phase, because not known: reward my_rewards:f" in out


def test_plan_is_one_json_object_on_demand(run: Run) -> None:
    found = json.loads(run("plan", "small.yaml", "--json")[1])
    assert found["a_prompt"]["velocity_evaluations"] == 1904
    assert found["prompts_per_iteration"] == 3
    model = found["model"]
    assert model["trained_parameters"] == 3_233_440
    assert model["peak_bytes"] == max(model["phase_bytes"].values())
    sizes = {part["name"]: part["size"] for part in model["memory_bytes"]}
    assert sizes["transformer weights"] == 4 * model["trained_parameters"]
    assert json.loads(run("plan", "small.yaml", "--json", "model.path=nowhere")[1])["model"] is None


def test_plan_names_a_damaged_file(run: Run) -> None:
    folder = Path("broken")
    (folder / "transformer").mkdir(parents=True)
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer/config.json").write_text("{}")
    assert "model_index.json lists no vae" in run("plan", "small.yaml", "model.path=broken")[2]
    (folder / "model_index.json").write_text(json.dumps(index | {"vae": ["diffusers", "AutoencoderKL"]}))
    assert "broken/vae/config.json: no such file" in run("plan", "small.yaml", "model.path=broken")[2]
    (folder / "vae").mkdir()
    (folder / "vae/config.json").write_text("{}")
    err = run("plan", "small.yaml", "model.path=broken")[2]
    assert "broken/vae/config.json: lacks 'block_out_channels'; expected the config" in err
    (folder / "transformer/config.json").write_text("{")
    code, _, err = run("plan", "small.yaml", "model.path=broken")
    assert code == 2
    assert "transformer/config.json: not valid JSON" in err


def test_plan_tells_what_changes_over_the_iterations_and_what_is_trained(run: Run) -> None:
    code, out, _ = run(
        "plan",
        "small.yaml",
        "algorithm={name: mix_grpo, num_steps: 6, window_size: 2, group_size: 4, iterations_per_position: 2}",
        "train.iterations=5",
    )
    assert code == 0
    # Five iterations see the windows at 0, 1 and 2: one state more is shared each time, of four.
    assert "over the first 5 a prompt costs 15 to 21 velocity evaluations" in out
    assert _costs(out)["velocity evaluations"][0] == 21
    out = run("plan", "small.yaml", "algorithm=neighbor_grpo")[1]
    assert _costs(out)["states trained on"][0] == 4 * 4
    assert "first iteration" not in out
    out = run("plan", "small.yaml", "algorithm={name: dance_grpo, num_steps: 6}")[1]
    (row,) = (line for line in out.splitlines() if "but from" in line)
    drawn = row.split("but from ")[1].removesuffix(" scored").split(", ")
    assert len(set(drawn)) == 2
    assert set(drawn) < set("01234")
    out = run("plan", "small.yaml", "algorithm={name: branch_grpo, kept_leaves: 8}")[1]
    assert "×16 trained (8 kept) scored" in out


def test_settings_lists_names_defaults_and_sentences(run: Run) -> None:
    out = run("settings")[1]
    assert "train.learning_rate = 2e-06\n    AdamW's highest learning rate" in out
    assert "name = (required)\n" in out
    assert run("settings", "Clip")[1].count("\n    ") == 2  # train.clip_range, guard.clip_fraction


@pytest.mark.parametrize("command", ["train", "evaluate", "sample", "plan", "report"])
def test_help_shows_an_example_of_the_command(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"flowcredit {command} " in out.split("Usage:")[1].split("\n", 1)[1]
    assert command in run("--help")[1]


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("flowcredit 0.")
