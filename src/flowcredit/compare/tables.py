"""The tables of a comparison, as texts in rows: scores, differences, costs, settings."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowcredit.compare.results import ArmResult, Estimate, Finished, Results, estimate, final, paired
from flowcredit.compare.runs import ITS_OWN
from flowcredit.config import Recipe
from flowcredit.published import Published
from flowcredit.recipe_io import recipe_diff
from flowcredit.visible import markdown as markdown_text

NONE = "–"
"""What stands where there is no value."""
MOST_COLUMNS = 6
"""Arms that stand side by side in the table of settings."""


@dataclass(frozen=True)
class Cell:
    """A text; ``trained``: a score of a reward that its arm was trained on; ``direction``: up or down where a
    difference lies beyond its interval."""

    text: str
    trained: bool = False
    direction: str = ""


@dataclass(frozen=True)
class Table:
    """``columns`` are headings, each with a remark below it; ``rows`` a name and a cell a column."""

    title: str
    note: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def score_tables(results: Results, steps: Sequence[int]) -> list[Table]:
    """Scores and their differences from the first arm: at the recipes' own number of steps, and others."""
    own = {arm.own_steps for arm in results.arms}
    alone = own.pop() if len(own) == 1 else None
    counts: list[int | None] = [None]
    counts += [count for count in sorted(steps) if count != alone]
    tables = []
    for count in counts:
        shown = alone if count is None else count
        at = f", {shown} sampling steps" if shown is not None else ""
        tables.append(_scores(results, count, at))
        if len(results.arms) > 1:
            tables.append(_differences(results, count, at))
    return tables


def _scores(results: Results, steps: int | None, at: str) -> Table:
    rewards = results.rewards
    found = {
        (arm.arm.name, reward): estimate(list(final(arm, reward, steps).values()))
        for arm in results.arms
        for reward in rewards
    }
    digits = {reward: decimals([found[arm.arm.name, reward] for arm in results.arms]) for reward in rewards}
    seeds = max((len(arm.runs) for arm in results.arms), default=0)
    lead = next((arm.own_steps for arm in results.arms if arm.finished), 0)
    before = results.before.get(lead if steps is None else steps, {})
    rows = [("before training", tuple(Cell(_number(before.get(name), digits[name])) for name in rewards))]
    for arm in results.arms:
        cells = [
            Cell(
                show(found[arm.arm.name, reward], digits[reward], of=len(arm.runs))
                if final(arm, reward, steps)
                else "not there yet",
                trained=reward in arm.trained,
            )
            for reward in rewards
        ]
        rows.append((arm.arm.name, tuple(cells)))
    spread = (
        f"Mean over {seeds} seeds ± half its 95 % interval (Student's t)."
        if seeds > 1
        else "One seed: there is no interval."
    )
    note = f"{spread} Bold: the arm was trained on this reward; the others were only measured."
    return Table(f"Held-out scores{at}", note, _headings(results), tuple(rows))


def _differences(results: Results, steps: int | None, at: str) -> Table:
    first, *others = results.arms
    rewards = results.rewards
    found = {
        (arm.arm.name, reward): paired(final(first, reward, steps), final(arm, reward, steps))
        for arm in others
        for reward in rewards
    }
    digits = {reward: decimals([found[arm.arm.name, reward] for arm in others]) for reward in rewards}
    rows = [
        (
            arm.arm.name,
            tuple(
                Cell(
                    show(found[arm.arm.name, reward], digits[reward], of=len(arm.runs), signed=True)
                    if found[arm.arm.name, reward].count
                    else NONE,
                    reward in arm.trained,
                    _direction(found[arm.arm.name, reward]),
                )
                for reward in rewards
            ),
        )
        for arm in others
    ]
    note = (
        "Mean over seeds of the difference of runs of the same seed ± half its 95 % interval; an arrow marks"
        " one beyond its interval, of which chance makes about one in twenty."
    )
    return Table(f"Difference from {first.arm.name}{at}", note, _headings(results), tuple(rows))


def _headings(results: Results) -> tuple[tuple[str, str], ...]:
    return tuple((reward, _role(results, reward)) for reward in results.rewards)


def _role(results: Results, reward: str) -> str:
    count = sum(reward in arm.trained for arm in results.arms)
    if count == 0:
        return "held out"
    return "trained on" if count == len(results.arms) else "trained on by some"


def cost_table(results: Results) -> Table:
    """What the runs of each arm took."""
    columns = (
        ("iterations", ""),
        ("velocity evaluations", "in all"),
        ("in rollouts", ""),
        ("reward calls", ""),
        ("minutes", "of training"),
        ("memory", "of the process"),
    )
    note = "Of one run. Minutes and memory were measured on a machine shared by the runs; ± as above."
    rows = tuple((arm.arm.name, tuple(Cell(text) for text in _costs(arm))) for arm in results.arms)
    return Table("Cost", note, columns, rows)


def _costs(arm: ArmResult) -> list[str]:
    ends = [run.costs()[-1] for run in arm.runs]
    minutes = estimate([each.end.seconds / 60 for each in arm.finished])
    peaks = [each.peak for each in arm.finished if each.peak]
    return [
        _span([run.iterations for run in arm.runs]),
        _span([cost.velocity_evaluations for cost in ends]),
        _span([cost.rollout for cost in ends]),
        _span([cost.reward_calls for cost in ends]),
        show(minutes, decimals([minutes]), of=len(arm.runs)) if minutes.count else NONE,
        f"{statistics.median(peaks) / 2**30:.2f} GiB" if peaks else NONE,
    ]


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def settings_table(results: Results) -> Table:
    """The settings in which the arms' recipes differ: a column for each arm, or a row where they are many."""
    names = [arm.arm.name for arm in results.arms]
    by_setting = differing([arm.runs[0].recipe for arm in results.arms])
    note = "All other settings are the same; – stands for none, or for a setting that a method does not have."
    rows = {setting: tuple(Cell(_value(value)) for value in values) for setting, values in by_setting.items()}
    if len(names) <= MOST_COLUMNS or not rows:
        columns = tuple((name, "") for name in names)
        return Table("Settings that differ", note, columns, tuple(rows.items()))
    turned = tuple(zip(names, zip(*rows.values(), strict=True), strict=True))
    return Table("Settings that differ", note, tuple((setting, "") for setting in rows), turned)


def differing(recipes: Sequence[Recipe]) -> Mapping[str, list[Any]]:
    """Values of each recipe by setting, for the settings that are not the same in all."""
    changes = [{change.setting: change for change in recipe_diff(recipes[0], each)} for each in recipes]
    named = [setting for each in changes for setting in each if setting not in ITS_OWN]
    firsts = {setting: change.before for each in changes for setting, change in each.items()}
    return {
        setting: [each[setting].after if setting in each else firsts[setting] for each in changes]
        for setting in dict.fromkeys(named)
    }


def published(table: Published) -> Table:
    """A paper's table, to stand below one's own; each column with the decimals of its longest number."""
    texts = [[f"{value:g}" for value in values] for _, values in table.rows]
    digits = [max(len(text.partition(".")[2]) for text in column) for column in zip(*texts, strict=True)]
    rows = tuple(
        (name, tuple(Cell(f"{value:.{count}f}") for value, count in zip(values, digits, strict=True)))
        for name, values in table.rows
    )
    columns = tuple((column, "") for column in table.columns)
    return Table(f"Published: {table.source}", f"{table.test}.", columns, rows)


def markdown(table: Table) -> str:
    """The table for a Markdown page, with its title and note."""
    heads = [f"{name} ({remark})" if remark else name for name, remark in table.columns]
    lines = [f"## {markdown_text(table.title)}", "", markdown_text(table.note), ""]
    lines.append("| | " + " | ".join(map(markdown_text, heads)) + " |")
    lines.append("|---" * (len(heads) + 1) + "|")
    for name, cells in table.rows:
        texts = [_markdown_cell(cell) for cell in cells]
        lines.append(f"| {markdown_text(name)} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: Cell) -> str:
    text = f"**{markdown_text(cell.text)}**" if cell.trained else markdown_text(cell.text)
    arrow = {"up": " ▲", "down": " ▼"}.get(cell.direction, "")
    return text + arrow


def decimals(estimates: Sequence[Estimate]) -> int:
    """Decimals for a column: two digits of the typical half width, or four digits in all without one."""
    largest = max((abs(each.mean) for each in estimates if not math.isnan(each.mean)), default=0.0)
    # What is left of equal values is rounding.
    halves = [each.half for each in estimates if each.half > 1e-9 * largest]
    if halves:
        return min(6, max(0, 1 - math.floor(math.log10(statistics.median(halves)))))
    if largest == 0:
        return 3
    return min(6, max(0, (3 if largest >= 1 else 2) - math.floor(math.log10(largest))))


def show(each: Estimate, digits: int, of: int = 0, signed: bool = False) -> str:
    """A mean with its half width; how many of ``of`` seeds it is of, where some are missing."""
    if each.count == 0:
        return "no score"
    text = f"{each.mean:{'+' if signed else ''}z.{digits}f}"
    if not math.isnan(each.half):
        text += f" ± {each.half:.{digits}f}"
    return text + (f" ({each.count} of {of} seeds)" if each.count < of else "")


def best_seed(runs: Sequence[Finished], reward: str, place: int) -> tuple[Finished, float] | None:
    """The run whose image of a prompt a reward likes best, and the score; None where none has a score."""
    scored = []
    for each in runs:
        scores = each.last.evaluation.scores.get(reward, ())
        if place < len(scores) and not math.isnan(scores[place]):
            scored.append((each, scores[place]))
    return max(scored, key=lambda pair: pair[1], default=None)


def _direction(each: Estimate) -> str:
    if not abs(each.mean) > each.half:
        return ""
    return "up" if each.mean > 0 else "down"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _value(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, tuple | list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
