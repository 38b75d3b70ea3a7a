"""Commands of flowcredit side by side in processes of their own; stopped together, and told of one by one."""

import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from flowcredit.processes import PARENT

PATIENCE_S = 60.0
"""How long a child that was asked to stop may take to save what it has, before it is ended."""
PATIENCE_ENDING_S = 5.0
"""How long one that was ended may take before it is killed."""
TICK_S = 0.2


@dataclass(frozen=True)
class Task:
    """Something that takes one or more commands: ``command`` gives the next, or None when all is there.

    ``work`` is how much there is to do in all, ``done`` how much of it is, in any one unit. ``peak`` is told
    the largest memory of each process, in bytes.
    """

    name: str
    console_file: Path
    command: Callable[[], list[str] | None]
    work: float
    done: Callable[[], float]
    peak: Callable[[int], None] = lambda size: None


@dataclass(frozen=True)
class Failure:
    """A task that did not come to its end: why, and what its process said last."""

    name: str
    why: str
    console_file: Path
    last_lines: tuple[str, ...]


class Listener(Protocol):
    """Who is told what goes on."""

    def started(self, task: Task, words: Sequence[str]) -> None: ...

    def finished(self, task: Task) -> None: ...

    def failed(self, failure: Failure) -> None: ...

    def tick(self) -> None: ...


class Process(Protocol):
    """A command that is under way."""

    def poll(self) -> int | None:
        """Its exit code, minus the signal that ended it, or None while it runs."""
        ...

    def peak(self) -> int:
        """Largest memory in bytes, once it has ended; 0 where that is not known."""
        ...

    def send(self, kind: signal.Signals) -> None: ...


Start = Callable[[Sequence[str], Path], Process]
"""Starts ``flowcredit`` with these words, what it says to be added to a file."""


class Child:
    """A process with its own session, so that a Ctrl-C of the terminal reaches it once, through us."""

    def __init__(self, command: Sequence[str], console_file: Path, threads: int) -> None:
        limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(limits, str(threads)), PARENT: str(os.getpid())}
        console_file.parent.mkdir(parents=True, exist_ok=True)
        with console_file.open("ab") as said:
            said.write(f"$ {shlex.join(command)}\n".encode())
            said.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                start_new_session=True,
            )
        self._peak = 0

    def poll(self) -> int | None:
        if self._process.returncode is None:
            # As Popen.poll, with what the process used besides.
            ended, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if ended:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._peak = _bytes(usage)
        return self._process.returncode

    def peak(self) -> int:
        return self._peak

    def send(self, kind: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(kind)


def start_flowcredit(threads: int) -> Start:
    """Starts this installation of flowcredit in a process of ``threads`` threads."""

    def start(words: Sequence[str], console_file: Path) -> Process:
        return Child([sys.executable, "-m", "flowcredit", *words], console_file, threads)

    return start


def run_tasks(tasks: Sequence[Task], parallel: int, start: Start, listener: Listener) -> list[Failure]:
    """Bring every task to its end, ``parallel`` at a time; the failures, which stop no other task.

    Raises KeyboardInterrupt on Ctrl-C, SIGTERM or SIGHUP, when all processes have ended.
    """
    waiting = [task for task in tasks if task.command() is not None]
    running: dict[str, _Running] = {}
    failures: list[Failure] = []
    with _stop_signals() as stop:
        try:
            while (waiting or running) and not stop.asked:
                while waiting and len(running) < parallel:
                    task = waiting.pop(0)
                    running[task.name] = _begin(task, start)
                    listener.started(task, running[task.name].words)
                time.sleep(TICK_S)
                listener.tick()
                for each in list(running.values()):
                    code = each.process.poll()
                    if code is None:
                        continue
                    del running[each.task.name]
                    if stop.asked:
                        continue
                    _look_after(each, code, waiting, failures, listener)
        finally:
            _end_all([each.process for each in running.values()], stop)
        if stop.asked:
            raise KeyboardInterrupt
    return failures


@dataclass(frozen=True)
class _Running:
    task: Task
    words: list[str]
    process: Process


def _begin(task: Task, start: Start) -> _Running:
    words = task.command()
    assert words is not None
    return _Running(task, words, start(words, task.console_file))


def _look_after(
    each: _Running, code: int, waiting: list[Task], failures: list[Failure], listener: Listener
) -> None:
    """A process has ended: the task goes on, is finished, or has failed."""
    task = each.task
    task.peak(each.process.peak())
    left = task.command()
    if code == 0 and left is None:
        listener.finished(task)
    elif code == 0 and left != each.words:
        waiting.insert(0, task)
    else:
        why = _why(code) + _reason(code, task.console_file)
        failures.append(Failure(task.name, why, task.console_file, _last_lines(task.console_file)))
        listener.failed(failures[-1])


def _why(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else "ended well, but what it was to write is not there"


def _reason(code: int, path: Path) -> str:
    """What the command that failed said of it: its own line of an error, or the last of a stack trace."""
    if code <= 0 or not path.is_file():
        return ""
    said = path.read_text(encoding="utf-8", errors="replace")
    started = max(said.rfind("\n$ ") + 1, 0)
    lines = [line.strip() for line in said[started:].splitlines() if line.strip() and line[:2] != "$ "]
    own = [line.removeprefix("flowcredit: ") for line in lines if line.startswith("flowcredit: ")]
    found = own[-1:] or lines[-1:]
    return f", {found[0]}" if found else ""


def _last_lines(path: Path, count: int = 5) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.rstrip() for line in lines if line.strip() and not line.startswith("$ ")]
    return tuple(said[-count:])


@dataclass
class _Stop:
    asked: int = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Signals that end a program are counted here, so that none arrives while a process is being started."""
    stop = _Stop()
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        before = [signal.signal(kind, stop) for kind in kinds]
    except ValueError:  # Signals belong to the main thread.
        yield stop
        return
    try:
        yield stop
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _end_all(processes: Sequence[Process], stop: _Stop) -> None:
    """End processes: first as Ctrl-C does, so that they save; a second Ctrl-C of ours ends them at once."""
    asked_before = stop.asked
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            process.send(kind)
        until = time.monotonic() + (PATIENCE_S if kind == signal.SIGINT else PATIENCE_ENDING_S)
        while any(process.poll() is None for process in left) and time.monotonic() < until:
            if stop.asked > max(1, asked_before) and kind != signal.SIGKILL:
                break
            time.sleep(0.05)


def _bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
