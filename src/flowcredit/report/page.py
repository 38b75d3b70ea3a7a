"""The report: what a run's folder holds, put into words, tables, pictures and curves."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowcredit.comparison import ComparisonRow, Summary, alarms, compare, format_summary, moment, moved
from flowcredit.console import duration
from flowcredit.report import figures
from flowcredit.report.changes import Change, extremes
from flowcredit.report.diagnosis_files import described, diagnosis_of_run, pictures
from flowcredit.report.origin import environment_of, origin_of, repetition
from flowcredit.report.parts import extras
from flowcredit.report.run_data import RunData, Snapshot, comparable, read_run
from flowcredit.report.tiles import tiles
from flowcredit.run_folder import write_text


def build_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run's folder, complete in itself, and return its path.

    Reads ``recipe.yaml``, ``log.jsonl``, ``evaluations/`` and ``images/``. A run that is under way, was
    killed, or has no evaluation yet gets the parts that there are.

    Raises:
        InputError: the folder is no run, or jinja2 is not installed, or matplotlib where the folder holds a
            diagnosis, whose figures it draws.
    """
    data = read_run(run_dir)
    environment = extras()
    diagnosis = diagnosis_of_run(run_dir)
    before, after = comparable(data.snapshots)
    pairs = _pairs(data, before, after)
    page = environment.get_template("page.html.j2").render(
        name=data.name,
        status=_status(data),
        notes=[*data.notes, *_absences(data, before, after)],
        alarms=_alarms(data, before, after),
        facts=_facts(data),
        table=_table(data, before, after),
        pairs=pairs,
        before_name="" if before is None else moment(before.evaluation),
        after_name="" if after is None else moment(after.evaluation),
        learning=figures.learning_curves(data),
        training=figures.training_curves(data),
        by_step=figures.step_curves(data),
        extremes=_extremes(data, before, after, pairs),
        diagnosis=[] if diagnosis is None else pictures(diagnosis),
        diagnosis_of="" if diagnosis is None else described(diagnosis),
        timings=_timings(data),
        recipe_text=data.recipe_text,
        origin=origin_of(data),
        again=repetition(run_dir, data),
        environment=environment_of(run_dir),
    )
    path = run_dir / "report.html"
    write_text(path, page)
    return path


def _status(data: RunData) -> str:
    done = f"{data.iterations} of {data.planned} iterations"
    seconds = data.column("seconds")
    if seconds and math.isfinite(seconds[-1]):
        done += f" in {duration(seconds[-1])}"
    if data.iterations >= data.planned:
        return done
    return f"unfinished: {done}; while it runs, the page is written anew after each evaluation"


def _alarms(data: RunData, before: Snapshot | None, after: Snapshot | None) -> list[str]:
    said = [
        f"Collapse at iteration {each['iteration']}: {each['why']}; {each['done']}." for each in data.guard
    ]
    if before is None or after is None:
        return said
    return [*said, *alarms(before.evaluation, after.evaluation, data.trained)]


def _absences(data: RunData, before: Snapshot | None, after: Snapshot | None) -> list[str]:
    said = []
    if before is None:
        said.append("There is no evaluation yet: table, images and learning curves follow with it.")
    elif after is None:
        said.append("There is one evaluation so far; what changed is shown once there is a second.")
    if not data.log:
        said.append("No iteration is finished yet.")
    missing = [
        (name, int(sum(value for value in data.column(f"missing/{name}") if value > 0)))
        for name in data.trained
    ]
    said += [f"{name}: {count} rollout images had no score." for name, count in missing if count]
    return said


def _facts(data: RunData) -> list[tuple[str, str]]:
    """What was run, in the words of the recipe; a setting that the recipe lacks is left out."""
    recipe = data.recipe
    model, algorithm = _section(recipe, "model"), _section(recipe, "algorithm")
    train, grid, noise = _section(recipe, "train"), _section(recipe, "grid"), _section(recipe, "noise")
    weights, prompts = _section(recipe, "weights"), _section(recipe, "prompts")
    watched = [str(reward["name"]) for reward in recipe.get("watch") or () if "name" in reward]
    settings = _listing(algorithm, leave_out=("name", "num_steps"))
    facts = [
        ("Model", _joined(model.get("path"), _size(model))),
        ("Method", _joined(algorithm.get("name"), settings)),
        ("Time grid", _joined(grid.get("kind"), _number_of(algorithm.get("num_steps"), "step"))),
        ("Noise", _joined(noise.get("kind"), _named("η", noise.get("eta")))),
        ("Rewards trained", ", ".join(data.trained)),
        ("Rewards only watched", ", ".join(watched)),
        ("Prompts", _joined(prompts.get("train"), _named("held out:", prompts.get("heldout")))),
        (
            "Update",
            _joined(
                _named("learning rate", train.get("learning_rate")),
                _number_of(train.get("prompts_per_iteration"), "prompt an iteration", "prompts an iteration"),
                _named("update", train.get("update")),
                _named("clip", train.get("clip_range")),
                _named("weights", weights.get("method")),
            ),
        ),
        ("Seed", str(recipe.get("seed", ""))),
    ]
    return [(name, text) for name, text in facts if text]


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = recipe.get(name)
    return found if isinstance(found, Mapping) else {"name": found} if isinstance(found, str) else {}


def _joined(*parts: object) -> str:
    return "; ".join(str(part) for part in parts if part not in (None, ""))


def _named(name: str, value: object) -> str:
    return "" if value is None else f"{name} {value}"


def _number_of(value: object, one: str, many: str | None = None) -> str:
    return "" if value is None else f"{value} {one if value == 1 else many or one + 's'}"


def _size(model: Mapping[str, Any]) -> str:
    return f"{model['width']}×{model['height']} pixels" if {"width", "height"} <= model.keys() else ""


def _listing(section: Mapping[str, Any], leave_out: Sequence[str]) -> str:
    return ", ".join(
        f"{key.replace('_', ' ')} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in section.items()
        if key not in leave_out
    )


@dataclass(frozen=True)
class _Line:
    """A row of the table as text, with the places of its marks in percent where the means are shares."""

    name: str
    group: bool
    role: str
    before: str
    after: str
    change: str
    direction: str
    marks: tuple[float, float] | None


def _table(data: RunData, before: Snapshot | None, after: Snapshot | None) -> list[_Line]:
    if before is None:
        return []
    return [
        _line(line, "trained" if line.reward in data.trained else "not trained")
        for line in compare(before.evaluation, None if after is None else after.evaluation)
    ]


def _line(line: ComparisonRow, role: str) -> _Line:
    change, direction = "", ""
    if line.change is not None and line.change.count:
        change, direction = format_summary(line.change, signed=True), _direction(line.change)
    means = (line.before.mean, (line.after or line.before).mean)
    shares = all(0 <= mean <= 1 for mean in means)
    return _Line(
        name=line.reward if line.group is None else line.group,
        group=line.group is not None,
        role="" if line.group is not None else role,
        before=format_summary(line.before, error=line.after is None),
        after="" if line.after is None else format_summary(line.after, error=False),
        change=change,
        direction=direction,
        marks=(100 * means[0], 100 * means[1]) if shares else None,
    )


def _direction(change: Summary) -> str:
    """Up or down where the change is beyond two standard errors."""
    return {1: "up", -1: "down", 0: "same"}[moved(change)]


@dataclass(frozen=True)
class _Pair:
    prompt: str
    before: str
    after: str | None
    score_before: str
    score_after: str
    small: bool


def _pairs(data: RunData, before: Snapshot | None, after: Snapshot | None) -> list[_Pair]:
    """The images of the same prompts before and after, with the first trained reward's scores."""
    if before is None:
        return []
    old = tiles(before)
    new = tiles(after) if after is not None else []
    reward = next((name for name in data.trained if name in before.evaluation.scores), None)
    return [
        _Pair(
            prompt=prompt,
            before=tile,
            after=new[index] if index < len(new) else None,
            score_before=_score(before, reward, index),
            score_after=_score(after, reward, index),
            small=before.layout is not None and before.layout.enlarged > 1,
        )
        for index, (prompt, tile) in enumerate(zip(before.evaluation.prompts, old, strict=False))
    ]


def _extremes(
    data: RunData, before: Snapshot | None, after: Snapshot | None, pairs: Sequence[_Pair]
) -> list[tuple[str, list[tuple[Change, _Pair | None]]]]:
    """Under two headings the prompts that changed most, with their images where those were kept."""
    weights = {str(each["name"]): float(each.get("weight", 1.0)) for each in data.recipe["rewards"]}
    titles = ("Rose most", "Fell most")
    count = 0 if before is None else len(pairs) or len(before.evaluation.prompts)
    shown = zip(titles, extremes(before, after, weights, count), strict=True)
    return [
        (title, [(each, pairs[each.place] if each.place < len(pairs) else None) for each in found])
        for title, found in shown
        if found
    ]


def _score(snapshot: Snapshot | None, reward: str | None, index: int) -> str:
    scores = snapshot.evaluation.scores.get(reward, ()) if snapshot is not None and reward else ()
    return f"{scores[index]:.2f}" if index < len(scores) and math.isfinite(scores[index]) else ""


def _timings(data: RunData) -> list[tuple[str, str]]:
    def last(key: str) -> float:
        values = data.column(key)
        return values[-1] if values else math.nan

    seconds = data.column("seconds")
    steps = [b - a for a, b in pairwise([0.0, *seconds]) if math.isfinite(b - a)]
    evaluating = [s.evaluation.seconds for s in data.snapshots if math.isfinite(s.evaluation.seconds)]
    spent = last("velocity_evaluations")
    rows = [
        ("Training", duration(last("seconds")) if math.isfinite(last("seconds")) else ""),
        ("Median iteration", f"{statistics.median(steps):.1f} s" if steps else ""),
        ("Held-out evaluations", f"{duration(sum(evaluating))} for {len(evaluating)}" if evaluating else ""),
        ("Velocity evaluations in rollouts", _count(spent)),
        ("Images decoded in rollouts", _count(last("decodes"))),
        ("Scores in rollouts", _count(last("reward_calls"))),
    ]
    return [(name, text) for name, text in rows if text]


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else ""
