"""A budget that every arm gets, and how many iterations of a recipe it pays for."""

import math
from dataclasses import dataclass

from flowcredit.config import Recipe
from flowcredit.costs import Cost, iteration_costs
from flowcredit.errors import InputError

KINDS = {"nfe": "velocity evaluations", "seconds": "seconds of training", "calls": "reward calls"}
"""What a budget counts, by the name that it is given by."""
MOST_ITERATIONS = 100_000


@dataclass(frozen=True)
class Budget:
    """``amount`` of what ``kind``, a key of ``KINDS``, counts."""

    kind: str
    amount: float

    def __str__(self) -> str:
        return f"{self.kind}={self.amount:g}"

    @property
    def words(self) -> str:
        return f"{self.number} {KINDS[self.kind]}"

    @property
    def number(self) -> str:
        """The amount, in whole units but where that would hide what it is."""
        return f"{self.amount:,.0f}" if self.amount >= 100 else f"{self.amount:g}"


def parse_budget(text: str, where: str = "--budget") -> Budget:
    """``nfe=4e5``, ``seconds=600`` or ``calls=20000``. Raises InputError for anything else."""
    kind, _, number = text.strip().partition("=")
    try:
        amount = float(number)
    except ValueError:
        amount = math.nan
    if kind not in KINDS or not (math.isfinite(amount) and amount > 0):
        named = "; ".join(f"{name}= counts {what}" for name, what in KINDS.items())
        raise InputError(f"{where}: got '{text}'; expected such as nfe=4e5 ({named})")
    return Budget(kind, amount)


def spent(cost: Cost, kind: str, pace: float | None = None) -> float:
    """What a cost takes of a budget; ``pace``, seconds a velocity evaluation, is for ``seconds``."""
    if kind == "calls":
        return cost.reward_calls
    if kind == "nfe":
        return cost.velocity_evaluations
    assert pace is not None, "a budget of seconds needs a pace"
    return pace * cost.velocity_evaluations


def iterations_within(recipe: Recipe, budget: Budget, pace: float | None = None) -> int:
    """Most iterations of a recipe, from its first on, whose costs together lie within a budget.

    Exact for velocity evaluations and reward calls. Raises InputError where not even one does, or more than
    ``MOST_ITERATIONS`` do.
    """
    total, count = 0.0, 0
    for cost in iteration_costs(recipe):
        one = spent(cost, budget.kind, pace)
        if total + one > budget.amount:
            break
        total, count = total + one, count + 1
        if count > MOST_ITERATIONS:
            raise InputError(
                f"a budget of {budget.words} pays for more than {MOST_ITERATIONS:,} iterations; give a"
                " smaller one"
            )
    if count == 0:
        price = f"{one:,.0f}" if one >= 10 else f"{one:.2g}"
        raise InputError(
            f"one iteration costs {price} {KINDS[budget.kind]}, more than the budget of {budget.number};"
            " raise it, or lower train.prompts_per_iteration or algorithm.group_size"
        )
    return count
