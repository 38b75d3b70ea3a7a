"""What changes while a run goes on, and how it is saved and brought back."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowcredit.assembly import Setup
from flowcredit.checkpoint import Checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint
from flowcredit.config import Recipe
from flowcredit.distributed import ALONE, World
from flowcredit.run_folder import RunFolder
from flowcredit.sharding import parted, whole
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
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))


def put_back(progress: Progress, checkpoint: Checkpoint) -> None:
    """Bring weights, optimizer, averages and counts to where a checkpoint has them."""
    with torch.no_grad():
        for name, parameter in progress.parameters.items():
            parameter.copy_(parted(checkpoint.groups["weights"][name], parameter))
    restore_optimizer(progress.optimizer, progress.parameters, checkpoint.groups["optimizer"])
    if progress.ema is not None:
        progress.ema.load_state_dict(checkpoint.groups["ema"])
    progress.iteration = checkpoint.iteration
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
    if not progress.world.first:
        return
    state = {"totals": progress.totals, "recipe": recipe.model_dump(mode="json")}
    save_checkpoint(folder.checkpoints, progress.iteration, groups, state, recipe.checkpoint.keep_last)
