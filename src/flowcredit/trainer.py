"""The loop: sample, roll out, score, credit, update. It names no method, no model and no reward."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from torch import Tensor

from flowcredit.assembly import Setup, assemble, build_grid
from flowcredit.checkpoint import Checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint, tidy
from flowcredit.comparison import alarms, evaluation_table, format_summary, summarise
from flowcredit.config import Recipe
from flowcredit.console import Monitor
from flowcredit.distributed import ALONE, World, joined
from flowcredit.errors import InputError
from flowcredit.evaluate import evaluate
from flowcredit.evaluation_files import load_evaluation, save_evaluation
from flowcredit.experience import Experience, collect
from flowcredit.export import export_weights
from flowcredit.image_pairs import PairError
from flowcredit.introduction import introduce
from flowcredit.model_card import write_model_card
from flowcredit.prompts import iteration_prompts
from flowcredit.resuming import read_back
from flowcredit.run_folder import RunFolder
from flowcredit.scoring import RewardError
from flowcredit.sharding import parted, whole
from flowcredit.training_log import Record, iteration_line, iteration_record
from flowcredit.update import UpdateMetrics, learning_rate, update_policy
from flowcredit.weights import EMA, fingerprints, trainable_parameters

SILENT_ITERATIONS = 5
"""A run that has learned nothing in its first iterations, so many, is stopped."""

TOTALS = ("velocity_evaluations", "decodes", "reward_calls", "seconds")


@dataclass
class Progress:
    """What changes while a run goes on: weights, optimizer, averages and counts."""

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    world: World = ALONE
    iteration: int = 0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))


class _Interrupt:
    """Ctrl-C, held back while weights change: the first asks the loop to stop, the second stops at once.

    Of several processes none stops before all have agreed to, between two iterations.
    """

    def __init__(self, world: World) -> None:
        self.asked = False
        self.world = world

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked and self.world.size == 1:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Stop here if it was asked for: nothing is lost at this point."""
        if self.asked and self.world.size == 1:
            raise KeyboardInterrupt

    def agree(self) -> None:
        """Stop here, all processes together, if any was asked to."""
        if any(self.world.largest([int(self.asked)])):
            raise KeyboardInterrupt


@contextmanager
def _holding_interrupts(world: World) -> Iterator[_Interrupt]:
    held = _Interrupt(world)
    try:
        before = signal.signal(signal.SIGINT, held)
    except ValueError:  # Signals belong to the main thread; elsewhere there is no Ctrl-C to hold.
        yield held
        return
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)


def train(recipe: Recipe, run_dir: Path, console: Console | None = None) -> None:
    """Run a recipe from its start into ``run_dir``, which must not exist; with the others under ``torchrun``.

    Raises InputError for whatever in the recipe cannot work, before the folder is made.
    """
    folder = RunFolder(run_dir)
    with joined(recipe.parallel.timeout_s) as world:
        console = _console(console, world)
        if world.first:
            folder.check_free()
        world.wait()
        setup = assemble(recipe, world)
        if world.first:
            folder.create(recipe)
        with _owned(folder, world):
            _run(setup, folder, _start(setup, world), console)


def resume(run_dir: Path, overrides: Sequence[str] = (), console: Console | None = None) -> None:
    """Go on with a run from its newest whole checkpoint, exactly as if it had never stopped.

    Raises InputError if there is no run, or if an override changes the meaning of the run.
    """
    left = read_back(run_dir, overrides)
    folder, recipe = RunFolder(run_dir), left.recipe
    with joined(recipe.parallel.timeout_s) as world, _owned(folder, world):
        console = _console(console, world)
        for note in left.notes:
            console.print(note, highlight=False, soft_wrap=True)
        setup = assemble(recipe, world)
        progress = _start(setup, world)
        if left.checkpoint is not None:
            _put_back(progress, left.checkpoint)
        if world.first:
            folder.write_recipe(recipe)
            folder.cut_log(progress.iteration)
            tidy(folder.checkpoints, progress.iteration, recipe.checkpoint.keep_last)
        console.print(f"resuming {run_dir} after iteration {progress.iteration}", highlight=False)
        _run(setup, folder, progress, console)


def _console(console: Console | None, world: World) -> Console:
    """Of several processes the first alone prints."""
    return (console or Console()) if world.first else Console(quiet=True)


def _owned(folder: RunFolder, world: World) -> AbstractContextManager[None]:
    return folder.owned() if world.first else nullcontext()


def _put_back(progress: Progress, checkpoint: Checkpoint) -> None:
    with torch.no_grad():
        for name, parameter in progress.parameters.items():
            parameter.copy_(parted(checkpoint.groups["weights"][name], parameter))
    restore_optimizer(progress.optimizer, progress.parameters, checkpoint.groups["optimizer"])
    if progress.ema is not None:
        progress.ema.load_state_dict(checkpoint.groups["ema"])
    progress.iteration = checkpoint.iteration
    progress.totals.update(checkpoint.state["totals"])


def _start(setup: Setup, world: World) -> Progress:
    settings = setup.recipe.train
    parameters = trainable_parameters(setup.model.network)
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )
    ema = EMA(setup.model.network, settings.ema_decay) if settings.ema_decay > 0 else None
    return Progress(parameters, optimizer, ema, world)


def _run(setup: Setup, folder: RunFolder, progress: Progress, console: Console) -> None:
    recipe, world = setup.recipe, progress.world
    total = recipe.train.iterations
    introduce(setup, folder.path, console)
    saved = began_at = progress.iteration
    silent = 0
    with (
        Monitor(console, total, progress.iteration, recipe.logging.every) as monitor,
        _holding_interrupts(world) as held,
    ):
        try:
            _evaluate_if_due(setup, folder, progress, monitor, held.check)
            while progress.iteration < total:
                record = _iterate(setup, progress, monitor, held.check)
                if world.first:
                    folder.append_log(record)
                if progress.iteration % recipe.checkpoint.every == 0 or progress.iteration == total:
                    _save(folder, progress, recipe)
                    saved = progress.iteration
                monitor.finish_iteration(iteration_line(tuple(setup.rewards), record))
                silent = silent + 1 if record.get("dead_groups") == 1 else 0
                _tell_silence(silent, progress.iteration - began_at, monitor)
                _evaluate_if_due(setup, folder, progress, monitor, held.check)
                held.agree()
        except (KeyboardInterrupt, RewardError, PairError) as stop:
            # None of them comes while weights change. An error is one process's own: the others are not here.
            together = world.size == 1 or isinstance(stop, KeyboardInterrupt)
            if together and progress.iteration > saved:
                _save(folder, progress, recipe)
            raise
    _finish(setup, folder, progress, console)
    world.wait()


def _tell_silence(silent: int, done: int, monitor: Monitor) -> None:
    """Say that an iteration taught nothing; InputError where that is so from the beginning on."""
    if silent == 0:
        return
    why = "no group had two images with different scores"
    if silent == done == SILENT_ITERATIONS:
        raise InputError(
            f"the first {done} iterations taught nothing: {why}; look at missing/ and reward/ in log.jsonl,"
            " and at the rewards by flowcredit check"
        )
    monitor.say(f"nothing was learned in this iteration: {why}")


def _iterate(setup: Setup, progress: Progress, monitor: Monitor, check: Callable[[], None]) -> Record:
    """One iteration; returns its log record. Weights change only after everything else is done."""
    began = time.monotonic()
    recipe, iteration = setup.recipe, progress.iteration
    count = recipe.train.prompts_per_iteration
    chosen = iteration_prompts(len(setup.train_prompts), recipe.seed, iteration, count)
    prompts = setup.train_prompts.take(chosen)
    found = collect(setup, prompts, iteration, _Listening(monitor, check), progress.world)
    check()
    for name, reason in found.counts.reasons.items():
        monitor.say(
            f"reward {name} failed on {found.counts.failed[name]} images, which are skipped; the first said:"
            f" {reason}"
        )
    monitor.stage("updating", 1)
    rate = learning_rate(recipe.train, iteration)
    metrics = _update(setup, progress, rate, found)
    progress.iteration += 1
    _count(progress, found, time.monotonic() - began)
    record: Record = {"iteration": progress.iteration, "learning_rate": rate, "prompts": len(prompts)}
    record |= iteration_record(tuple(setup.rewards), found.scores, found.counts, found.advantages, metrics)
    return record | progress.totals


def _update(setup: Setup, progress: Progress, rate: float, found: Experience) -> UpdateMetrics:
    """Train on an experience. Raises InputError where the run's first update moves nothing."""
    for group in progress.optimizer.param_groups:
        group["lr"] = rate

    def after_step() -> None:
        if progress.ema is not None:
            progress.ema.update(setup.model.network)

    first = progress.iteration == 0 and found.teaches
    before = fingerprints(progress.parameters) if first else {}
    metrics = update_policy(
        setup.trained_flow,
        found.cond,
        found.sets,
        progress.optimizer,
        setup.recipe.train,
        after_step,
        setup.reference,
        progress.world,
        found.own,
    )
    if first and not any(progress.world.largest([int(fingerprints(progress.parameters) != before)])):
        raise InputError(
            "the first update moved no trained weight, though advantages were not all 0: the gradient does"
            f" not reach them (its norm was {metrics['grad_norm']:g}); look at weights.targets and"
            " train.learning_rate"
        )
    return metrics


@dataclass(frozen=True)
class _Listening:
    """Moves the bar of the stage, and is where a first Ctrl-C takes effect."""

    monitor: Monitor
    check: Callable[[], None]

    def stage(self, name: str, total: int) -> None:
        self.monitor.stage(name, total)

    def advance(self, units: int) -> None:
        self.check()
        self.monitor.advance(units)


def _count(progress: Progress, found: Experience, seconds: float) -> None:
    progress.totals["velocity_evaluations"] += found.velocity_evaluations
    progress.totals["decodes"] += found.counts.decodes
    progress.totals["reward_calls"] += found.counts.reward_calls
    progress.totals["seconds"] += seconds


def _evaluate_if_due(
    setup: Setup, folder: RunFolder, progress: Progress, monitor: Monitor, check: Callable[[], None]
) -> None:
    """Held-out prompts at fixed seeds, with the averaged weights where there are any.

    Due before and after the run and every so many iterations; also where a stop came before it was done.
    """
    recipe, every = setup.recipe, setup.recipe.evaluation.every
    ends = progress.iteration in (0, recipe.train.iterations)
    due = ends or (every > 0 and progress.iteration % every == 0)
    # The first process writes: the others must not look before all have decided.
    done = progress.world.largest([int(folder.evaluation(progress.iteration).exists())])
    if not due or any(done):
        return
    steps = recipe.evaluation.num_steps or recipe.algorithm.num_steps
    monitor.stage("evaluating", len(setup.heldout_prompts) * steps)
    with _averaged(setup, progress):
        began = time.monotonic()
        result = evaluate(
            setup.model,
            setup.heldout_prompts,
            {**setup.rewards, **setup.watched},
            recipe.evaluation,
            build_grid(recipe.grid, setup.model, steps),
            scoring=recipe.scoring,
            iteration=progress.iteration,
            progress=_Listening(monitor, check).advance,
            world=progress.world,
        )
    if not progress.world.first:
        return
    result = replace(result, seconds=time.monotonic() - began)
    save_evaluation(result, folder.path)
    means = "  ".join(
        f"{name} {format_summary(summarise(s), error=False)}" for name, s in result.scores.items()
    )
    monitor.say(f"held-out at iteration {progress.iteration}: {means}")
    if progress.iteration and folder.evaluation(0).exists():
        before, _ = load_evaluation(folder.evaluation(0))
        for line in alarms(before, result, tuple(setup.rewards)):
            monitor.say(line)


def _averaged(setup: Setup, progress: Progress) -> AbstractContextManager[None]:
    return nullcontext() if progress.ema is None else progress.ema.applied(setup.model.network)


def _finish(setup: Setup, folder: RunFolder, progress: Progress, console: Console) -> None:
    with _averaged(setup, progress):
        trained = whole(trainable_parameters(setup.model.network), progress.world)
        if progress.world.first:
            export_weights(setup.model, folder.final, trained, overwrite=True)
    if not progress.world.first:
        return
    after, _ = load_evaluation(folder.evaluation(progress.iteration))
    before = load_evaluation(folder.evaluation(0))[0] if folder.evaluation(0).exists() else None
    write_model_card(folder.final, setup.recipe, type(setup.model.pipeline).__name__, before, after)
    console.print(evaluation_table(after) if before is None else evaluation_table(before, after))
    console.print(
        f"weights for diffusers (dtype=torch.float32 or bfloat16): {folder.final}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        from flowcredit.report import build_report

        console.print(f"report: {build_report(folder.path)}", highlight=False, soft_wrap=True)
    except InputError as error:
        console.print(f"no report: {error}", highlight=False, soft_wrap=True)


def _save(folder: RunFolder, progress: Progress, recipe: Recipe) -> None:
    groups: dict[str, dict[str, Tensor]] = {
        "weights": dict(progress.parameters),
        "optimizer": optimizer_tensors(progress.optimizer, progress.parameters),
    }
    if progress.ema is not None:
        groups["ema"] = progress.ema.state_dict()
    groups = {name: whole(tensors, progress.world) for name, tensors in groups.items()}
    if not progress.world.first:
        return
    state = {"totals": progress.totals, "recipe": recipe.model_dump(mode="json")}
    save_checkpoint(folder.checkpoints, progress.iteration, groups, state, recipe.checkpoint.keep_last)
