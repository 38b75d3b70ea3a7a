"""The settings of every method: what a recipe's ``algorithm`` may hold."""

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from flowcredit.sections import Positive, Section, Steps, Whole, refuse, refuse_repeats

ProbeSteps = Steps | Annotated[str, Field(pattern=r"^t/[1-9][0-9]{0,2}$")]


class G2RPOSettings(Section):
    """Granular-GRPO: one stochastic step at a time, several strides to the image (arXiv 2510.01982)."""

    name: Literal["g2rpo"] = "g2rpo"
    """The method; it decides which further settings there are."""
    num_steps: Annotated[Whole, Field(ge=2, le=1000)] = 16
    """Steps T of the sampling grid; 16 as in G²RPO's runs."""
    train_steps: Literal["first_half"] | Annotated[tuple[Whole, ...], Field(min_length=1)] = "first_half"
    """Grid steps M that are made stochastic and trained, as indices from 0 (noise) and never the last;
    `first_half`, 0 to T/2 - 1, as in G²RPO's runs."""
    group_size: Annotated[Whole, Field(ge=2, le=4096)] = 12
    """Branches G for each prompt and trained step; 12 as in G²RPO's runs."""
    strides: Annotated[tuple[Steps, ...], Field(min_length=1)] = (1, 2, 3)
    """Strides Λ by which each branch is finished, an image and an advantage for each; 1, 2, 3 as in the
    paper (its scripts have 1, 2)."""
    anchor: Literal["end", "branch"] = "end"
    """Whence strides are counted: the clean `end` (the paper) or the `branch` (its released code)."""
    combine: Literal["sum", "mean"] = "sum"
    """How the advantages of the strides become one; `sum` as in G²RPO."""
    advantage_clamp: Positive = 5.0
    """Advantages are cut to plus and minus this; 5 as in G²RPO's released code."""
    initial_noise: Literal["shared", "separate"] = "shared"
    """One initial noise for all branches of a prompt, or one for each, at the cost of a trunk and a trained
    state for each; `shared` as in G²RPO."""

    @property
    def train_indices(self) -> tuple[Whole, ...]:
        """``train_steps`` written out, ascending."""
        if self.train_steps == "first_half":
            return tuple(range(self.num_steps // 2))
        return tuple(sorted(self.train_steps))

    @model_validator(mode="after")
    def _fits_the_grid(self) -> "G2RPOSettings":
        last = self.num_steps - 1
        for step in self.train_indices:
            if not 0 <= step < last:
                why = " (its noise would stay in the image)" if step == last else ""
                refuse(
                    "train_steps",
                    f"step {step} of {self.num_steps} cannot be trained{why}",
                    f"0 to {last - 1}",
                )
        refuse_repeats("train_steps", self.train_indices)
        refuse_repeats("strides", self.strides)
        if max(self.strides) > self.num_steps:
            refuse(
                "strides", f"stride {max(self.strides)} is longer than the grid", f"at most {self.num_steps}"
            )
        return self


class FlowGRPOSettings(Section):
    """Flow-GRPO: full stochastic trajectories, the image's advantage to every step (arXiv 2505.05470)."""

    name: Literal["flow_grpo"] = "flow_grpo"
    """The method; it decides which further settings there are."""
    num_steps: Annotated[Whole, Field(ge=2, le=1000)] = 10
    """Steps T of the sampling grid, stochastic but for the last; 10 as in Flow-GRPO's runs."""
    group_size: Annotated[Whole, Field(ge=2, le=4096)] = 24
    """Trajectories G for each prompt; 24 as in Flow-GRPO's runs."""
    initial_noise: Literal["shared", "separate"] = "separate"
    """One initial noise for a prompt's trajectories, or one for each; `separate` as in Flow-GRPO."""
    advantage_clamp: Positive = 5.0
    """Advantages are cut to plus and minus this; 5 as in Flow-GRPO's released code."""


class DenseGRPOSettings(Section):
    """DenseGRPO: every step rewarded by what it gained, found by finishing each state (arXiv 2601.20218)."""

    name: Literal["dense_grpo"] = "dense_grpo"
    """The method; it decides which further settings there are."""
    num_steps: Annotated[Whole, Field(ge=2, le=1000)] = 10
    """Steps T of the sampling grid, stochastic but for the last; 10 as in DenseGRPO's runs."""
    group_size: Annotated[Whole, Field(ge=2, le=4096)] = 24
    """Trajectories G for each prompt; 24 as in DenseGRPO's runs."""
    probe_steps: Literal["all"] | ProbeSteps = "all"
    """Euler steps that finish a state for its reward: `all` that remain on the grid (DenseGRPO), at most a
    number of them, or a share of them written as `t/2`."""
    step_reward: Literal["gain", "state"] = "gain"
    """What rewards a step: the `gain` of its end over its start (DenseGRPO), or the reward of the `state`
    that it ends in (its dense baseline)."""
    initial_noise: Literal["shared", "separate"] = "shared"
    """One initial noise for a prompt's trajectories, whose reward cancels and is not computed, or one for
    each; `shared`, which is open in the paper."""
    advantage_clamp: Positive = 5.0
    """Advantages are cut to plus and minus this; 5 as in Flow-GRPO's released code."""

    def probe_length(self, remaining: int) -> int:
        """Euler steps of a probe where so many grid steps remain."""
        if self.probe_steps == "all":
            return remaining
        if isinstance(self.probe_steps, int):
            return min(self.probe_steps, remaining)
        return max(1, math.ceil(remaining / int(self.probe_steps.removeprefix("t/"))))


def _g2rpo_if_unnamed(value: object) -> object:
    return {"name": "g2rpo", **value} if isinstance(value, dict) and "name" not in value else value


AlgorithmSettings = Annotated[
    Annotated[G2RPOSettings | FlowGRPOSettings | DenseGRPOSettings, Field(discriminator="name")],
    BeforeValidator(_g2rpo_if_unnamed),
]
