"""What turns rewards into the credit of steps, and that into a loss: the choices, without the arithmetic.

No tensors.
"""

from dataclasses import dataclass
from typing import Literal

Rule = Literal["leaves", "fused", "state", "gain", "turning", "similarity"]
Combine = Literal["sum", "mean"]
Spread = Literal["group", "batch"]
Scope = Literal["step", "trajectory", "siblings"]
WeightsOn = Literal["advantages", "rewards"]


@dataclass(frozen=True)
class Credit:
    """How rewards become advantages.

    ``rule``: which rewards are a transition's own; ``advantages.credit_steps`` says what each means.
    ``combine``: how the advantages of several leaves become one. ``clamp``: largest advantage either way.
    ``spread``: the standard deviation that divides is the group's, or that of all rewards of the iteration
    (the mean is the group's either way). ``scope``: what rewards of steps are compared with: the prompt's
    samples at that step, those at all steps of its trajectories, or those of one start, its siblings.
    """

    rule: Rule = "leaves"
    combine: Combine = "sum"
    clamp: float | None = 5.0
    spread: Spread = "group"
    scope: Scope = "step"


@dataclass(frozen=True)
class Neighbours:
    """The policy of distances between neighbours (Neighbor GRPO), on the recorded steps of a plan.

    ``anchors`` of a prompt's samples are stepped by the trained model; ``temperature`` divides squared
    distances; ``quasi_norm`` is the order p of what divides a group's centred rewards.
    """

    anchors: int
    temperature: float
    quasi_norm: float
