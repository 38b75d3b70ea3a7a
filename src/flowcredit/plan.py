"""The rollout tree of a method: what is drawn where, what is scored, and what it costs. No tensors.

A plan is a tuple of segments, parents first. A segment continues the end state of its parent along
indices of the time grid (0 is sigma 1, ``num_steps`` is sigma 0); it is deterministic (Euler steps) or
one stochastic step, a *transition*, and it may be scored, then its end at sigma 0 is a *leaf*.

The plan compiles to distinct states. Two deterministic continuations of one state to the same next index
are the same state, so strides that share a prefix, a trunk and its branches, or a probe and the step
beside it, cost one velocity evaluation.

Widths count samples for one prompt. Sample ``i`` of a parent has the children ``i * fan_out + j``.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

Anchor = Literal["end", "branch"]


def strided_path(num_steps: int, start: int, stride: int, anchor: Anchor = "end") -> tuple[int, ...]:
    """Grid indices that an ODE with a coarser stride visits from ``start`` to ``num_steps``, both included.

    ``"end"`` counts strides back from the last fine step, as the set S_j in the G2RPO paper does
    (arXiv 2510.01982): index ``num_steps - 1`` is always visited. ``"branch"`` counts from the branch, as
    its released code does: one fine step, then strides, with the last point moved to sigma 0, so that the
    final jump may be long. After a stochastic step ``k -> k + 1``, ``start`` is ``k + 1``.
    """
    if stride < 1:
        raise ValueError(f"stride is {stride}: expected a whole number of grid steps, 1 or more")
    if not 0 <= start < num_steps:
        raise ValueError(f"a path cannot start at grid index {start}: expected 0 to {num_steps - 1}")
    if anchor == "end":
        first = start + 1 + (num_steps - 2 - start) % stride
        between = range(first, num_steps, stride)
    elif anchor == "branch":
        between = range(start + 1, num_steps + 1, stride)[:-1]
    else:
        raise ValueError(f"anchor is {anchor!r}: expected 'end' or 'branch'")
    return (start, *between, num_steps)


def spread_path(num_steps: int, start: int, count: int) -> tuple[int, ...]:
    """Grid indices of ``count`` steps from ``start`` to ``num_steps``, spread evenly over those that remain.

    Halves are rounded down, so that the early steps are the short ones. ValueError unless 1 <= count <=
    ``num_steps - start``.
    """
    remaining = num_steps - start
    if not 1 <= count <= remaining:
        raise ValueError(f"{count} steps from grid index {start} to {num_steps}: expected 1 to {remaining}")
    return tuple(start + (i * remaining) // count for i in range(count + 1))


@dataclass(frozen=True)
class Segment:
    """A piece of trajectory below the end of an earlier one.

    ``parent``: index of an earlier segment, or None for the initial noise (grid index 0).
    ``path``: grid indices, strictly increasing, at least two; the first is the parent's last.
    ``fan_out``: samples for each parent sample; above 1 only where the segment is stochastic.
    ``stochastic``: one noisy step that does not end at sigma 0. ``trained``: whether the policy learns
    from it. ``scored``: the end, at sigma 0, is decoded and given to the rewards. ``correlation``: of the
    noises of siblings, each of which is standard normal. ``kept``: the policy learns from so many of a
    prompt's samples alone, those of the highest and of the lowest advantages; all by default. ``recorded``: a
    single Euler step whose start and end the rollout keeps.
    """

    parent: int | None
    path: tuple[int, ...]
    fan_out: int = 1
    stochastic: bool = False
    scored: bool = False
    trained: bool = True
    correlation: float = 0.0
    kept: int | None = None
    recorded: bool = False


@dataclass(frozen=True)
class Node:
    """A distinct state: ``width`` samples for a prompt at grid index ``index``.

    It comes from ``parent`` (a position in ``Plan.nodes``; None for the initial noise) by an Euler step,
    or, if ``stochastic``, by a transition that draws ``fan_out`` samples for each parent sample.
    """

    parent: int | None
    index: int
    width: int
    fan_out: int = 1
    stochastic: bool = False


@dataclass(frozen=True)
class Plan:
    """Segments over a grid of ``num_steps`` steps, with ``root_width`` initial noises for a prompt.

    Without segments nothing is sampled: what is learned from comes from elsewhere.
    ``root_correlation``: of the initial noises of a prompt, each of which is standard normal.
    Raises ValueError where a segment does not continue its parent, would put noise into sigma 0, copies a
    deterministic state, or leads to no scored end.
    """

    num_steps: int
    segments: tuple[Segment, ...]
    root_width: int = 1
    root_correlation: float = 0.0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"a plan has {self.num_steps} steps: expected 1 or more")
        if self.root_width < 1:
            raise ValueError(f"a plan has {self.root_width} initial noises for a prompt: expected 1 or more")
        for position, segment in enumerate(self.segments):
            self._check_links(position, segment)
            self._check_kind(position, segment)
        for position in range(len(self.segments)):
            if not self.leaves_under(position):
                raise ValueError(f"segment {position} leads to no scored segment: score it, or leave it out")

    def _check_links(self, position: int, segment: Segment) -> None:
        path = segment.path
        if len(path) < 2 or any(a >= b for a, b in pairwise(path)):
            raise ValueError(f"segment {position} has path {path}: expected two or more increasing indices")
        if path[-1] > self.num_steps:
            raise ValueError(f"segment {position} ends at {path[-1]}: the grid ends at {self.num_steps}")
        if segment.parent is None:
            if path[0] != 0:
                raise ValueError(f"segment {position} has no parent and starts at {path[0]}: expected 0")
            return
        if not 0 <= segment.parent < position:
            raise ValueError(
                f"segment {position} names parent {segment.parent}: expected an earlier one, below {position}"
            )
        end = self.segments[segment.parent].path[-1]
        if path[0] != end:
            raise ValueError(
                f"segment {position} starts at {path[0]}, its parent {segment.parent} ends at {end}:"
                " expected the same index"
            )

    def _check_kind(self, position: int, segment: Segment) -> None:
        path = segment.path
        if segment.fan_out < 1:
            raise ValueError(f"segment {position} has fan_out {segment.fan_out}: expected 1 or more")
        if segment.stochastic:
            if len(path) != 2:
                raise ValueError(
                    f"segment {position} is stochastic over path {path}: expected one step, two indices"
                )
            if path[1] == self.num_steps:
                raise ValueError(
                    f"segment {position} puts noise into the last step, to sigma 0, where it stays in the"
                    f" image: expected a stochastic step to end before index {self.num_steps}"
                )
            if segment.kept is not None and (segment.fan_out > 1 or segment.kept < 2):
                raise ValueError(
                    f"segment {position} keeps {segment.kept} samples at a fan_out of {segment.fan_out}:"
                    " expected 2 or more, at a fan_out of 1"
                )
            if not 0 <= segment.correlation < 1:
                raise ValueError(
                    f"segment {position} has siblings correlated by {segment.correlation}: expected 0"
                    " to below 1"
                )
        elif segment.recorded and len(path) != 2:
            raise ValueError(
                f"segment {position} is recorded over path {path}: expected one step, two indices"
            )
        elif segment.fan_out > 1:
            raise ValueError(
                f"segment {position} is deterministic with fan_out {segment.fan_out}: its samples would be"
                " copies; use root_width, or a stochastic segment"
            )
        if segment.scored and path[-1] != self.num_steps:
            raise ValueError(
                f"segment {position} is scored at index {path[-1]}: expected its end at sigma 0, index"
                f" {self.num_steps}"
            )

    @cached_property
    def _compiled(self) -> tuple[tuple[Node, ...], tuple[tuple[int, ...], ...]]:
        nodes = [Node(None, 0, self.root_width)]
        known: dict[tuple[int, int], int] = {}
        visited: list[tuple[int, ...]] = []
        for segment in self.segments:
            here = 0 if segment.parent is None else visited[segment.parent][-1]
            passed = [here]
            for index in segment.path[1:]:
                step = (here, index)
                if segment.stochastic or step not in known:
                    width = nodes[here].width * segment.fan_out
                    nodes.append(Node(here, index, width, segment.fan_out, segment.stochastic))
                    here = len(nodes) - 1
                    if not segment.stochastic:
                        known[step] = here
                else:
                    here = known[step]
                passed.append(here)
            visited.append(tuple(passed))
        return tuple(nodes), tuple(visited)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The distinct states, parents first; the first is the initial noise."""
        return self._compiled[0]

    @cached_property
    def segment_nodes(self) -> tuple[tuple[int, ...], ...]:
        """For each segment the nodes it passes, one for each index of its path."""
        return self._compiled[1]

    @cached_property
    def segment_end(self) -> tuple[int, ...]:
        """For each segment the node it ends in."""
        return tuple(passed[-1] for passed in self.segment_nodes)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes that one step leads to."""
        below: list[list[int]] = [[] for _ in self.nodes]
        for position, node in enumerate(self.nodes):
            if node.parent is not None:
                below[node.parent].append(position)
        return tuple(tuple(each) for each in below)

    @cached_property
    def transitions(self) -> tuple[int, ...]:
        """The stochastic segments."""
        return tuple(i for i, segment in enumerate(self.segments) if segment.stochastic)

    @cached_property
    def scored(self) -> tuple[int, ...]:
        """The scored segments."""
        return tuple(i for i, segment in enumerate(self.segments) if segment.scored)

    def width(self, segment: int) -> int:
        """Samples for a prompt at the end of a segment."""
        return self.nodes[self.segment_end[segment]].width

    def leaves_under(self, segment: int) -> tuple[int, ...]:
        """The scored segments that descend from a segment, or are it."""
        inside = {segment}
        for position in range(segment + 1, len(self.segments)):
            if self.segments[position].parent in inside:
                inside.add(position)
        return tuple(i for i in sorted(inside) if self.segments[i].scored)

    @property
    def velocity_evaluations(self) -> int:
        """Distinct (state, sigma) pairs whose velocity one prompt needs: the NFE of the wavefront."""
        return sum(
            node.width for node, below in zip(self.nodes, self.children, strict=True) if len(below) > 0
        )

    @property
    def trained_sets(self) -> tuple[int, ...]:
        """For each transition that is trained, the states whose velocity training needs again for one
        prompt."""
        trained = [segment for segment in self.transitions if self.segments[segment].trained]
        starts = {segment: self.width(segment) // self.segments[segment].fan_out for segment in trained}
        return tuple(min(width, self.segments[i].kept or width) for i, width in starts.items())

    @property
    def trained_states(self) -> int:
        """The states of all of them."""
        return sum(self.trained_sets)

    @property
    def trajectory_evaluations(self) -> int | None:
        """NFE of one stochastic trajectory with its probes, from a start of its own; None for other trees."""
        parents = [self.segments[i].parent for i in self.transitions]
        if not parents or parents != [None, *self.transitions[:-1]]:
            return None
        return sum(len(below) > 0 for below in self.children)

    @property
    def decodes(self) -> int:
        """Distinct images for one prompt."""
        return sum(self.nodes[node].width for node in {self.segment_end[i] for i in self.scored})

    @property
    def scores(self) -> int:
        """Scores for one prompt from each reward: every distinct image once."""
        return self.decodes

    @property
    def naive_velocity_evaluations(self) -> int:
        """NFE of one prompt where nothing is shared, as in released G2RPO code.

        Every segment is stepped for itself, sample by sample: a branch evaluates again the trunk state it
        starts at, a stride the states it has in common with others. A trunk that branches with a single
        stochastic step fan out from is stepped on to sigma 0, for its own image.
        """
        alone = sum(self.width(i) * (len(segment.path) - 1) for i, segment in enumerate(self.segments))
        return alone + self.root_width * self._unused_trunk_steps

    @property
    def _unused_trunk_steps(self) -> int:
        trunk: set[int | None] = {None}
        reached: list[int] = []
        noisy_parents = {self.segments[i].parent for i in self.transitions}
        for position, segment in enumerate(self.segments):
            if segment.parent not in trunk:
                continue
            if segment.stochastic:
                if segment.fan_out > 1 and position not in noisy_parents:
                    reached.append(segment.path[0])
            elif segment.scored:
                return 0
            else:
                trunk.add(position)
        return self.num_steps - max(reached) if reached else 0
