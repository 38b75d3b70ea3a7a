"""What an iteration of a recipe costs, counted from its plan: known before anything is loaded. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from flowcredit import algorithms
from flowcredit.config import Recipe


@dataclass(frozen=True)
class Cost:
    """Counts of one iteration, or of several.

    A velocity evaluation is one call of the network for one sample: in the ``rollout``, for a ``trained``
    state (its forward and backward count as one), or for the ``reference`` policy of a KL or a
    preference. Classifier-free
    guidance, which doubles each, is not counted. ``reward_calls``: one for each image and trained reward.
    """

    rollout: int = 0
    trained: int = 0
    reference: int = 0
    decodes: int = 0
    reward_calls: int = 0

    @property
    def velocity_evaluations(self) -> int:
        return self.rollout + self.trained + self.reference

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.rollout + other.rollout,
            self.trained + other.trained,
            self.reference + other.reference,
            self.decodes + other.decodes,
            self.reward_calls + other.reward_calls,
        )


def iteration_cost(recipe: Recipe, algorithm: algorithms.Algorithm, iteration: int) -> Cost:
    """The cost of ``iteration`` (from 0) of a recipe by its method; trees may differ from one to another."""
    plan, prompts = algorithm.plan_at(iteration), recipe.train.prompts_per_iteration
    trained = prompts * algorithm.trained_states(plan)
    has_reference = recipe.train.kl_weight > 0 or algorithm.needs_reference
    return Cost(
        rollout=prompts * plan.velocity_evaluations,
        trained=trained,
        reference=trained if has_reference else 0,
        decodes=prompts * plan.decodes,
        reward_calls=prompts * plan.scores * len(recipe.rewards),
    )


def iteration_costs(recipe: Recipe) -> Iterator[Cost]:
    """The cost of every iteration of a recipe, one after the other, without end."""
    algorithm, iteration = algorithms.build(recipe.algorithm, recipe.seed), 0
    while True:
        yield iteration_cost(recipe, algorithm, iteration)
        iteration += 1
