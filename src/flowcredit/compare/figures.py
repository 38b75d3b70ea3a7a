"""Learning curves of arms side by side, as SVG text.

matplotlib is imported here at the top: import this module only where the page is made.
"""

from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flowcredit.compare.results import ArmResult, Point, Results, curve, estimate
from flowcredit.report.parts import short
from flowcredit.report.style import COLOURS, STYLE, WIDTH, drawn, to_svg

MORE_COLOURS = (*COLOURS, "#56B4E9", "#B8860B", "#222222")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
MOST_ARMS = 16
"""More curves than these cannot be told apart."""
AGAINST: Sequence[tuple[str, Callable[[Point], float]]] = (
    ("velocity evaluations", lambda point: point.cost.velocity_evaluations),
    ("seconds of training", lambda point: point.seconds),
    ("reward calls", lambda point: point.cost.reward_calls),
)
"""What the curves are drawn against: the label and its value at a point."""


def learning_curves(results: Results) -> str | None:
    """Each reward a row: its mean over seeds with the 95 % interval, against what was spent.

    None where no arm has two points, or there are more than ``MOST_ARMS``.
    """
    arms = [arm for arm in results.arms if len(curve(arm)) > 1]
    rewards = results.rewards
    if not arms or not rewards or len(arms) > MOST_ARMS:
        return None
    with matplotlib.rc_context(STYLE):
        legend = 0.22 * -(-len(arms) // 3)
        figure = Figure(figsize=(WIDTH, 0.7 + legend + 2.1 * len(rewards)), layout="constrained")
        axes = figure.subplots(len(rewards), len(AGAINST), sharex="col", sharey="row", squeeze=False)
        for row, reward in enumerate(rewards):
            role = "trained on" if any(reward in arm.trained for arm in arms) else "held out"
            axes[row, 0].set_title(f"{drawn(short(reward))} ({role})")
            for place, arm in enumerate(arms):
                for axis, (_, of) in zip(axes[row], AGAINST, strict=True):
                    _draw(axis, arm, reward, of, place)
        for axis, (label, _) in zip(axes[-1], AGAINST, strict=True):
            axis.set_xlabel(label)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.xaxis.set_major_locator(MaxNLocator(4))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(arms)))
        return to_svg(figure)


def _draw(axis: Axes, arm: ArmResult, reward: str, of: Callable[[Point], float], place: int) -> None:
    points = curve(arm)
    x = np.array([np.mean([of(point) for point in together]) for together in points])
    found = [estimate([point.means.get(reward, np.nan) for point in together]) for together in points]
    mean = np.array([each.mean for each in found])
    half = np.nan_to_num(np.array([each.half for each in found]))
    colour = MORE_COLOURS[place % len(MORE_COLOURS)]
    axis.fill_between(x, mean - half, mean + half, color=colour, alpha=0.1, linewidth=0)
    axis.plot(
        x,
        mean,
        color=colour,
        linestyle=DASHES[place % len(DASHES)],
        marker=MARKERS[place % len(MARKERS)],
        markersize=3.5,
        linewidth=1.6,
        # matplotlib leaves out labels that begin with an underscore, and reads dollars as formulas.
        label="\u200b" + drawn(arm.arm.name),
    )
    axis.yaxis.set_major_locator(MaxNLocator(5))
