"""What a user is told: near names alone, one line, what is wrong where it is wrong, and before the work."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcredit import console as consoles
from flowcredit.assembly import assemble
from flowcredit.calibrate import calibrate_command
from flowcredit.config import Recipe
from flowcredit.console import Monitor, counted
from flowcredit.errors import InputError
from flowcredit.evaluate import evaluate_command, sample_command
from flowcredit.introduction import introduce
from flowcredit.models.loading import load_model
from flowcredit.nearest import nearest
from flowcredit.plan_command import plan_command
from flowcredit.prompts import PromptSet
from flowcredit.recipe_io import load_recipe
from flowcredit.report import diagnose as diagnosing
from flowcredit.scoring import score_images
from flowcredit.trainer import train
from tiny_flux import build_tiny_flux

RECIPES = Path(__file__).parent.parent / "recipes"

pytestmark = pytest.mark.usefixtures("one_thread")


def small(*overrides: str) -> Recipe:
    tree = "algorithm={name: g2rpo, num_steps: 3, group_size: 2, strides: [1]}"
    length = ["train.iterations=2", "train.prompts_per_iteration=1", "train.warmup_iterations=0"]
    looked_at = ["evaluation.prompts=1", "evaluation.every=0", "evaluation.images=0", "watch=[]"]
    return load_recipe(RECIPES / "shapes_g2rpo.yaml", [tree, *length, *looked_at, *overrides])


@pytest.mark.parametrize(
    ("wanted", "known", "meant"),
    [
        ("learning_rat", ["learning_rate", "rate"], "learning_rate"),
        ("warmup", ["warmup_iterations", "weights"], "warmup_iterations"),
        ("cosnie", ["constant", "cosine", "linear"], "cosine"),
        ("clop", ["clip", "ocr"], "clip"),
        ("HPS", ["hps", "http"], "hps"),
        ("hp", ["hps", "http"], "hps"),
        ("half", ["full", "lora"], None),
        ("fid", ["ocr", "hps", "clip"], None),
        ("lr", ["rank", "seed", "eta"], None),
        ("x", ["y", "z"], None),
        ("steps", ["shape", "strides"], None),
    ],
)
def test_names_are_suggested_where_they_are_near(wanted: str, known: list[str], meant: str | None) -> None:
    assert nearest(wanted, known) == meant


@pytest.mark.parametrize(
    ("override", "told", "silent"),
    [
        ("model.dtype=half", "model.dtype is", "did you mean"),
        ("model.dtype=bfloat61", "did you mean 'bfloat16'?", "known here"),
        ("train.lr=1e-5", "unknown setting 'train.lr'; known here: iterations", "did you mean"),
        (
            "prompts.train=bundled:flowers",
            "nothing is bundled as 'bundled:flowers'; there are",
            "did you mean",
        ),
        ("model.path=bundled:shape", "did you mean 'bundled:shapes'?", "; there"),
    ],
)
def test_suggestions_in_recipes(override: str, told: str, silent: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_command(small(override), as_json=False)
    assert told in str(caught.value)
    assert silent not in str(caught.value)


def test_a_rewards_own_error_is_put_on_one_line() -> None:
    def fails(images: Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> Tensor:
        raise RuntimeError("no key\n\n  in the table\r\nat all")

    with pytest.raises(InputError, match="RuntimeError: no key in the table at all ") as caught:
        score_images({"own": fails}, torch.zeros(1, 3, 2, 2), ["a"], {}, batch_size=1)
    assert len(str(caught.value).splitlines()) == 1


def load_with(folder: Path, **settings: object) -> object:
    common = {"height": 32, "width": 32, "guidance_scale": 1.0, "max_sequence_length": 8}
    others = {"dtype": torch.float32, "device": "cpu", "decode_batch_size": 1}
    return load_model(folder, **{**common, **others, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_weights_that_are_no_numbers_are_named_when_they_are_loaded(tmp_path: Path, part: str) -> None:
    folder = build_tiny_flux(tmp_path / "model")
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    name = "decoder.conv_in.weight"
    if part != "vae":
        name = next(key for key, value in tensors.items() if value.dim() == 2 and "embed" not in key)
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"model/{part}: weights that hold NaN or infinity: \S+; expected"):
        load_with(folder)


def test_a_text_cache_that_cannot_be_used_is_told_with_its_setting(tmp_path: Path) -> None:
    folder = build_tiny_flux(tmp_path / "model")
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"^model\.text_cache \S*taken: is a file; expected a folder"):
        load_with(folder, text_cache_folder=tmp_path / "taken")
    model = load_model(
        folder, height=32, width=32, guidance_scale=1.0, max_sequence_length=8, dtype=torch.float32,
        device="cpu", decode_batch_size=1, text_cache_folder=tmp_path / "cache",
    )  # fmt: skip
    (tmp_path / "cache").write_text("made since")
    with pytest.raises(InputError, match=r"^model\.text_cache: nothing can be written in \S*cache"):
        model.encode(["a red circle"])


def told_before(recipe: Recipe) -> str:
    said = io.StringIO()
    introduce(assemble(recipe), Path("run"), Console(file=said, width=200))
    return said.getvalue()


def test_noise_that_a_method_does_not_read_is_told() -> None:
    deaf = ("algorithm={name: neighbor_grpo, num_steps: 3, group_size: 2, anchors: 1, train_steps: [0]}",)
    line = "noise.eta is 0.3, which algorithm neighbor_grpo does not read"
    assert line in plan_command(small(*deaf, "noise={eta: 0.3}"), as_json=False)
    assert line in told_before(small(*deaf, "noise={eta: 0.3}"))
    assert "noise.kind is cps" in plan_command(small("algorithm=dpo", "noise={kind: cps}"), as_json=False)
    for recipe in (small("noise={eta: 0.3}"), small(*deaf, "noise={}")):
        assert "does not read" not in plan_command(recipe, as_json=False)


def test_compiling_is_shown_as_a_stage_once() -> None:
    said = io.StringIO()
    with Monitor(Console(file=said, width=200), 2, 0, 1, compiles=True) as monitor:
        for name in ("evaluating", "rolling out", "scoring", "updating") * 2:
            monitor.stage(name, 1)
    lines = said.getvalue().splitlines()
    assert [line.removesuffix(": the first time takes minutes") for line in lines] == [
        f"compiling the network, {name}" for name in ("evaluating", "rolling out", "updating")
    ]
    said = io.StringIO()
    with Monitor(Console(file=said), 2, 0, 1) as monitor:
        monitor.stage("evaluating", 1)
    assert said.getvalue() == ""


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said, clock = io.StringIO(), [0.0]
    monkeypatch.setattr("flowcredit.console.time.monotonic", lambda: clock[0])
    with counted(Console(file=said, width=200), "evaluations", 1000) as advance:
        for _ in range(10):
            clock[0] += 25.0
            advance(100)
    assert said.getvalue().splitlines() == [
        "evaluations: 300 of 1,000, about 3 min left",
        "evaluations: 600 of 1,000, about 2 min left",
        "evaluations: 900 of 1,000, about 25 s left",
    ]


Command = Callable[[Path], object]


@pytest.mark.parametrize(
    "command",
    [
        lambda out: evaluate_command(small(), None, out),
        lambda out: calibrate_command(small("algorithm={name: dense_grpo, num_steps: 3}"), out),
        lambda out: sample_command(small(), None, PromptSet(("a",)), out, 1, 0),
        lambda out: diagnosing.diagnose_command(small(), None, out, 1),
    ],
    ids=["evaluate", "calibrate", "sample", "diagnose"],
)
def test_a_place_that_cannot_be_written_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def loaded(*arguments: object, **named: object) -> None:
        raise AssertionError("a model was loaded first")

    monkeypatch.setattr("flowcredit.assembly.load_model", loaded)
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"^--out \S*: \S*taken is no folder; choose another place"):
        command(tmp_path / "taken" / "below")


def test_a_run_is_refused_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"^output \S*taken: is a file; expected a folder"):
        train(small(), tmp_path / "taken" / "run", Console(quiet=True))


def test_a_diagnosis_says_its_cost_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is what it then takes, and how far it is is told."""
    module, scored = ModuleType("counting_rewards"), [0]

    def counting(images: Tensor, prompts: Sequence[str]) -> Tensor:
        scored[0] += len(images)
        return images.mean((1, 2, 3))

    vars(module).update(counting=counting)
    monkeypatch.setitem(sys.modules, "counting_rewards", module)
    monkeypatch.setattr(consoles, "LINE_EVERY_S", 0.0)
    evaluated: list[int] = []

    @contextmanager
    def listening(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
        with counted(console, what, total) as advance:

            def both(units: int) -> None:
                evaluated.append(units)
                advance(units)

            yield both

    monkeypatch.setattr(diagnosing, "counted", listening)
    diagnosing.diagnose_command(small("rewards=['counting_rewards:counting']"), None, tmp_path / "out", 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"diagnosing shapes-g2rpo on 2 prompts: {sum(evaluated)} velocity evaluations, {scored[0]} images"
    )
    assert f"velocity evaluations: {evaluated[0]} of {sum(evaluated)}, about " in lines[1]


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("silent_rewards")

    def nothing(images: Tensor, prompts: Sequence[str]) -> list[None]:
        return [None] * len(prompts)

    def fails(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise RuntimeError("down\nagain")

    def alike(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.ones(len(prompts))

    vars(module).update(nothing=nothing, fails=fails, alike=alike)
    monkeypatch.setitem(sys.modules, "silent_rewards", module)


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize("reward", ["nothing", "fails"])
def test_a_short_run_without_a_single_score_is_told_and_ends_badly(tmp_path: Path, reward: str) -> None:
    said = io.StringIO()
    recipe = small(f"rewards=['silent_rewards:{reward}']", "scoring.on_error=skip")
    with pytest.raises(InputError, match="no reward gave a score to any image of the whole run"):
        train(recipe, tmp_path / "run", Console(file=said, width=200))
    lines = said.getvalue().splitlines()
    assert sum("gave no score to any image of this iteration" in line for line in lines) == 2
    if reward == "fails":
        assert any("RuntimeError: down again (test_messages.py" in line for line in lines)
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.usefixtures("rewards")
def test_a_reward_without_scores_beside_another_is_told(tmp_path: Path) -> None:
    """Equal scores, which a short trial easily has, are told and no error."""
    said = io.StringIO()
    recipe = small("rewards=['silent_rewards:nothing', 'silent_rewards:alike']")
    train(recipe, tmp_path / "run", Console(file=said, width=200))
    text = said.getvalue()
    assert text.count("reward silent_rewards:nothing gave no score to any image of this iteration") == 2
    assert text.count("nothing was learned in this iteration") == 2
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["reward/silent_rewards:nothing"] for line in log] == [None, None]
    assert (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("shapes_g2rpo", "recipes/shapes_g2rpo.yaml"),
        ("shapes_dance_grpo.yaml", "recipes/shapes_dance_grpo.yaml"),
        ("mien.yaml", "mine.yaml"),
        ("unlike.yaml", None),
    ],
)
def test_a_recipe_that_is_not_there_brings_up_the_one_that_is(
    asked: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("name: mine\n")
    with pytest.raises(InputError, match="no such file") as refused:
        load_recipe(Path(asked), [])
    assert ("did you mean" in str(refused.value)) == (meant is not None)
    assert meant is None or f"(did you mean {meant}?)" in str(refused.value)


def test_a_setting_of_another_algorithm_is_not_taken_for_a_misspelling() -> None:
    with pytest.raises(InputError) as refused:
        load_recipe(RECIPES / "shapes_g2rpo.yaml", ["algorithm.name=mix_grpo"])
    said = str(refused.value)
    assert "'algorithm.train_steps' of algorithm mix_grpo" in said
    assert "did you mean" not in said
    assert "known here: num_steps, group_size" in said
