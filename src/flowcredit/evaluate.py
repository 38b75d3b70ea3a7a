"""Held-out prompts to a table of rewards: always the same prompts, the same noises, the plain ODE.

Axes: N prompts of the evaluation, B of one batch, T steps of the grid, H and W image height and width.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from torch import Tensor

from flowcredit.background import ready, submitting
from flowcredit.comparison import Evaluation, evaluation_table, steps_table, summarise
from flowcredit.config import Recipe
from flowcredit.console import counted, say
from flowcredit.destinations import check_file, check_folder
from flowcredit.distributed import ALONE, World
from flowcredit.errors import InputError
from flowcredit.image_grid import save_grid, save_image
from flowcredit.interfaces import FlowModel, Reward
from flowcredit.leaf_scoring import decode_images
from flowcredit.plan import Plan, Segment
from flowcredit.prompts import PromptSet, check_group_by, load_prompts
from flowcredit.rollout import KeyedNoise, rollout
from flowcredit.running import EvaluationSettings, ScoringSettings
from flowcredit.scoring import check_columns, score_images

__all__ = [
    "Evaluation",
    "evaluate",
    "evaluate_command",
    "evaluation_table",
    "sample",
    "sample_command",
    "summarise",
    "weights_of",
]

Progress = Callable[[int], None]

_ITERATION = -1
"""The iteration that keys the noises of an evaluation: none of training's, whatever its seed."""


def sample(
    model: FlowModel,
    prompts: Sequence[str],
    grid: Tensor,
    *,
    seed: int,
    batch_size: int,
    progress: Progress | None = None,
    places: Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """Draw one image for each prompt with the deterministic ODE, in batches: [B, 3, H, W] in [0, 1].

    The initial noise of a prompt is keyed by ``seed`` and its place among ``prompts``: batches of any
    size, before and after training, start from the same noises.

    Args:
        grid: [T+1] sigmas from 1 to 0.
        places: the prompts to draw; all by default.
        progress: told the number of velocity evaluations as they are done, T for each prompt.
    """
    num_steps = len(grid) - 1
    plan = Plan(num_steps, (Segment(None, tuple(range(num_steps + 1)), scored=True),))
    chosen = range(len(prompts)) if places is None else places
    for start in range(0, len(chosen), batch_size):
        part = chosen[start : start + batch_size]
        cond = model.encode([prompts[place] for place in part])
        noise = KeyedNoise(model, seed, _ITERATION, part)
        done = rollout(model, plan, cond, grid, _no_noise, noise, batch_size, progress=progress)
        yield decode_images(model, done.leaves[0].squeeze(1))


def evaluate(
    model: FlowModel,
    prompt_set: PromptSet,
    rewards: Mapping[str, Reward],
    settings: EvaluationSettings,
    grid: Tensor,
    *,
    scoring: ScoringSettings,
    iteration: int = 0,
    progress: Progress | None = None,
    world: World = ALONE,
) -> Evaluation:
    """Sample the first ``settings.prompts`` prompts on ``grid`` [T+1] and score them with every reward.

    Raises:
        InputError: the prompt file lacks a column that a reward or ``settings.group_by`` needs; a reward
            fails (`flowcredit.scoring.RewardError`); the model decodes to NaN.
    """
    chosen = prompt_set.take(range(min(settings.prompts, len(prompt_set))))
    check_columns(rewards, chosen.columns, chosen.source)
    groups = _groups(chosen, settings.group_by)
    share, began = world.share(len(chosen)), time.monotonic()
    mine = chosen.take(share.places)
    shown = max(0, min(share.own, settings.images - share.places[0]))
    tell = progress or (lambda done: None)
    kept: list[Tensor] = []
    parts: list[Future[Tensor]] = []
    start = 0
    with submitting(scoring.overlap, lambda: tell(0)) as submit:
        for images in sample(
            model,
            chosen.prompts,
            grid,
            seed=settings.seed,
            batch_size=settings.batch_size,
            progress=progress,
            places=share.places,
        ):
            rows = range(start, min(start + len(images), share.own))
            kept.append(images[: max(0, shown - start)].cpu())
            start += len(images)
            if rows:
                parts.append(submit(partial(_scored, rewards, images[: len(rows)], mine.take(rows), scoring)))
        found = [_waited(part, tell) for part in parts]
    scores = world.gathered(torch.cat([torch.empty(len(rewards), 0), *found], dim=1), dim=1)
    pictures = world.gathered(torch.cat(kept))
    return Evaluation(
        iteration=iteration,
        prompts=chosen.prompts,
        scores={name: tuple(row.tolist()) for name, row in zip(rewards, scores, strict=True)},
        group_by=settings.group_by,
        groups=groups,
        seconds=time.monotonic() - began,
        images=pictures,
    )


def _waited(part: Future[Tensor], tell: Progress) -> Tensor:
    while not ready(part):
        tell(0)
    return part.result()


def _scored(
    rewards: Mapping[str, Reward], images: Tensor, prompts: PromptSet, scoring: ScoringSettings
) -> Tensor:
    return score_images(
        rewards,
        images,
        prompts.prompts,
        prompts.columns,
        batch_size=scoring.batch_size,
        on_error=scoring.on_error,
        timeout_s=scoring.timeout_s,
    )


def evaluate_command(
    recipe: Recipe, run_dir: Path | None, out: Path | None, num_steps: Sequence[int] = ()
) -> None:
    """Evaluate a recipe's model, or with ``run_dir`` what that run made of it; print the table.

    ``num_steps``: numbers of sampling steps, a column each; the recipe's own by default. ``out``: file for
    every score, as JSON; with several numbers of steps an object of them. Raises InputError as `evaluate`
    does, and for a run that has no finished iteration.
    """
    from flowcredit.assembly import build_grid, build_model, build_rewards, device_of
    from flowcredit.demands import check_prompts
    from flowcredit.evaluation_files import to_json
    from flowcredit.run_folder import write_text

    if out is not None:
        check_file(out, "--out")
    heldout = load_prompts(recipe.prompts.heldout, recipe.prompts.column)
    rewards = build_rewards(recipe, (*recipe.rewards, *recipe.watch), device_of(recipe.model.device))
    check_prompts(rewards, heldout, recipe.scoring.on_error)
    model = build_model(recipe)
    chosen = tuple(dict.fromkeys(num_steps)) or (recipe.evaluation.num_steps or recipe.algorithm.num_steps,)
    total = min(len(heldout), recipe.evaluation.prompts) * sum(chosen)
    console = Console()
    results = {}
    with weights_of(model, run_dir) as iteration, counted(console, "evaluating", total) as advance:
        for steps in chosen:
            results[steps] = evaluate(
                model,
                heldout,
                rewards,
                recipe.evaluation,
                build_grid(recipe.grid, model, steps),
                scoring=recipe.scoring,
                iteration=iteration,
                progress=advance,
            )
    alone = results[chosen[0]] if len(chosen) == 1 else None
    console.print(steps_table(results) if alone is None else evaluation_table(alone))
    if out is not None:
        content = (
            {"steps": {str(steps): to_json(result) for steps, result in results.items()}}
            if alone is None
            else to_json(alone)
        )
        write_text(out, json.dumps(content, indent=1, allow_nan=False) + "\n")
        say(console, f"scores: {out}")


def sample_command(
    recipe: Recipe, run_dir: Path | None, prompts: PromptSet, out: Path, count: int, seed: int
) -> None:
    """Draw ``count`` images for each prompt, with the seeds ``seed``, ``seed + 1``, ..., into ``out``.

    Each image is a PNG of its own size, listed with its prompt and seed in ``images.jsonl``; up to 64 of
    them are also laid side by side in ``grid.png``, a row for each prompt.
    """
    from flowcredit.assembly import build_grid, build_model

    check_folder(out, "--out")
    model = build_model(recipe)
    steps = recipe.evaluation.num_steps or recipe.algorithm.num_steps
    grid = build_grid(recipe.grid, model, steps)
    console = Console()
    out.mkdir(parents=True)
    rows: dict[tuple[int, int], Tensor] = {}
    with (
        weights_of(model, run_dir),
        counted(console, "sampling", len(prompts) * count * steps) as advance,
        (out / "images.jsonl").open("w", encoding="utf-8") as listing,
    ):
        for place, of_seed in enumerate(range(seed, seed + count)):
            batches = sample(
                model,
                prompts.prompts,
                grid,
                seed=of_seed,
                batch_size=recipe.evaluation.batch_size,
                progress=advance,
            )
            for index, image in enumerate(image for batch in batches for image in batch):
                name = f"{index:04d}-{_slug(prompts.prompts[index])}-{of_seed}.png"
                save_image(image, out / name)
                entry = {"file": name, "prompt": prompts.prompts[index], "seed": of_seed}
                # In ASCII: a prompt may hold characters at which a reader would end the line.
                listing.write(json.dumps(entry) + "\n")
                if len(prompts) * count <= 64:
                    rows[index, place] = image.cpu()
    if rows:
        save_grid(torch.stack([rows[key] for key in sorted(rows)]), out / "grid.png", columns=count)
    drawn = len(prompts) * count
    say(console, f"{drawn} image{'' if drawn == 1 else 's'}: {out}")


@contextmanager
def weights_of(
    model: FlowModel, run_dir: Path | None, iteration: int | None = None, averaged: bool = True
) -> Iterator[int]:
    """The model with a run's newest weights, or those after ``iteration``; its iterations.

    Averaged ones where the run keeps them, unless not ``averaged``: training itself samples with the others.
    """
    from flowcredit.checkpoint import latest_checkpoint, load_checkpoint
    from flowcredit.run_folder import RunFolder
    from flowcredit.weights import weights_replaced

    if run_dir is None:
        yield 0
        return
    kept = RunFolder(run_dir).checkpoints
    if iteration is None:
        checkpoint, damaged = latest_checkpoint(kept)
    else:
        checkpoint, damaged = load_checkpoint(kept / f"{iteration:06d}"), []
    if checkpoint is None:
        raise InputError(
            f"{run_dir}: no whole checkpoint{''.join(f'; {line}' for line in damaged)}; expected a run with "
            "a finished iteration (flowcredit train --resume goes on with it)"
        )
    groups = checkpoint.groups
    with weights_replaced(
        model.network, groups["ema"] if averaged and "ema" in groups else groups["weights"]
    ):
        yield checkpoint.iteration


def _slug(prompt: str) -> str:
    return re.sub(r"[^0-9A-Za-z]+", "-", prompt)[:40].strip("-") or "prompt"


def _no_noise(x: Tensor, v: Tensor, k: int, k_next: int) -> NoReturn:
    raise AssertionError("the plan of an evaluation has no stochastic segment")


def _groups(chosen: PromptSet, group_by: str | None) -> tuple[str, ...]:
    check_group_by(chosen, group_by)
    if group_by is None:
        return ()
    return tuple(str(value) for value in chosen.columns[group_by])
