"""The curves of a run: held-out rewards, what the log says of rollouts and updates, and credit by step."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flowcredit.comparison import summarise
from flowcredit.report.charts import Chart, Drawn, Line, draw
from flowcredit.report.parts import short
from flowcredit.report.run_data import RunData


@dataclass(frozen=True)
class _Panel:
    title: str
    columns: tuple[tuple[str, str], ...]
    """Columns of the log, each with its label."""
    smooth: bool = False
    log: bool = False
    bottom: float | None = None
    limit: tuple[str, float] | None = None


def learning_curves(data: RunData) -> list[Drawn]:
    """Held-out reward, each against iterations and against velocity evaluations of training.

    The band is one standard error over the prompts. Nothing with fewer than two evaluations.
    """
    if len(data.snapshots) < 2:
        return []
    evaluations = [snapshot.evaluation for snapshot in data.snapshots]
    iterations = [float(evaluation.iteration) for evaluation in evaluations]
    spent = [data.evaluations_until(evaluation.iteration) for evaluation in evaluations]
    charts = []
    for name in evaluations[0].scores:
        summaries = [summarise(each.scores.get(name, ())) for each in evaluations]
        role = "trained" if name in data.trained else "not trained"
        line = Line(
            "",
            [summary.mean for summary in summaries],
            [summary.standard_error for summary in summaries],
            colour=0 if name in data.trained else 1,
        )
        title = f"{short(name)} ({role})"
        charts.append(Chart(title, "iteration", iterations, [line]))
        if all(math.isfinite(each) for each in spent):
            charts.append(Chart(title, "velocity evaluations in rollouts", spent, [line]))
    return [drawn for drawn in map(draw, charts) if drawn is not None]


def training_curves(data: RunData) -> list[Drawn]:
    """What the log says of the rollouts and updates, a chart each; nothing without two iterations."""
    if len(data.log) < 2:
        return []
    xs = data.column("iteration")
    drawn = [draw(_chart(panel, xs, data)) for panel in _panels(data)]
    return [each for each in drawn if each is not None]


def step_curves(data: RunData) -> list[Drawn]:
    """Per denoising step, in the first and the last third of the run: how much credit it was given, and how
    many of its groups taught nothing. Nothing where the log has no steps."""
    third = max(1, len(data.log) // 3)
    charts = []
    for title, key in (
        ("Mean |advantage| of a step", "advantage"),
        ("Groups without a signal", "dead_groups"),
    ):
        steps = sorted(
            {int(m[1]) for record in data.log for k in record if (m := re.fullmatch(rf"{key}/(\d+)", k))}
        )
        if len(steps) < 2:
            continue
        lines = [
            Line(label, [_mean(data.column(f"{key}/{step}")[part]) for step in steps], colour=colour)
            for label, part, colour in (
                ("first third", slice(third), 1),
                ("last third", slice(-third, None), 0),
            )
        ]
        charts.append(Chart(title, "step", [float(step) for step in steps], lines, bottom=0))
    return [drawn for drawn in map(draw, charts) if drawn is not None]


def _panels(data: RunData) -> list[_Panel]:
    norm = data.recipe["train"].get("max_grad_norm")
    clipped = None if norm is None else ("clipped to this", float(norm))
    pairs = any(not math.isnan(value) for value in data.column("implicit_margin"))
    loss = [_Panel("Loss over the pairs", (("", "loss"),), smooth=True)] if pairs else []
    ratio = (("before the update", "on_policy_deviation"), ("largest in it", "ratio_max_deviation"))
    clips = (("below 1 − ε", "clip_fraction_low"), ("above 1 + ε", "clip_fraction_high"))
    return [
        *(
            _Panel(f"Rollout reward: {short(name)}", (("", f"reward/{name}"),), smooth=True)
            for name in data.trained
        ),
        _Panel("|ratio − 1|", ratio, log=True),
        _Panel("Share of ratios clipped", clips, bottom=0),
        _Panel("Gradient norm before clipping", (("", "grad_norm"),), bottom=0, limit=clipped),
        _Panel("Share of groups without a signal", (("", "dead_groups"),), bottom=0),
        _Panel("How much images of a prompt differ", (("", "image_spread"),), bottom=0),
        *loss,
        _Panel("KL from the model before training", (("", "kl_reference"),), bottom=0),
        _Panel("Implicit margin of the pairs", (("", "implicit_margin"),), smooth=True),
        _Panel("Share of pairs with a margin above 0", (("", "implicit_accuracy"),), smooth=True, bottom=0),
        _Panel("Learning rate", (("", "learning_rate"),), bottom=0),
    ]


def _chart(panel: _Panel, xs: Sequence[float], data: RunData) -> Chart:
    lines = []
    for colour, (label, key) in enumerate(panel.columns):
        values = data.column(key)
        raw = values if panel.smooth else None
        lines.append(Line(label, _moving_average(values) if panel.smooth else values, raw=raw, colour=colour))
    return Chart(panel.title, "iteration", xs, lines, panel.bottom, panel.log, panel.limit)


def _moving_average(values: Sequence[float], share: int = 12) -> list[float]:
    """Mean over a centred window of about a twelfth of the run, NaN left out."""
    reach = max(1, len(values) // share // 2)
    return [_mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if math.isfinite(value)]
    return fmean(there) if there else math.nan
