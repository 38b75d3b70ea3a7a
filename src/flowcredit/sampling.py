"""The rollouts of an iteration and their scores: part after part, or scored while the next part rolls out.

Axes: R rewards, P prompts, W samples of a prompt at a segment, *D latent dimensions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from flowcredit.assembly import Setup
from flowcredit.background import Submit, submitting
from flowcredit.interfaces import Conditioning
from flowcredit.leaf_scoring import ScoreCounts, Scored, Scoring, begin_scoring
from flowcredit.plan import Plan
from flowcredit.prompts import PromptSet
from flowcredit.rollout import KeyedNoise, Rollout, Transition, rollout, rows_of


class Listener(Protocol):
    """Who is told how far it is; it may raise KeyboardInterrupt."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins, of so many units."""
        ...

    def advance(self, units: int) -> None:
        """So many units are done."""
        ...


def sample(
    setup: Setup,
    plan: Plan,
    prompts: PromptSet,
    cond: Conditioning,
    iteration: int,
    places: Sequence[int],
    own: int,
    listener: Listener,
) -> tuple[Rollout, Scored]:
    """Roll out the plan for every prompt, ``rollout.prompts`` at a time, and score the first ``own`` of them.

    With ``scoring.overlap`` a part is scored while the next is rolled out. Parts, batches and their order
    are the same without, and so are all results.

    Args:
        cond: conditioning of the P prompts.
        iteration, places: key the noises, with the prompts' places in the whole iteration.

    Raises:
        RewardError, InputError: as `flowcredit.leaf_scoring.begin_scoring`; of several failures the first.
    """
    size, overlap = setup.recipe.rollout.prompts or len(prompts), setup.recipe.scoring.overlap
    done: list[Rollout] = []
    begun: list[Scoring] = []
    with submitting(overlap, lambda: listener.advance(0)) as submit:
        for first in range(0, len(prompts), size):
            rows = range(first, min(first + size, len(prompts)))
            listener.stage("rolling out", plan.velocity_evaluations * len(rows))
            noises = KeyedNoise(setup.model, setup.recipe.seed, iteration, [places[row] for row in rows])
            part = rollout(
                setup.model,
                plan,
                rows_of(cond, torch.tensor(rows)),
                setup.grid,
                setup.kernel,
                noises,
                setup.recipe.rollout.batch_size,
                progress=listener.advance,
            )
            done.append(part)
            mine = prompts.take(row for row in rows if row < own)
            listener.stage("decoding" if overlap else "scoring", plan.decodes * len(mine))
            begun.append(_begun(setup, part, mine, listener, submit))
        if overlap:
            listener.stage("scoring", sum(each.images for each in begun))
        scored = [each.result(listener.advance if overlap else None) for each in begun]
    return _joined(done), _added(scored)


def _begun(setup: Setup, part: Rollout, prompts: PromptSet, listener: Listener, submit: Submit) -> Scoring:
    """The scoring of the first prompts of a part."""
    scoring = setup.recipe.scoring
    return begin_scoring(
        setup.model,
        {leaf: states[: len(prompts)] for leaf, states in part.leaves.items()},
        prompts.prompts,
        prompts.columns,
        setup.rewards,
        batch_size=scoring.batch_size,
        on_error=scoring.on_error,
        timeout_s=scoring.timeout_s,
        progress=listener.advance,
        submit=submit,
    )


def _joined(parts: Sequence[Rollout]) -> Rollout:
    """The rollouts of all prompts as one; segments that share a leaf share it still."""
    if len(parts) == 1:
        return parts[0]
    steps = [_one_step(steps) for steps in zip(*(part.transitions for part in parts), strict=True)]
    whole: dict[int, Tensor] = {}
    for leaf, states in parts[0].leaves.items():
        twin = next((key for key in whole if parts[0].leaves[key] is states), None)
        whole[leaf] = torch.cat([part.leaves[leaf] for part in parts]) if twin is None else whole[twin]
    recorded = {
        segment: (
            torch.cat([part.recorded[segment][0] for part in parts]),
            torch.cat([part.recorded[segment][1] for part in parts]),
        )
        for segment in parts[0].recorded
    }
    return Rollout(tuple(steps), whole, sum(part.velocity_evaluations for part in parts), recorded)


def _one_step(parts: Sequence[Transition]) -> Transition:
    return replace(
        parts[0],
        x=torch.cat([part.x for part in parts]),
        v=torch.cat([part.v for part in parts]),
        x_next=torch.cat([part.x_next for part in parts]),
        log_prob=torch.cat([part.log_prob for part in parts]),
    )


def _added(parts: Sequence[Scored]) -> Scored:
    if len(parts) == 1:
        return parts[0]
    return Scored(
        {leaf: torch.cat([part.scores[leaf] for part in parts], dim=1) for leaf in parts[0].scores},
        added_counts([part.counts for part in parts]),
        torch.cat([part.spread for part in parts]),
        {name: fault for part in reversed(parts) for name, fault in part.faults.items()},
    )


def added_counts(counts: Sequence[ScoreCounts]) -> ScoreCounts:
    """The counts of all; the reasons of the first that has any."""
    names = counts[0].missing
    return ScoreCounts(
        decodes=sum(each.decodes for each in counts),
        reward_calls=sum(each.reward_calls for each in counts),
        missing={name: sum(each.missing[name] for each in counts) for name in names},
        failed={name: sum(each.failed[name] for each in counts) for name in names},
        reasons={name: why for each in reversed(counts) for name, why in each.reasons.items()},
    )
