"""A kept fault, brought about again: the batch through the weights of then, or the images to the reward.

Axes: B rows of a batch, *D latent dimensions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from flowcredit.assembly import build_model, build_rewards, device_of
from flowcredit.config import Recipe
from flowcredit.console import say
from flowcredit.faults import Fault, KeptFault, read_faults
from flowcredit.recipe_io import load_recipe
from flowcredit.scoring import RewardError, score_images
from flowcredit.weights import trainable_parameters, weights_replaced


def replay_command(place: Path) -> bool:
    """Replay what lies in a folder of ``faults/`` and say what came of it; whether any fault came again.

    Raises InputError where there is no fault, or its recipe, model or reward cannot be loaded.
    """
    console = Console()
    again = False
    for kept in read_faults(place):
        recipe = load_recipe(kept.recipe, ["parallel.sharding=replicated"])
        whose = f"after iteration {kept.iteration}, process {kept.rank}"
        say(console, f"{kept.fault.kind}, {whose}: {kept.fault.message}")
        told = _reward(kept.fault, recipe) if kept.fault.kind == "reward" else _network(kept, recipe)
        say(console, f"  {told or 'did not come again'}")
        again = again or told is not None
    return again


def _reward(fault: Fault, recipe: Recipe) -> str | None:
    """Have the reward score its images again; what it did wrong, or None."""
    name = fault.details["reward"]
    chosen = [each for each in (*recipe.rewards, *recipe.watch) if each.name == name]
    rewards = build_rewards(recipe, chosen, device_of(recipe.model.device))
    images, prompts = fault.tensors["images"], fault.details["prompts"]
    try:
        scores = score_images(
            rewards,
            images,
            prompts,
            fault.details["columns"],
            batch_size=len(images),
            timeout_s=recipe.scoring.timeout_s,
        )
    except RewardError as error:
        return f"again: {error}"
    lacking = int(scores.isnan().sum())
    return f"again: no score for {lacking} of {scores.numel()} images" if lacking else None


def _network(kept: KeptFault, recipe: Recipe) -> str | None:
    """Put the batch through the network with the weights of then; where it first is not finite, or None."""
    model = build_model(recipe)
    tensors = {name: value.to(model.device) for name, value in kept.fault.tensors.items()}
    cond = {name.removeprefix("cond/"): t for name, t in tensors.items() if name.startswith("cond/")}
    weights = kept.weights or {n: v.detach() for n, v in trainable_parameters(model.network).items()}
    with weights_replaced(model.network, weights), _watching(model.network) as first:
        v = model.velocity(tensors["x"], tensors["sigma"], cond)
        if not v.isfinite().all():
            return f"again: the velocity is not finite, first in {first[0] if first else 'its input'}"
        grad = tensors.get("grad_v")
        if grad is None:
            return None
        if not grad.isfinite().all():
            return "again: velocities are finite, the loss's gradient at them is not: the loss is at fault"
        v.backward(grad)
        return _bad_gradients(model.network)


def _bad_gradients(network: nn.Module) -> str | None:
    """The parameters whose gradients are not finite; the last in the network is the first on the way back."""
    names = [name for name, p in trainable_parameters(network).items() if not _finite(p.grad)]
    network.zero_grad(set_to_none=True)
    if not names:
        return None
    return f"again: the gradients of {len(names)} tensors are not finite, first on the way back {names[-1]}"


def _finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


@contextmanager
def _watching(network: nn.Module) -> Iterator[list[str]]:
    """Collects the names of modules without parts that turn finite numbers into others, in their order."""
    first: list[str] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            outcome = made[0] if isinstance(made, tuple) else made
            if not _finite(outcome) and all(_finite(each) for each in given):
                first.append(name)

        return look

    leaves = [(name, each) for name, each in network.named_modules() if not any(each.children())]
    handles = [each.register_forward_hook(hook(name)) for name, each in leaves]
    try:
        with torch.enable_grad():
            yield first
    finally:
        for handle in handles:
            handle.remove()
