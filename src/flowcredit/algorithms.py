"""One short function a paper: a plan, how noise enters, and how the leaves' rewards become credit.

Everything slow or stateful lives elsewhere and knows no method by name. No torch here: a plan and its cost
are known before anything is loaded.
"""

from dataclasses import dataclass
from typing import Literal

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


def g2rpo(
    num_steps: int,
    train_steps: tuple[int, ...],
    group_size: int,
    strides: tuple[int, ...],
    anchor: Literal["end", "branch"] = "end",
    combine: Literal["sum", "mean"] = "sum",
    clamp: float | None = 5.0,
    shared_noise: bool = True,
) -> Algorithm:
    """Granular-GRPO (arXiv 2510.01982): singular stochastic sampling, multi-granularity advantages.

    One deterministic trunk; at each ``k`` of ``train_steps`` one noisy step with ``group_size`` branches;
    each branch finished by the ODE once for every stride, the strides' advantages summed. Without
    ``shared_noise`` each branch has an initial noise, and so a trunk, of its own.
    """
    segments: list[Segment] = []
    last: int | None = None
    fan_out = group_size if shared_noise else 1
    at = 0
    for k in sorted(train_steps):
        if k > at:
            segments.append(Segment(last, tuple(range(at, k + 1))))
            last, at = len(segments) - 1, k
        segments.append(Segment(last, (k, k + 1), fan_out=fan_out, stochastic=True))
        branch = len(segments) - 1
        for stride in strides:
            path = strided_path(num_steps, k + 1, stride, anchor)
            segments.append(Segment(branch, path, scored=True))
    plan = Plan(num_steps, tuple(segments), root_width=1 if shared_noise else group_size)
    return Algorithm("g2rpo", plan, Credit(combine, clamp))
