"""One short function a paper: a plan, how noise enters, and how the leaves' rewards become credit.

Everything slow or stateful lives elsewhere and knows no method by name. No torch here: a plan and its cost
are known before anything is loaded. What is drawn at random (which steps, which window) depends on the run's
seed and the iteration alone, so every process draws the same.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flowcredit.credit import Credit, Neighbours, Preferences, Scope
from flowcredit.methods import (
    AlgorithmSettings,
    BranchGRPOSettings,
    CoCASettings,
    DanceGRPOSettings,
    DenseGRPOSettings,
    DPOSettings,
    FlowGRPOFastSettings,
    FlowGRPOSettings,
    G2RPOSettings,
    MixGRPOSettings,
    NeighborGRPOSettings,
    StepwiseFlowGRPOSettings,
    TempFlowGRPOSettings,
    TurningPointGRPOSettings,
)
from flowcredit.methods.common import finish_length
from flowcredit.plan import Plan, Segment, spread_path, strided_path

_Probed = DenseGRPOSettings | StepwiseFlowGRPOSettings | TurningPointGRPOSettings
_Trajectories = FlowGRPOSettings | FlowGRPOFastSettings | DanceGRPOSettings | MixGRPOSettings | CoCASettings


@dataclass(frozen=True)
class Algorithm:
    """What distinguishes one method from another; ``plan_at`` gives the tree of an iteration, from 0 on.

    ``objective``: None for the clipped policy objective on the plan's transitions.
    """

    name: str
    plan_at: Callable[[int], Plan]
    credit: Credit
    objective: Neighbours | Preferences | None = None

    @property
    def plan(self) -> Plan:
        """The tree of the first iteration."""
        return self.plan_at(0)

    def set_states(self, plan: Plan) -> tuple[int, ...]:
        """For each set that is trained, the states of one prompt whose velocity it needs again."""
        if isinstance(self.objective, Preferences):
            return (2,) * self.objective.draws
        if isinstance(self.objective, Neighbours):
            return tuple(self.objective.anchors for segment in plan.segments if segment.recorded)
        return plan.trained_sets

    def trained_states(self, plan: Plan) -> int:
        """States of one prompt whose velocity training needs again, at most."""
        return sum(self.set_states(plan))

    @property
    def needs_reference(self) -> bool:
        """Whether the objective itself is measured from the model before training."""
        return self.objective is not None and self.objective.needs_reference


def _always(plan: Plan) -> Callable[[int], Plan]:
    return lambda iteration: plan


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
    return Algorithm("g2rpo", _always(plan), Credit(combine=settings.combine, clamp=settings.advantage_clamp))


def flow_grpo(settings: FlowGRPOSettings) -> Algorithm:
    """Flow-GRPO (arXiv 2505.05470): every step but the last stochastic, the image's advantage for all."""
    plan = _trajectories(settings, range(settings.num_steps - 1))
    credit = Credit(clamp=settings.advantage_clamp, spread=settings.advantage_std)
    return Algorithm("flow_grpo", _always(plan), credit)


def flow_grpo_fast(settings: FlowGRPOFastSettings, seed: int = 0) -> Algorithm:
    """Flow-GRPO-Fast (released code of arXiv 2505.05470): noise in a short window at a random place.

    Its code draws the place for every batch on every device, so that a group may mix places; here it is one
    for the whole iteration, and a group compares like with like.
    """

    def plan_at(iteration: int) -> Plan:
        start = _drawn(seed, iteration).choice(settings.starts)
        return _windowed(settings, start, settings.window_size)

    credit = Credit(clamp=settings.advantage_clamp, spread=settings.advantage_std)
    return Algorithm("flow_grpo_fast", plan_at, credit)


def dance_grpo(settings: DanceGRPOSettings, seed: int = 0) -> Algorithm:
    """DanceGRPO (arXiv 2505.07818): every step but the last stochastic, a random share of them trained.

    Its code draws the steps for each sample; here they are drawn for the iteration, so that a step's whole
    group is trained or none of it.
    """
    everything = range(settings.num_steps - 1)

    def plan_at(iteration: int) -> Plan:
        chosen = _drawn(seed, iteration).sample(everything, settings.trained_steps)
        return _trajectories(settings, everything, frozenset(chosen))

    return Algorithm("dance_grpo", plan_at, Credit(clamp=settings.advantage_clamp))


def mix_grpo(settings: MixGRPOSettings, seed: int = 0) -> Algorithm:
    """MixGRPO (arXiv 2507.21802): noise in a window that slides from noise to image, the ODE elsewhere.

    The window is never cut short or empty, as the released code's becomes past its last position.
    """
    positions, size = settings.positions, settings.window_size

    def plan_at(iteration: int) -> Plan:
        if settings.window_order == "random":
            start = _drawn(seed, iteration).randrange(positions[-1] + 1)
        else:
            moved = iteration // settings.iterations_per_position
            wraps = settings.at_end == "wrap"
            start = positions[moved % len(positions) if wraps else min(moved, len(positions) - 1)]
        return _windowed(settings, start, size, settings.finish_steps)

    return Algorithm("mix_grpo", plan_at, Credit(clamp=settings.advantage_clamp))


def coca(settings: CoCASettings) -> Algorithm:
    """CoCA (arXiv 2505.19196) on flows: Flow-GRPO's plan, the image's advantage shared out by similarity."""
    plan = _trajectories(settings, range(settings.num_steps - 1))
    credit = Credit("similarity", scope="trajectory", clamp=settings.advantage_clamp)
    return Algorithm("coca", _always(plan), credit)


def tempflow_grpo(settings: TempFlowGRPOSettings) -> Algorithm:
    """TempFlow-GRPO (arXiv 2508.04324): branches at every step but the last, on the trunk of each seed."""
    steps, segments = settings.num_steps, list[Segment]()
    trunk: int | None = None
    for k in range(steps - 1):
        if k > 0:
            segments.append(Segment(trunk, (k - 1, k)))
            trunk = len(segments) - 1
        segments.append(Segment(trunk, (k, k + 1), settings.group_size, stochastic=True))
        segments.append(Segment(len(segments) - 1, tuple(range(k + 1, steps + 1)), scored=True))
    plan = Plan(steps, tuple(segments), root_width=settings.seeds)
    scope: Scope = "siblings" if settings.compare == "seed" else "step"
    credit = Credit("fused", scope=scope, clamp=settings.advantage_clamp)
    return Algorithm("tempflow_grpo", _always(plan), credit)


def branch_grpo(settings: BranchGRPOSettings) -> Algorithm:
    """BranchGRPO (arXiv 2509.06040): a tree of stochastic steps; a state's reward is the mean of its leaves'.

    Leaves count alike, as by default in its code; siblings' noises are correlated as the paper's equation 2
    has it, which keeps the distribution of every trajectory (its code multiplies the deviation by 4).
    """
    steps, splits = settings.num_steps, frozenset(settings.split_steps)
    late = max(splits) + 1

    def plan_at(iteration: int) -> Plan:
        moved = iteration // settings.iterations_per_depth
        deepest = max(steps - 1 - moved, late + settings.pruned_depths)
        pruned = range(deepest - settings.pruned_depths, deepest)
        segments = [
            Segment(
                k - 1 if k > 0 else None,
                (k, k + 1),
                fan_out=settings.fan_out if k in splits else 1,
                stochastic=True,
                # Before the first split there is one state, which nothing compares with.
                trained=k not in pruned and k >= min(splits),
                correlation=1 / (1 + settings.split_scale**2) if k in splits else 0.0,
                kept=settings.kept_leaves if k >= late else None,
            )
            for k in range(steps - 1)
        ]
        return Plan(steps, (*segments, Segment(steps - 2, (steps - 1, steps), scored=True)))

    return Algorithm("branch_grpo", plan_at, Credit("fused", clamp=settings.advantage_clamp))


def dense_grpo(settings: DenseGRPOSettings, score_start: bool = False) -> Algorithm:
    """DenseGRPO (arXiv 2601.20218): each step's reward is the gain in reward from its start to its end.

    A state's reward is that of the image that the ODE makes of it. The last step is the ODE's: it gains
    nothing. The reward of an initial noise that the whole group shares cancels in the first step's
    advantage, and is left out unless ``score_start`` asks for it.
    """
    cancels = settings.initial_noise == "shared" or settings.step_reward == "state"
    plan = _probed(settings, score_start or not cancels)
    return Algorithm(
        "dense_grpo", _always(plan), Credit(settings.step_reward, clamp=settings.advantage_clamp)
    )


def stepwise_flow_grpo(settings: StepwiseFlowGRPOSettings) -> Algorithm:
    """Stepwise-Flow-GRPO (arXiv 2603.28718): gains of the images that states predict, compared over all
    steps.

    Its own sampler, Flow-CPS with the deviation ``a s' sqrt(1 - s)``, has none at the first step and leaves a
    open; it is not here, any of ``noise.kind`` does. Probes step on the grid.
    """
    credit = Credit("gain", scope=settings.compare, clamp=settings.advantage_clamp)
    return Algorithm("stepwise_flow_grpo", _always(_probed(settings, score_start=True)), credit)


def turning_point_grpo(settings: TurningPointGRPOSettings) -> Algorithm:
    """TurningPoint-GRPO (arXiv 2602.06422): gains, and at turning points the gain to the end.

    The initial noise's reward is that of the trajectory's own (its released code draws another).
    """
    credit = Credit("turning", clamp=settings.advantage_clamp)
    return Algorithm("turning_point_grpo", _always(_probed(settings, score_start=True)), credit)


def neighbor_grpo(settings: NeighborGRPOSettings) -> Algorithm:
    """Neighbor GRPO (arXiv 2511.16955): the ODE from correlated noises; a step of an anchor by the trained
    model is compared with the neighbours' states.

    By Euler steps throughout, so that the anchor's own state is that of the policy before the update.
    """
    steps, trained = settings.num_steps, frozenset(settings.train_steps)
    segments = [
        Segment(k - 1 if k > 0 else None, (k, k + 1), scored=k == steps - 1, recorded=k in trained)
        for k in range(steps)
    ]
    plan = Plan(steps, tuple(segments), settings.group_size, root_correlation=1 - settings.perturbation**2)
    objective = Neighbours(settings.anchors, settings.temperature, settings.quasi_norm)
    credit = Credit(clamp=settings.advantage_clamp)
    return Algorithm("neighbor_grpo", _always(plan), credit, objective)


def dpo(settings: DPOSettings) -> Algorithm:
    """Diffusion-DPO (arXiv 2311.12908) on flows: pairs of images, ranked in a group or named by a file.

    Groups are sampled by the ODE from separate noises (Flow-GRPO's script samples by its SDE). The reference
    stays the model before training (that script may renew it every 40 steps).
    """
    steps = settings.num_steps
    drawn = (Segment(None, tuple(range(steps + 1)), scored=True),)
    if settings.pairs == "file":
        plan, columns = Plan(steps, ()), (settings.chosen_column, settings.rejected_column)
    else:
        plan, columns = Plan(steps, drawn, settings.group_size), None
    objective = Preferences(settings.beta, settings.draws, columns)
    return Algorithm("dpo", _always(plan), Credit(clamp=None), objective)


def _probed(settings: _Probed, score_start: bool) -> Plan:
    """Trajectories, stochastic but for the last step, with every state finished by the ODE and scored."""
    steps = settings.num_steps
    chain, width = _chain(range(steps - 1), settings.group_size, settings.initial_noise == "shared")
    segments = list(chain)
    for k in range(0 if score_start else 1, steps):
        path = spread_path(steps, k, settings.probe_length(steps - k))
        segments.append(Segment(k - 1 if k > 0 else None, path, scored=True))
    return Plan(steps, tuple(segments), width)


def _windowed(
    settings: FlowGRPOFastSettings | MixGRPOSettings, start: int, size: int, finish: int | str = "all"
) -> Plan:
    return _trajectories(settings, range(start, start + size), finish=finish)


def _trajectories(
    settings: _Trajectories,
    noisy: range,
    trained: frozenset[int] | None = None,
    finish: int | str = "all",
) -> Plan:
    """The ODE up to the ``noisy`` steps, these one after the other, and the ODE to the image, which is
    scored.

    ``trained``: the steps that the policy learns from; all that are noisy by default.
    """
    shared = settings.initial_noise == "shared"
    chain, width = _chain(noisy, settings.group_size, shared, trained)
    end = noisy[-1] + 1
    path = spread_path(settings.num_steps, end, finish_length(finish, settings.num_steps - end))
    return Plan(settings.num_steps, (*chain, Segment(len(chain) - 1, path, scored=True)), width)


def _chain(
    noisy: range, group: int, shared: bool, trained: frozenset[int] | None = None
) -> tuple[tuple[Segment, ...], int]:
    """The ODE to the first noisy step and the stochastic segments after it; and the plan's root width."""
    segments = [Segment(None, tuple(range(noisy[0] + 1)))] if noisy[0] > 0 else []
    for k in noisy:
        above = len(segments) - 1 if segments else None
        fan_out = group if shared and k == noisy[0] else 1
        learns = trained is None or k in trained
        segments.append(Segment(above, (k, k + 1), fan_out, stochastic=True, trained=learns))
    return tuple(segments), 1 if shared else group


def _drawn(seed: int, iteration: int) -> random.Random:
    return random.Random(f"{seed}/{iteration}/plan")


_BUILDERS: Mapping[type, Callable[..., Algorithm]] = {
    G2RPOSettings: g2rpo,
    DenseGRPOSettings: dense_grpo,
    FlowGRPOSettings: flow_grpo,
    CoCASettings: coca,
    TempFlowGRPOSettings: tempflow_grpo,
    BranchGRPOSettings: branch_grpo,
    StepwiseFlowGRPOSettings: stepwise_flow_grpo,
    TurningPointGRPOSettings: turning_point_grpo,
    NeighborGRPOSettings: neighbor_grpo,
    DPOSettings: dpo,
}
_DRAWING: Mapping[type, Callable[..., Algorithm]] = {
    FlowGRPOFastSettings: flow_grpo_fast,
    DanceGRPOSettings: dance_grpo,
    MixGRPOSettings: mix_grpo,
}


def build(settings: AlgorithmSettings, seed: int = 0) -> Algorithm:
    """The method that the settings name; ``seed`` is the run's, for what a method draws."""
    kind = type(settings)
    return _DRAWING[kind](settings, seed) if kind in _DRAWING else _BUILDERS[kind](settings)
