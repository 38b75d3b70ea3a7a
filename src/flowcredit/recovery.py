"""What is done where a run goes wrong: a reward fails, a number is not finite, the policy collapses."""

from dataclasses import dataclass
from pathlib import Path

from flowcredit.assembly import Setup
from flowcredit.checkpoint import kept_iterations
from flowcredit.console import Monitor
from flowcredit.distributed import World
from flowcredit.experience import Experience
from flowcredit.faults import Fault, FaultError, NonFinite, keep_fault, place_for
from flowcredit.guard import Collapse, Guard, note
from flowcredit.interrupts import Interrupt
from flowcredit.progress import Progress, go_back, reward_weights
from flowcredit.run_folder import RunFolder
from flowcredit.standing import best_iterations
from flowcredit.trackers import Trackers


@dataclass(frozen=True)
class Run:
    """A run under way, and who watches it."""

    setup: Setup
    folder: RunFolder
    progress: Progress
    monitor: Monitor
    interrupt: Interrupt
    guard: Guard
    trackers: Trackers

    @property
    def world(self) -> World:
        return self.progress.world


def heed(run: Run, why: str | None) -> None:
    """Do about a collapse what the recipe says. Raises Collapse where the run stops."""
    recipe, progress, folder = run.setup.recipe, run.progress, run.folder
    settings, world = recipe.guard, run.world
    # The first process reads the folder, which the others may see later.
    ranked = best_iterations(folder, reward_weights(recipe), 1_000_000) if world.first and why else []
    kept = kept_iterations(folder.checkpoints) if world.first else []
    why, back = world.told([why, next((each for each in ranked if each in kept), None)])[0]
    if why is None or settings.action == "off":
        return
    back = None if back == progress.iteration else back
    returns = settings.action == "return" and back is not None and progress.returns < settings.returns
    done = "warned" if settings.action == "warn" else f"back to iteration {back}" if returns else "stopped"
    run.monitor.say(f"collapse at iteration {progress.iteration}: {why}; {done}")
    if world.first:
        note(folder, progress.iteration, why, done)
    if done == "warned":
        return
    best_one = f"the best checkpoint is of iteration {back}" if back else "no better checkpoint is there"
    if not returns or back is None:
        raise Collapse(
            f"the run has collapsed at iteration {progress.iteration}: {why}; {best_one};"
            " lower train.learning_rate in a new run, or go on regardless by guard.action=warn"
        )
    go_back(folder, progress, recipe, back)
    run.guard.streaks.clear()
    if world.first:
        run.trackers.begin(back)
    run.monitor.go_back(back)


def with_fault(run: Run, error: FaultError) -> str:
    """An error's message, with where its batch was kept."""
    kept = None if error.fault is None else _kept_alone(run, error.fault)
    return str(error) if kept is None else f"{error}; its batch is kept: flowcredit replay {kept}"


def _kept_alone(run: Run, fault: Fault) -> Path | None:
    """Write a fault that this process alone knows of; returns where."""
    place = place_for(run.folder.faults, fault.kind, run.progress.iteration)
    if place is not None:
        _keep(run, place, fault)
    return place


def _keep(run: Run, place: Path, fault: Fault | None) -> None:
    """Write a fault and, where each process has them whole, the trained weights."""
    progress = run.progress
    weights = {} if fault is not None and fault.kind == "reward" else progress.parameters
    spread = run.setup.recipe.parallel.sharding == "sharded"
    keep_fault(
        place,
        fault,
        progress.iteration,
        run.world.rank,
        run.setup.recipe,
        weights if run.world.first and not spread else {},
    )


def tell_failures(run: Run, found: Experience) -> None:
    """Say which rewards failed on images that are skipped, and keep the first of these."""
    kept = {name: _kept_alone(run, fault) for name, fault in found.faults.items()}
    for name, reason in found.counts.reasons.items():
        where = f" (kept: {kept[name]})" if kept.get(name) else ""
        run.monitor.say(
            f"reward {name} failed on {found.counts.failed[name]} images, which are skipped; the first said:"
            f" {reason}{where}"
        )


def on_fault(run: Run, fault: Fault | None) -> None:
    """Keep the batch of a loss or gradient that is not finite; every process comes here. Raises NonFinite
    where the recipe stops the run for it."""
    own = None if fault is None else [fault.kind, fault.message]
    seen = [each for each in run.world.told(own) if each is not None]
    kind, message = seen[0] if seen else ("update", "a sum of gradients is no finite number")
    place = place_for(run.folder.faults, kind, run.progress.iteration)
    # The first process decides: the others may look when it has written already.
    kept = run.world.told(None if place is None else str(place))[0]
    if kept is not None:
        _keep(run, Path(kept), fault)
    where = "" if kept is None else f"; its batch is kept: flowcredit replay {kept}"
    train = run.setup.recipe.train
    if train.on_nonfinite == "stop":
        raise NonFinite(
            f"iteration {run.progress.iteration + 1}: {message}: training has diverged; go back to a"
            f" checkpoint and lower train.learning_rate (now {train.learning_rate:g}){where}"
        )
    run.monitor.say(f"iteration {run.progress.iteration + 1}: {message}: optimizer step skipped{where}")
