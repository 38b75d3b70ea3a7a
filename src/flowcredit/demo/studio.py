"""What the pages draw with: a run's model, rewards and prompts, and its checkpoints as they come and go."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from torch import Tensor

from flowcredit.assembly import build_grid, build_model, build_rewards, device_of
from flowcredit.checkpoint import STATE_FILE, kept_iterations
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.interfaces import Reward
from flowcredit.models.loading import PipelineFlow
from flowcredit.progress import reward_weights
from flowcredit.prompts import PromptSet, load_prompts
from flowcredit.run_folder import RunFolder
from flowcredit.shapes.scenes import scene_of
from flowcredit.standing import best_iterations

BASE = 0
"""The iteration that stands for the model before training."""
LONGEST_PROMPT = 4000
"""Characters."""


@dataclass(frozen=True)
class Moment:
    """A point of the run whose weights are at hand; ``words`` say which."""

    iteration: int
    words: str


@dataclass(frozen=True)
class Studio:
    """A run's parts, loaded once. ``lock`` is held by whoever puts weights into the model."""

    recipe: Recipe
    folder: RunFolder
    model: PipelineFlow
    grid: Tensor
    """[T+1] sigmas of the evaluation, with which images are compared."""
    rewards: Mapping[str, Reward]
    watched: Mapping[str, Reward]
    train_prompts: PromptSet
    heldout_prompts: PromptSet
    lock: Lock = field(default_factory=Lock)

    @property
    def steps(self) -> int:
        """Sampling steps of the compared images: those of the run's evaluation."""
        return len(self.grid) - 1


def open_studio(recipe: Recipe, run_dir: Path) -> Studio:
    """Load what a run was made of; nothing is written. Raises InputError for what cannot be loaded."""
    device = device_of(recipe.model.device)
    heldout = load_prompts(recipe.prompts.heldout, recipe.prompts.column)
    train = load_prompts(recipe.prompts.train, recipe.prompts.column)
    rewards = build_rewards(recipe, recipe.rewards, device)
    watched = build_rewards(recipe, recipe.watch, device)
    model = build_model(recipe)
    steps = recipe.evaluation.num_steps or recipe.algorithm.num_steps
    grid = build_grid(recipe.grid, model, steps)
    return Studio(recipe, RunFolder(run_dir), model, grid, rewards, watched, train, heldout)


def moments(studio: Studio) -> tuple[Moment, ...]:
    """The model before training, and what there is a checkpoint of at this moment, in order."""
    kept = [each for each in kept_iterations(studio.folder.checkpoints) if each > BASE]
    last = studio.recipe.train.iterations
    ranked = best_iterations(studio.folder, reward_weights(studio.recipe), 1_000_000)
    best = next((each for each in ranked if each in kept), None)
    found = [Moment(BASE, "the base model, before training")]
    for each in kept:
        marks = ["final"] if each == last else ["newest so far"] if each == kept[-1] else []
        marks += ["best of these on held-out prompts"] if each == best and len(kept) > 1 else []
        found.append(
            Moment(each, f"iteration {each} of {last}" + (f" ({', '.join(marks)})" if marks else ""))
        )
    return tuple(found)


def check_kept(studio: Studio, iteration: int) -> int:
    """When a checkpoint was written (0 for the base); InputError where it is no longer there."""
    if iteration == BASE:
        return 0
    kept = kept_iterations(studio.folder.checkpoints)
    try:
        return (studio.folder.checkpoints / f"{iteration:06d}" / STATE_FILE).stat().st_mtime_ns
    except OSError:
        listed = ", ".join(map(str, kept)) or "none"
        raise InputError(
            f"there is no checkpoint of iteration {iteration} any more (kept now: {listed}); choose another"
        ) from None


def asked_prompt(studio: Studio, text: str) -> PromptSet:
    """One prompt, with the columns that it has in the run's prompt files, or by the bundled world's grammar.

    InputError for none, or no text.
    """
    prompt = text.strip()
    if not prompt:
        raise InputError("type a prompt first: this one is empty")
    if len(prompt) > LONGEST_PROMPT:
        raise InputError(f"the prompt has {len(prompt)} characters; expected at most {LONGEST_PROMPT}")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise InputError("the prompt holds half of a surrogate pair, which is no character; expected text")
    for prompts in (studio.heldout_prompts, studio.train_prompts):
        if prompt in prompts.prompts:
            return prompts.take([prompts.prompts.index(prompt)])
    scene = scene_of(prompt) if studio.recipe.model.path.startswith("bundled:") else None
    if scene is None:
        return PromptSet((prompt,), source="this page")
    columns = scene.record()
    return PromptSet((columns.pop("prompt"),), {name: (each,) for name, each in columns.items()}, "this page")


def asked_seed(text: str) -> int:
    """A seed as it was typed. InputError unless it is a whole number, 0 or more."""
    word = text.strip()
    # As Python reads numbers "1_0" and digits of every script would be seeds, too.
    if not (word.isascii() and word.isdigit() and len(word) <= 18):
        shown = repr(word[:40]) if word else "empty"
        raise InputError(f"the seed is {shown}; expected a whole number, 0 or more, of at most 18 digits")
    return int(word)


def examples(studio: Studio, count: int = 200) -> list[str]:
    """Held-out prompts, each once, in the order of their file."""
    return list(dict.fromkeys(studio.heldout_prompts.prompts))[:count]
