"""Noise levels, one for each grid step, in a file: written by hand, or by ``flowcredit calibrate``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError
from flowcredit.text_file import read_text
from flowcredit.yaml_lines import Located, parse_yaml


@dataclass(frozen=True)
class NoiseTable:
    """Levels of T steps, or of the first T - 1; if told, the T + 1 sigmas for which they were found."""

    levels: tuple[float, ...]
    grid: tuple[float, ...] | None
    source: str


def read_noise_table(path: str | Path) -> NoiseTable:
    """Read a list of levels, or an object with the list ``levels`` and perhaps ``grid``, in YAML or JSON.

    Raises InputError, with file and line, for a level that is missing, negative or not finite. How many
    levels a grid needs is checked where they are used.
    """
    source = str(path)
    located = parse_yaml(read_text(Path(path), "a table of noise levels"), source)
    value = located.value
    if isinstance(value, dict) and "levels" in value:
        levels = _numbers(located, source, value["levels"], ("levels",), "level")
        grid = _numbers(located, source, value["grid"], ("grid",), "sigma") if "grid" in value else None
        return NoiseTable(levels, grid, source)
    return NoiseTable(_numbers(located, source, value, (), "level"), None, source)


def _numbers(located: Located, source: str, value: Any, at: tuple[str, ...], what: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        where = f"{source}: {'.'.join(at)} is" if at else f"{source}: holds"
        raise InputError(f"{where} {_show(value)}; expected a list with a {what} for each grid step")
    for place, number in enumerate(value):
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        if not plain or not 0 <= number < float("inf"):
            where = f"{source}:{located.lines[(*at, place)]}"
            raise InputError(
                f"{where}: {what} {place} is {_show(number)}; expected a finite number, at least 0"
            )
    return tuple(float(number) for number in value)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
