"""Leaves of a rollout to decoded images to scores, batch by batch; rewards may score beside what follows.

Axes: P prompts, W samples per prompt at a leaf, R rewards, B images of one batch, *D latent dimensions.
Scores are float32 on the CPU; NaN means "no score".
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from flowcredit.background import Submit, at_once, ready
from flowcredit.errors import InputError
from flowcredit.faults import Fault
from flowcredit.interfaces import FlowModel, Reward
from flowcredit.scoring import Batch, OnError, Policy, batches, score_batch

THUMB = 8
"""Side, in pixels, to which images are averaged to compare those of a group."""


@dataclass(frozen=True)
class ScoreCounts:
    """What scoring cost and what came out of it."""

    decodes: int
    """Latents decoded to images."""
    reward_calls: int
    """Images times rewards: how many scores were asked for."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Per reward, the images left without a score (NaN or None returned, or a failure skipped)."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Per reward, those of the missing that are failures: an exception, a time-out, an infinite score."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Per reward that failed, what its first failure said."""


@dataclass(frozen=True)
class Scored:
    """Scores by scored segment, [R, P, W]; what they cost; and ``spread`` [P], how much the images of a
    prompt differ: the standard deviation of a pixel, at `THUMB` x `THUMB`, within a group, mean over
    pixels, channels and leaves. NaN where no group has two images."""

    scores: dict[int, Tensor]
    counts: ScoreCounts
    spread: Tensor
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Per reward that failed, the images on which it did first."""


@dataclass(frozen=True)
class Scoring:
    """A scoring that was begun: every image is decoded, its rewards have been asked for or will be."""

    leaves: Mapping[int, Tensor]
    distinct: Mapping[tuple[Any, ...], Tensor]
    names: Sequence[str]
    parts: Sequence[tuple[int, Future[tuple[Tensor, Tensor]]]]
    thumbs: Tensor
    policy: Policy

    @property
    def images(self) -> int:
        """How many images are scored."""
        return len(self.thumbs)

    def result(self, progress: Callable[[int], None] | None = None) -> Scored:
        """Wait for the scores; ``progress`` is told the images of each batch, and every tenth of a second 0.

        Raises RewardError as `flowcredit.scoring.score_images`.
        """
        found = []
        for count, part in self.parts:
            while progress is not None and not ready(part):
                progress(0)
            found.append(part.result())
            if progress is not None:
                progress(count)
        scores = torch.cat([torch.empty(len(self.names), 0), *(each for each, _ in found)], dim=1)
        failed = sum((each for _, each in found), torch.zeros(len(self.names), dtype=torch.int64))
        counts = ScoreCounts(
            decodes=scores.shape[1],
            reward_calls=scores.numel(),
            missing=self._by_reward(scores.isnan().sum(dim=1)),
            failed=self._by_reward(failed),
            reasons=self.policy.reasons,
        )
        by_leaf = self._pieces(scores.T)
        mine = {segment: by_leaf[_memory(leaf)].permute(2, 0, 1) for segment, leaf in self.leaves.items()}
        return Scored(mine, counts, self._spread(), self.policy.faults)

    def _pieces(self, rows: Tensor) -> dict[tuple[Any, ...], Tensor]:
        """[N, ...] rows of all distinct leaves to [P, W, ...] of each."""
        sizes = [leaf.shape[0] * leaf.shape[1] for leaf in self.distinct.values()]
        split = zip(self.distinct.items(), rows.split(sizes), strict=True)
        return {memory: piece.unflatten(0, leaf.shape[:2]) for (memory, leaf), piece in split}

    def _spread(self) -> Tensor:
        groups = [piece for piece in self._pieces(self.thumbs).values() if piece.shape[1] > 1]
        if not groups:
            prompts = max((len(leaf) for leaf in self.leaves.values()), default=0)
            return torch.full((prompts,), torch.nan)
        return torch.stack([group.std(dim=1).mean(dim=-1) for group in groups]).mean(dim=0)

    def _by_reward(self, counts: Tensor) -> dict[str, int]:
        return dict(zip(self.names, (int(count) for count in counts), strict=True))


def begin_scoring(
    model: FlowModel,
    leaves: Mapping[int, Tensor],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    rewards: Mapping[str, Reward],
    *,
    batch_size: int,
    on_error: OnError = "stop",
    timeout_s: float | None = None,
    progress: Callable[[int], None] | None = None,
    submit: Submit = at_once,
) -> Scoring:
    """Decode the leaves of a rollout, and have each batch of images scored by ``submit``.

    Segments that end in the same leaf hold the same tensor: it is decoded and scored once.

    Args:
        leaves: scored segment -> [P, W, *D] states at sigma 0.
        prompts: P prompts; sample w of prompt p is scored with prompt p and its columns.
        columns: further columns of the prompt file, P values each.
        batch_size: images decoded and scored together.
        on_error, timeout_s: as in `flowcredit.scoring.score_images`.
        progress: told the number of images of each batch that is decoded and handed over.
        submit: where the rewards are called; at once by default. The batches and their order, and so the
            scores, are the same wherever that is.

    Raises:
        RewardError: where the rewards are called at once, or an earlier batch has failed by now.
        InputError: the model decodes to NaN or infinity (the training has diverged).
    """
    policy = Policy(on_error, timeout_s)
    distinct = {_memory(leaf): leaf for leaf in leaves.values()}
    rows = [row for leaf in distinct.values() for row in leaf.flatten(0, 1)]
    owners = _owners(distinct.values(), {"prompts": prompts, **columns})
    parts, thumbs = [], [torch.empty(0, 3 * THUMB * THUMB)]
    for part in batches(len(rows), batch_size):
        images = decode_images(model, torch.stack(rows[part]))
        mine = {name: [values[p] for p in owners[part]] for name, values in columns.items()}
        batch = Batch(images, [prompts[p] for p in owners[part]], mine)
        thumbs.append(adaptive_avg_pool2d(images, THUMB).flatten(1).float().cpu())
        parts.append((len(batch), submit(partial(score_batch, rewards, batch, policy))))
        if progress is not None:
            progress(len(batch))
    return Scoring(leaves, distinct, tuple(rewards), parts, torch.cat(thumbs), policy)


def score_leaves(
    model: FlowModel,
    leaves: Mapping[int, Tensor],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    rewards: Mapping[str, Reward],
    *,
    batch_size: int,
    on_error: OnError = "stop",
    timeout_s: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[int, Tensor], ScoreCounts]:
    """Decode the leaves of a rollout and score them here and now; the images of one batch are in memory.

    Arguments and errors as `begin_scoring`. Returns scored segment -> [R, P, W] float32, and the counts.
    """
    done = begin_scoring(
        model,
        leaves,
        prompts,
        columns,
        rewards,
        batch_size=batch_size,
        on_error=on_error,
        timeout_s=timeout_s,
        progress=progress,
    ).result()
    return done.scores, done.counts


def decode_images(model: FlowModel, rows: Tensor) -> Tensor:
    """[B, *D] states at sigma 0 to [B, 3, H, W] images; InputError where they are not finite numbers."""
    images = model.decode(rows.to(model.device, torch.float32))
    if not images.isfinite().all():
        raise InputError(
            f"{int((~images.isfinite()).flatten(1).any(dim=1).sum())} of {len(images)} decoded images "
            "contain NaN or infinity: the training has diverged; go back to an earlier checkpoint and lower "
            "the learning rate (before any training: numbers too large for model.dtype; take float32)"
        )
    return images


def _owners(leaves: Collection[Tensor], aligned: Mapping[str, Sequence[Any]]) -> list[int]:
    """For each row of the leaves, one after the other, the prompt that it belongs to."""
    for name, values in aligned.items():
        for leaf in leaves:
            if len(leaf) != len(values):
                raise ValueError(f"got {len(values)} {name} for leaves of {len(leaf)} prompts")
    return [prompt for leaf in leaves for prompt in range(leaf.shape[0]) for _ in range(leaf.shape[1])]


def _memory(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype
