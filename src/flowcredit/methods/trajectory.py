"""Settings of the methods that credit the steps of a trajectory with its image's reward."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from flowcredit.methods.common import FinishSteps, Grid, Group, InitialNoise, MethodSettings, WindowSettings
from flowcredit.sections import Count, Steps, Whole, refuse


class FlowGRPOSettings(MethodSettings):
    """Flow-GRPO: full stochastic trajectories, the image's advantage to every step (arXiv 2505.05470)."""

    name: Literal["flow_grpo"] = "flow_grpo"
    """The method; it decides which further settings there are."""
    initial_noise: InitialNoise = "separate"
    """One initial noise for a prompt's trajectories, or one for each; `separate` as in Flow-GRPO."""
    advantage_std: Literal["group", "batch"] = "group"
    """Whose standard deviation divides: that of the prompt's `group`, or of all rewards of the iteration
    (`batch`, the global std of Flow-GRPO's runs on SD3.5-M); the paper has `group`."""


class FlowGRPOFastSettings(WindowSettings):
    """Flow-GRPO-Fast: noise in a short window at a random place, drawn anew each iteration."""

    others: ClassVar = {"noise": {"kind": "cps_squared_error", "eta": 0.8}}
    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"
    """The method; it decides which further settings there are."""
    window_size: Steps = 3
    """Steps of the window, each stochastic and trained; 3 as in Flow-GRPO's fast runs."""
    window_end: Steps | None = None
    """Grid index that the window does not pass; half the grid by default, as in Flow-GRPO's fast runs."""
    initial_noise: InitialNoise = "separate"
    """One initial noise for a prompt's images, or one for each; `separate` as in Flow-GRPO's fast runs."""
    advantage_std: Literal["group", "batch"] = "batch"
    """Whose standard deviation divides: that of the prompt's `group`, or of all rewards of the iteration;
    `batch` as in Flow-GRPO's fast runs on SD3.5-M."""

    @property
    def starts(self) -> range:
        """Where the window may begin; one place at least."""
        end = self.num_steps // 2 if self.window_end is None else self.window_end
        return range(max(end, self.window_size) - self.window_size + 1)

    @model_validator(mode="after")
    def _end_fits(self) -> "FlowGRPOFastSettings":
        if self.window_end is not None and not self.window_size <= self.window_end < self.num_steps:
            refuse(
                "window_end",
                f"a window of {self.window_size} steps cannot end at {self.window_end} on a grid of"
                f" {self.num_steps}",
                f"{self.window_size} to {self.num_steps - 1}",
            )
        return self


class DanceGRPOSettings(MethodSettings):
    """DanceGRPO: full stochastic trajectories from one noise, a random share of the steps trained
    (arXiv 2505.07818)."""

    others: ClassVar = {"noise": {"kind": "dance_sde", "eta": 0.3}}
    name: Literal["dance_grpo"] = "dance_grpo"
    """The method; it decides which further settings there are."""
    num_steps: Grid = 16
    """Steps T of the sampling grid, stochastic but for the last; 16 as in DanceGRPO's runs on FLUX.1-dev."""
    group_size: Group = 12
    """Trajectories G for each prompt; 12 as in DanceGRPO's runs."""
    initial_noise: InitialNoise = "shared"
    """One initial noise for a prompt's trajectories, or one for each; `shared` as in DanceGRPO."""
    step_share: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.6
    """Share of the stochastic steps that is trained, drawn anew each iteration; 0.6 as in DanceGRPO's
    runs."""

    @property
    def trained_steps(self) -> int:
        """How many steps an iteration trains."""
        # A share that is whole but for rounding is whole.
        return max(1, int((self.num_steps - 1) * self.step_share + 1e-9))


class MixGRPOSettings(WindowSettings):
    """MixGRPO: noise in a window of steps that slides over the grid as training goes on (arXiv
    2507.21802)."""

    name: Literal["mix_grpo"] = "mix_grpo"
    """The method; it decides which further settings there are."""
    num_steps: Grid = 25
    """Steps T of the sampling grid; 25 as in MixGRPO's runs on FLUX.1-dev."""
    group_size: Group = 12
    """Images G of each prompt that are compared; 12 as in MixGRPO's runs."""
    initial_noise: InitialNoise = "shared"
    """One initial noise for a prompt's images, or one for each; `shared` as in MixGRPO."""
    window_order: Literal["progressive", "random"] = "progressive"
    """The window slides from noise to image, or is drawn anew each iteration; `progressive` as in MixGRPO's
    runs."""
    window_stride: Steps = 1
    """Steps by which a progressive window moves; 1 as in MixGRPO's runs."""
    iterations_per_position: Count = 25
    """Iterations before a progressive window moves; 25 as in MixGRPO's runs."""
    at_end: Literal["wrap", "stay"] = "wrap"
    """What a progressive window does past its last position: begin again, or stay there; `wrap` as in
    MixGRPO's scripts."""
    finish_steps: FinishSteps = "all"
    """Euler steps from the window to the image: `all` that remain, at most a number, or a share of them as
    `t/2`; fewer are MixGRPO-Flash, which takes them by DPM-Solver++."""

    @property
    def positions(self) -> tuple[Whole, ...]:
        """Where a progressive window begins, in order; the last step takes no noise."""
        last = self.num_steps - 1 - self.window_size
        return (*range(0, last, self.window_stride), last)


class CoCASettings(MethodSettings):
    """CoCA on flows: the image's advantage shared out by how alike each state and the image are
    (arXiv 2505.19196, as DenseGRPO, arXiv 2601.20218, compares with it)."""

    name: Literal["coca"] = "coca"
    """The method; it decides which further settings there are."""
    initial_noise: InitialNoise = "separate"
    """One initial noise for a prompt's trajectories, or one for each; `separate` as in Flow-GRPO."""
