"""Prompt sets: what a prompt file holds, and which prompts an iteration draws."""

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError
from flowcredit.prompt_files import Row, json_type, read_rows
from flowcredit.shapes import bundled_path

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
    places: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """For messages, where each prompt stands ("prompts.txt:7"); nothing where they come from no file."""

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
            places=tuple(self.places[row] for row in wanted) if self.places else (),
        )

    def describe(self) -> str:
        """One line: how many prompts, from where, and how many blank lines were passed over."""
        text = f"{len(self)} {_plural(len(self), 'prompt')} from {self.source}"
        if self.skipped_blank:
            text += f" ({self.skipped_blank} blank {_plural(self.skipped_blank, 'line')} skipped)"
        return text


def load_prompts(path: str | Path, column: str = PROMPT_KEY) -> PromptSet:
    """Reads the prompts of a file, a folder or a data set of the hub; `prompt_files` has the formats.

    A row's prompt is under ``column``; what else it has becomes columns, which rewards may ask for. Names
    that begin with ``bundled:`` (``bundled:shapes/train``) stand for files in the package. Raises InputError
    with file and line for whatever cannot be read.
    """
    source = str(path)
    found = read_rows(bundled_path(source), source, column)
    if not found.rows:
        raise InputError(f"{source}: holds no prompts; expected at least one line that is not blank")
    for row in found.rows:
        _check_texts(row)
    prompts = tuple(_prompt(row, column) for row in found.rows)
    names = dict.fromkeys(key for row in found.rows for key in row.values if key != column)
    return PromptSet(
        prompts=prompts,
        columns={name: tuple(row.values.get(name) for row in found.rows) for name in names},
        source=source,
        skipped_blank=found.skipped_blank,
        places=tuple(row.where for row in found.rows),
    )


def _prompt(row: Row, column: str) -> str:
    if column not in row.values:
        held = ", ".join(f'"{key}"' for key in row.values) or "none"
        raise InputError(
            f'{row.where}: no "{column}" in this row; its keys: {held}; name the one that holds the prompt'
            " with prompts.column"
        )
    prompt = row.values[column]
    if not isinstance(prompt, str) or not prompt.strip():
        got = "an empty text" if isinstance(prompt, str) else json_type(prompt)
        raise InputError(f'{row.where}: "{column}" must be a text that is not empty, got {got}')
    return prompt.strip()


def _check_texts(row: Row) -> None:
    """JSON may hold halves of surrogate pairs, which no file and no tokenizer takes."""
    for name, value in row.values.items():
        for text in (name, value):
            if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
                raise InputError(
                    f"{row.where}: {name!r} holds half of a surrogate pair (\\ud800 to \\udfff), which is no"
                    " character; expected text"
                )


def check_group_by(prompts: PromptSet, group_by: str | None) -> None:
    """InputError where an evaluation is to be split by a column that the prompts do not have."""
    if group_by is not None and group_by not in prompts.columns:
        has = ", ".join(["prompt", *sorted(prompts.columns)])
        raise InputError(
            f"{prompts.source}: evaluation.group_by is {group_by!r}, but the columns here are: {has}"
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


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
