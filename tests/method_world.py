"""A world for tests of methods: a mixture of normals in float64, exact and fast, in a run's own parts."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from flowcredit import algorithms
from flowcredit.assembly import Setup, build_reference, build_rewards
from flowcredit.config import Recipe
from flowcredit.experience import Experience, collect
from flowcredit.models.gaussian import GaussianMixtureFlow
from flowcredit.models.loading import PipelineFlow
from flowcredit.prompts import PromptSet
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import make_kernel
from flowcredit.update import UpdateMetrics, update_policy

PROMPTS = ("one", "two", "three")


class CountingMixture(GaussianMixtureFlow):
    """Keeps how many rows each velocity was asked for."""

    def __init__(self) -> None:
        means = torch.tensor([[2.0, 0.0, -1.0, 0.5], [-1.0, 1.5, 0.5, 0.0]], dtype=torch.float64)
        variances, weights = torch.tensor([0.1, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
        super().__init__(means, variances, weights, prompt_spread=0.5, dtype=torch.float64)
        self.rows: list[int] = []

    def velocity(self, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        self.rows.append(len(x))
        return super().velocity(x, sigma, cond)


class Silent:
    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, units: int) -> None:
        pass


def recipe_of(algorithm: Mapping[str, Any], **sections: Any) -> Recipe:
    """A recipe of the method; what a section holds is laid over what tests need."""
    train = {"iterations": 40, "prompts_per_iteration": 3, "mixed_precision": "no", "micro_batch_size": 7}
    return Recipe.model_validate(
        {
            "name": "world",
            "model": {"path": "none"},
            "prompts": {"train": "none", "heldout": "none"},
            "rewards": ["simple_rewards:brightness", {"name": "simple_rewards:contrast", "weight": 0.5}],
            "algorithm": algorithm,
            **sections,
            "train": {**train, **sections.get("train", {})},
        }
    )


def world(algorithm: Mapping[str, Any], **sections: Any) -> Setup:
    """A run's parts with the mixture as its model."""
    recipe = recipe_of(algorithm, **sections)
    model = cast(PipelineFlow, CountingMixture())
    grid = shifted_linear(recipe.algorithm.num_steps, recipe.grid.shift)
    method = algorithms.build(recipe.algorithm, recipe.seed)
    return Setup(
        recipe,
        model,
        method,
        grid,
        make_kernel(recipe.noise.kind, grid, recipe.noise.eta),
        build_rewards(recipe, recipe.rewards, model.device),
        {},
        PromptSet(PROMPTS),
        PromptSet(PROMPTS),
        build_reference(recipe, model, method),
    )


def gather(setup: Setup, iteration: int = 0) -> Experience:
    return collect(setup, setup.train_prompts, iteration, Silent())


def learn(
    setup: Setup,
    found: Experience,
    optimizer: torch.optim.Optimizer,
    after: Callable[[], None] = lambda: None,
) -> UpdateMetrics:
    return update_policy(
        setup.model, found.cond, found.sets, optimizer, setup.recipe.train, after, setup.reference
    )
