"""``flowcredit check``: is this recipe ready for this model? Tried on one prompt, nothing is written.

Axes: P prompts, H and W image height and width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from flowcredit.assembly import Setup, assemble
from flowcredit.config import Recipe
from flowcredit.console import say
from flowcredit.experience import collect
from flowcredit.models.own_call import pipeline_images
from flowcredit.plan import Plan, Segment
from flowcredit.readiness import notes
from flowcredit.rollout import rollout
from flowcredit.scoring import score_images
from flowcredit.update import UpdateMetrics, update_policy
from flowcredit.weights import fingerprints, trainable_parameters

EXACT, ROUNDED = 1e-4, 0.05
"""Largest difference of an image from the pipeline's, mean over its pixels: in float32, and below."""
UNDECIDED = 1e-6
"""How far the loss of a pair may be from log 2 where model and reference are the same."""
STEPS = 4
"""Sampling steps of the comparison."""
DRAWN = 4
"""Held-out prompts whose images the rewards are tried on."""
_ITERATION = -3_000_000
"""Keys the noises of a check: none of training's, evaluation's, calibration's or a diagnosis'."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: whether it holds, and what was measured."""

    holds: bool
    text: str


def check_command(recipe: Recipe, console: Console | None = None) -> bool:
    """Check a recipe on its own model and rewards and print a line each; whether all holds.

    Raises InputError for whatever cannot be loaded or run at all.
    """
    console = console or Console()
    say(console, f"checking {recipe.name} on {recipe.model.path}")
    for note in notes(recipe):
        say(console, note)
    good = True
    for finding in findings(assemble(recipe)):
        mark = Text("ok", "green") if finding.holds else Text("NO", "red")
        console.print(mark, end="  ")
        say(console, finding.text)
        good = good and finding.holds
    return good


def findings(setup: Setup) -> Iterator[Finding]:
    """What holds and what does not, each as soon as it is known."""
    yield parity(setup)
    yield from rewards_tell_apart(setup)
    yield from first_update(setup)
    yield cost(setup)


def parity(setup: Setup) -> Finding:
    """With the noise off, the image of the adapter is that of the pipeline's own call."""
    model = setup.model
    prompts = setup.heldout_prompts.prompts[:1]
    grid = model.time_grid(STEPS)
    x = model.initial_noise(1, torch.Generator().manual_seed(0))
    plan = Plan(STEPS, (Segment(None, tuple(range(STEPS + 1)), scored=True),))
    cond = model.encode(prompts)
    done = rollout(model, plan, cond, grid, setup.kernel, _Given(x[None]), batch_size=1)
    own = model.decode(done.leaves[0].squeeze(1)).cpu()
    theirs = pipeline_images(model, prompts, STEPS, torch.Generator().manual_seed(0)).cpu()
    exact = setup.recipe.train.mixed_precision == "no" and setup.recipe.model.dtype == "float32"
    found = float((own - theirs).abs().max() if exact else (own - theirs).abs().mean())
    bound, measure = (EXACT, "largest") if exact else (ROUNDED, "mean")
    return Finding(
        found <= bound,
        f"image without noise against {type(model.pipeline).__name__}'s own call, {STEPS} steps: {measure}"
        f" difference of a pixel {found:.1e}, expected at most {bound:g}",
    )


@dataclass(frozen=True)
class _Given:
    """Initial states that are handed in; no other draw."""

    states: Tensor

    def initial(self, width: int) -> Tensor:
        return self.states

    def step(self, segment: int, width: int) -> Tensor:
        raise AssertionError("a comparison without noise draws none")

    def common(self, segment: int | None, width: int) -> Tensor:
        raise AssertionError("a comparison without noise draws none")


class _Silent:
    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, units: int) -> None:
        pass


def rewards_tell_apart(setup: Setup) -> Iterator[Finding]:
    """Every reward scores drawn images, noise and black with numbers, and not all alike."""
    recipe = setup.recipe
    count = min(DRAWN, len(setup.heldout_prompts))
    prompts = setup.heldout_prompts.take([*range(count), 0, 0])
    steps = recipe.evaluation.num_steps or recipe.algorithm.num_steps
    drawn = pipeline_images(
        setup.model, prompts.prompts[:count], steps, torch.Generator().manual_seed(1)
    ).cpu()
    noise = torch.rand(drawn[:1].shape, generator=torch.Generator().manual_seed(2))
    images = torch.cat([drawn, noise, torch.zeros_like(noise)]).to(setup.model.device)
    rewards = {**setup.rewards, **setup.watched}
    scores = score_images(
        rewards,
        images,
        prompts.prompts,
        prompts.columns,
        batch_size=recipe.scoring.batch_size,
        timeout_s=recipe.scoring.timeout_s,
    )
    for name, row in zip(rewards, scores.tolist(), strict=True):
        *drew, of_noise, black = row
        shown = f"{min(drew):.4g}" if min(drew) == max(drew) else f"{min(drew):.4g} to {max(drew):.4g}"
        yield Finding(
            all(math.isfinite(value) for value in row) and len(set(row)) > 1,
            f"reward {name}: {count} drawn images {shown}, noise {of_noise:.4g}, black {black:.4g}; expected"
            " numbers that are not all the same",
        )


def first_update(setup: Setup) -> Iterator[Finding]:
    """On a fresh rollout the ratio is 1, or the preference undecided; one update moves what is trained and
    nothing else."""
    recipe, model = setup.recipe, setup.model
    found = collect(setup, setup.train_prompts.take([0]), 0, _Silent(), noise_iteration=_ITERATION)
    if found.advantages:
        spread = max(float(each.abs().max()) for each in found.advantages.values())
        yield Finding(
            spread > 0,
            f"advantages of one prompt: the largest is {spread:.2f}; expected some that are not 0",
        )
    if not found.sets:
        return
    # Of a preference's draws one: each may be an optimizer step, after which nothing is as before training.
    sets = found.sets[:1] if setup.algorithm.needs_reference else found.sets
    trained = trainable_parameters(model.network)
    everything = dict(model.network.named_parameters())
    before = fingerprints(everything)
    optimizer = torch.optim.AdamW(trained.values(), lr=recipe.train.learning_rate, weight_decay=0)
    metrics = update_policy(
        setup.trained_flow, found.cond, sets, optimizer, recipe.train, lambda: None, setup.reference
    )
    yield from _as_before_training(setup, metrics)
    after = fingerprints(everything)
    moved = {name for name in everything if before[name] != after[name]}
    yield Finding(
        bool(moved) and moved <= trained.keys(),
        f"one update moved {len(moved & trained.keys())} of {len(trained)} trained tensors and"
        f" {len(moved - trained.keys())} of {len(everything) - len(trained)} others; expected some, and none",
    )


def _as_before_training(setup: Setup, metrics: UpdateMetrics) -> Iterator[Finding]:
    """What holds exactly before the first optimizer step, if there was any."""
    train = setup.recipe.train
    if not metrics:
        return
    if setup.algorithm.needs_reference:
        off = abs(metrics["loss"] - math.log(2))
        yield Finding(
            off <= UNDECIDED,
            f"loss of a pair before the first update: off log 2 by {off:.1e}, expected at most {UNDECIDED:g}",
        )
        return
    tolerance = train.ratio_tolerance if train.mixed_precision == "no" else 1e-2
    deviation = metrics["on_policy_deviation"]
    yield Finding(
        deviation <= tolerance,
        f"ratio on the fresh rollout: off 1 by {deviation:.1e}, expected at most {tolerance:g}",
    )


def cost(setup: Setup) -> Finding:
    """What an iteration will ask of the model and the rewards."""
    plan, count = setup.algorithm.plan, setup.recipe.train.prompts_per_iteration
    trained = sum(parameter.numel() for parameter in trainable_parameters(setup.model.network).values())
    in_training = count * setup.algorithm.trained_states(plan)
    reference = "" if setup.reference is None else " and as many of the reference"
    return Finding(
        True,
        f"an iteration costs {count * plan.velocity_evaluations:,} velocity evaluations in the rollout and"
        f" {in_training:,} in training{reference}, {count * plan.decodes:,} decodes"
        f" and as many scores from each of {len(setup.rewards)} rewards; {trained:,} weights are trained",
    )
