"""The page of a comparison: one HTML file, and the same as Markdown and JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowcredit.compare.arms import Comparison
from flowcredit.compare.budget import Budget
from flowcredit.compare.results import (
    ArmResult,
    Estimate,
    Finished,
    Means,
    Results,
    estimate,
    final,
    paired,
    read_results,
)
from flowcredit.compare.runs import Run
from flowcredit.compare.tables import (
    Table,
    best_seed,
    cost_table,
    differing,
    markdown,
    published,
    score_tables,
    settings_table,
)
from flowcredit.published import PUBLISHED
from flowcredit.report.parts import inline_svg, with_figures
from flowcredit.report.run_data import Snapshot
from flowcredit.report.tiles import tiles
from flowcredit.run_folder import write_text
from flowcredit.visible import markdown as markdown_text


def write_page(
    comparison: Comparison, budget: Budget, runs: Sequence[Run], out: Path, notes: Sequence[str]
) -> list[str]:
    """Write ``comparison.html``, ``results.md`` and ``results.json`` into ``out``; lines for the console.

    ``notes`` stand at the top, before what is found missing. Raises InputError where the packages for pages
    are not installed, or a file of a run cannot be read.
    """
    environment = with_figures()
    from flowcredit.compare.figures import learning_curves

    results = read_results(runs, out, comparison.steps)
    all_notes = [*notes, *results.notes]
    title = comparison.title or comparison.name
    scores = score_tables(results, comparison.steps)
    others = [cost_table(results), settings_table(results)]
    beside = [published(PUBLISHED[name]) for name in comparison.beside]
    page = environment.get_template("comparison_page.html.j2").render(
        title=title,
        status=_status(results, budget),
        notes=all_notes,
        scores=scores,
        published=beside,
        curves=inline_svg(learning_curves(results)),
        costs=others[0],
        settings=others[1],
        heads=["before training", *(arm.arm.name for arm in results.arms if arm.finished)],
        samples=_samples(results, comparison.images),
        arms=[(arm.arm.name, str(arm.arm.recipe), " ".join(arm.arm.overrides)) for arm in results.arms],
    )
    write_text(out / "comparison.html", page)
    text = _markdown(title, _status(results, budget), all_notes, [*scores, *beside, *others])
    write_text(out / "results.md", text)
    found = to_json(comparison, budget, results, all_notes)
    write_text(out / "results.json", json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return [*(markdown(scores[0]).splitlines()), "", *all_notes, f"page: {out / 'comparison.html'}"]


def _status(results: Results, budget: Budget) -> str:
    done = sum(len(arm.finished) for arm in results.arms)
    total = sum(len(arm.runs) for arm in results.arms)
    whole = f"{total} runs" if done == total else f"{done} of {total} runs so far"
    return f"{len(results.arms)} arms, {whole}, {budget.words} a run"


@dataclass(frozen=True)
class _Sample:
    """A prompt with a picture for each heading, as data URIs, with what stands below each."""

    prompt: str
    pictures: tuple[tuple[str, str], ...]
    small: bool


def _samples(results: Results, count: int) -> list[_Sample]:
    """The same prompts from the same noises: before training, and the best of each arm's seeds."""
    arms = [arm for arm in results.arms if arm.finished]
    if results.first is None or not arms or count == 0:
        return []
    reward = arms[0].trained[0]
    old = tiles(results.first)
    new = {each.run.name: tiles(each.last) for arm in arms for each in arm.finished}
    evaluation = results.first.evaluation
    samples = []
    for place in _spread(len(old), count):
        pictures = [(old[place], _score(evaluation.scores.get(reward, ()), place))]
        pictures += [_best(arm, place, evaluation.prompts[place], new) for arm in arms]
        small = results.first.layout is not None and results.first.layout.enlarged > 1
        samples.append(_Sample(evaluation.prompts[place], tuple(pictures), small))
    return samples


def _best(arm: ArmResult, place: int, prompt: str, pictures: dict[str, list[str]]) -> tuple[str, str]:
    """The picture of a prompt by the arm's best seed, by the reward that it trained first; and its score."""
    of_prompt = [each for each in arm.finished if _shows(each.last, place, prompt, pictures[each.run.name])]
    found = best_seed(of_prompt, arm.trained[0], place)
    if found is None:
        return "", "no image"
    best, score = found
    return pictures[best.run.name][place], f"{score:.2f}, seed {best.run.seed}"


def _shows(last: Snapshot, place: int, prompt: str, pictures: Sequence[str]) -> bool:
    prompts = last.evaluation.prompts
    return place < min(len(prompts), len(pictures)) and prompts[place] == prompt


def _spread(there: int, wanted: int) -> list[int]:
    """Places spread evenly over those that there are."""
    count = min(there, wanted)
    return [place * there // count for place in range(count)]


def _score(scores: Sequence[float], place: int) -> str:
    return f"{scores[place]:.2f}" if place < len(scores) and math.isfinite(scores[place]) else ""


def _markdown(title: str, status: str, notes: Sequence[str], tables: Sequence[Table]) -> str:
    head = [f"# {markdown_text(title)}", "", status, ""]
    head += [f"- {markdown_text(note)}" for note in notes] + ([""] if notes else [])
    return "\n".join(head) + "\n" + "\n".join(markdown(table) for table in tables)


def to_json(comparison: Comparison, budget: Budget, results: Results, notes: Sequence[str]) -> dict[str, Any]:
    """Every number of the page, null where there is none."""
    settings = differing([arm.runs[0].recipe for arm in results.arms])
    first = results.arms[0]
    return {
        "name": comparison.name,
        "budget": {"kind": budget.kind, "amount": budget.amount},
        "seeds": list(comparison.seeds),
        "notes": list(notes),
        "before": {str(steps): _numbers(means) for steps, means in results.before.items()},
        "arms": [
            {
                "name": arm.arm.name,
                "recipe": str(arm.arm.recipe),
                "overrides": list(arm.arm.overrides),
                "settings": {name: values[place] for name, values in settings.items()},
                "trained_on": list(arm.trained),
                "scores": {reward: _summary(first, arm, reward) for reward in results.rewards},
                "runs": [_run(each) for each in arm.finished],
            }
            for place, arm in enumerate(results.arms)
        ],
    }


def _summary(first: ArmResult, arm: ArmResult, reward: str) -> dict[str, Any]:
    values = final(arm, reward)
    difference = paired(final(first, reward), values)
    return {
        **_estimate(estimate(list(values.values()))),
        "difference_from_first": None if arm is first else _estimate(difference),
    }


def _run(each: Finished) -> dict[str, Any]:
    return {
        "seed": each.run.seed,
        "folder": str(each.run.folder),
        "iterations": each.run.iterations,
        "peak_memory_bytes": each.peak or None,
        "steps": {str(steps): _numbers(means) for steps, means in each.steps.items()},
        "points": [
            {
                "iteration": point.iteration,
                "velocity_evaluations": point.cost.velocity_evaluations,
                "rollout_evaluations": point.cost.rollout,
                "decodes": point.cost.decodes,
                "reward_calls": point.cost.reward_calls,
                "seconds": _number(point.seconds),
                "scores": _numbers(point.means),
            }
            for point in each.points
        ],
    }


def _estimate(each: Estimate) -> dict[str, Any]:
    return {"mean": _number(each.mean), "interval_95": _number(each.half), "seeds": each.count}


def _numbers(values: Means) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
