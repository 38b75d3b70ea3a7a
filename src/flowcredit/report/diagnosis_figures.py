"""The figures of a diagnosis, as PNG files, as SVG on a page of its own, and for the report of a run."""

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowcredit.diagnostics import Diagnosis, gains, rank_correlations, stride_spread, variance_shares
from flowcredit.report.parts import short
from flowcredit.report.style import BLUE, GREEN, ORANGE, STYLE, WIDTH, drawn

MOST_LINES = 200
"""Trajectories drawn as lines of their own; all count in means and shares."""


def figures(diagnosis: Diagnosis) -> dict[str, tuple[str, Figure]]:
    """Name of the file, what it shows, and the figure."""
    reward = short(diagnosis.reward)
    with matplotlib.rc_context(STYLE):
        return {
            "gains": (
                f"What each step added to the reward {reward}, a line a trajectory, below the noise level of"
                " the step. Where more lose than gain, exploration hurts.",
                _gains(diagnosis),
            ),
            "states": (
                f"The reward {reward} of each state, finished by the ODE, a line a trajectory; and how well"
                " the order of a group's states foretells the order of its images.",
                _states(diagnosis),
            ),
            "variance": (
                f"The share of the variance of {reward} within a group that the noise of each step explains."
                " The shares add up to 1.",
                _variance(diagnosis),
            ),
            "strides": (
                f"One direction finished at strides {', '.join(map(str, diagnosis.strides))}: how far its own"
                " rewards lie apart, beside how far directions of a group do.",
                _strides(diagnosis),
            ),
        }


def load_diagnosis(path: Path) -> Diagnosis:
    """Read ``diagnosis.json``."""
    return Diagnosis(**json.loads(path.read_text(encoding="utf-8")))


def _gains(diagnosis: Diagnosis) -> Figure:
    found = gains(diagnosis).flatten(1).numpy()
    steps = np.arange(len(found))
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    spans = -np.diff(diagnosis.sigmas)[: len(found)]
    upper.bar(steps, np.array(diagnosis.noise) / np.sqrt(spans), width=0.5, color=GREEN)
    upper.set_title(f"Noise level of a step ({drawn(diagnosis.noise_kind)}): its deviation over √(σ − σ′)")
    upper.set_ylabel("level")
    lower.plot(steps, found[:, _chosen(found)], color=BLUE, linewidth=0.7, alpha=0.25)
    lower.plot(steps, np.nanmean(found, 1), color=ORANGE, linewidth=2, marker="o", label="mean")
    lower.axhline(0, color="#4a4f57", linewidth=1)
    for k, row in enumerate(found):
        share = float(np.mean(row[np.isfinite(row)] > 0))
        lower.annotate(f"{share:.0%}", (k, 1), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    lower.set_title("Gain, and the share of trajectories that gain", pad=18)
    lower.set_ylabel("gain in reward")
    lower.legend(loc="lower right")
    _step_axis(lower, diagnosis.sigmas[: len(found)])
    return figure


def _states(diagnosis: Diagnosis) -> Figure:
    states = np.array(diagnosis.states).reshape(len(diagnosis.states), -1)
    correlations = rank_correlations(diagnosis)
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    steps = np.arange(len(states))
    upper.plot(steps, states[:, _chosen(states)], color=BLUE, linewidth=0.7, alpha=0.25)
    upper.plot(steps, np.nanmean(states, 1), color=ORANGE, linewidth=2, marker="o", label="mean")
    upper.set_title("Reward of the state, finished by the ODE")
    upper.set_ylabel("reward")
    upper.legend(loc="lower right")
    lower.bar(steps[1:], correlations, width=0.5, color=GREEN)
    lower.axhline(0, color="#4a4f57", linewidth=1)
    lower.set_ylim(min(0.0, *np.nan_to_num(correlations)), 1.05)
    lower.set_title("Rank correlation with the images' rewards, within groups")
    lower.set_ylabel("Spearman")
    _step_axis(lower, diagnosis.sigmas[: len(states)])
    return figure


def _variance(diagnosis: Diagnosis) -> Figure:
    shares = variance_shares(diagnosis)
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    axis = figure.subplots()
    bars = axis.bar(np.arange(len(shares)), np.nan_to_num(shares), width=0.6, color=BLUE)
    axis.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=9)
    axis.axhline(0, color="#4a4f57", linewidth=1)
    axis.margins(y=0.15)
    axis.set_title("Share of the reward's variance within a group")
    axis.set_ylabel("share")
    _step_axis(axis, diagnosis.sigmas[: len(shares)])
    return figure


def _strides(diagnosis: Diagnosis) -> Figure:
    within, between = stride_spread(diagnosis)
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    axis = figure.subplots()
    axis.plot(diagnosis.branch_steps, between, color=BLUE, marker="o", label="between directions of a group")
    axis.plot(
        diagnosis.branch_steps,
        within,
        color=ORANGE,
        marker="s",
        linestyle="--",
        label="between strides of one direction",
    )
    axis.set_ylim(bottom=0)
    axis.set_title("Spread of the reward of a branch")
    axis.set_ylabel("standard deviation")
    axis.legend(loc="best")
    _step_axis(axis, diagnosis.sigmas[: len(within)])
    return figure


def _chosen(lines: np.ndarray) -> np.ndarray:
    count = lines.shape[1]
    return np.unique(np.linspace(0, count - 1, min(count, MOST_LINES)).astype(int))


def _step_axis(axis: Axes, sigmas: Sequence[float]) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(sigmas) <= 20:
        axis.set_xticks(range(len(sigmas)), [f"{k}\nσ {sigma:.2f}" for k, sigma in enumerate(sigmas)])
    axis.set_xlabel("step (grid index, sigma before it)")
