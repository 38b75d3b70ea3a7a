"""A run's figures and images for TensorBoard, Weights & Biases or trackio, by accelerate's trackers.

They are a copy for looking at: nothing of a run depends on them, and one that fails is left out from then on.
"""

import importlib.util
import json
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

import numpy as np
import torch
from accelerate import PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from PIL import Image

from flowcredit.config import Recipe
from flowcredit.errors import InputError, one_line
from flowcredit.recipe_io import dump_recipe
from flowcredit.run_folder import RunFolder, write_text
from flowcredit.running import TrackerName

IMAGES = "heldout/images"


def wanted(choice: Literal["auto"] | tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
    """The trackers of a run: `auto` is TensorBoard where it is installed.

    Raises:
        InputError: one that is named and is not installed.
    """
    if choice == "auto":
        return ("tensorboard",) if importlib.util.find_spec("tensorboard") else ()
    for name in choice:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"logging.trackers has {name!r}, but the package {name} is not installed; install it with: "
                f"pip install 'flowcredit[{name}]'"
            )
    return choice


class Trackers:
    """Those of a run that are open. Every call reaches each of them, or is told as lost."""

    def __init__(self, recipe: Recipe, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._recipe, self._folder, self._say = recipe, folder, say
        self._open: dict[str, GeneralTracker] = {}

    def begin(self, iteration: int) -> None:
        """Open them for what follows ``iteration``; what they have of later ones counts no more."""
        self.finish()
        names = wanted(self._recipe.logging.trackers)
        if names:
            _initialise_accelerate()
        for name in names:
            self._try(name, partial(self._begin, name, iteration))

    def _begin(self, name: TrackerName, iteration: int) -> None:
        tracker = _make(name, self._recipe, self._folder, iteration)
        tracker.start()
        self._open[name] = tracker
        if iteration:
            return
        if name == "tensorboard":
            tracker.log({"recipe": f"```yaml\n{dump_recipe(self._recipe)}\n```"}, step=0)
        else:
            tracker.store_init_configuration(self._recipe.model_dump(mode="json"))

    def log(self, values: Mapping[str, float | int | None], iteration: int) -> None:
        """Figures after an iteration; those that are no number are left out."""
        told = {name: value for name, value in values.items() if value is not None and name != "iteration"}
        self._each(lambda tracker: tracker.log(told, step=iteration))

    def evaluated(self, means: Mapping[str, float], iteration: int) -> None:
        """Held-out rewards, and the images that the run keeps of the same prompts and noises each time."""
        self.log({f"heldout/{name}": mean for name, mean in means.items()}, iteration)
        file = self._folder.images(iteration)
        if self._open and file.exists():
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB"))[None]
            self._each(lambda tracker: _show(tracker, pixels, iteration))

    def finish(self) -> None:
        """Close what is open."""
        self._each(lambda tracker: tracker.finish())
        self._open.clear()

    def _each(self, call: Callable[[GeneralTracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, partial(call, tracker))

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except Exception as error:  # A service that is down, a full disk: training goes on.
            self._open.pop(name, None)
            self._say(f"{name} is left out from here on: {type(error).__name__}: {one_line(error)[:200]}")


@contextmanager
def tracking(
    recipe: Recipe, folder: RunFolder, iteration: int, say: Callable[[str], None], first: bool
) -> Iterator[Trackers]:
    """The trackers of a run that goes on after ``iteration``, closed at the end; those of the first process
    alone write."""
    trackers = Trackers(recipe, folder, say)
    with _quiet_threads():
        if first:
            trackers.begin(iteration)
        try:
            yield trackers
        finally:
            trackers.finish()


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """TensorBoard's writing thread tells its failure at the next call: the trace that it prints besides tells
    nobody more."""
    before = threading.excepthook

    def hook(raised: threading.ExceptHookArgs) -> None:
        if not type(raised.thread).__module__.startswith("tensorboard."):
            before(raised)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _make(name: TrackerName, recipe: Recipe, folder: RunFolder, iteration: int) -> GeneralTracker:
    project = recipe.logging.project
    match name:
        case "tensorboard":
            # Of two lives of a run, steps from `purge_step` on are the later one's.
            purge = {"purge_step": iteration + 1} if folder.tensorboard.exists() else {}
            tracker = TensorBoardTracker(folder.tensorboard.name, folder.path, **purge)
            tracker.main_process_only = False
            return tracker
        case "wandb":
            known = _run_id(folder)
            return WandBTracker(project, name=recipe.name, id=known, resume="allow", dir=str(folder.path))
        case "trackio":
            return TrackioTracker(project, name=f"{recipe.name}-{_run_id(folder)}", resume="allow")


def _show(tracker: GeneralTracker, pixels: np.ndarray, iteration: int) -> None:
    """[1, H, W, 3] bytes to those trackers that take images."""
    if isinstance(tracker, TensorBoardTracker):
        tracker.log_images({IMAGES: pixels}, step=iteration, dataformats="NHWC")
    elif isinstance(tracker, WandBTracker):
        tracker.log_images({IMAGES: list(pixels)}, step=iteration)


def _run_id(folder: RunFolder) -> str:
    """By which a service knows the run again when it is resumed."""
    file = folder.path / "tracker.json"
    if not file.exists():
        write_text(file, json.dumps({"id": secrets.token_hex(4)}))
    return str(json.loads(file.read_text(encoding="utf-8"))["id"])


def _initialise_accelerate() -> None:
    """Its trackers log by a logger that wants to know of processes. Kernels keep their number of threads,
    which it would choose anew where several processes compute on CPUs, and sums would round otherwise."""
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PartialState(cpu=True)
    torch.set_num_threads(threads)
