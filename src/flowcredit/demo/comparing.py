"""Base and aligned from the same noises: the images of ``flowcredit sample``, the scores of ``evaluate``.

Axes: N images, H and W their height and width.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowcredit.demo.studio import BASE, Studio, check_kept
from flowcredit.errors import InputError
from flowcredit.evaluate import sample, weights_of
from flowcredit.interfaces import ChecksPrompts, Reward
from flowcredit.prompts import PromptSet
from flowcredit.rewards.waiting import itself
from flowcredit.scoring import RewardError, columns_of, score_images

KEPT = 64
"""Images that are kept, should the slider come back to them."""


@dataclass(frozen=True)
class Drawn:
    """Images [N, 3, H, W] in [0, 1], of consecutive seeds; by reward N scores, NaN where there is none, or,
    in ``lacking``, why it gives none."""

    images: Tensor
    seeds: tuple[int, ...]
    scores: Mapping[str, tuple[float, ...]]
    lacking: Mapping[str, str]


@dataclass
class Album:
    """Draws images of a run, and remembers the last of them; for one page each or for all."""

    studio: Studio
    pages: "OrderedDict[tuple[str, int, int, int, int], Drawn]" = field(default_factory=OrderedDict)

    def draw(self, prompt: PromptSet, seed: int, count: int, iteration: int) -> Drawn:
        """``count`` images of one prompt by the weights after ``iteration``, with the seeds from ``seed`` on.

        Raises InputError where there is no such checkpoint, or the model decodes to no image.
        """
        written = check_kept(self.studio, iteration)
        key = (prompt.prompts[0], seed, count, iteration, written)
        with self.studio.lock:
            if key not in self.pages:
                self.pages[key] = _drawn(self.studio, prompt, seed, count, iteration)
            self.pages.move_to_end(key)
            while len(self.pages) > 1 and sum(len(each.seeds) for each in self.pages.values()) > KEPT:
                self.pages.popitem(last=False)
            return self.pages[key]


def _drawn(studio: Studio, prompt: PromptSet, seed: int, count: int, iteration: int) -> Drawn:
    seeds = tuple(range(seed, seed + count))
    run_dir = None if iteration == BASE else studio.folder.path
    with weights_of(studio.model, run_dir, iteration):
        images = torch.cat([image for each in seeds for image in _one(studio, prompt, each)])
    scores: dict[str, tuple[float, ...]] = {}
    lacking: dict[str, str] = {}
    for name, reward in {**studio.rewards, **studio.watched}.items():
        why = refusal(reward, prompt)
        try:
            if why is None:
                scores[name] = _scores(studio, name, reward, images, prompt)
        except RewardError as error:
            why = str(error)
        if why is not None:
            lacking[name] = why
    return Drawn(images.cpu(), seeds, scores, lacking)


def _one(studio: Studio, prompt: PromptSet, seed: int) -> list[Tensor]:
    """As ``flowcredit sample`` draws the image of a prompt and a seed: [1, 3, H, W]."""
    size = studio.recipe.evaluation.batch_size
    return list(sample(studio.model, prompt.prompts, studio.grid, seed=seed, batch_size=size))


def _scores(
    studio: Studio, name: str, reward: Reward, images: Tensor, prompt: PromptSet
) -> tuple[float, ...]:
    scoring, repeated = studio.recipe.scoring, prompt.take([0] * len(images))
    (found,) = score_images(
        {name: reward},
        images,
        repeated.prompts,
        repeated.columns,
        batch_size=scoring.batch_size,
        timeout_s=scoring.timeout_s,
    )
    return tuple(found.tolist())


def refusal(reward: Reward, prompt: PromptSet) -> str | None:
    """Why a reward cannot score the images of a prompt; None if it can."""
    missing = [column for column in columns_of(reward).required if column not in prompt.columns]
    if missing:
        named = " and ".join(repr(column) for column in missing)
        return f"it needs {named} besides the text, as prompts of the run's files have: choose an example"
    demanding = itself(reward)
    if isinstance(demanding, ChecksPrompts):
        values = {column: cells[0] for column, cells in prompt.columns.items()}
        return demanding.refusal(prompt.prompts[0], values)
    return None


def check_scored(rewards: Mapping[str, Reward], prompt: PromptSet) -> None:
    """InputError for a prompt that one of the rewards cannot score."""
    for name, reward in rewards.items():
        why = refusal(reward, prompt)
        if why is not None:
            raise InputError(f"reward {name} cannot score this prompt: {why}")
