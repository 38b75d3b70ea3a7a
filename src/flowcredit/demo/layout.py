"""Where the states of a plan stand in a picture of it, and in which order they come. No tensors.

A state is the end of a segment that leads on, or the initial noise, and one sample of the prompt there. What
only finishes a state (a scored path to sigma 0) is no state of its own: where the trajectory goes on besides
it is the state's *probe*, else one of its *finishes*.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flowcredit.plan import Plan, Segment


@dataclass(frozen=True)
class Item:
    """A state. ``k``: its grid index; ``row``: its place from above, which may lie between two rows.

    ``came``: the stage with which it appears. ``probe`` and ``finishes``: scored segments that start here.
    """

    segment: int | None
    sample: int
    k: int
    row: float
    came: int
    parent: int | None
    probe: int | None
    finishes: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """What is played at once: a noisy or a recorded step, by its segment; None for the beginning and end."""

    segment: int | None
    words: str


@dataclass(frozen=True)
class Layout:
    """Items, parents first; so many rows; and the stages, of which the first is the initial noise and the
    last the whole tree."""

    items: tuple[Item, ...]
    rows: int
    stages: tuple[Stage, ...]


def lay_out(plan: Plan) -> Layout:
    """The picture's layout. ValueError for a plan that samples nothing."""
    if not plan.segments:
        raise ValueError("a plan without segments has no picture")
    return _Placing(plan).layout()


class _Placing:
    """One walk through a plan that hands out rows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.below: dict[int | None, list[int]] = {None: []}
        for position, segment in enumerate(plan.segments):
            self.below.setdefault(segment.parent, []).append(position)
        self.steps = [i for i, each in enumerate(plan.segments) if each.stochastic or each.recorded]
        # Trunk and branches: what is not noisy then has a row of its own, above its branches.
        self.trunk = any(len(self._on(place)) > 1 for place in self.below)
        self.items: list[Item] = []
        self.rows = 0

    def layout(self) -> Layout:
        for sample in range(self.plan.root_width):
            self._place(None, sample, None)
        words = [Stage(None, "initial noise"), *(Stage(i, _words(self.plan.segments[i])) for i in self.steps)]
        return Layout(tuple(self.items), self.rows, (*words, Stage(None, "the whole tree")))

    def _on(self, place: int | None) -> list[int]:
        """The segments that lead on from the end of one: scored ones are its probe or its finishes."""
        return [i for i in self.below.get(place, ()) if not self.plan.segments[i].scored]

    def _place(self, place: int | None, sample: int, parent: int | None, row: float | None = None) -> float:
        """Put a state and all below it into rows; returns the row of the state."""
        here, on = len(self.items), self._on(place)
        scored = tuple(i for i in self.below.get(place, ()) if self.plan.segments[i].scored)
        self.items.append(
            Item(
                place,
                sample,
                0 if place is None else self.plan.segments[place].path[-1],
                -1.0,
                self._came(place),
                parent,
                scored[0] if on and scored else None,
                () if on else scored,
            )
        )
        noisy = place is not None and self.plan.segments[place].stochastic
        if row is None and (not on or (self.trunk and not noisy)):
            row = self._next_row()
        goes_on = [i for i in on if self._straight(i, on)]
        rows = [self._place(i, sample, here, row) for i in goes_on]
        for branch in (i for i in on if i not in goes_on):
            fan_out = self.plan.segments[branch].fan_out
            rows += [self._place(branch, sample * fan_out + j, here) for j in range(fan_out)]
        found = (rows[0] + rows[-1]) / 2 if row is None else row
        self.items[here] = _moved(self.items[here], found)
        return found

    def _straight(self, segment: int, on: list[int]) -> bool:
        """Whether it goes on in the same row: the trunk, or the only sample there is."""
        each = self.plan.segments[segment]
        return (
            not each.stochastic if len(on) > 1 else each.fan_out == 1 and not (self.trunk and each.stochastic)
        )

    def _next_row(self) -> float:
        self.rows += 1
        return float(self.rows - 1)

    def _came(self, place: int | None) -> int:
        """The stage of a state: of its own step, or for a piece of trunk of the first step that follows."""
        if place is None:
            return 0
        if place in self.steps:
            return self.steps.index(place) + 1
        return min((self.steps.index(i) + 1 for i in self._after(place) if i in self.steps), default=0)

    def _after(self, place: int) -> Iterator[int]:
        for each in self.below.get(place, ()):
            yield each
            yield from self._after(each)


def _moved(item: Item, row: float) -> Item:
    return Item(item.segment, item.sample, item.k, row, item.came, item.parent, item.probe, item.finishes)


def _words(segment: Segment) -> str:
    return f"step {segment.path[0]}"
