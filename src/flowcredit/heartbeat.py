"""What several processes of a run know of each other: who is where, who has failed, and who tells it.

A thread of each process tells the store of torch's rendezvous once a second where its process is, and looks
whether another has failed. The first process that fails, or that finds another missing, claims the word: it
prints the one error, and the others end quietly with its exit code. So an error is never hidden behind the
collective that it broke.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from flowcredit import processes
from flowcredit.errors import InputError, SharedError
from flowcredit.visible import visible

BEAT_S = 1.0
"""Seconds between two signs of life."""
GRACE_S = 10.0
"""Seconds in which a process may end by itself after another has failed."""
TOLD_S = 5.0
"""How long a broken connection waits for the word of the process that broke it."""
BAD_INPUT, FAULT, INTERRUPTED = 2, 1, 130


@dataclass(frozen=True)
class Failure:
    """What ended a run: whose it is, its line (none for Ctrl-C), the exit code of all processes."""

    rank: int
    line: str
    code: int
    host: str = ""


@dataclass(frozen=True)
class Sign:
    """A sign of life: ``arrived`` counts the meetings with the others that a process has come to; ``place``
    is the line that its main thread is at."""

    beat: int = 0
    arrived: int = 0
    stage: str = "starting"
    iteration: int | None = None
    place: str = ""

    def describe(self) -> str:
        when = "" if self.iteration is None else f" in iteration {self.iteration}"
        return f"{self.stage}{when}{f', at {self.place}' if self.place else ''}"


class LostContact(RuntimeError):
    """A meeting with the other processes that did not come about."""


class Board:
    """The keys of a store by which processes tell each other; a connection of its own."""

    def __init__(self, store: Any, environment: Mapping[str, str] = os.environ) -> None:
        """``store``: one of torch.distributed's."""
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"flowcredit/{restart}", store)

    def claim(self, failure: Failure) -> bool:
        """Whether this failure is the first: then this process has the word."""
        own = json.dumps(asdict(failure))
        return self._store.compare_set("failure", "", own).decode() == own

    def failure(self) -> Failure | None:
        if not self._store.check(["failure"]):
            return None
        return Failure(**json.loads(self._store.get("failure")))

    def tell(self, rank: int, sign: Sign) -> None:
        self._store.set(f"sign/{rank}", json.dumps(asdict(sign)))

    def signs(self, size: int) -> dict[int, Sign]:
        """By rank, of those that have given any."""
        keys = {rank: f"sign/{rank}" for rank in range(size)}
        return {
            rank: Sign(**json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }


def connect(timeout_s: float, environment: Mapping[str, str] = os.environ) -> Board:
    """A board of this process's own on the store of the run. Raises RuntimeError where there is none."""
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return Board(store, environment)


class Heartbeat:
    """One process's part in it. Its thread begins with `start` and ends with `stop`."""

    def __init__(self, board: Board, rank: int, size: int, timeout_s: float) -> None:
        self.board, self.rank, self.size, self.timeout_s = board, rank, size, timeout_s
        self.run: Path | None = None
        self._sign = Sign()
        self._waits_since: float | None = None
        self._seen: dict[int, tuple[Sign, float]] = {}
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="heartbeat")

    def start(self) -> None:
        self._tell()
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * BEAT_S)

    def note(self, stage: str, iteration: int | None = None) -> None:
        """A stage begins."""
        self._sign = replace(self._sign, stage=stage, iteration=iteration, place="")
        with suppress(RuntimeError):  # A store that is gone is found by the thread.
            self._tell()

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While entered, this process waits for the others. Raises LostContact where that fails."""
        self._sign = replace(self._sign, arrived=self._sign.arrived + 1)
        self._waits_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise LostContact(str(error)) from error
        finally:
            self._waits_since = None

    def settle(self, error: BaseException) -> BaseException:
        """What an error that ends this process is to be raised as: itself, where this process has the word
        (with its number), SystemExit where another has."""
        if isinstance(error, SystemExit):
            return error
        if isinstance(error, KeyboardInterrupt):
            self._claim(Failure(self.rank, "", INTERRUPTED))
            return error
        try:
            failure = self._foreign() if _broken(error) else self._own(error)
            heard = None if self.board.claim(failure) and failure.rank == self.rank else self.board.failure()
        except RuntimeError:  # The store is gone, and with it whoever held it.
            return self._worded(error, self._lost() if _broken(error) else self._own(error))
        if heard is None:
            return self._worded(error, failure)
        if heard.code == INTERRUPTED:
            return KeyboardInterrupt()
        self._repeat(heard)
        return SystemExit(heard.code)

    def _own(self, error: BaseException) -> Failure:
        line = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        code = BAD_INPUT if isinstance(error, OSError) else FAULT
        if isinstance(error, InputError):
            code = error.exit_code
        return Failure(self.rank, line, code, socket.gethostname())

    def _worded(self, error: BaseException, failure: Failure) -> BaseException:
        processes.tell(asdict(failure))
        who = processes.named(self.rank, self.size)
        if isinstance(error, InputError):
            return SharedError.of_code(f"{who}: {failure.line}", failure.code)
        if not _broken(error):
            error.add_note(f"This was {who}.")
            return error
        _say(self._advised(failure.line))
        return SystemExit(failure.code)

    def _claim(self, failure: Failure) -> bool:
        try:
            return self.board.claim(replace(failure, host=socket.gethostname()))
        except RuntimeError:
            return True

    def _foreign(self) -> Failure:
        """Why a meeting broke: what another process tells, or, where none does, who is missing."""
        until = time.monotonic() + TOLD_S
        while (heard := self.board.failure()) is None and time.monotonic() < until:
            self._listen()
            time.sleep(0.1)
        return heard or Failure(self.rank, self._missing(broken=True), FAULT, socket.gethostname())

    def _lost(self) -> Failure:
        return Failure(
            self.rank,
            f"{processes.named(self.rank, self.size)} has lost the processes on the first machine: the one"
            " that holds their store is gone",
            FAULT,
            socket.gethostname(),
        )

    def _missing(self, broken: bool) -> str:
        """Names the processes that are not where this one waits."""
        now, found = time.monotonic(), self._seen
        late = [rank for rank in range(self.size) if self._is_late(rank)]
        silent = [
            rank
            for rank in range(self.size)
            if rank != self.rank and rank in found and now - found[rank][1] > 3 * BEAT_S
        ]
        who = (silent or late) if broken else late or silent
        if not who:
            if not broken:
                return f"a meeting of all {self.size} processes took longer than {self._limit()}"
            return f"the connection between the {self.size} processes broke, though all give signs of life"
        first = who[0]
        name = processes.named(first, self.size) + (f" (and {len(who) - 1} more)" if len(who) > 1 else "")
        if first not in found:
            return f"{name} has not begun within {self._limit()}"
        sign, when = found[first]
        if first in silent:
            return f"{name} is gone: no sign of life for {now - when:.0f} s, last seen {sign.describe()}"
        return f"{name} has not come to the others within {self._limit()}: it is {sign.describe()}"

    def _is_late(self, rank: int) -> bool:
        return rank != self.rank and (
            rank not in self._seen or self._seen[rank][0].arrived < self._sign.arrived
        )

    def _limit(self) -> str:
        return f"{self.timeout_s:g} s (parallel.timeout_s)"

    def _advised(self, line: str) -> str:
        if self.run is None or not self.run.is_dir():
            return line
        command = processes.resume_command(self.run)
        return f"{line}; go on from the last checkpoint with: {command}"

    def _repeat(self, failure: Failure) -> None:
        """On other machines, whose output has not shown it, one process repeats it."""
        if failure.host != socket.gethostname() and processes.number("LOCAL_RANK", 1) == 0 and failure.line:
            _say(f"{processes.named(failure.rank, self.size)}, on {failure.host}: {failure.line}")

    def _work(self) -> None:
        failed_since: float | None = None
        while not self._ended.wait(BEAT_S):
            try:
                failed = self._beat()
            except RuntimeError:
                failed = self._lost()
            if failed is None:
                continue
            failed_since = failed_since or time.monotonic()
            if time.monotonic() - failed_since > GRACE_S and not self._ended.is_set():
                self._repeat(failed)
                _leave(failed.code)

    def _beat(self) -> Failure | None:
        self._sign = replace(self._sign, beat=self._sign.beat + 1, place=self._place())
        self._tell()
        heard = self.board.failure()
        if heard is None:
            self._look()
        return heard

    def _tell(self) -> None:
        self.board.tell(self.rank, self._sign)
        run = None if self.run is None else str(self.run)
        processes.write(f"{self.rank}.json", [self._sign.describe(), run])

    def _look(self) -> None:
        """Where this process waits for others: has one of them kept it waiting too long?"""
        waits_since = self._waits_since
        if waits_since is None:
            return
        self._listen()
        # Silence alone is no death: a library that writes a large file may hold up all threads of a process.
        if time.monotonic() - waits_since < self.timeout_s:
            return
        failure = Failure(self.rank, self._missing(broken=False), FAULT, socket.gethostname())
        if self._waits_since == waits_since and self.board.claim(failure):
            processes.tell(asdict(failure))
            _say(self._advised(failure.line))
            _leave(failure.code)

    def _listen(self) -> None:
        now = time.monotonic()
        for rank, sign in self.board.signs(self.size).items():
            if rank not in self._seen or self._seen[rank][0] != sign:
                self._seen[rank] = (sign, now)

    def _place(self) -> str:
        """The main thread's innermost line outside of libraries."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        while frame is not None and _in_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def speaks_before_joining(line: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process shall print an error found before the processes joined: one of them does."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    failure = Failure(processes.number("RANK", 0, environment), line, BAD_INPUT, socket.gethostname())
    try:
        first = connect(TOLD_S, environment).claim(failure)
    except RuntimeError:
        return failure.rank == 0
    if first:
        processes.tell(asdict(failure), environment)
    return first


def _broken(error: BaseException) -> bool:
    """Whether an error may be another process's: a connection that broke or a wait that ran out."""
    if isinstance(error, LostContact | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Gloo"))


def _in_library(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<", os.path.dirname(os.__file__))) or file == __file__


def _say(line: str) -> None:
    print(f"\nflowcredit: {visible(line)}", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """End at once: the main thread waits in a call that Python cannot interrupt."""
    sys.stdout.flush()
    os._exit(code)
