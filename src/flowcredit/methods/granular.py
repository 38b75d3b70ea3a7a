"""Settings of the methods that make one step at a time stochastic, on a deterministic trunk."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from flowcredit.methods.common import Grid, Group, InitialNoise, MethodSettings
from flowcredit.sections import Steps, Whole, refuse, refuse_repeats


class G2RPOSettings(MethodSettings):
    """Granular-GRPO: one stochastic step at a time, several strides to the image (arXiv 2510.01982)."""

    name: Literal["g2rpo"] = "g2rpo"
    """The method; it decides which further settings there are."""
    num_steps: Grid = 16
    """Steps T of the sampling grid; 16 as in G²RPO's runs."""
    train_steps: Literal["first_half"] | Annotated[tuple[Whole, ...], Field(min_length=1)] = "first_half"
    """Grid steps M that are made stochastic and trained, as indices from 0 (noise) and never the last;
    `first_half`, 0 to T/2 - 1, as in G²RPO's runs."""
    group_size: Group = 12
    """Branches G for each prompt and trained step; 12 as in G²RPO's runs."""
    strides: Annotated[tuple[Steps, ...], Field(min_length=1)] = (1, 2, 3)
    """Strides Λ by which each branch is finished, an image and an advantage for each; 1, 2, 3 as in the
    paper (its scripts have 1, 2)."""
    anchor: Literal["end", "branch"] = "end"
    """Whence strides are counted: the clean `end` (the paper) or the `branch` (its released code)."""
    combine: Literal["sum", "mean"] = "sum"
    """How the advantages of the strides become one; `sum` as in G²RPO."""
    initial_noise: InitialNoise = "shared"
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


class TempFlowGRPOSettings(MethodSettings):
    """TempFlow-GRPO: one stochastic step at a time on the trunks of several seeds, weighted by its noise
    (arXiv 2508.04324)."""

    others: ClassVar = {"train": {"step_weights": "noise"}}
    name: Literal["tempflow_grpo"] = "tempflow_grpo"
    """The method; it decides which further settings there are."""
    seeds: Steps = 4
    """Initial noises of a prompt, each with a trunk; 4 as in TempFlow-GRPO's runs."""
    group_size: Group = 6
    """Branches G at each step of each trunk, which are compared with each other; 6 as in TempFlow-GRPO's
    runs."""
    compare: Literal["seed", "prompt"] = "seed"
    """Whether a branch is compared with those of its own `seed` (TempFlow-GRPO's released code), or with all
    of the `prompt` at that step."""
