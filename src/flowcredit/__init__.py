"""flowcredit: online reinforcement learning of flow-matching text-to-image models, step by step.

What is exported here is meant to stay; everything else may move. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowcredit.api import Outcome, Trainer
    from flowcredit.comparison import Evaluation, Summary
    from flowcredit.config import Recipe
    from flowcredit.errors import InputError
    from flowcredit.interfaces import FlowModel, Reward
    from flowcredit.models.loading import load_model
    from flowcredit.prompts import PromptSet, load_prompts
    from flowcredit.recipe_io import load_recipe
    from flowcredit.rewards.loading import load_reward

__all__ = [
    "Evaluation",
    "FlowModel",
    "InputError",
    "Outcome",
    "PromptSet",
    "Recipe",
    "Reward",
    "Summary",
    "Trainer",
    "load_model",
    "load_prompts",
    "load_recipe",
    "load_reward",
]

_ROOMS = {
    "Evaluation": "comparison",
    "FlowModel": "interfaces",
    "InputError": "errors",
    "Outcome": "api",
    "PromptSet": "prompts",
    "Recipe": "config",
    "Reward": "interfaces",
    "Summary": "comparison",
    "Trainer": "api",
    "load_model": "models.loading",
    "load_prompts": "prompts",
    "load_recipe": "recipe_io",
    "load_reward": "rewards.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"flowcredit.{_ROOMS[name]}"))[name]


def __dir__() -> list[str]:
    return __all__
