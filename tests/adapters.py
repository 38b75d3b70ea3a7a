"""What every adapter of a pipeline must do, whatever its family: one rollout and one update, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowcredit.algorithms import g2rpo
from flowcredit.config import TrainSettings
from flowcredit.methods import G2RPOSettings
from flowcredit.models.loading import PipelineFlow
from flowcredit.objectives import policy_sets
from flowcredit.rollout import KeyedNoise, rollout, rows_of
from flowcredit.transition import make_kernel
from flowcredit.update import UpdateMetrics, update_policy
from flowcredit.weights import prepare_weights, trainable_parameters

GROUP = 2


def rolled_and_updated(model: PipelineFlow, prompts: Sequence[str], rate: float = 1e-2) -> UpdateMetrics:
    """A G²RPO rollout of three steps over the model's own grid, and one update on random advantages.

    Rollout and training see each state in a batch of the same size, so that nothing rounds differently.
    """
    plan = g2rpo(G2RPOSettings(num_steps=3, train_steps=(0, 1), group_size=GROUP, strides=(1,))).plan
    grid = model.time_grid(3)
    kernel = make_kernel("flow_sde", grid, 0.7)
    cond = model.encode(prompts)
    noise = KeyedNoise(model, 1, 0, range(len(prompts)))
    done = rollout(model, plan, cond, grid, kernel, noise, len(prompts))
    assert all(torch.isfinite(leaf).all() for leaf in done.leaves.values())
    generator = torch.Generator().manual_seed(0)
    advantages = {
        segment: torch.randn(len(prompts), GROUP, generator=generator) for segment in plan.transitions
    }
    settings = TrainSettings(mixed_precision="no", update="per_step", micro_batch_size=len(prompts))
    trained = trainable_parameters(model.network).values()
    optimizer = torch.optim.AdamW(trained, lr=rate)
    sets = policy_sets(done.transitions, advantages, kernel, settings)
    return update_policy(model, cond, sets, optimizer, settings, lambda: None)


def weights_of_all_parts(model: PipelineFlow) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": value.detach().clone()
        for part, module in model.pipeline.components.items()
        if isinstance(module, torch.nn.Module)
        for name, value in module.named_parameters()
    }


@dataclass(frozen=True)
class Updated:
    """What one update did; names of weights begin with their part of the pipeline."""

    metrics: UpdateMetrics
    trained: set[str]
    moved: set[str]
    reached: float
    """Share that moved, of the weights that a first update can move: of a LoRA the second matrices alone."""


def updated_once(model: PipelineFlow, method: Literal["full", "lora"], prompts: Sequence[str]) -> Updated:
    """Choose what is trained, roll out, update, and compare every weight of the pipeline with before."""
    prepare_weights(model.network, method, rank=2, alpha=4.0, targets=model.lora_targets)
    trained = {f"{model.part}.{name}" for name in trainable_parameters(model.network)}
    before = weights_of_all_parts(model)
    metrics = rolled_and_updated(model, prompts)
    after = weights_of_all_parts(model)
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    movable = {name for name in trained if method == "full" or ".lora_B." in name}
    return Updated(metrics, trained, moved, len(moved & movable) / len(movable))


def train_stand_in(model: PipelineFlow, method: Literal["full", "lora"], size: float = 0.05) -> None:
    """Weights that have moved far enough to change the image; alpha is not the rank."""
    prepare_weights(model.network, method, rank=4, alpha=20.0, targets=model.lora_targets)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in trainable_parameters(model.network).values():
            value.add_(size * torch.randn(value.shape, generator=generator))


@torch.no_grad()
def velocities_by_row(model: PipelineFlow, prompts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Velocities of rows of different texts, states and sigmas: in one batch, each alone, and each under its
    neighbour's text."""
    cond = model.encode(prompts)
    x = model.initial_noise(len(prompts), torch.Generator().manual_seed(3))
    sigma = torch.linspace(0.9, 0.2, len(prompts))
    alone, swapped = [], []
    for row in range(len(prompts)):
        here = (x[row : row + 1], sigma[row : row + 1])
        alone.append(model.velocity(*here, model.encode([prompts[row]])))
        swapped.append(model.velocity(*here, rows_of(cond, torch.tensor([(row + 1) % len(prompts)]))))
    return model.velocity(x, sigma, cond), torch.cat(alone), torch.cat(swapped)


@dataclass(frozen=True)
class Recomputed:
    """Runs of the first blocks, and the gradients by name, without checkpointing and with it."""

    plain_runs: int
    checkpointed_runs: int
    plain: dict[str, Tensor]
    checkpointed: dict[str, Tensor]


def with_and_without_checkpointing(
    model: PipelineFlow, method: Literal["full", "lora"], prompts: Sequence[str]
) -> Recomputed:
    """One forward and backward pass either way, and once more without."""
    prepare_weights(model.network, method, rank=2, alpha=4.0, targets=model.lora_targets)
    x = model.initial_noise(len(prompts), torch.Generator().manual_seed(0))
    sigma, cond = torch.linspace(0.8, 0.4, len(prompts)), model.encode(prompts)
    names = {"transformer_blocks", "single_transformer_blocks", "down_blocks"}
    lists = [module for name, module in model.network.named_modules() if name in names]
    inner = {next(iter(each.children())) for each in lists}
    runs: list[int] = []
    for block in inner:
        first = next(module for module in block.modules() if isinstance(module, torch.nn.Linear))
        first.register_forward_pre_hook(lambda *_: runs.append(1))

    def gradients(enabled: bool) -> dict[str, Tensor]:
        model.set_gradient_checkpointing(enabled)
        model.network.zero_grad()
        runs.clear()
        model.velocity(x, sigma, cond).square().mean().backward()
        trained = trainable_parameters(model.network)
        return {name: value.grad.clone() for name, value in trained.items() if value.grad is not None}

    plain = gradients(False)
    once = len(runs)
    recomputed = gradients(True)
    twice = len(runs)
    again = gradients(False)
    assert len(runs) == once
    assert plain.keys() == again.keys()
    return Recomputed(once, twice, plain, recomputed)
