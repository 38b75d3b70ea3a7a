"""Checkpoints that appear whole or not at all, and are checked before they are trusted.

A checkpoint is a folder named by its iteration: safetensors files, and ``state.json`` with the loop's own
numbers, the SHA-256 of each file and one of its own content. It is written beside its place, flushed to disk
and renamed.
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

from flowcredit.disk import writing
from flowcredit.errors import InputError
from flowcredit.sharding import parted

STATE_FILE = "state.json"
OWN = "own_sha256"
"""The key of the digest of the rest of ``state.json``."""
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
    ``keep_also``; returns the new folder.

    Later ones go too: the run went back before them. Raises InputError where the disk takes no more; then
    nothing is changed.
    """
    final, partial = folder / f"{iteration:06d}", folder / f".{iteration:06d}.partial"
    tidy(folder, iteration, keep_last, keep_also)
    try:
        with writing(final, SafetensorError):
            _write(partial, iteration, groups, state)
    except InputError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists():
        # What a kill leaves aside here is still found, and put back by whoever goes on with the run.
        final.replace(_aside(final))
    partial.replace(final)
    _flush(folder)
    for later in _numbered(folder):
        if int(later.name) > iteration:
            shutil.rmtree(later)
    tidy(folder, iteration, keep_last, keep_also)
    return final


def tidy(folder: Path, iteration: int, keep_last: int, keep_also: Collection[int] = ()) -> None:
    """Remove what is only half written, and of the checkpoints up to ``iteration`` all but the newest
    ``keep_last`` and ``keep_also``."""
    for candidate in _candidates(folder):
        if candidate.name.startswith("."):
            candidate.replace(_place_of(candidate))
    for left_over in folder.glob(".*.partial"):
        shutil.rmtree(left_over)
    for old in [each for each in _numbered(folder) if int(each.name) <= iteration][:-keep_last]:
        if int(old.name) not in keep_also:
            shutil.rmtree(old)


def _write(folder: Path, iteration: int, groups: Groups, state: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    digests = {}
    for name, tensors in groups.items():
        file = folder / f"{name}.safetensors"
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, file)
        digests[file.name] = _digest(file)
        _flush(file)
    content = {"iteration": iteration, "sha256": digests, "state": dict(state)}
    content[OWN] = _content_digest(content)
    (folder / STATE_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    _flush(folder / STATE_FILE)
    _flush(folder)


def kept_iterations(folder: Path) -> list[int]:
    """The iterations of which there is a checkpoint, in order."""
    return [int(entry.name) for entry in _numbered(folder)]


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, or None; and a line for each damaged one passed over."""
    damaged: list[str] = []
    for candidate in reversed(_candidates(folder)):
        try:
            return load_checkpoint(candidate), damaged
        except InputError as error:
            damaged.append(str(error))
    return None, damaged


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint. Raises InputError, naming the file, if any of it is missing or altered."""
    content = _manifest(folder / STATE_FILE)
    groups = {}
    for name, digest in content["sha256"].items():
        file = folder / name
        if not file.is_file():
            raise InputError(f"checkpoint {file}: missing")
        try:
            if _digest(file) != digest:
                raise InputError(f"checkpoint {file}: not the bytes that were written (SHA-256 differs)")
            groups[file.stem] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"checkpoint {file}: cannot be read ({error})") from error
    return Checkpoint(content["iteration"], groups, content["state"])


def _manifest(file: Path) -> dict[str, Any]:
    """What ``state.json`` holds, as it was written. Those of older versions have no digest of their own."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        own = content.pop(OWN, None)
        names = content.keys()
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"checkpoint {file}: cannot be read ({error})") from error
    whole = names == {"iteration", "sha256", "state"} and own in (None, _content_digest(content))
    place = _place_of(file.parent) if file.parent.name.startswith(".") else file.parent
    if not whole or place.name != f"{content['iteration']:06d}":
        raise InputError(f"checkpoint {file}: not the content that was written (its own SHA-256 differs)")
    return content


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


def _aside(checkpoint: Path) -> Path:
    """Where a checkpoint lies while another one takes its place."""
    return checkpoint.with_name(f".{checkpoint.name}.replaced.partial")


def _place_of(aside: Path) -> Path:
    return aside.with_name(aside.name.split(".")[1])


def _candidates(folder: Path) -> list[Path]:
    """The checkpoints, in order; those put aside, too, whose places are empty."""
    aside = [each for each in folder.glob(".*.replaced.partial") if not _place_of(each).exists()]
    return sorted([*_numbered(folder), *aside], key=lambda each: each.name.removeprefix("."))


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name.isdigit())


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
