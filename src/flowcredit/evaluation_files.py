"""Evaluations as files of a run: JSON for the scores, a PNG grid for the images."""

import json
import math
from pathlib import Path
from typing import Any

from flowcredit.comparison import Evaluation, Summary, group_means, summarise
from flowcredit.disk import writing
from flowcredit.errors import InputError, misfit
from flowcredit.image_grid import Layout, save_grid
from flowcredit.run_folder import RunFolder, write_text
from flowcredit.text_file import read_text


def save_evaluation(evaluation: Evaluation, run_dir: Path) -> Path:
    """Write ``evaluations/NNNNNN.json`` and, of kept images, ``images/NNNNNN.png``; the JSON's path."""
    folder = RunFolder(run_dir)
    layout = None
    if evaluation.images is not None and len(evaluation.images) > 0:
        grid = folder.images(evaluation.iteration)
        with writing(grid):
            layout = save_grid(evaluation.images, grid)
    path = folder.evaluation(evaluation.iteration)
    write_text(path, json.dumps(to_json(evaluation, layout), indent=1, allow_nan=False) + "\n")
    return path


def to_json(evaluation: Evaluation, layout: Layout | None = None) -> dict[str, Any]:
    """An object for JSON: the scores (null for none), and for a reader's eye their means."""
    rewards = {}
    for name, scores in evaluation.scores.items():
        groups = {group: _summary_json(s) for group, s in group_means(evaluation, name).items()}
        rewards[name] = {
            **_summary_json(summarise(scores)),
            **({"groups": groups} if groups else {}),
            "scores": [_number(score) for score in scores],
        }
    return {
        "iteration": evaluation.iteration,
        "seconds": _number(evaluation.seconds),
        "rewards": rewards,
        "group_by": evaluation.group_by,
        "groups": list(evaluation.groups),
        "images": None if layout is None else vars(layout),
        "prompts": list(evaluation.prompts),
    }


def load_evaluation(path: Path) -> tuple[Evaluation, Layout | None]:
    """Read what `save_evaluation` wrote, and how its images lie in their grid.

    Raises:
        InputError: the file cannot be read, or is no evaluation.
    """
    try:
        content = json.loads(read_text(path, "an evaluation"))
        layout = None if content["images"] is None else Layout(**content["images"])
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise _no_evaluation(path, error) from error
    return from_json(content, path), layout


def from_json(content: Any, path: Path) -> Evaluation:
    """The evaluation that `to_json` made an object of; ``path`` is where it was found.

    Raises:
        InputError: it is no evaluation.
    """
    try:
        return Evaluation(
            iteration=content["iteration"],
            prompts=tuple(content["prompts"]),
            scores={
                name: tuple(math.nan if s is None else float(s) for s in reward["scores"])
                for name, reward in content["rewards"].items()
            },
            group_by=content["group_by"],
            groups=tuple(content["groups"]),
            seconds=math.nan if content["seconds"] is None else content["seconds"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _no_evaluation(path, error) from error


def _no_evaluation(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path}: not an evaluation of flowcredit ({misfit(error)}); expected a file that a run wrote"
    )


def _summary_json(summary: Summary) -> dict[str, Any]:
    return {
        "mean": _number(summary.mean),
        "standard_error": _number(summary.standard_error),
        "count": summary.count,
        "missing": summary.missing,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
