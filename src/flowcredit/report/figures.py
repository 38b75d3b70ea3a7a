"""Curves of a run as SVG text.

matplotlib is imported here at the top: import this module only where the report is made.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from flowcredit.comparison import summarise
from flowcredit.report.run_data import RunData
from flowcredit.report.style import BLUE, COLOURS, ORANGE, STYLE, WIDTH, drawn, short, to_svg


@dataclass(frozen=True)
class _Panel:
    title: str
    draw: Callable[[Axes], None]


def learning_curves(data: RunData) -> str | None:
    """Held-out reward, a row each, against iterations and against velocity evaluations of training.

    The band is one standard error over the prompts. None without a reward or with fewer than two evaluations.
    """
    if len(data.snapshots) < 2 or not data.snapshots[0].evaluation.scores:
        return None
    evaluations = [snapshot.evaluation for snapshot in data.snapshots]
    names = list(evaluations[0].scores)
    iterations = [float(evaluation.iteration) for evaluation in evaluations]
    spent = [data.evaluations_until(evaluation.iteration) for evaluation in evaluations]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.5 + 1.85 * len(names)), layout="constrained")
        axes = figure.subplots(len(names), 2, sharex="col", sharey="row", squeeze=False)
        for row, name in enumerate(names):
            summaries = [summarise(e.scores.get(name, ())) for e in evaluations]
            mean = np.array([summary.mean for summary in summaries])
            error = np.nan_to_num(np.array([summary.standard_error for summary in summaries]))
            colour, role = (BLUE, "trained") if name in data.trained else (ORANGE, "not trained")
            for column, x in enumerate((iterations, spent)):
                axis = axes[row, column]
                axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)
                axis.plot(x, mean, color=colour, marker="o", markersize=4, linewidth=1.8)
                axis.yaxis.set_major_locator(MaxNLocator(5))
            axes[row, 0].set_title(f"{drawn(short(name))} ({role})")
        axes[-1, 0].set_xlabel("iteration")
        axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1, 1].set_xlabel("velocity evaluations spent on rollouts")
        axes[-1, 1].xaxis.set_major_formatter(EngFormatter(sep=""))
        return to_svg(figure)


def training_curves(data: RunData) -> str | None:
    """What the log says of the rollouts and updates, a panel each; None without two iterations."""
    if len(data.log) < 2:
        return None
    panels = _panels(data)
    if not panels:
        return None
    rows = math.ceil(len(panels) / 2)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.4 + 1.75 * rows), layout="constrained")
        axes = figure.subplots(rows, 2, sharex=True, squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            panel.draw(axis)
            axis.set_title(drawn(panel.title))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            if axis.get_legend_handles_labels()[1]:
                # Beside the title, which stands at the left, so that no curve is covered.
                axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.02), ncols=2, borderaxespad=0)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[-1]:
            axis.set_xlabel("iteration")
        if len(panels) % 2:
            axes[-2, 1].xaxis.set_tick_params(labelbottom=True)
            axes[-2, 1].set_xlabel("iteration")
        return to_svg(figure)


def _panels(data: RunData) -> list[_Panel]:
    x = data.column("iteration")
    log_scale = {"log": True, "bottom": 0}
    settings = data.recipe["train"]
    lines: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        (f"Rollout reward: {short(name)}", {f"reward/{name}": ""}, {"smooth": True}) for name in data.trained
    ]
    lines += [
        (
            "|ratio − 1|",
            {"on_policy_deviation": "before the update", "ratio_max_deviation": "largest in it"},
            log_scale,
        ),
        (
            "Share of ratios clipped",
            {"clip_fraction_low": "< 1 − ε", "clip_fraction_high": "> 1 + ε"},
            {"bottom": 0},
        ),
        (
            "Gradient norm before clipping",
            {"grad_norm": ""},
            {"bottom": 0, "limit": settings.get("max_grad_norm")},
        ),
        ("Share of groups without a signal", {"dead_groups": ""}, {"bottom": 0}),
        ("KL from the model before training", {"kl_reference": ""}, {"bottom": 0}),
        ("Implicit margin of the pairs", {"implicit_margin": ""}, {"smooth": True}),
        ("Share of pairs with a margin above 0", {"implicit_accuracy": ""}, {"smooth": True, "bottom": 0}),
        ("Learning rate", {"learning_rate": ""}, {"bottom": 0}),
    ]
    if any(not math.isnan(value) for value in data.column("implicit_margin")):
        lines.insert(-3, ("Loss over the pairs", {"loss": ""}, {"smooth": True}))
    panels = []
    for title, keys, options in lines:
        columns = [(label, data.column(key)) for key, label in keys.items()]
        there = [(label, y) for label, y in columns if not all(math.isnan(value) for value in y)]
        if there:
            panels.append(_Panel(title, _drawing(x, there, **options)))
    return panels


def _drawing(
    x: Sequence[float],
    columns: Sequence[tuple[str, Sequence[float]]],
    *,
    smooth: bool = False,
    log: bool = False,
    bottom: float | None = None,
    limit: float | None = None,
) -> Callable[[Axes], None]:
    def draw(axis: Axes) -> None:
        for (label, y), colour, dashes in zip(columns, COLOURS, ("-", "--", ":", "-."), strict=False):
            values = np.array(y)
            mean = _moving_average(values) if smooth else values
            if smooth:
                axis.plot(x, values, color=colour, linewidth=0.8, alpha=0.35)
            axis.plot(x, mean, color=colour, linewidth=1.7, linestyle=dashes, label=label)
        if log:
            # With a place for 0, which is what the ratio's distance ought to be before the update.
            axis.set_yscale("symlog", linthresh=1e-8)
            axis.yaxis.set_major_locator(FixedLocator([0, 1e-8, 1e-6, 1e-4, 1e-2, 1]))
            axis.yaxis.set_minor_locator(NullLocator())
        else:
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        if limit is not None and any(value > 0.5 * limit for _, y in columns for value in y):
            axis.axhline(limit, color="#8a8f98", linewidth=1, linestyle=":", label="clipped to this")
        if bottom is not None:
            axis.set_ylim(bottom=bottom)
            if not any(value > 0 for _, y in columns for value in y):
                axis.set_ylim(0, 1e-6 if log else 1)

    return draw


def _moving_average(values: np.ndarray, share: int = 12) -> np.ndarray:
    """Mean over a centred window of about a twelfth of the run, NaN left out."""
    reach = max(1, len(values) // share // 2)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return np.array([np.nanmean(w) if np.isfinite(w).any() else np.nan for w in windows])
