"""Trackers: TensorBoard's own reader finds what the log holds, once; and training needs none of it."""

import importlib.util
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, TENSORS, EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from flowcredit import trackers, trainer
from flowcredit.errors import InputError
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder
from flowcredit.trackers import Trackers
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trackers")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\na green cross\n")
    model = {"path": str(root / "pipeline"), "height": 32, "width": 32, "max_sequence_length": 12}
    content = {
        "name": "tiny",
        "model": {**model, "dtype": "float32"},
        "prompts": {"train": str(root / "prompts.txt"), "heldout": str(root / "prompts.txt")},
        "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 2, "strides": [1], "train_steps": [0]},
        "rewards": [{"name": "simple_rewards:redness"}],
        "train": {"iterations": 4, "prompts_per_iteration": 2, "mixed_precision": "no"},
        "evaluation": {"every": 2, "prompts": 3, "images": 3},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    return root / "recipe.yaml"


def train(recipe: Path, run: Path, *overrides: str) -> str:
    """What the console said."""
    said = io.StringIO()
    trainer.train(load_recipe(recipe, overrides), run, Console(file=said, width=500))
    return said.getvalue()


def read(run: Path) -> EventAccumulator:
    found = EventAccumulator(str(run / "tensorboard"), {SCALARS: 0, IMAGES: 0, TENSORS: 0})
    return found.Reload()


def points(found: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(name)]


def logged(run: Path, name: str) -> list[tuple[int, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(line["iteration"], pytest.approx(line[name], rel=1e-6, abs=1e-9)) for line in lines]


def assert_as_logged(run: Path) -> None:
    found = read(run)
    for name in ("reward/simple_rewards:redness", "grad_norm", "velocity_evaluations", "learning_rate"):
        assert points(found, name) == logged(run, name)
    for step, mean in points(found, "heldout/simple_rewards:redness"):
        content = json.loads((run / "evaluations" / f"{step:06d}.json").read_text())
        assert mean == pytest.approx(content["rewards"]["simple_rewards:redness"]["mean"], rel=1e-6)
    assert [step for step, _ in points(found, "heldout/simple_rewards:redness")] == [0, 2, 4]
    images = found.Images("heldout/images")
    assert [image.step for image in images] == [0, 2, 4]
    shown = np.asarray(Image.open(io.BytesIO(images[1].encoded_image_string)).convert("RGB"))
    kept = np.asarray(Image.open(run / "images" / "000002.png").convert("RGB"))
    assert np.array_equal(shown, kept)


def test_tensorboard_holds_the_log_the_evaluations_and_the_images(recipe: Path, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run")
    assert_as_logged(tmp_path / "run")
    text = read(tmp_path / "run").Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "learning_rate" in text


def test_a_resumed_run_has_each_point_once_and_its_weights_do_not_change(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe, tmp_path / "without", "logging.trackers=[]")
    assert not (tmp_path / "without" / "tensorboard").exists()
    log = Trackers.log

    def stop(self: Trackers, values: Mapping[str, Any], iteration: int) -> None:
        log(self, values, iteration)
        if iteration == 3 and "grad_norm" in values:
            raise RuntimeError("cut short, before iteration 3 is saved")

    with monkeypatch.context() as patched:
        patched.setattr(Trackers, "log", stop)
        with pytest.raises(RuntimeError, match="cut short"):
            train(recipe, tmp_path / "run", "checkpoint.every=2")
    trainer.resume(tmp_path / "run", [], Console(quiet=True))
    assert_as_logged(tmp_path / "run")
    exported = "final/transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "run" / exported).read_bytes() == (tmp_path / "without" / exported).read_bytes()


def test_a_tracker_that_fails_is_left_out_and_training_goes_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, values: Any, step: int | None = None, **kwargs: Any) -> None:
        if step == 2:
            raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(TensorBoardTracker, "log", fail)
    said = train(recipe, tmp_path / "run")
    assert said.count("tensorboard is left out from here on: ConnectionError: no network") == 1
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_cannot_begin_is_left_out(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardTracker, "start", fail)
    assert "tensorboard is left out from here on: OSError" in train(recipe, tmp_path / "run")


def test_a_full_disk_costs_the_tracker_and_one_line(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(self: Any, record: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    said = train(recipe, tmp_path / "run")
    assert said.count("tensorboard is left out from here on: OSError: [Errno 28]") == 1
    assert "Traceback" not in capfd.readouterr().err


class Service:
    """What wandb or trackio hand out, here without a network."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.said.append((f"log {step}", dict(values)))

    def finish(self) -> None:
        self.said.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_the_same_by_accelerates_trackers(
    name: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is installed: the part of accelerate's tracker that calls the package is replaced, no more."""
    kind: Any = {"wandb": WandBTracker, "trackio": TrackioTracker}[name]
    service = Service()
    begun: list[Any] = []

    def start(self: Any) -> None:
        self.run = service
        begun.append((self.run_name, self.init_kwargs))

    monkeypatch.setattr(kind, "start", start)
    monkeypatch.setattr(kind, "store_init_configuration", lambda self, values: begun.append(values["name"]))
    monkeypatch.setattr(
        WandBTracker, "log_images", lambda self, values, step: service.said.append((f"images {step}", values))
    )
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted, *more: found("json" if wanted == name else wanted, *more)
    )
    train(recipe, tmp_path / "run", f"logging={{trackers: [{name}], project: mine}}")
    assert begun[0][0] == "mine"
    assert begun[1] == "tiny"
    logged = {label: values for label, values in service.said if label.startswith("log")}
    record = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[3])
    figures = [values for label, values in service.said if label == "log 4" and "grad_norm" in values]
    assert figures == [
        {key: value for key, value in record.items() if key != "iteration" and value is not None}
    ]
    assert "heldout/simple_rewards:redness" in logged["log 0"]
    assert [label for label, _ in service.said if label.startswith("images")] == (
        ["images 0", "images 2", "images 4"] if name == "wandb" else []
    )
    assert service.said[-1] == ("finish", None)
    # A resumed run is the same run to the service.
    again = Trackers(load_recipe(tmp_path / "run" / "recipe.yaml", []), RunFolder(tmp_path / "run"), print)
    again.begin(4)
    assert begun[2][1] == begun[0][1]
    assert len(begun) == 3


@pytest.mark.parametrize(
    ("trackers_asked", "said"),
    [
        (
            "[wandb]",
            r"the package wandb is not installed; install it with: pip install 'flowcredit\[wandb\]'",
        ),
        ("[tensorbord]", "did you mean 'tensorboard'"),
        ("nothing", "logging.trackers"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_loaded(
    trackers_asked: str, said: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "assemble", lambda *given: pytest.fail("loaded"))
    with pytest.raises(InputError, match=said) as refused:
        train(recipe, tmp_path / "run", f"logging.trackers={trackers_asked}")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_where_tensorboard_is_not_installed_nobody_misses_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = train(recipe, tmp_path / "run", "train.iterations=1")
    assert "left out" not in said
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen_anew(cpu: bool) -> None:
        assert cpu
        torch.set_num_threads(3)

    monkeypatch.setattr(trackers, "PartialState", chosen_anew)
    trackers._initialise_accelerate()
    assert torch.get_num_threads() == 1
