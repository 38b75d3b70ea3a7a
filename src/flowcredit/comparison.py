"""What evaluations say: means with their errors, by reward and by group, before and after.

Before and after share prompts and noises, so a change is summarised prompt by prompt.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from flowcredit.visible import visible


@dataclass(frozen=True)
class Evaluation:
    """Every score of one evaluation; what is told about it is computed from these."""

    iteration: int
    """Finished training iterations; 0 is the model before training."""
    prompts: tuple[str, ...]
    scores: Mapping[str, tuple[float, ...]]
    """Per reward one score for each prompt, NaN where there is none."""
    group_by: str | None = None
    groups: tuple[str, ...] = ()
    """The group of each prompt (its value of the column ``group_by``); empty without one."""
    seconds: float = field(default=math.nan, compare=False)
    images: Tensor | None = field(default=None, compare=False)
    """[n, 3, H, W] in [0, 1]: the images of the first n prompts; None when read back from a file."""


@dataclass(frozen=True)
class Summary:
    """Mean of the scores there are, with its standard error (sample deviation / sqrt(count))."""

    mean: float
    standard_error: float
    count: int
    missing: int


def summarise(scores: Sequence[float]) -> Summary:
    """Mean and standard error of the scores that are not NaN; both NaN where there are too few."""
    there = [score for score in scores if not math.isnan(score)]
    count = len(there)
    mean = math.fsum(there) / count if count else math.nan
    error = math.nan
    if count > 1:
        error = math.sqrt(math.fsum((score - mean) ** 2 for score in there) / (count - 1) / count)
    return Summary(mean, error, count, len(scores) - count)


def group_rows(evaluation: Evaluation) -> dict[str, list[int]]:
    """The prompts of each group, groups in the order in which they first appear."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(evaluation.groups):
        rows.setdefault(group, []).append(row)
    return rows


def group_means(evaluation: Evaluation, reward: str) -> dict[str, Summary]:
    """`summarise` for each group, such as the exact match of each task."""
    scores = evaluation.scores[reward]
    return {group: summarise([scores[row] for row in rows]) for group, rows in group_rows(evaluation).items()}


def paired_change(
    before: Evaluation, after: Evaluation, reward: str, rows: Sequence[int] | None = None
) -> Summary:
    """Mean change of a reward and its standard error over the prompts (or some of them).

    Both evaluations start from the same noise for the same prompt, so the differences prompt by prompt
    are summarised: their error is smaller than that of two independent means.

    Raises:
        ValueError: the two are not of the same prompts.
    """
    if before.prompts != after.prompts:
        raise ValueError(
            f"evaluations of {len(before.prompts)} and {len(after.prompts)} different prompts cannot be "
            "compared; evaluate both on the same prompt file"
        )
    old, new = before.scores[reward], after.scores[reward]
    chosen = range(len(old)) if rows is None else rows
    return summarise([new[row] - old[row] for row in chosen])


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the table: a reward, or one group of it (``group`` is then its name)."""

    reward: str
    group: str | None
    before: Summary
    after: Summary | None
    change: Summary | None


def compare(before: Evaluation, after: Evaluation | None) -> list[ComparisonRow]:
    """The lines of the table before/after: each reward, and below it, by group, those that are rates.

    A reward is a rate if all its scores are 0 or 1 (an exact match). Without any, the first reward is
    split by group.
    """
    shared = [name for name in before.scores if after is None or name in after.scores]
    every: list[int] = list(range(len(before.prompts)))
    rates = [name for name in shared if _is_rate(before, name) and (after is None or _is_rate(after, name))]
    lines = []
    for name in shared:
        lines.append(_line(before, after, name, None, every))
        if name in (rates or shared[:1]):
            groups = group_rows(before).items()
            lines += [_line(before, after, name, group, rows) for group, rows in groups]
    return lines


def alarms(before: Evaluation, after: Evaluation, trained: Sequence[str]) -> list[str]:
    """A line for each reward that is only watched and falls while a trained one rises, as a hacked one does.

    Both changes lie beyond two standard errors over the prompts.
    """
    changes = {name: paired_change(before, after, name) for name in before.scores if name in after.scores}
    risen = [name for name in trained if name in changes and moved(changes[name]) > 0]
    if not risen:
        return []
    return [
        f"alarm: held-out {name}, not trained, fell by {format_summary(_negative(change))} while"
        f" {', '.join(risen)} rose: look at the images, the trained reward may be hacked"
        for name, change in changes.items()
        if name not in trained and moved(change) < 0
    ]


def moved(change: Summary) -> int:
    """1, -1, or 0 where the change lies within two standard errors or has none."""
    if not abs(change.mean) > 2 * change.standard_error:
        return 0
    return 1 if change.mean > 0 else -1


def _negative(change: Summary) -> Summary:
    return Summary(-change.mean, change.standard_error, change.count, change.missing)


def evaluation_table(before: Evaluation, after: Evaluation | None = None) -> Table:
    """The comparison as a table for the console; with ``before`` alone, its means."""
    table = Table(
        title=f"Held-out, {len(before.prompts)} prompts (± standard error)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("reward", overflow="fold")
    table.add_column(moment(before), justify="right")
    if after is not None:
        table.add_column(moment(after), justify="right")
        table.add_column("change", justify="right")
    for line in compare(before, after):
        name = line.reward if line.group is None else f"  {line.group}"
        cells: list[str | Text] = [format_summary(line.before, error=after is None)]
        if line.after is not None and line.change is not None:
            cells += [format_summary(line.after, error=False), _styled_change(line.change)]
        table.add_row(Text(visible(name)), *cells)
    return table


def steps_table(results: Mapping[int, Evaluation]) -> Table:
    """Evaluations of one model by number of sampling steps, a column each, for the console."""
    evaluations = list(results.values())
    table = Table(
        title=f"Held-out, {len(evaluations[0].prompts)} prompts, by sampling steps (± standard error)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("reward", overflow="fold")
    for steps in results:
        table.add_column(f"{steps} steps", justify="right")
    for lines in zip(*(compare(each, None) for each in evaluations), strict=True):
        name = lines[0].reward if lines[0].group is None else f"  {lines[0].group}"
        table.add_row(Text(visible(name)), *(format_summary(line.before) for line in lines))
    return table


def score_text(value: float, *, signed: bool = False) -> str:
    """Three decimals; what is too long for a column with them, in powers of ten."""
    return format(value, f"{'+' if signed else ''}{'.3f' if abs(value) < 1e6 else '.4g'}")


def format_summary(summary: Summary, *, error: bool = True, signed: bool = False) -> str:
    """A mean with three decimals, its error, and how many scores are missing."""
    if summary.count == 0:
        return "no score"
    text = score_text(summary.mean, signed=signed)
    if error and not math.isnan(summary.standard_error):
        text += f" ± {score_text(summary.standard_error)}"
    return text + (f" ({summary.missing} missing)" if summary.missing else "")


def _is_rate(evaluation: Evaluation, reward: str) -> bool:
    return all(score in (0.0, 1.0) or math.isnan(score) for score in evaluation.scores[reward])


def _line(
    before: Evaluation, after: Evaluation | None, reward: str, group: str | None, rows: Sequence[int]
) -> ComparisonRow:
    return ComparisonRow(
        reward,
        group,
        before=summarise([before.scores[reward][row] for row in rows]),
        after=None if after is None else summarise([after.scores[reward][row] for row in rows]),
        change=None if after is None else paired_change(before, after, reward, rows),
    )


def moment(evaluation: Evaluation) -> str:
    """When it was made, as a heading."""
    if evaluation.iteration == 0:
        return "before"
    return f"after {evaluation.iteration} iteration{'' if evaluation.iteration == 1 else 's'}"


def _styled_change(change: Summary) -> Text:
    return Text(format_summary(change, signed=True), {1: "green", -1: "red", 0: ""}[moved(change)])
