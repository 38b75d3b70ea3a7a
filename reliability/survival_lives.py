"""Lives of a run: real processes, forked from one that has imported everything, and killed.

What a life does to the run's files is counted by Python's audit events, so that it can be ended, or the disk
be full, at any of them.
"""

import hashlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import flowcredit.report
from flowcredit import cli, experience, preference
from flowcredit.errors import InputError
from flowcredit.rollout import KeyedNoise

RUN = Path("runs/run")
NOISES = "noises.jsonl"
OPERATIONS = "operations.txt"
LONGEST_S = 1200.0
MARK = b"!"
"""Told where an aim's operation is reached."""


@dataclass(frozen=True)
class Aim:
    """When a life is ended: ``after_s`` seconds of it, or of its ``operation``-th (from 1 on) on the run's
    files whose path holds ``among``; at 0 seconds after an operation it ends itself before it."""

    after_s: float
    operation: int | None = None
    among: str = ""


@dataclass(frozen=True)
class Life:
    """How a process ended. ``code``: its exit code, or minus the signal's number."""

    code: int
    said: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def live(
    folder: Path,
    recipe: Path,
    aim: Aim | None = None,
    within: Callable[[], None] | None = None,
) -> Life:
    """Train, or go on, in the working folder ``folder`` until the end or the ``aim``.

    ``within`` is called in the new process, before anything else.
    """
    said_here, said_there = os.pipe()
    told_here, told_there = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(said_here)
        os.close(told_here)
        _be_a_run(folder, recipe, said_there, told_there, aim, within)
    os.close(said_there)
    os.close(told_there)
    try:
        said, told = _watched(pid, said_here, told_here, aim, began)
    finally:
        os.close(said_here)
        os.close(told_here)
    with (folder / NOISES).open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in told)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return Life(code, said.decode(errors="replace"), time.monotonic() - began)


def _watched(
    pid: int, said_here: int, told_here: int, aim: Aim | None, began: float
) -> tuple[bytes, list[str]]:
    """What a life says until it ends, by ``aim`` or by itself, and what it tells of its noises."""
    parts: dict[int, bytes] = {said_here: b"", told_here: b""}
    kill_at = began + LONGEST_S
    if aim is not None and aim.operation is None:
        kill_at = began + aim.after_s
    open_ends = set(parts)
    while open_ends:
        ready, _, _ = select.select(open_ends, [], [], max(0.0, kill_at - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            kill_at = time.monotonic() + LONGEST_S
        for end in ready:
            chunk = os.read(end, 65536)
            parts[end] += chunk
            if not chunk:
                open_ends.remove(end)
            if end == told_here and MARK in chunk and aim is not None:
                kill_at = time.monotonic() + aim.after_s
    return parts[said_here], parts[told_here].replace(MARK, b"").decode().splitlines()


def _be_a_run(
    folder: Path, recipe: Path, said: int, told: int, aim: Aim | None, within: Callable[[], None] | None
) -> NoReturn:
    code = 70
    try:
        os.chdir(folder)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.close(said)
        torch.set_num_threads(1)
        if aim is not None and aim.operation is not None:
            _at_operation(aim.operation, aim.among, _ending(told, aim))
        if within is not None:
            within()
        _tell_noises(told)
        _without_report()
        resuming = (RUN / "recipe.yaml").is_file()
        sys.argv = ["flowcredit", "train", *(["--resume", str(RUN)] if resuming else [str(recipe)])]
        cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ending(told: int, aim: Aim) -> Callable[[], None]:
    def end() -> None:
        if aim.after_s == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(told, MARK)

    return end


def full_from(operation: int, room: int) -> Callable[[], None]:
    """To be called ``within`` a life: from an operation on no file can grow beyond ``room`` bytes."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

    return lambda: _at_operation(operation, "", fill)


def recorded(folder: Path, recipe: Path) -> Life:
    """A life without an end before its time, that also leaves a list of its operations on files."""
    with (folder / OPERATIONS).open("a", encoding="utf-8", buffering=1) as listing:

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            path = _changed(event, arguments)
            if path is not None:
                listing.write(f"{event} {path}\n")

        return live(folder, recipe, within=lambda: sys.addaudithook(note))


def operations(folder: Path, among: str = "") -> int:
    """How many operations on files the life recorded in ``folder`` had, of those with ``among``."""
    return sum(among in line for line in (folder / OPERATIONS).read_text().splitlines())


def _at_operation(operation: int, among: str, act: Callable[[], None]) -> None:
    """Calls ``act`` before the so-manieth operation, from 1 on, on files with ``among`` in their path."""
    counted = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal counted
        path = _changed(event, arguments)
        if path is not None and among in path:
            counted += 1
            if counted == operation:
                act()

    sys.addaudithook(hook)


def _changed(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The path among the runs' files that an audit event is about to change, if it is one of those."""
    if event not in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"):
        return None
    if not isinstance(arguments[0], str | bytes | os.PathLike):
        return None
    path = os.path.abspath(os.fsdecode(arguments[0]))
    if not path.startswith(str(RUN.parent.absolute())):
        return None
    # Reading changes nothing, but what is flushed to disk is opened for it, and a checkpoint's tensors are
    # written by code that tells no event.
    read = event == "open" and not int(arguments[2]) & (os.O_WRONLY | os.O_RDWR)
    return None if read and ".partial" not in path else path


def _tell_noises(told: int) -> None:
    """Every noise that a run draws, by its key, as a digest: an evaluation's and a training iteration's."""

    def note(key: Sequence[object], value: Tensor) -> None:
        digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        os.write(told, (json.dumps(["/".join(str(part) for part in key), digest]) + "\n").encode())

    def noted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(self: KeyedNoise, role: str, width: int) -> Tensor:
            value = original(self, role, width)
            note((self.seed, self.iteration, list(self.prompt_indices), role, width), value)
            return value

        return drawn

    def pair_draws(*arguments: Any) -> tuple[Tensor, Tensor]:
        noises, sigmas = preference.pair_draws(*arguments)
        note(("pairs", *arguments[2:]), noises)
        note(("levels", *arguments[2:]), sigmas)
        return noises, sigmas

    for name in ("_initial", "_drawn"):
        setattr(KeyedNoise, name, noted(getattr(KeyedNoise, name)))
    setattr(experience, "pair_draws", pair_draws)  # noqa: B010


def _without_report() -> None:
    """The page is drawn from the other files, can be drawn again, and takes longer than the tiny run."""

    def refuse(folder: Path) -> Path:
        raise InputError("left out")

    setattr(flowcredit.report, "build_report", refuse)  # noqa: B010
