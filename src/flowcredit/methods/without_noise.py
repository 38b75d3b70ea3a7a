"""Settings of the methods that sample by the ODE alone."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from flowcredit.methods.common import Grid, Group, MethodSettings
from flowcredit.sections import Number, Positive, Steps, Whole, refuse, refuse_repeats


class NeighborGRPOSettings(MethodSettings):
    """Neighbor GRPO: a group of perturbed initial noises, and a policy of distances between neighbours
    (arXiv 2511.16955)."""

    unread: ClassVar = ("kl_weight", "ratio", "step_weights")
    reads_noise: ClassVar = False
    name: Literal["neighbor_grpo"] = "neighbor_grpo"
    """The method; it decides which further settings there are."""
    num_steps: Grid = 8
    """Euler steps T of the sampling grid; 8 as in Neighbor GRPO's fast runs, which take them by
    DPM-Solver++."""
    group_size: Group = 12
    """Neighbours G of each prompt; 12 as in Neighbor GRPO's runs."""
    perturbation: Annotated[Number, Field(ge=0.001, lt=1)] = 0.3
    """How far the initial noises of a prompt differ, σ in sqrt(1 - σ²) shared + σ own; 0.3 as in Neighbor
    GRPO."""
    anchors: Steps = 4
    """Neighbours of which a step is taken by the trained model and compared with the others' states; 4 as in
    Neighbor GRPO's runs."""
    train_steps: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0, 1, 2, 3)
    """Steps that are trained; 4 as in Neighbor GRPO's runs, which ones is open in the paper."""
    temperature: Positive = 1.0
    """Squared distances, a mean over dimensions, are divided by this in the policy's softmax; open in the
    paper, which prints a sum and no temperature."""
    quasi_norm: Annotated[float, Field(strict=True, gt=0, le=2)] = 0.8
    """Order p of the quasi-norm that divides a group's centred rewards; 0.8 as in Neighbor GRPO."""

    @model_validator(mode="after")
    def _fits(self) -> "NeighborGRPOSettings":
        for step in self.train_steps:
            if not 0 <= step < self.num_steps:
                refuse(
                    "train_steps",
                    f"step {step} is not on a grid of {self.num_steps}",
                    f"0 to {self.num_steps - 1}",
                )
        refuse_repeats("train_steps", self.train_steps)
        if self.anchors > self.group_size:
            refuse("anchors", f"{self.anchors} of {self.group_size} neighbours", f"1 to {self.group_size}")
        return self
