"""From a recipe to the parts of a run: model, method, grid, rewards, prompts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flowcredit import algorithms, time_grid
from flowcredit.config import GridSettings, Recipe, WatchedReward
from flowcredit.credit import Preferences
from flowcredit.demands import check_prompts
from flowcredit.distributed import ALONE, World
from flowcredit.errors import InputError
from flowcredit.image_pairs import check_pairs
from flowcredit.interfaces import FlowModel, Reward
from flowcredit.models.compiling import compile_network
from flowcredit.models.loading import PipelineFlow, load_model
from flowcredit.noise_table import read_noise_table
from flowcredit.prompts import PromptSet, check_group_by, load_prompts
from flowcredit.rewards.loading import load_reward
from flowcredit.rewards.waiting import waiting
from flowcredit.shapes import bundled_path
from flowcredit.sharding import shard
from flowcredit.transition import Kernel, make_kernel
from flowcredit.weights import adapter_disabled, prepare_weights, reference_copy, weights_replaced

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same while a run goes on; only the network's weights change."""

    recipe: Recipe
    model: PipelineFlow
    algorithm: algorithms.Algorithm
    grid: Tensor
    kernel: Kernel
    rewards: Mapping[str, Reward]
    watched: Mapping[str, Reward]
    train_prompts: PromptSet
    heldout_prompts: PromptSet
    reference: Callable[[], AbstractContextManager[None]] | None
    """Turns the model into the one before training while entered; None where nothing is measured from it."""

    @property
    def reward_weights(self) -> Tensor:
        """[R] weights of the trained rewards."""
        return torch.tensor([reward.weight for reward in self.recipe.rewards])

    @property
    def trained_flow(self) -> FlowModel:
        """The model as training evaluates it: with guidance, but for objectives that are not guided."""
        objective = self.algorithm.objective
        return self.model if objective is None or objective.guided else self.model.without_guidance()


def assemble(recipe: Recipe, world: World = ALONE) -> Setup:
    """Load and check every part of a run before it begins. Raises InputError for whatever cannot work."""
    algorithm = algorithms.build(recipe.algorithm, recipe.seed)
    train_prompts = load_prompts(recipe.prompts.train, recipe.prompts.column)
    heldout = load_prompts(recipe.prompts.heldout, recipe.prompts.column)
    check_group_by(heldout, recipe.evaluation.group_by)
    device = device_of(recipe.model.device, world)
    rewards = build_rewards(recipe, recipe.rewards, device)
    watched = build_rewards(recipe, recipe.watch, device)
    check_prompts(rewards, train_prompts, recipe.scoring.on_error)
    check_prompts({**rewards, **watched}, heldout, recipe.scoring.on_error)
    objective = algorithm.objective
    if isinstance(objective, Preferences) and objective.columns is not None:
        check_pairs(train_prompts, objective.columns, recipe.model.height, recipe.model.width)
    model = build_model(recipe, world)
    grid = build_grid(recipe.grid, model, recipe.algorithm.num_steps)
    chosen = recipe.evaluation.prompts
    return Setup(
        recipe,
        model,
        algorithm,
        grid,
        build_kernel(recipe, grid),
        rewards,
        watched,
        train_prompts,
        heldout if len(heldout) <= chosen else heldout.take(range(chosen)),
        build_reference(recipe, model, algorithm),
    )


def build_reference(
    recipe: Recipe, model: PipelineFlow, algorithm: algorithms.Algorithm
) -> Callable[[], AbstractContextManager[None]] | None:
    """The policy that a KL or a preference is measured from: the model as it now is; a LoRA run needs no copy
    of it.

    To be called before any weight has moved. None where the recipe has no KL, nor its method a preference.
    """
    if not algorithm.needs_reference and recipe.train.kl_weight == 0:
        return None
    if recipe.weights.method == "lora":
        return partial(adapter_disabled, model.network)
    return partial(weights_replaced, model.network, reference_copy(model.network))


def device_of(name: str, world: World = ALONE) -> torch.device:
    """The device that a recipe names, `auto` one for each process. InputError if torch does not have it."""
    if name == "auto":
        name = f"cuda:{world.local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"model.device is {name!r}, which cannot be used: {reason}; expected auto or cpu"
        ) from None
    return device


def build_model(recipe: Recipe, world: World = ALONE) -> PipelineFlow:
    """The model of a recipe, with the weights chosen that are trained."""
    settings, weights, train = recipe.model, recipe.weights, recipe.train
    frozen = DTYPES[settings.dtype]
    model = load_model(
        bundled_path(settings.path),
        height=settings.height,
        width=settings.width,
        guidance_scale=settings.guidance_scale,
        max_sequence_length=settings.max_sequence_length,
        dtype=frozen,
        device=device_of(settings.device, world),
        decode_batch_size=settings.decode_batch_size,
        network_dtype=frozen if weights.method == "lora" else torch.float32,
        autocast=torch.bfloat16 if train.mixed_precision == "bf16" else None,
        negative_prompt=settings.negative_prompt,
        text_cache_folder=settings.text_cache,
        lora=settings.lora,
        offload=settings.offload,
        vae_slicing=settings.vae_slicing,
        vae_tiling=settings.vae_tiling,
        adapter=settings.adapter,
    )
    prepare_weights(
        model.network,
        weights.method,
        rank=weights.rank,
        alpha=weights.alpha,
        targets=model.lora_targets if weights.targets is None else weights.targets,
        seed=recipe.seed,
    )
    if train.gradient_checkpointing:
        model.set_gradient_checkpointing(True)
    if settings.compile:
        compile_network(model.network, model.device)
    if recipe.parallel.sharding == "sharded":
        compute = torch.bfloat16 if train.mixed_precision == "bf16" else None
        shard(model.network, world, model.device, compute)
    return model


def build_rewards(recipe: Recipe, chosen: Sequence[WatchedReward], device: torch.device) -> dict[str, Reward]:
    """Rewards of a recipe by name, in its order; where it says so, with networks that wait on the CPU."""
    rewards = {}
    for reward in chosen:
        loaded = load_reward(reward.name, reward.options, device)
        rewards[reward.name] = waiting(loaded, device) if recipe.scoring.offload else loaded
    return rewards


def build_grid(settings: GridSettings, model: FlowModel, num_steps: int) -> Tensor:
    """[num_steps + 1] sigmas of the kind that the recipe asks for."""
    if settings.kind == "scheduler":
        return model.time_grid(num_steps)
    if settings.kind == "resolution_shift":
        return time_grid.shifted_linear(num_steps, time_grid.resolution_shift(model.image_tokens))
    return time_grid.shifted_linear(num_steps, settings.shift)


def build_kernel(recipe: Recipe, grid: Tensor) -> Kernel:
    """The stochastic step of a recipe on a grid. Raises InputError for a table that does not fit it."""
    settings = recipe.noise
    if settings.table is None:
        return make_kernel(settings.kind, grid, settings.eta)
    table = read_noise_table(settings.table)
    if table.grid is not None and not _same_grid(table.grid, grid):
        raise InputError(
            f"{table.source}: was calibrated for {_grid_words(table.grid)}, but this recipe samples"
            f" {_grid_words(grid.tolist())}; calibrate again, or sample as it was calibrated"
        )
    try:
        kernel = make_kernel("table", grid, table.levels)
    except ValueError as error:
        raise InputError(f"{table.source}: {error}") from None
    for step in _noisy_steps(recipe):
        if table.levels[step] == 0:
            raise InputError(
                f"{table.source}: the level of step {step} is 0, but {recipe.algorithm.name} draws noise"
                " there; expected more than 0"
            )
    return kernel


def _noisy_steps(recipe: Recipe) -> list[int]:
    algorithm = algorithms.build(recipe.algorithm, recipe.seed)
    plans = [algorithm.plan_at(iteration) for iteration in range(recipe.train.iterations)]
    return sorted({plan.segments[i].path[0] for plan in plans for i in plan.transitions})


def _same_grid(one: Sequence[float], other: Tensor) -> bool:
    return len(one) == len(other) and bool(
        (torch.tensor(one, dtype=torch.float64) - other).abs().max() < 1e-4
    )


def _grid_words(sigmas: Sequence[float]) -> str:
    return f"{len(sigmas) - 1} steps, sigma {', '.join(f'{sigma:.3g}' for sigma in sigmas[:4])}, ..."
