"""What more devices would give, derived from counts before anything is loaded. No torch.

FLOPs of the network, the VAE and the rewards, and the bytes that devices send each other, are counted as
training does it; how fast a device computes and sends is assumed. Nothing here is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from flowcredit import algorithms
from flowcredit.config import Recipe, RewardSettings
from flowcredit.memory.activations import Work
from flowcredit.memory.estimate import MODEL_OPTIONS, Estimate
from flowcredit.memory.folders import reward_flops

FLOAT = 4
FREE = ("shapes", "shapes_exact", "sharpness")
"""Rewards that compute next to nothing."""
GAIN = 1.05
"""Twice the devices are worth it while they make an iteration at least so much shorter."""


@dataclass(frozen=True)
class Assumptions:
    """Speeds of the devices: the defaults are the data sheet's of an H100 SXM (dense bf16, NVLink one way)
    and of one network port of 400 Gbit/s for each; the share of the peak that is reached is a guess."""

    peak_tflops: float = 989.0
    utilisation: float = 0.4
    link_gbs: float = 450.0
    network_gbs: float = 50.0
    gpus_per_machine: int = 8

    @property
    def flops(self) -> float:
        """FLOP/s that are reached."""
        return self.peak_tflops * 1e12 * self.utilisation

    def bandwidth(self, gpus: int) -> float:
        """Bytes that a device sends a second, in a ring of so many."""
        return 1e9 * (self.link_gbs if gpus <= self.gpus_per_machine else self.network_gbs)


@dataclass(frozen=True)
class Derived:
    """One iteration on the busiest of ``gpus`` devices: FLOPs, bytes that it sends, seconds of both.

    ``rollout`` includes the passes of a reference.
    """

    gpus: int
    prompts: int
    rollout_flops: float
    scoring_flops: float
    training_flops: float
    sent: "Sent"
    computing_s: float
    sending_s: float
    seconds: float


@dataclass(frozen=True)
class Sent:
    """Bytes that a device sends in an iteration, in a ring: weights that are gathered for evaluations without
    gradient; those gathered, and gradients scattered, in training; gradients summed after it."""

    rollout: float = 0.0
    training: float = 0.0
    summed: float = 0.0

    @property
    def total(self) -> float:
        return self.rollout + self.training + self.summed


@dataclass(frozen=True)
class Counts:
    """A recipe's counts, a prompt each, and what one evaluation, decode and score costs."""

    recipe: Recipe
    algorithm: algorithms.Algorithm
    work: Work
    trained: int
    score: int
    uncounted: tuple[str, ...]
    """Rewards whose FLOPs are not known."""


def counts(recipe: Recipe, found: Estimate | None) -> Counts | None:
    """None where the model's configs do not tell."""
    if found is None or found.work is None or found.trained is None:
        return None
    costs = {reward.name: _score(reward) for reward in recipe.rewards}
    unknown = tuple(name for name, cost in costs.items() if cost is None)
    algorithm = algorithms.build(recipe.algorithm, recipe.seed)
    score = sum(cost or 0 for cost in costs.values())
    return Counts(recipe, algorithm, found.work, found.trained, score, unknown)


def _score(reward: RewardSettings) -> int | None:
    """FLOPs of one image; None for a reward that is not known."""
    if reward.name.partition("/")[0] in FREE:
        return 0
    models = [value for name in MODEL_OPTIONS if isinstance(value := reward.options.get(name), str)]
    costs = [reward_flops(Path(model)) for model in models]
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known and len(known) == len(costs) else None


def derive(found: Counts, gpus: int, assumed: Assumptions) -> Derived:
    """One iteration of the recipe on so many devices.

    A prompt's whole tree is on one device, so the busiest has prompts / gpus, rounded up. Gathering weights
    overlaps with the computing of its own phase, rollout or training; summing gradients does not.
    """
    recipe, plan, work = found.recipe, found.algorithm.plan, found.work
    prompts = ceil(recipe.train.prompts_per_iteration / gpus)
    trained = prompts * found.algorithm.trained_states(plan)
    rollout = prompts * plan.velocity_evaluations * work.evaluation
    scoring = prompts * plan.decodes * ((work.decode or 0) + found.score)
    training = trained * work.evaluation * _passes(recipe)
    if _has_reference(found):
        rollout += trained * work.evaluation
    sends, bandwidth = sent(found, gpus), assumed.bandwidth(gpus)
    phases = [(rollout, sends.rollout), (scoring, 0.0), (training, sends.training)]
    seconds = sum(max(flops / assumed.flops, size / bandwidth) for flops, size in phases)
    return Derived(
        gpus=gpus,
        prompts=prompts,
        rollout_flops=rollout,
        scoring_flops=scoring,
        training_flops=training,
        sent=sends,
        computing_s=(rollout + scoring + training) / assumed.flops,
        sending_s=sends.total / bandwidth,
        seconds=seconds + sends.summed / bandwidth,
    )


def _passes(recipe: Recipe) -> int:
    """A trained state in evaluations: forward, back through activations, back to weights, and once more
    forward where activations are computed anew."""
    back = 2 if recipe.weights.method == "full" else 1
    return 1 + back + int(recipe.train.gradient_checkpointing)


def _has_reference(found: Counts) -> bool:
    return found.algorithm.needs_reference or found.recipe.train.kl_weight > 0


def calls(found: Counts, gpus: int) -> tuple[int, int, int]:
    """How often a device calls the network in an iteration: in rollout (and for a reference), in training;
    and its optimizer steps."""
    recipe, plan = found.recipe, found.algorithm.plan
    prompts = ceil(recipe.train.prompts_per_iteration / gpus)
    at = [0] * (plan.num_steps + 1)
    for node, below in zip(plan.nodes, plan.children, strict=True):
        at[node.index] += node.width if below else 0
    together = min(prompts, recipe.rollout.prompts or prompts)
    parts = [together] * (prompts // together) + [prompts % together] * (prompts % together > 0)
    sampled = sum(ceil(part * width / recipe.rollout.batch_size) for part in parts for width in at)
    sets = [prompts * states for states in found.algorithm.set_states(plan)]
    size = recipe.train.micro_batch_size
    steps = sets if recipe.train.update == "per_step" else [sum(sets)]
    reference = sum(ceil(states / size) for states in sets) if _has_reference(found) else 0
    return sampled + reference, sum(ceil(states / size) for states in steps), len(steps)


def sent(found: Counts, gpus: int) -> Sent:
    """What each of so many devices sends.

    Replicated, each optimizer step sums the trained weights' gradients. Sharded, each call of the network
    gathers its weights, once more to go back, and scatters the gradients of the trained ones.
    """
    share = (gpus - 1) / gpus
    forward, trained, steps = calls(found, gpus)
    if found.recipe.parallel.sharding == "replicated":
        return Sent(summed=2 * share * FLOAT * found.trained * steps)
    weights = found.work.weights * found.work.gathered_width
    if found.recipe.weights.method == "lora":
        weights += found.trained * found.work.gathered_width
    return Sent(share * forward * weights, share * trained * (2 * weights + FLOAT * found.trained))


def table(found: Counts, gpus: int, assumed: Assumptions) -> list[Derived]:
    """One device, twice as many, and so on up to ``gpus``, and as many as there are prompts."""
    numbers = {2**n for n in range(gpus.bit_length())} | {gpus}
    numbers |= {found.recipe.train.prompts_per_iteration}
    return [derive(found, number, assumed) for number in sorted(n for n in numbers if n <= gpus)]


def stops(found: Counts, assumed: Assumptions) -> Derived:
    """The number of devices, of powers of two and the number of prompts, after which the next brings less
    than `GAIN`."""
    prompts = found.recipe.train.prompts_per_iteration
    rows = table(found, 2 * prompts, assumed)
    best = rows[0]
    for row in rows[1:]:
        if best.seconds / row.seconds >= GAIN:
            best = row
    return best


def why_it_stops(found: Counts, last: Derived, assumed: Assumptions) -> str:
    """A sentence on what more devices than ``last`` has would meet."""
    prompts = found.recipe.train.prompts_per_iteration
    if last.gpus >= prompts:
        return (
            f"it stops at {last.gpus} GPUs: each then has one of the {prompts} prompts of"
            " train.prompts_per_iteration, whose tree is not divided; further GPUs only repeat one"
        )
    more = derive(found, 2 * last.gpus, assumed)
    return (
        f"it stops at {last.gpus} GPUs: with {more.gpus} each sends {_short(more.sending_s)} s and"
        f" computes {_short(more.computing_s)} s"
    )


def lines(found: Counts, gpus: int, assumed: Assumptions) -> list[str]:
    """What `flowcredit plan --gpus` prints beneath its tables."""
    rows = table(found, gpus, assumed)
    how = found.recipe.parallel.sharding
    head = [
        f"{gpus} GPUs, {how}: derived from counts, not measured",
        f"assumed: {assumed.peak_tflops:g} TFLOP/s a GPU at its peak, of which {assumed.utilisation:.0%} are"
        f" reached; {assumed.link_gbs:g} GB/s between GPUs of a machine of {assumed.gpus_per_machine},"
        f" {assumed.network_gbs:g} GB/s a GPU between machines; gathering weights overlaps with computing",
        f"a velocity evaluation: {_tera(found.work.evaluation)}; a decode: {_tera(found.work.decode)};"
        f" a score: {_score_words(found)}",
        "",
        f"{'GPUs':>6} {'prompts each':>13} {'computing, s':>13} {'sent, GB':>10} {'sending, s':>11}"
        f" {'iteration, s':>13} {'speed-up':>9} {'efficiency':>11}",
    ]
    return [*head, *_rows(rows), "", why_it_stops(found, stops(found, assumed), assumed), NOT_COUNTED]


NOT_COUNTED = (
    "not counted: reading the prompts, the optimizer's own step, exchange of scores, evaluations, checkpoints"
)


def _rows(rows: Sequence[Derived]) -> list[str]:
    alone = rows[0].seconds
    return [
        f"{row.gpus:>6} {row.prompts:>13} {_short(row.computing_s):>13}"
        f" {_short(row.sent.total / 1e9):>10} {_short(row.sending_s):>11}"
        f" {_short(row.seconds):>13} {alone / row.seconds:>9,.1f} {alone / row.seconds / row.gpus:>11.0%}"
        for row in rows
    ]


def _tera(flops: int | None) -> str:
    return "not known" if flops is None else f"{flops / 1e12:,.3g} TFLOP"


def _score_words(found: Counts) -> str:
    if not found.uncounted:
        return _tera(found.score)
    known = f"{_tera(found.score)} (" if found.score else "("
    return f"{known}not known, and not counted: {', '.join(found.uncounted)})"


def _short(number: float) -> str:
    """A tenth is enough above one; below, two digits that tell something."""
    return f"{number:,.1f}" if number >= 1 or number == 0 else f"{number:.2g}"
