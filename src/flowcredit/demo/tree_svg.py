"""A tree's picture at one stage of its playing, as SVG. No tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from flowcredit.demo.growing import Grown, State
from flowcredit.demo.layout import Item, Layout

COLUMN = 96
"""Pixels from one grid index to the next."""
SLOT = 76
"""Pixels that a finished image takes, its reward beside it."""
OPEN, CLOSED, FLAT = 44, 8, 24
"""Heights of a row: one that is looked at, one that is not, and one in the view of a large whole tree."""
FEW = 18
"""Up to so many rows are open at every stage."""
TOP, LEFT = 40, 34


def picture_id(kind: str, state: State) -> str:
    """The name under which a picture is kept once for the whole page."""
    place, sample = state
    return f"tree-{kind}-{'root' if place is None else place}-{sample}"


def picture_store(grown: Grown) -> str:
    """All pictures, each once and one unit wide, to be used by name."""
    kept = []
    for kind, pictures in (("finished", grown.finished), ("predicted", grown.predicted)):
        for state, uri in pictures.items():
            pixels = ' style="image-rendering: pixelated"' if uri.startswith("data:image/png") else ""
            kept.append(
                f'<image id="{picture_id(kind, state)}" href="{uri}" width="1" height="1"{pixels}></image>'
            )
    return f'<svg class="store" width="0" height="0" aria-hidden="true"><defs>{"".join(kept)}</defs></svg>'


def shown(name: str, x: float, y: float, side: float) -> str:
    """A kept picture, its middle at a point."""
    corner = f"{x - side / 2:.1f} {y - side / 2:.1f}"
    return f'<use href="#{name}" transform="translate({corner}) scale({side:g})"></use>'


def number(value: float, signed: bool = False) -> str:
    """A reward or an advantage in a few characters; a dash where there is none."""
    if math.isnan(value):
        return "–"
    digits = 2 if abs(value) < 100 else 0
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return text.replace("-", "−")


def sign(value: float) -> str:
    """The class that colours an advantage."""
    return "up" if value > 0 else "down" if value < 0 else "even"


@dataclass(frozen=True)
class TreePicture:
    """One tree at one stage."""

    grown: Grown
    layout: Layout
    stage: int

    @property
    def last(self) -> bool:
        return self.stage == len(self.layout.stages) - 1

    def svg(self, words: str) -> str:
        """The picture, with ``words`` for those who do not see it."""
        heights = self._heights()
        tops = [TOP + sum(heights[:row]) for row in range(self.layout.rows)]
        middles = [top + height / 2 for top, height in zip(tops, heights, strict=True)]
        slots = max((len(item.finishes) for item in self.layout.items), default=0)
        width = LEFT + self.grown.plan.num_steps * COLUMN + max(0, slots - 1) * SLOT + 96
        height = TOP + sum(heights) + 8
        # Lines first: pictures lie over them.
        lines = "".join(part for item in self.layout.items for part in self._lines(item, middles))
        marks = "".join(part for item in self.layout.items for part in self._marks(item, middles, heights))
        return (
            f'<svg class="tree" role="img" aria-label="{escape(words, quote=True)}" width="{width}"'
            f' height="{height:.0f}" viewBox="0 0 {width} {height:.0f}">{self._header()}{lines}{marks}</svg>'
        )

    def _heights(self) -> list[float]:
        rows = self.layout.rows
        if rows <= FEW:
            return [OPEN] * rows
        if self.last:
            return [FLAT] * rows
        opened = {
            row
            for item in self.layout.items
            if item.came == self.stage or (self._is_trunk(item) and self.grown.plan.root_width == 1)
            for row in (math.floor(item.row), math.ceil(item.row))
        }
        return [OPEN if row in opened else CLOSED for row in range(rows)]

    def _is_trunk(self, item: Item) -> bool:
        return item.segment is None or not self.grown.plan.segments[item.segment].stochastic

    def _header(self) -> str:
        return "".join(
            f'<text class="axis" x="{_x(k)}" y="14">{k}</text>'
            f'<text class="axis" x="{_x(k)}" y="27">σ {sigma:.2f}</text>'
            for k, sigma in enumerate(self.grown.sigmas)
        )

    def _late(self, came: int) -> str:
        return " late" if came > self.stage else ""

    def _lines(self, item: Item, middles: list[float]) -> Iterator[str]:
        y, plan = _between(item.row, middles), self.grown.plan
        if item.parent is not None and item.segment is not None:
            above = self.layout.items[item.parent]
            segment = plan.segments[item.segment]
            kind, width = ("noise", 1.6) if segment.stochastic else ("ode", 1.6)
            advantage = self._advantage(item)
            if advantage is not None:
                kind, width = f"noise {sign(advantage)}", 1.2 + min(2.0, abs(advantage)) * 1.4
            yield _curve(
                _x(above.k), _between(above.row, middles), _x(item.k), y, kind + self._late(item.came), width
            )
            for k in segment.path[1:-1]:
                yield _dot("passed" + self._late(item.came), _x(k), y, 2)
        if item.finishes:
            end = _x(plan.num_steps)
            yield _curve(_x(item.k), y, end, y, "ode" + self._late(item.came), 1.2)
            passed = sorted({k for leaf in item.finishes for k in plan.segments[leaf].path[1:-1]})
            for k in passed:
                yield _dot("passed" + self._late(item.came), _x(k), y, 1.6)

    def _advantage(self, item: Item) -> float | None:
        """Of the step that led to a state, once it is told."""
        if item.segment is None or item.came > self.stage or item.segment not in self.grown.advantages:
            return None
        return self.grown.advantages[item.segment][item.sample]

    def _marks(self, item: Item, middles: list[float], heights: list[float]) -> Iterator[str]:
        x, y = _x(item.k), _between(item.row, middles)
        side = heights[math.floor(item.row)] - 10
        told, room = item.came <= self.stage, side >= 12
        name, reward = self._picture(item)
        if told and room and name is not None:
            kind = "node foretold" if reward is None else "node"
            yield f'<g class="{kind}">{shown(name, x, y, side)}{_frame(x, y, side)}</g>'
            if reward is not None and side > 20:
                yield _text(x + side / 2 + 3, y + 13, number(reward), "reward")
        else:
            yield _dot("state" + self._late(item.came), x, y, 3 if room else 1.8)
        advantage = self._advantage(item)
        if advantage is not None and side > 20:
            # Before a picture, else on the line that goes on: beside lines that fan in it would not be read.
            at, anchor = (x - side / 2 - 3, "end") if name is not None else (x + 5, "start")
            yield _text(at, y - 5, number(advantage, signed=True), f"label {sign(advantage)}", anchor)
        if item.segment is None and item.sample in self.grown.anchors and side > 20:
            yield _text(x + side / 2 + 3, y + 14, "anchor", "label")
        if told and room:
            yield from self._finished(item, y, side)

    def _picture(self, item: Item) -> tuple[str | None, float | None]:
        """A state's picture by name, and the reward of it: of its probe, else what it foretells."""
        if item.probe is not None:
            name = picture_id("finished", (item.probe, item.sample))
            return name, self.grown.scores[item.probe][item.sample][0]
        state = (item.segment, item.sample)
        return (picture_id("predicted", state), None) if state in self.grown.predicted else (None, None)

    def _finished(self, item: Item, y: float, side: float) -> Iterator[str]:
        for slot, leaf in enumerate(item.finishes):
            x = _x(self.grown.plan.num_steps) + slot * SLOT
            name = picture_id("finished", (leaf, item.sample))
            yield f'<g class="node">{shown(name, x, y, side)}{_frame(x, y, side)}</g>'
            if side > 12:
                yield _text(
                    x + side / 2 + 3, y - 2, number(self.grown.scores[leaf][item.sample][0]), "reward"
                )
            if leaf in self.grown.advantages and side > 20:
                advantage = self.grown.advantages[leaf][item.sample]
                yield _text(
                    x + side / 2 + 3, y + 11, number(advantage, signed=True), f"label {sign(advantage)}"
                )


def _x(k: int) -> int:
    return LEFT + k * COLUMN


def _between(row: float, middles: list[float]) -> float:
    low, high = middles[math.floor(row)], middles[math.ceil(row)]
    return low + (high - low) * (row - math.floor(row))


def _curve(x: float, y: float, to_x: float, to_y: float, kind: str, width: float) -> str:
    bend = (to_x - x) / 2 if to_x - x <= COLUMN else COLUMN / 2
    return (
        f'<path class="line {kind}" stroke-width="{width:.1f}" d="M{x} {y:.1f}'
        f'C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x} {to_y:.1f}"></path>'
    )


def _frame(x: float, y: float, side: float) -> str:
    return f'<rect x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:g}" height="{side:g}"></rect>'


def _dot(kind: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="{kind}" cx="{x}" cy="{y:.1f}" r="{radius:g}"></circle>'


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
