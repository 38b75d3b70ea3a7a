"""One short function a paper: a plan, how noise enters, and how the leaves' rewards become credit.

Everything slow or stateful lives elsewhere and knows no method by name. No torch here: a plan and its cost
are known before anything is loaded.
"""

from dataclasses import dataclass
from typing import Literal

from flowcredit.config import AlgorithmSettings, G2RPOSettings
from flowcredit.plan import Plan, Segment, strided_path


@dataclass(frozen=True)
class Credit:
    """How rewards become advantages: ``advantages.leaf_advantages`` with these arguments."""

    combine: Literal["sum", "mean"] = "sum"
    clamp: float | None = 5.0


@dataclass(frozen=True)
class Algorithm:
    """What distinguishes one method from another."""

    name: str
    plan: Plan
    credit: Credit


def g2rpo(settings: G2RPOSettings) -> Algorithm:
    """Granular-GRPO (arXiv 2510.01982): singular stochastic sampling, multi-granularity advantages.

    One deterministic trunk; at each trained step one noisy step with ``group_size`` branches; each branch
    finished by the ODE once for every stride, the strides' advantages summed. With separate initial noises
    each branch has a trunk of its own.
    """
    shared = settings.initial_noise == "shared"
    segments: list[Segment] = []
    trunk, at = None, 0
    for k in settings.train_indices:
        if k > at:
            segments.append(Segment(trunk, tuple(range(at, k + 1))))
            trunk, at = len(segments) - 1, k
        fan_out = settings.group_size if shared else 1
        segments.append(Segment(trunk, (k, k + 1), fan_out=fan_out, stochastic=True))
        branch = len(segments) - 1
        for stride in settings.strides:
            path = strided_path(settings.num_steps, k + 1, stride, settings.anchor)
            segments.append(Segment(branch, path, scored=True))
    plan = Plan(settings.num_steps, tuple(segments), root_width=1 if shared else settings.group_size)
    return Algorithm("g2rpo", plan, Credit(settings.combine, settings.advantage_clamp))


METHODS = {"g2rpo": g2rpo}


def build(settings: AlgorithmSettings) -> Algorithm:
    """The method that the settings name."""
    return METHODS[settings.name](settings)
