"""Arms looked over before the first of them runs, by what can be told without loading weights."""

from collections.abc import Sequence

from flowcredit.compare.arms import Arm
from flowcredit.errors import InputError
from flowcredit.readiness import look_over
from flowcredit.rewards.loading import check_reward


def check_arms(arms: Sequence[Arm]) -> None:
    """InputError for the first arm whose recipe could not run: a model, prompts, a table, a LoRA or a reward
    that is missing, or that does not fit."""
    for arm in arms:
        recipe = arm.load()
        try:
            missing = look_over(recipe, quick=False)
            if missing:
                more = f" (and {len(missing) - 1} more: {'; '.join(missing[1:])})" if missing[1:] else ""
                raise InputError(f"{missing[0]}{more}; nothing was run")
            for reward in (*recipe.rewards, *recipe.watch):
                check_reward(reward.name, reward.options)
        except InputError as error:
            raise arm.wrong(error) from None
