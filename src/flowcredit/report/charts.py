"""Curves as inline SVG, drawn here so that they follow the page's colours and can be read value by value.

Without scripts a chart is a picture with a text. The page's script (``page.js``) makes it a slider: pointer,
touch and arrow keys walk along the x axis, and the values there are told in words, which are written here.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from flowcredit.visible import visible

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 36
DASHES = ("", "6 3", "2 3", "8 3 2 3")
DOTS = 30
"""Values up to which each has a dot."""
LOG_FLOOR = 1e-8
"""Below it a logarithmic axis is linear, so that 0 has a place on it."""
LOG_TICKS = (0.0, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2)


@dataclass(frozen=True)
class Line:
    """A curve; NaN where there is no value."""

    label: str
    ys: Sequence[float]
    errors: Sequence[float] | None = None
    """Half the width of a band about it."""
    raw: Sequence[float] | None = None
    """What the curve is an average of, drawn faintly and told in its place."""
    colour: int = 0
    """Which of the page's colours."""


@dataclass(frozen=True)
class Chart:
    """Curves over one axis."""

    title: str
    x_name: str
    xs: Sequence[float]
    lines: Sequence[Line]
    bottom: float | None = None
    """Where the y axis begins; None leaves it to the curves."""
    log: bool = False
    limit: tuple[str, float] | None = None
    """A level that is marked where curves come near it, and what it is called."""


@dataclass(frozen=True)
class Drawn:
    """What the page's template takes: all text in ``svg`` is escaped, ``points`` is safe within a script."""

    title: str
    svg: str
    points: str
    legend: Sequence[tuple[str, int, int]]
    """Each curve's label, colour and dashes, where there is more than one."""


def draw(chart: Chart) -> Drawn | None:
    """The chart; None where no curve has a value."""
    lines = [line for line in chart.lines if any(math.isfinite(y) for y in line.ys)]
    if not lines or not chart.xs:
        return None
    x = _Axis(min(chart.xs), max(chart.xs), LEFT, WIDTH - RIGHT)
    low, high = _range(chart, lines)
    y = _Axis(_scaled(low, chart.log), _scaled(high, chart.log), HEIGHT - BOTTOM, TOP)
    drawing = _Drawing(chart, x, y)
    parts = drawing.axes(low, high)
    for place, line in enumerate(lines):
        parts += drawing.curve(line, place)
    label = f"{chart.title}: {words(chart, lines, len(chart.xs) - 1)}"
    parts.append(f'<line class="rule" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"></line>')
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(visible(label))}">'
    svg = f"{head}{''.join(parts)}</svg>"
    points = [[round(x.place(at), 1), visible(words(chart, lines, i))] for i, at in enumerate(chart.xs)]
    legend = [(line.label, line.colour, place) for place, line in enumerate(lines)] if len(lines) > 1 else []
    return Drawn(visible(chart.title), svg, in_script(points), legend)


def words(chart: Chart, lines: Sequence[Line], index: int) -> str:
    """What the curves say at a place: "iteration 24: shapes 0.81 ± 0.01"."""
    told = []
    for line in lines:
        value = (line.raw or line.ys)[index]
        text = f"{value:.4g}" if math.isfinite(value) else "no value"
        if line.errors is not None and math.isfinite(line.errors[index]):
            text += f" ± {line.errors[index]:.2g}"
        told.append(f"{line.label} {text}".strip())
    return f"{chart.x_name} {chart.xs[index]:,.0f}: {', '.join(told)}"


def in_script(value: object) -> str:
    """JSON that cannot end the script element it lies in."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.5
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class _Drawing:
    chart: Chart
    x: _Axis
    y: _Axis

    def _y(self, value: float) -> float:
        return self.y.place(_scaled(value, self.chart.log))

    def axes(self, low: float, high: float) -> list[str]:
        marks = [t for t in LOG_TICKS if low <= t <= high] if self.chart.log else ticks(low, high, 4)
        parts = []
        for value in marks:
            at = f"{self._y(value):.1f}"
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"></line>')
            text = f"{value:.0e}" if self.chart.log and value else short_number(value)
            parts.append(_text("tick", f"{LEFT - 6}", at, "end", text, ' dy="3.5"'))
        floor = HEIGHT - BOTTOM
        for value in ticks(self.x.low, self.x.high, 6, whole=True):
            at = f"{self.x.place(value):.1f}"
            parts.append(_text("tick", at, f"{floor + 15}", "middle", short_number(value)))
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(_text("name", f"{middle}", f"{HEIGHT - 5}", "middle", self.chart.x_name))
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"></line>')
        return [*parts, *self._limit(high)]

    def _limit(self, high: float) -> list[str]:
        if self.chart.limit is None or not self.chart.limit[1] <= high:
            return []
        name, level = self.chart.limit
        at = self._y(level)
        return [
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"></line>',
            _text("tick", f"{WIDTH - RIGHT}", f"{at - 4:.1f}", "end", name),
        ]

    def curve(self, line: Line, place: int) -> list[str]:
        parts = []
        colour = f"c{line.colour}"
        if line.errors is not None:
            pairs = [
                (x, y, 0.0 if math.isnan(e) else e)
                for x, y, e in zip(self.chart.xs, line.ys, line.errors, strict=True)
                if math.isfinite(y)
            ]
            rim = [(x, y + e) for x, y, e in pairs] + [(x, y - e) for x, y, e in reversed(pairs)]
            corners = " ".join(f"{self.x.place(x):.1f},{self._y(y):.1f}" for x, y in rim)
            parts.append(f'<polygon class="band {colour}" points="{corners}"></polygon>')
        if line.raw is not None:
            parts.append(f'<path class="raw {colour}" d="{self._path(line.raw)}"></path>')
        dashes = f' stroke-dasharray="{DASHES[place % len(DASHES)]}"' if place else ""
        parts.append(f'<path class="curve {colour}" d="{self._path(line.ys)}"{dashes}></path>')
        if len(self.chart.xs) <= DOTS:
            places = [
                (self.x.place(x), self._y(y))
                for x, y in zip(self.chart.xs, line.ys, strict=True)
                if math.isfinite(y)
            ]
            shape = f'<circle class="dot {colour}" r="2.6"'
            parts += [f'{shape} cx="{x:.1f}" cy="{y:.1f}"></circle>' for x, y in places]
        return parts

    def _path(self, ys: Sequence[float]) -> str:
        steps, pen = [], "M"
        for x, y in zip(self.chart.xs, ys, strict=True):
            if not math.isfinite(y):
                pen = "M"
                continue
            steps.append(f"{pen}{self.x.place(x):.1f} {self._y(y):.1f}")
            pen = "L"
        return "".join(steps)


def _text(kind: str, x: str, y: str, anchor: str, text: str, more: str = "") -> str:
    shown = escape(visible(text))
    return f'<text class="{kind}" x="{x}" y="{y}"{more} text-anchor="{anchor}">{shown}</text>'


def _range(chart: Chart, lines: Sequence[Line]) -> tuple[float, float]:
    values = [y for line in lines for y in (*line.ys, *(line.raw or ())) if math.isfinite(y)]
    for line in lines:
        if line.errors is not None:
            pairs = [(y, e) for y, e in zip(line.ys, line.errors, strict=True) if math.isfinite(y + e)]
            values += [y + sign * e for y, e in pairs for sign in (-1, 1)]
    low, high = min(values), max(values)
    if chart.limit is not None and high > 0.5 * chart.limit[1]:
        high = max(high, chart.limit[1])
    if chart.log:
        return 0.0, max(1e-6, 10 ** math.ceil(math.log10(high)) if high > 0 else 0.0)
    if chart.bottom is not None:
        return chart.bottom, high if high > chart.bottom else chart.bottom + 1
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _scaled(value: float, log: bool) -> float:
    if not log:
        return value
    return value / LOG_FLOOR if value < LOG_FLOOR else 1 + math.log10(value / LOG_FLOOR)


def ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many; whole ones alone where asked for."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span / about))
    step = min((1, 2, 2.5, 5, 10), key=lambda each: abs(span / (each * power) - about)) * power
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first
    return [(first + i) * step for i in range(count + 1)]


def short_number(value: float) -> str:
    """1500 as 1.5k, 0.05 as 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}" if value else "0"
