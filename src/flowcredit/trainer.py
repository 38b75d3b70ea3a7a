"""The loop: sample, roll out, score, credit, update. It names no method, no model and no reward."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from flowcredit.assembly import Setup, assemble, build_grid
from flowcredit.checkpoint import tidy
from flowcredit.comparison import Evaluation, alarms, evaluation_table, format_summary, summarise
from flowcredit.config import Recipe
from flowcredit.console import Monitor, say
from flowcredit.distributed import World, joined
from flowcredit.errors import InputError
from flowcredit.evaluate import evaluate
from flowcredit.evaluation_files import load_evaluation, save_evaluation
from flowcredit.experience import Experience, collect
from flowcredit.export import export_weights
from flowcredit.faults import FaultError, NonFinite
from flowcredit.guard import guard_of
from flowcredit.image_pairs import PairError
from flowcredit.inputs import input_digests, refuse_other_inputs
from flowcredit.interrupts import holding_interrupts
from flowcredit.introduction import introduce
from flowcredit.model_card import write_model_card
from flowcredit.progress import Progress, kept_best, put_back, reward_weights, save, start
from flowcredit.prompts import iteration_prompts
from flowcredit.recovery import Run, heed, on_fault, tell_failures, with_fault
from flowcredit.resuming import read_back
from flowcredit.run_folder import RunFolder
from flowcredit.scoring import RewardError
from flowcredit.sharding import whole
from flowcredit.standing import best_iterations
from flowcredit.trackers import tracking, wanted
from flowcredit.training_log import Record, iteration_line, iteration_record, unscored
from flowcredit.update import UpdateMetrics, learning_rate, update_policy
from flowcredit.versions import environment
from flowcredit.weights import fingerprints, trainable_parameters

SILENT_ITERATIONS = 5
"""A run that has learned nothing in its first iterations, so many, is stopped."""


def train(recipe: Recipe, run_dir: Path, console: Console | None = None) -> None:
    """Run a recipe from its start into ``run_dir``, which must not exist; with the others under ``torchrun``.

    Raises InputError for whatever in the recipe cannot work, before the folder is made.
    """
    folder = RunFolder(run_dir)
    with joined(recipe.parallel.timeout_s) as world:
        console = _console(console, world)
        wanted(recipe.logging.trackers)
        if world.first:
            folder.check_free()
        world.wait()
        setup = assemble(recipe, world)
        if world.first:
            folder.create(recipe, environment(setup.model.device, world.size), input_digests(setup))
        with _owned(folder, world):
            _run(setup, folder, start(setup, world), console)


def resume(run_dir: Path, overrides: Sequence[str] = (), console: Console | None = None) -> None:
    """Go on with a run from its newest whole checkpoint, exactly as if it had never stopped.

    Raises InputError if there is no run, or if an override changes the meaning of the run.
    """
    left = read_back(run_dir, overrides)
    folder, recipe = RunFolder(run_dir), left.recipe
    with joined(recipe.parallel.timeout_s) as world, _owned(folder, world):
        console = _console(console, world)
        for note in left.notes:
            say(console, note)
        wanted(recipe.logging.trackers)
        setup = assemble(recipe, world)
        if world.first:
            refuse_other_inputs(folder, setup)
        progress = start(setup, world)
        if left.checkpoint is not None:
            put_back(progress, left.checkpoint)
        if world.first:
            folder.write_recipe(recipe)
            folder.cut_log(progress.iteration)
            best = best_iterations(folder, reward_weights(recipe), kept_best(recipe))
            tidy(folder.checkpoints, progress.iteration, recipe.checkpoint.keep_last, best)
        say(console, f"resuming {run_dir} after iteration {progress.iteration}")
        _run(setup, folder, progress, console)


def _console(console: Console | None, world: World) -> Console:
    """Of several processes the first alone prints."""
    return (console or Console()) if world.first else Console(quiet=True)


def _owned(folder: RunFolder, world: World) -> AbstractContextManager[None]:
    return folder.owned() if world.first else nullcontext()


def _run(setup: Setup, folder: RunFolder, progress: Progress, console: Console) -> None:
    recipe, world = setup.recipe, progress.world
    world.note_run(folder.path)
    introduce(setup, folder.path, console)
    guard = guard_of(folder, recipe.guard, reward_weights(recipe), progress.iteration)
    with (
        Monitor(
            console,
            recipe.train.iterations,
            progress.iteration,
            recipe.logging.every,
            recipe.model.compile,
            world.note,
        ) as monitor,
        holding_interrupts(world) as held,
        tracking(recipe, folder, progress.iteration, monitor.say, world.first) as trackers,
    ):
        run = Run(setup, folder, progress, monitor, held, guard, trackers)
        try:
            _train(run)
        except (KeyboardInterrupt, RewardError, PairError) as stop:
            # None of them comes while weights change. An error is one process's own: the others are not here.
            together = world.size == 1 or isinstance(stop, KeyboardInterrupt)
            if together and progress.iteration > progress.saved:
                save(folder, progress, recipe)
            if together:
                world.wait()  # For the checkpoint: who starts the processes ends all after the first.
            if isinstance(stop, FaultError):
                raise type(stop)(with_fault(run, stop), stop.fault) from stop
            raise
        except NonFinite as stop:
            raise NonFinite(with_fault(run, stop), stop.fault) from stop
    _finish(setup, folder, progress, console)
    world.wait()


def _train(run: Run) -> None:
    recipe, progress = run.setup.recipe, run.progress
    began_at, silent, mute = progress.iteration, 0, 0
    heed(run, _judged(run, _evaluate_if_due(run) or _evaluated(run)))
    while progress.iteration < recipe.train.iterations:
        record = _iterate(run)
        if run.world.first:
            run.folder.append_log(record)
            run.trackers.log(record, progress.iteration)
        if _to_be_saved(recipe, progress.iteration):
            save(run.folder, progress, recipe)
        run.monitor.finish_iteration(iteration_line(tuple(run.setup.rewards), record))
        silent = silent + 1 if record.get("dead_groups") == 1 else 0
        _tell_silence(silent, progress.iteration - began_at, run.monitor)
        mute += _tell_mute(run, record, mute + 1 == recipe.train.iterations)
        odd = run.guard.look(record)
        fallen = _judged(run, _evaluate_if_due(run))
        heed(run, odd or fallen)
        run.interrupt.agree()


def _to_be_saved(recipe: Recipe, iteration: int) -> bool:
    if iteration % recipe.checkpoint.every == 0 or iteration == recipe.train.iterations:
        return True
    return kept_best(recipe) > 0 and _evaluation_due(recipe, iteration)


def _evaluated(run: Run) -> Evaluation | None:
    """What the run's newest evaluation found, where a stop came after it; for the first process alone."""
    file = run.folder.evaluation(run.progress.iteration)
    return load_evaluation(file)[0] if run.world.first and file.exists() else None


def _judged(run: Run, evaluation: Evaluation | None) -> str | None:
    """Why an evaluation is a collapse; None where it is not, or there was none."""
    return None if evaluation is None else run.guard.judge(evaluation)


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


def _tell_mute(run: Run, record: Record, never: bool) -> bool:
    """Say which trained rewards gave no score; whether none did. InputError if so ``never`` in the run."""
    rewards = tuple(run.setup.rewards)
    without = unscored(rewards, record)
    for name in without:
        run.monitor.say(f"reward {name} gave no score to any image of this iteration")
    if never and without and without == rewards:
        raise InputError(
            "no reward gave a score to any image of the whole run, so it learned nothing, and no weights are"
            " exported; look at the rewards by flowcredit check"
        )
    return bool(without) and without == rewards


def _iterate(run: Run) -> Record:
    """One iteration; returns its log record. Weights change only after everything else is done."""
    began = time.monotonic()
    setup, progress, monitor = run.setup, run.progress, run.monitor
    recipe, iteration = setup.recipe, progress.iteration
    count = recipe.train.prompts_per_iteration
    chosen = iteration_prompts(len(setup.train_prompts), recipe.seed, iteration, count)
    prompts = setup.train_prompts.take(chosen)
    found = collect(setup, prompts, iteration, _Listening(monitor, run.interrupt.check), run.world)
    run.interrupt.check()
    tell_failures(run, found)
    monitor.stage("updating", 1)
    rate = learning_rate(recipe.train, iteration) * progress.rate_scale
    metrics = _update(run, rate, found)
    progress.iteration += 1
    _count(progress, found, time.monotonic() - began)
    plan = setup.algorithm.plan_at(iteration)
    steps = {i: plan.segments[i].path[0] for i in plan.transitions}
    record: Record = {"iteration": progress.iteration, "learning_rate": rate, "prompts": len(prompts)}
    record |= iteration_record(
        tuple(setup.rewards), found.scores, found.counts, found.advantages, metrics, found.spread, steps
    )
    return record | progress.totals


def _update(run: Run, rate: float, found: Experience) -> UpdateMetrics:
    """Train on an experience. Raises InputError where the run's first update moves nothing."""
    setup, progress = run.setup, run.progress
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
        partial(on_fault, run),
    )
    moved = metrics.get("skipped_steps", 0) > 0 or not first or fingerprints(progress.parameters) != before
    if not any(progress.world.largest([int(moved)])):
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


def _evaluation_due(recipe: Recipe, iteration: int) -> bool:
    every = recipe.evaluation.every
    return iteration in (0, recipe.train.iterations) or (every > 0 and iteration % every == 0)


def _evaluate_if_due(run: Run) -> Evaluation | None:
    """Held-out prompts at fixed seeds, with the averaged weights where there are any; None if not done.

    Due before and after the run and every so many iterations; also where a stop came before it was done.
    """
    setup, folder, progress, monitor = run.setup, run.folder, run.progress, run.monitor
    recipe = setup.recipe
    # The first process writes: the others must not look before all have decided.
    done = progress.world.largest([int(folder.evaluation(progress.iteration).exists())])
    if not _evaluation_due(recipe, progress.iteration) or any(done):
        return None
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
            progress=_Listening(monitor, run.interrupt.check).advance,
            world=progress.world,
        )
    if not progress.world.first:
        return result
    result = replace(result, seconds=time.monotonic() - began)
    save_evaluation(result, folder.path)
    means = {name: summarise(scores) for name, scores in result.scores.items()}
    told = "  ".join(f"{name} {format_summary(each, error=False)}" for name, each in means.items())
    monitor.say(f"held-out at iteration {progress.iteration}: {told}")
    run.trackers.evaluated({name: each.mean for name, each in means.items()}, progress.iteration)
    if progress.iteration and folder.evaluation(0).exists():
        before, _ = load_evaluation(folder.evaluation(0))
        for line in alarms(before, result, tuple(setup.rewards)):
            monitor.say(line)
    _report(folder)
    return result


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
    say(console, f"weights for diffusers (dtype=torch.float32 or bfloat16): {folder.final}")
    say(console, _report(folder))


def _report(folder: RunFolder) -> str:
    """Write the page of the run anew; a word on it. What stands in its way is no reason to stop a run."""
    try:
        from flowcredit.report import build_report

        return f"report: {build_report(folder.path)}"
    except InputError as error:
        return f"no report: {error}"
