"""Settings of the method whose trajectories split on their way."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from flowcredit.methods.common import Grid, MethodSettings
from flowcredit.sections import Count, Number, Steps, Whole, refuse, refuse_repeats


class BranchGRPOSettings(MethodSettings):
    """BranchGRPO: trajectories that split at chosen steps, credit from the leaves below each state
    (arXiv 2509.06040)."""

    others: ClassVar = {"noise": {"kind": "dance_sde", "eta": 0.3}}
    name: Literal["branch_grpo"] = "branch_grpo"
    """The method; it decides which further settings there are."""
    num_steps: Grid = 20
    """Steps T of the sampling grid, stochastic but for the last; 20 as in BranchGRPO's runs on FLUX.1-dev."""
    group_size: Annotated[Whole, Field(ge=2, le=4096)] = 16
    """Images G of each prompt: `fan_out` to the power of the number of splits; 16 as in BranchGRPO's runs."""
    split_steps: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0, 3, 6, 9)
    """Steps at which every state splits; 0, 3, 6, 9 as in BranchGRPO's runs."""
    fan_out: Annotated[Whole, Field(ge=2, le=64)] = 2
    """States that each state splits into; 2 as in BranchGRPO's runs."""
    split_scale: Annotated[Number, Field(ge=0.01, le=1000)] = 4.0
    """How much larger the noise of each sibling's own is than what they share, s in (shared + s own) / sqrt(1
    + s²); 4 as in BranchGRPO's runs."""
    pruned_depths: Annotated[Whole, Field(ge=0, le=1000)] = 0
    """Steps that are not trained, a window that moves from the image towards the last split; none by default,
    5 in BranchGRPO's runs with depth pruning."""
    iterations_per_depth: Count = 30
    """Iterations before that window moves by a step; 30 as in BranchGRPO's runs."""
    kept_leaves: Steps | None = None
    """After the last split, train only the trajectories of so many images, the best and the worst; all by
    default, 8 (half) as in BranchGRPO's runs with width pruning."""

    @model_validator(mode="after")
    def _fits_the_grid(self) -> "BranchGRPOSettings":
        last = self.num_steps - 1
        for step in self.split_steps:
            if not 0 <= step < last:
                why = " (its noise would stay in the image)" if step == last else ""
                refuse(
                    "split_steps", f"step {step} of {self.num_steps} cannot split{why}", f"0 to {last - 1}"
                )
        refuse_repeats("split_steps", self.split_steps)
        leaves = self.fan_out ** len(self.split_steps)
        if leaves != self.group_size:
            refuse(
                "group_size",
                f"{self.group_size}, but {len(self.split_steps)} splits into {self.fan_out} make {leaves}",
                f"{leaves}, or other splits",
            )
        late = last - 1 - max(self.split_steps)
        if self.pruned_depths > late:
            refuse(
                "pruned_depths",
                f"{self.pruned_depths}, but {late} steps follow the last split",
                f"0 to {late}",
            )
        if self.kept_leaves is not None and not 2 <= self.kept_leaves <= leaves:
            refuse("kept_leaves", f"{self.kept_leaves} of {leaves} images", f"2 to {leaves}")
        return self
