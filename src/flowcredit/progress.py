"""What changes while a run goes on, and how it is saved and brought back."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowcredit.assembly import Setup
from flowcredit.checkpoint import (
    Checkpoint,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from flowcredit.config import Recipe
from flowcredit.distributed import ALONE, World
from flowcredit.processes import finishing
from flowcredit.run_folder import RunFolder
from flowcredit.sharding import parted, whole
from flowcredit.standing import best_iterations
from flowcredit.weights import EMA, trainable_parameters

TOTALS = ("velocity_evaluations", "decodes", "reward_calls", "seconds")


@dataclass
class Progress:
    """What changes while a run goes on: weights, optimizer, averages and counts."""

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    world: World = ALONE
    iteration: int = 0
    saved: int = 0
    """The iteration of the newest checkpoint."""
    returns: int = 0
    """How often the run has gone back to an earlier checkpoint."""
    rate_scale: float = 1.0
    """What the returns have made of the learning rate."""
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))


def put_back(progress: Progress, checkpoint: Checkpoint) -> None:
    """Bring weights, optimizer, averages and counts to where a checkpoint has them."""
    with torch.no_grad():
        for name, parameter in progress.parameters.items():
            parameter.copy_(parted(checkpoint.groups["weights"][name], parameter))
    restore_optimizer(progress.optimizer, progress.parameters, checkpoint.groups["optimizer"])
    if progress.ema is not None:
        progress.ema.load_state_dict(checkpoint.groups["ema"])
    progress.iteration = progress.saved = checkpoint.iteration
    progress.returns = checkpoint.state.get("returns", 0)
    progress.rate_scale = checkpoint.state.get("rate_scale", 1.0)
    progress.totals.update(checkpoint.state["totals"])


def start(setup: Setup, world: World) -> Progress:
    """The beginning of a run: no moments, averages equal to the weights."""
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


def save(folder: RunFolder, progress: Progress, recipe: Recipe) -> None:
    """A checkpoint of everything; to be called by all processes, of which the first writes."""
    groups: dict[str, dict[str, Tensor]] = {
        "weights": dict(progress.parameters),
        "optimizer": optimizer_tensors(progress.optimizer, progress.parameters),
    }
    if progress.ema is not None:
        groups["ema"] = progress.ema.state_dict()
    groups = {name: whole(tensors, progress.world) for name, tensors in groups.items()}
    progress.saved = progress.iteration
    if not progress.world.first:
        return
    state = {
        "totals": progress.totals,
        "returns": progress.returns,
        "rate_scale": progress.rate_scale,
        "recipe": recipe.model_dump(mode="json"),
    }
    keep = recipe.checkpoint
    best = best_iterations(folder, reward_weights(recipe), kept_best(recipe))
    with finishing():
        save_checkpoint(folder.checkpoints, progress.iteration, groups, state, keep.keep_last, best)


def reward_weights(recipe: Recipe) -> dict[str, float]:
    """The weights of the trained rewards, by name."""
    return {reward.name: reward.weight for reward in recipe.rewards}


def kept_best(recipe: Recipe) -> int:
    """How many checkpoints are kept for being the best; one to return to is."""
    return max(recipe.checkpoint.keep_best, int(recipe.guard.action == "return"))


def go_back(folder: RunFolder, progress: Progress, recipe: Recipe, iteration: int) -> None:
    """Bring the run, and what it has written, to where it was after an earlier ``iteration``, at a lower
    learning rate; to be called by all processes.

    Wherever this is cut short, the run can be resumed and comes to the same point.
    """
    world, returns, scale = progress.world, progress.returns + 1, progress.rate_scale * recipe.guard.rate
    checkpoint = load_checkpoint(folder.checkpoints / f"{iteration:06d}")
    world.wait()
    if world.first:
        folder.forget_after(iteration)
    put_back(progress, checkpoint)
    progress.returns, progress.rate_scale = returns, scale
    save(folder, progress, recipe)
    if world.first:
        folder.cut_log(iteration)
    world.wait()
