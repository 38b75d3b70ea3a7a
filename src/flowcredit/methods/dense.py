"""Settings of the methods that reward each step of a trajectory by itself."""

from typing import ClassVar, Literal

from flowcredit.methods.common import FinishSteps, InitialNoise, MethodSettings, finish_length


class DenseGRPOSettings(MethodSettings):
    """DenseGRPO: every step rewarded by what it gained, found by finishing each state (arXiv 2601.20218)."""

    name: Literal["dense_grpo"] = "dense_grpo"
    """The method; it decides which further settings there are."""
    probe_steps: FinishSteps = "all"
    """Euler steps that finish a state for its reward: `all` that remain on the grid (DenseGRPO), at most a
    number of them, or a share of them written as `t/2`."""
    step_reward: Literal["gain", "state"] = "gain"
    """What rewards a step: the `gain` of its end over its start (DenseGRPO), or the reward of the `state`
    that it ends in (its dense baseline)."""
    initial_noise: InitialNoise = "shared"
    """One initial noise for a prompt's trajectories, whose reward cancels and is not computed, or one for
    each; `shared`, which is open in the paper."""

    def probe_length(self, remaining: int) -> int:
        """Euler steps of a probe where so many grid steps remain."""
        return finish_length(self.probe_steps, remaining)


class StepwiseFlowGRPOSettings(MethodSettings):
    """Stepwise-Flow-GRPO: every step rewarded by the gain of the image that its state predicts, all gains of
    a group compared together (arXiv 2603.28718)."""

    name: Literal["stepwise_flow_grpo"] = "stepwise_flow_grpo"
    """The method; it decides which further settings there are."""
    probe_steps: FinishSteps = 1
    """Euler steps, on the grid, that finish a state for its reward; 1 is the image that it predicts. The
    paper is also said to take 5."""
    compare: Literal["trajectory", "step"] = "trajectory"
    """Whether a gain is compared with all gains of the prompt's trajectories (Stepwise-Flow-GRPO), or with
    those of its `step` (its ablation)."""
    initial_noise: InitialNoise = "shared"
    """One initial noise for a prompt's trajectories, or one for each; `shared` as in Stepwise-Flow-GRPO."""

    def probe_length(self, remaining: int) -> int:
        """Euler steps of a probe where so many grid steps remain."""
        return finish_length(self.probe_steps, remaining)


class TurningPointGRPOSettings(MethodSettings):
    """TurningPoint-GRPO: steps rewarded by their gain, or, where a trajectory turns to its overall trend, by
    the gain to the end (arXiv 2602.06422)."""

    others: ClassVar = {"noise": {"kind": "cps_squared_error", "eta": 0.7}}
    name: Literal["turning_point_grpo"] = "turning_point_grpo"
    """The method; it decides which further settings there are."""
    initial_noise: InitialNoise = "separate"
    """One initial noise for a prompt's trajectories, or one for each; `separate` as in TurningPoint-GRPO."""

    def probe_length(self, remaining: int) -> int:
        """Euler steps of a probe: all that remain."""
        return remaining
