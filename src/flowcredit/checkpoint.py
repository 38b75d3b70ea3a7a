"""Checkpoints that appear whole or not at all, and are checked before they are trusted.

A checkpoint is a folder named by its iteration: safetensors files, and ``state.json`` with the loop's own
numbers and the SHA-256 of each file. It is written beside its place, flushed to disk and renamed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.sharding import parted

STATE_FILE = "state.json"
Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group ("weights", "optimizer", "ema") and name."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after ``iteration`` finished iterations; tensors on the CPU."""

    iteration: int
    groups: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    iteration: int,
    groups: Groups,
    state: Mapping[str, Any],
    keep_last: int,
    keep_also: Collection[int] = (),
) -> Path:
    """Write ``folder/NNNNNN`` and remove all but the newest ``keep_last`` and the iterations of
    ``keep_also``; returns the new folder."""
    final, partial = folder / f"{iteration:06d}", folder / f".{iteration:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    digests = {}
    for name, tensors in groups.items():
        file = partial / f"{name}.safetensors"
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, file)
        digests[file.name] = _digest(file)
        _flush(file)
    content = {"iteration": iteration, "sha256": digests, "state": dict(state)}
    (partial / STATE_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    _flush(partial / STATE_FILE)
    _flush(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.replace(final)
    _flush(folder)
    for old in _numbered(folder)[:-keep_last]:
        if int(old.name) not in keep_also:
            shutil.rmtree(old)
    return final


def kept_iterations(folder: Path) -> list[int]:
    """The iterations of which there is a checkpoint, in order."""
    return [int(entry.name) for entry in _numbered(folder)]


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, or None; and a line for each damaged one passed over."""
    damaged: list[str] = []
    for candidate in reversed(_numbered(folder)):
        try:
            return load_checkpoint(candidate), damaged
        except InputError as error:
            damaged.append(str(error))
    return None, damaged


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint. Raises InputError, naming the file, if any of it is missing or altered."""
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        digests, iteration, state = content["sha256"], int(content["iteration"]), content["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"checkpoint {folder / STATE_FILE}: cannot be read ({error})") from error
    groups = {}
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file():
            raise InputError(f"checkpoint {file}: missing")
        if _digest(file) != digest:
            raise InputError(f"checkpoint {file}: not the bytes that were written (SHA-256 differs)")
        try:
            groups[file.stem] = load_file(file)
        except SafetensorError as error:
            raise InputError(f"checkpoint {file}: {error}") from error
    return Checkpoint(iteration, groups, state)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state as tensors named ``parameter/key``."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put ``optimizer_tensors`` back. Moments go to the parameter's device, step counts stay on the CPU."""
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        optimizer.state[parameter][entry] = (
            value.clone() if value.dim() == 0 else parted(value, parameter).clone()
        )


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name.isdigit())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
