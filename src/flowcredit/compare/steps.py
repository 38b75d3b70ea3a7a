"""Scores of one model by number of sampling steps, in files beside its run."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from flowcredit.errors import InputError


def steps_command(source: Path, beside: Path, counts: Sequence[int]) -> list[str]:
    """The words that evaluate a run or a recipe at some numbers of steps, behind ``flowcredit``."""
    file = beside.with_name(f"{beside.name}.steps-{'-'.join(map(str, counts))}.json")
    return ["evaluate", str(source), *(f"--steps={count}" for count in counts), "--out", str(file)]


def steps_there(beside: Path) -> dict[int, Path]:
    """The numbers of steps that are evaluated, and in which file."""
    pattern = re.compile(re.escape(beside.name) + r"\.steps-([0-9]+(?:-[0-9]+)*)\.json")
    found: dict[int, Path] = {}
    for file in sorted(beside.parent.iterdir()) if beside.parent.is_dir() else ():
        if match := pattern.fullmatch(file.name):
            found |= {int(count): file for count in match[1].split("-")}
    return found


def read_steps(file: Path, count: int) -> object:
    """The evaluation at one number of steps, as JSON has it. InputError where the file is not whole."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        # With one number of steps the command writes the evaluation alone.
        found: object = content["steps"][str(count)] if "steps" in content else content
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); remove it and give the command again") from None
    return found
