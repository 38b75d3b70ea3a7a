"""Lives of a run: real processes, forked from one that has imported everything, and killed.

What a life does to the run's files is counted by Python's audit events, so that it can be ended, or the disk
be full, at any of them.
"""

import hashlib
import json
import os
import random
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
LONGEST_S = 300.0


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


def live(folder: Path, recipe: Path, aim: Aim | None = None, full: Aim | None = None, seed: int = 0) -> Life:
    """Train, or go on, in the working folder ``folder`` until the end or the ``aim``.

    ``full``: the moment from which on no file of the run can grow by more than a few bytes, drawn by
    ``seed``; only by its ``operation``.
    """
    said_here, said_there = os.pipe()
    mark_here, mark_there = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(said_here)
        os.close(mark_here)
        _be_a_run(folder, recipe, said_there, mark_there, aim, full, seed)
    os.close(said_there)
    os.close(mark_there)
    try:
        said = _watched(pid, said_here, mark_here, aim, began)
    finally:
        os.close(said_here)
        os.close(mark_here)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return Life(code, said.decode(errors="replace"), time.monotonic() - began)


def _watched(pid: int, said_here: int, mark_here: int, aim: Aim | None, began: float) -> bytes:
    """What a life says until its end, which comes by ``aim`` or by itself."""
    said, kill_at = b"", began + LONGEST_S
    if aim is not None and aim.operation is None:
        kill_at = began + aim.after_s
    watched = [said_here, mark_here]
    while said_here in watched:
        ready, _, _ = select.select(watched, [], [], max(0.0, kill_at - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            kill_at = time.monotonic() + LONGEST_S
        if mark_here in ready:
            watched.remove(mark_here)
            if os.read(mark_here, 1) and aim is not None:
                kill_at = time.monotonic() + aim.after_s
        if said_here in ready:
            chunk = os.read(said_here, 65536)
            said += chunk
            if not chunk:
                watched.remove(said_here)
    return said


def _be_a_run(
    folder: Path, recipe: Path, said: int, mark: int, aim: Aim | None, full: Aim | None, seed: int
) -> NoReturn:
    code = 70
    try:
        os.chdir(folder)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.close(said)
        torch.set_num_threads(1)
        run = RUN.absolute()
        if aim is not None and aim.operation is not None:
            _at_operation(run, aim, _ending(mark, aim))
        if full is not None:
            _at_operation(run, full, _filling(seed))
        _record_noises(folder / NOISES)
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


def _ending(mark: int, aim: Aim) -> Callable[[], None]:
    def end() -> None:
        if aim.after_s == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(mark, b"x")

    return end


def _filling(seed: int) -> Callable[[], None]:
    def fill() -> None:
        most = random.Random(seed).choice((0, 1, 60, 400, 3000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    return fill


def operations(folder: Path, among: str = "") -> int:
    """How many operations on files the life recorded in ``folder`` had, of those with ``among``."""
    return sum(among in line for line in (folder / "operations.txt").read_text().splitlines())


def recorded(folder: Path, recipe: Path) -> Life:
    """A life without an end before its time, that also leaves a list of its operations on files."""
    listing = folder / "operations.txt"
    listing.touch()
    return live(folder, recipe, full=Aim(0.0, None, str(listing)))


def _at_operation(run: Path, aim: Aim, act: Callable[[], None]) -> None:
    """Calls ``act`` before the operation that ``aim`` counts to; lists them all where it counts to none."""
    counted = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal counted
        path = _changed(event, arguments)
        if path is None or not path.startswith(str(run)):
            return
        if aim.operation is None:
            listing = os.open(aim.among, os.O_WRONLY | os.O_APPEND)
            os.write(listing, f"{event} {path}\n".encode())
            os.close(listing)
        elif aim.among in path:
            counted += 1
            if counted == aim.operation:
                act()

    sys.addaudithook(hook)


def _changed(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The path that an audit event is about to change, if it is one of those."""
    if event not in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate"):
        return None
    if event == "open" and not int(arguments[2]) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY):
        # Reading ends no life: but what is flushed to disk is opened for reading, and a checkpoint's weights
        # are written by code that tells no event.
        return str(arguments[0]) if ".partial" in str(arguments[0]) else None
    path = arguments[0]
    return os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else None


def _record_noises(file: Path) -> None:
    """Every noise that a run draws, by its key, as a digest: an evaluation's and a training iteration's."""

    def note(key: Sequence[object], value: Tensor) -> None:
        digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        line = json.dumps(["/".join(str(part) for part in key), digest])
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

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
    experience.pair_draws = pair_draws


def _without_report() -> None:
    """The page is drawn from the other files, can be drawn again, and takes longer than the tiny run."""

    def refuse(folder: Path) -> Path:
        raise InputError("left out")

    flowcredit.report.build_report = refuse
