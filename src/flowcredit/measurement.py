"""Rollouts that are only looked at: any plan over many prompts, decoded and scored batch by batch.

Axes: R rewards, P prompts of a batch, W samples of a prompt at a leaf.
"""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from flowcredit.assembly import Setup
from flowcredit.interfaces import Reward
from flowcredit.leaf_scoring import score_leaves
from flowcredit.plan import Plan
from flowcredit.prompts import iteration_prompts
from flowcredit.rollout import KeyedNoise, rollout
from flowcredit.transition import Kernel


def scored_rollouts(
    setup: Setup,
    plan: Plan,
    kernel: Kernel,
    rewards: Mapping[str, Reward],
    *,
    count: int,
    draw: int,
    noise_iteration: int,
    progress: Callable[[int], None] | None = None,
) -> Iterator[dict[int, Tensor]]:
    """Scores by scored segment, [R, P, W], of ``count`` training prompts, ``prompts_per_iteration`` at once.

    ``draw`` says which prompts, as an iteration of training does; ``noise_iteration`` keys the noises, and is
    negative so that they are none of training's. ``progress`` is told the velocity evaluations.
    """
    recipe = setup.recipe
    rows = iteration_prompts(len(setup.train_prompts), recipe.seed, draw, count)
    for first in range(0, count, recipe.train.prompts_per_iteration):
        part = range(first, min(first + recipe.train.prompts_per_iteration, count))
        prompts = setup.train_prompts.take(rows[place] for place in part)
        done = rollout(
            setup.model,
            plan,
            setup.model.encode(prompts.prompts),
            setup.grid,
            kernel,
            KeyedNoise(setup.model, recipe.seed, noise_iteration, part),
            recipe.rollout.batch_size,
            progress=progress,
        )
        scores, _ = score_leaves(
            setup.model,
            done.leaves,
            prompts.prompts,
            prompts.columns,
            rewards,
            batch_size=recipe.scoring.batch_size,
            on_error=recipe.scoring.on_error,
            timeout_s=recipe.scoring.timeout_s,
        )
        yield scores
