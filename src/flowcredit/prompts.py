"""Prompt sets: what a prompt file holds, and which prompts an iteration draws."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError
from flowcredit.shapes import bundled_path
from flowcredit.text_file import read_text

PROMPT_KEY = "prompt"


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order. Equal texts in two rows stay two prompts, each with its own columns."""

    prompts: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The file's other keys, each aligned with ``prompts``; None where a row lacks the key."""
    source: str = "the command line"
    """Where the prompts come from, for messages."""
    skipped_blank: int = 0
    """Lines of the file that held nothing."""

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self.prompts):
                raise ValueError(f"column '{name}' has {len(values)} values for {len(self.prompts)} prompts")

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Iterable[int]) -> "PromptSet":
        """The prompts at ``rows``, in that order and as often as they are named."""
        wanted = list(rows)
        return PromptSet(
            prompts=tuple(self.prompts[row] for row in wanted),
            columns={name: tuple(values[row] for row in wanted) for name, values in self.columns.items()},
            source=self.source,
        )

    def describe(self) -> str:
        """One line: how many prompts, from where, and how many blank lines were passed over."""
        text = f"{len(self)} {_plural(len(self), 'prompt')} from {self.source}"
        if self.skipped_blank:
            text += f" ({self.skipped_blank} blank {_plural(self.skipped_blank, 'line')} skipped)"
        return text


def load_prompts(path: str | Path) -> PromptSet:
    """Reads a prompt file: one prompt a line (``.txt``), or one JSON object a line (``.jsonl``).

    A ``.jsonl`` row needs the key "prompt"; its other keys become columns, which rewards may ask for.
    Names that begin with ``bundled:`` (``bundled:shapes/train``) stand for files in the package.
    Raises InputError with file and line for whatever cannot be read.
    """
    source = str(path)
    file = bundled_path(source)
    if file.suffix.lower() not in (".txt", ".jsonl"):
        raise InputError(
            f"{source}: expected a prompt file that ends in .txt (one prompt a line) or .jsonl "
            f'(one JSON object a line, with the key "{PROMPT_KEY}")'
        )
    lines = read_text(file, "a prompt file").split("\n")
    if lines[-1] == "":
        lines.pop()
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise InputError(f"{source}: holds no prompts; expected at least one line that is not blank")
    skipped = len(lines) - len(filled)
    if file.suffix.lower() == ".txt":
        return PromptSet(tuple(line.strip() for _, line in filled), source=source, skipped_blank=skipped)
    rows = [_json_row(f"{source}:{number}", line) for number, line in filled]
    names = dict.fromkeys(key for row in rows for key in row if key != PROMPT_KEY)
    return PromptSet(
        prompts=tuple(row[PROMPT_KEY] for row in rows),
        columns={name: tuple(row.get(name) for row in rows) for name in names},
        source=source,
        skipped_blank=skipped,
    )


def iteration_prompts(count: int, seed: int, iteration: int, per_iteration: int) -> list[int]:
    """The rows, each in 0..count-1, that ``iteration`` (from 0) draws.

    All iterations together read one endless stream: the set in a fresh random order, epoch after epoch.
    The draw depends on the arguments alone, so a resumed run and a run on more processes see the same
    prompts. With fewer prompts than ``per_iteration`` a row comes more than once in an iteration: what is
    keyed by prompt must then be keyed by the place in this list, not by the row.
    """
    if count < 1 or per_iteration < 1:
        raise ValueError(
            f"expected at least one prompt and one draw, got count={count}, per_iteration={per_iteration}"
        )
    if iteration < 0:
        raise ValueError(f"iterations count from 0, got {iteration}")
    first = iteration * per_iteration
    return [
        _epoch_order(count, seed, place // count)[place % count]
        for place in range(first, first + per_iteration)
    ]


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    # Python promises the same random() for a seed in every version, but not the same shuffle().
    digest = hashlib.sha256(f"prompts/{seed}/{epoch}".encode()).digest()
    source = random.Random(int.from_bytes(digest, "big"))
    keys = [source.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _json_row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: not valid JSON: {error.msg} at column {error.colno}; expected one JSON object a line"
        ) from None
    if not isinstance(row, dict):
        raise InputError(
            f'{where}: expected a JSON object with the key "{PROMPT_KEY}", got {_json_type(row)}'
        )
    if PROMPT_KEY not in row:
        held = ", ".join(f'"{key}"' for key in row) or "none"
        raise InputError(f'{where}: no "{PROMPT_KEY}" in this row; its keys: {held}')
    prompt = row[PROMPT_KEY]
    if not isinstance(prompt, str) or not prompt.strip():
        got = "an empty text" if isinstance(prompt, str) else _json_type(prompt)
        raise InputError(f'{where}: "{PROMPT_KEY}" must be a text that is not empty, got {got}')
    return {**row, PROMPT_KEY: prompt.strip()}


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
