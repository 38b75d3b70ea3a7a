"""Where a reward is made: rewards of the states along trajectories, and what each step's noise does to them.

The measurements behind the figures of DenseGRPO (arXiv 2601.20218, figures 3 and 8) and G2RPO
(arXiv 2510.01982, figure 3).

Axes: P prompts, G trajectories or branches of a prompt, T steps of the grid, K stochastic steps, S strides.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flowcredit.algorithms import dense_grpo, g2rpo
from flowcredit.assembly import Setup
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.measurement import scored_rollouts
from flowcredit.methods import DenseGRPOSettings, G2RPOSettings
from flowcredit.plan import Plan

_ITERATION = -2_000_000
"""Keys the noises of a diagnosis: none of training's, evaluation's or calibration's."""
STRIDES = (1, 2, 3)


@dataclass(frozen=True)
class Diagnosis:
    """What was found for the first trained reward; lists are by step.

    ``sigmas`` [T+1]; ``noise`` [K], the deviation of each stochastic step; ``states`` [T][P][G], the reward
    of state k finished by the ODE (the last is the image); ``branches`` [M][S][P][G], the reward of branch G
    at step ``branch_steps[M]`` finished at stride ``strides[S]``.
    """

    reward: str
    noise_kind: str
    sigmas: list[float]
    noise: list[float]
    states: list[list[list[float]]]
    branch_steps: list[int]
    strides: list[int]
    branches: list[list[list[list[float]]]]

    def to_json(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


def gains(diagnosis: Diagnosis) -> Tensor:
    """[K, P, G] float64: what each stochastic step added to the reward."""
    states = torch.tensor(diagnosis.states, dtype=torch.float64)
    return states[1:] - states[:-1]


def variance_shares(diagnosis: Diagnosis) -> list[float]:
    """[K] shares of the variance of the image's reward within a group that each step's noise explains.

    ``cov(gain_k, R) / var(R)``, pooled over prompts whose images differ: as the gains add up to the reward
    less that of the group's common start, the shares add up to 1. A share below 0 is a step that undoes what
    others did. NaN where no group's images differ.
    """
    final = torch.tensor(diagnosis.states[-1], dtype=torch.float64)
    centred = final - final.mean(-1, keepdim=True)
    variance = (centred**2).sum()
    found = gains(diagnosis)
    return [float((step * centred).sum() / variance) for step in found]


def rank_correlations(diagnosis: Diagnosis) -> list[float]:
    """[T - 1] Spearman correlations, within groups, of the rewards of states 1 to T - 1 with the images'.

    The mean over prompts; ties share their mean rank. NaN where no group's rewards differ.
    """
    final = _ranks(torch.tensor(diagnosis.states[-1], dtype=torch.float64))
    result = []
    for state in diagnosis.states[1:]:
        ranks = _ranks(torch.tensor(state, dtype=torch.float64))
        covariance = (ranks * final).sum(-1)
        size = ranks.norm(dim=-1) * final.norm(dim=-1)
        result.append(float((covariance / size)[size > 0].mean()))
    return result


def _ranks(values: Tensor) -> Tensor:
    """[P, G] to mean ranks, centred."""
    below = (values[..., None, :] < values[..., :, None]).sum(-1).double()
    equal = (values[..., None, :] == values[..., :, None]).sum(-1).double()
    ranks = below + (equal - 1) / 2
    return ranks - ranks.mean(-1, keepdim=True)


def stride_spread(diagnosis: Diagnosis) -> tuple[list[float], list[float]]:
    """For each branching step: the deviation of one direction's reward over strides, and of the mean over
    strides between the directions of a group. [M] each, root mean squares over prompts."""
    rewards = torch.tensor(diagnosis.branches, dtype=torch.float64)
    alone = rewards.shape[1] < 2
    within = torch.zeros(len(rewards)) if alone else rewards.var(1).mean((1, 2)).sqrt()
    between = rewards.mean(1).var(-1).mean(-1).sqrt()
    return within.tolist(), between.tolist()


def trees(steps: int, group: int) -> tuple[Plan, Plan, G2RPOSettings]:
    """Trajectories with every state probed; branches at every step that can be stochastic; its settings."""
    dense = dense_grpo(DenseGRPOSettings(num_steps=steps, group_size=group), score_start=True).plan
    strides = tuple(stride for stride in STRIDES if stride <= steps)
    branching = G2RPOSettings(
        num_steps=steps, group_size=group, strides=strides, train_steps=tuple(range(steps - 1))
    )
    return dense, g2rpo(branching).plan, branching


def cost(recipe: Recipe, prompts: int) -> tuple[int, int]:
    """Velocity evaluations of a diagnosis, and its decodes, each scored once."""
    dense, tree, _ = trees(recipe.algorithm.num_steps, recipe.algorithm.group_size)
    return (
        prompts * (dense.velocity_evaluations + tree.velocity_evaluations),
        prompts * (dense.decodes + tree.decodes),
    )


def check_rewarded(recipe: Recipe) -> None:
    """InputError for a recipe that trains no reward."""
    if not recipe.rewards:
        raise InputError("rewards is [], and a diagnosis measures the first of them; expected at least 1")


def diagnose(setup: Setup, prompts: int, progress: Callable[[int], None] | None = None) -> Diagnosis:
    """Measure a recipe's model with its noise on its first trained reward; ``progress`` is told evaluations.

    The recipe's number of steps and group size are used, whatever its method.
    """
    recipe = setup.recipe
    check_rewarded(recipe)
    steps, group = recipe.algorithm.num_steps, recipe.algorithm.group_size
    dense, tree, branching = trees(steps, group)
    states = _scored(setup, dense, prompts, progress)
    found = _scored(setup, tree, prompts, progress)
    x = torch.zeros(1, 1)
    return Diagnosis(
        reward=recipe.rewards[0].name,
        noise_kind=recipe.noise.kind,
        sigmas=setup.grid.tolist(),
        noise=[float(setup.kernel(x, x, k, k + 1).std) for k in range(steps - 1)],
        states=_by_start(dense, states, group),
        branch_steps=list(branching.train_indices),
        strides=list(branching.strides),
        branches=[[found[leaf].tolist() for leaf in tree.leaves_under(step)] for step in tree.transitions],
    )


def _by_start(plan: Plan, scores: dict[int, Tensor], group: int) -> list[list[list[float]]]:
    by_start = {plan.segments[leaf].path[0]: scores[leaf] for leaf in plan.scored}
    return [by_start[k].expand(-1, group).tolist() for k in sorted(by_start)]


def _scored(
    setup: Setup, plan: Plan, count: int, progress: Callable[[int], None] | None
) -> dict[int, Tensor]:
    """The first reward of every leaf, [P, W]."""
    name = setup.recipe.rewards[0].name
    parts = list(
        scored_rollouts(
            setup,
            plan,
            setup.kernel,
            {name: setup.rewards[name]},
            count=count,
            draw=0,
            noise_iteration=_ITERATION,
            progress=progress,
        )
    )
    return {leaf: torch.cat([part[leaf][0] for part in parts]) for leaf in parts[0]}
