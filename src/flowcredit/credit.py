"""What turns rewards into the credit of steps, and that into a loss: the choices, without the arithmetic.

No tensors.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

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

    needs_reference: ClassVar[bool] = False
    guided: ClassVar[bool] = True

    anchors: int
    temperature: float
    quasi_norm: float


@dataclass(frozen=True)
class Preferences:
    """Pairs of images whose errors of denoising are compared with the reference's (Diffusion-DPO).

    ``beta`` weighs the errors; ``draws`` noises and noise levels for each pair. ``columns``: those of the
    prompt file with the chosen and the rejected image; None for the best and the worst of a prompt's samples.
    Not ``guided``: the error is that of the model's own velocity, which guidance would move from its target.
    """

    needs_reference: ClassVar[bool] = True
    guided: ClassVar[bool] = False

    beta: float
    draws: int
    columns: tuple[str, str] | None = None
