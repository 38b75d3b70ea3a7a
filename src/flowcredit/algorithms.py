"""One short function a paper: a plan, how noise enters, and how the leaves' rewards become credit.

Everything slow or stateful lives elsewhere and knows no method by name. No torch here: a plan and its cost
are known before anything is loaded.
"""

from dataclasses import dataclass
from typing import Literal

from flowcredit.methods import AlgorithmSettings, DenseGRPOSettings, FlowGRPOSettings, G2RPOSettings
from flowcredit.plan import Plan, Segment, spread_path, strided_path


@dataclass(frozen=True)
class Credit:
    """How rewards become advantages: ``advantages.credit_steps`` with these arguments."""

    rule: Literal["leaves", "state", "gain"] = "leaves"
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
    return Algorithm("g2rpo", plan, Credit(combine=settings.combine, clamp=settings.advantage_clamp))


def flow_grpo(settings: FlowGRPOSettings) -> Algorithm:
    """Flow-GRPO (arXiv 2505.05470): every step but the last stochastic, the image's advantage for all."""
    chain, width = _chain(settings.num_steps, settings.group_size, settings.initial_noise == "shared")
    last = Segment(len(chain) - 1, (settings.num_steps - 1, settings.num_steps), scored=True)
    plan = Plan(settings.num_steps, (*chain, last), width)
    return Algorithm("flow_grpo", plan, Credit(clamp=settings.advantage_clamp))


def dense_grpo(settings: DenseGRPOSettings, score_start: bool = False) -> Algorithm:
    """DenseGRPO (arXiv 2601.20218): each step's reward is the gain in reward from its start to its end.

    A state's reward is that of the image that the ODE makes of it. The last step is the ODE's: it gains
    nothing. The reward of an initial noise that the whole group shares cancels in the first step's
    advantage, and is left out unless ``score_start`` asks for it.
    """
    steps, shared = settings.num_steps, settings.initial_noise == "shared"
    chain, width = _chain(steps, settings.group_size, shared)
    segments = list(chain)
    cancels = shared or settings.step_reward == "state"
    starts = range(1 if cancels and not score_start else 0, steps)
    for k in starts:
        path = spread_path(steps, k, settings.probe_length(steps - k))
        segments.append(Segment(k - 1 if k > 0 else None, path, scored=True))
    credit = Credit(rule=settings.step_reward, clamp=settings.advantage_clamp)
    return Algorithm("dense_grpo", Plan(steps, tuple(segments), width), credit)


def _chain(steps: int, group: int, shared: bool) -> tuple[tuple[Segment, ...], int]:
    """Stochastic segments over all steps but the last, segment k from index k, and the plan's root width."""
    segments = tuple(
        Segment(k - 1 if k > 0 else None, (k, k + 1), group if shared and k == 0 else 1, stochastic=True)
        for k in range(steps - 1)
    )
    return segments, 1 if shared else group


def build(settings: AlgorithmSettings) -> Algorithm:
    """The method that the settings name."""
    if isinstance(settings, FlowGRPOSettings):
        return flow_grpo(settings)
    if isinstance(settings, DenseGRPOSettings):
        return dense_grpo(settings)
    return g2rpo(settings)
