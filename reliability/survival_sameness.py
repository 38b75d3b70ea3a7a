"""Whether two runs ended in the same: parameters, optimizer, average, log, evaluations, export, noises."""

import hashlib
import json
from pathlib import Path
from typing import Any

from survival_lives import NOISES, RUN

CLOCK = "seconds"
"""The one thing in a run's files that two equal runs do not share."""


def differences(reference: Path, folder: Path) -> list[str]:
    """What differs between the runs in two working folders, a line each; files that one lacks among it."""
    one, other = ending(reference), ending(folder)
    found = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    left = leftovers(folder)
    return found + left + _drawn_otherwise(reference / NOISES, folder / NOISES)


def ending(folder: Path) -> dict[str, Any]:
    """Each file of a finished run by its path: its bytes' SHA-256, or its content without the clock."""
    run = folder / RUN
    found: dict[str, Any] = {}
    for file in sorted(each for each in run.rglob("*") if each.is_file()):
        name = str(file.relative_to(run))
        if name == "log.jsonl":
            found[name] = [_timeless(json.loads(line)) for line in file.read_text().splitlines()]
        elif name.startswith("evaluations/"):
            found[name] = _timeless(json.loads(file.read_text()))
        elif file.name == "state.json":
            content = json.loads(file.read_text())
            found[name] = _timeless({key: content[key] for key in ("iteration", "sha256", "state")})
        elif name != ".lock" and not name.startswith("tensorboard/"):  # Which is a copy, with the time in it.
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def leftovers(folder: Path) -> list[str]:
    """What only half was written and nobody cleared away."""
    return [f"left over: {file}" for file in sorted(folder.rglob("*.partial"))]


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(each) for key, each in value.items() if key != CLOCK}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def _drawn_otherwise(reference: Path, file: Path) -> list[str]:
    """Noises by key: those of all lives of a run must be the reference's, each of them, and no others."""
    expected, found = noises(reference), noises(file)
    return [
        f"noise {key}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]


def noises(file: Path) -> dict[str, set[str]]:
    """Digests of every noise drawn, by its key; a line that a kill tore is left out."""
    drawn: dict[str, set[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            key, digest = json.loads(line)
        except json.JSONDecodeError:
            continue
        drawn.setdefault(key, set()).add(digest)
    return drawn
