"""`flowcredit launch`: the processes of a run, started through torch's elastic agent, and ended as one.

The agent is that of torchrun: environment, rendezvous and ranks are the same. What differs is what a person
sees: one error with the number of the process that it is of, that error's exit code, no trace of the agent;
and Ctrl-C, which is handed to the processes, lets them finish their iteration and save, however long that
takes.
"""

import json
import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from flowcredit import processes
from flowcredit.errors import InputError
from flowcredit.visible import visible

POLL_S = 0.1
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where the processes run: ``nproc`` here, on each of ``nnodes`` machines that meet at an endpoint."""

    nproc: int
    nnodes: int = 1
    endpoint: str | None = None
    run_id: str | None = None

    @property
    def command(self) -> str:
        """The beginning of the command that says this."""
        words = ["flowcredit", "launch", "--nproc", str(self.nproc)]
        if self.nnodes > 1:
            words += ["--nnodes", str(self.nnodes), "--rdzv-endpoint", str(self.endpoint)]
        if self.run_id is not None:
            words += ["--rdzv-id", self.run_id]
        return shlex.join(words)


def launch(words: Sequence[str], place: Place) -> int:
    """Run ``flowcredit WORDS`` in every process; the exit code for all of them.

    Raises InputError for words that are no training, and where the machines do not find each other.
    """
    if not words or words[0] != "train":
        found = shlex.join(words[:1]) or "nothing"
        raise InputError(f"launch starts several processes of train; got {found}: see flowcredit launch -h")
    if place.nnodes > 1 and place.endpoint is None:
        raise InputError("--nnodes without --rdzv-endpoint; expected the first machine, as in HOST:29500")
    if place.nnodes == 1 and place.endpoint is not None:
        raise InputError(
            f"--rdzv-endpoint {place.endpoint} is where several machines meet, and this is one; expected"
            " --nnodes with it, or neither"
        )
    if "WORLD_SIZE" in os.environ:
        raise InputError("launch was itself started by torchrun or launch; start it alone, once a machine")
    with tempfile.TemporaryDirectory(prefix="flowcredit-") as folder:
        os.environ[processes.FOLDER] = folder
        os.environ[processes.COMMAND] = place.command
        os.environ[processes.PARENT] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // place.nproc)))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        logging.disable(logging.CRITICAL)
        agent = _Agent(list(words), place)
        with _signals(Path(folder)) as asked:
            agent.thread.start()
            while agent.thread.is_alive():
                agent.thread.join(POLL_S)
                asked.hand_on()
        return _exit_code(agent, Path(folder), asked.numbers)


class _Agent:
    """torch's agent in a thread, where it leaves signals alone; ``failures`` by rank when it has ended."""

    def __init__(self, words: list[str], place: Place) -> None:
        self.words, self.place = words, place
        self.failures: Mapping[int, Any] = {}
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="agent")

    def _run(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        alone = self.place.nnodes == 1
        config = LaunchConfig(
            min_nodes=self.place.nnodes,
            max_nodes=self.place.nnodes,
            nproc_per_node=self.place.nproc,
            run_id=self.place.run_id or (uuid.uuid4().hex if alone else "flowcredit"),
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOOPBACK}:0" if alone else str(self.place.endpoint),
            local_addr=LOOPBACK if alone else None,
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "flowcredit", *self.words)
        except ChildFailedError as error:
            self.failures = error.failures
        except Exception as error:
            self.error = error


@dataclass
class _Asked:
    """Signals that came: the first Ctrl-C is handed to every process once, all others end them."""

    folder: Path
    numbers: list[int] = field(default_factory=list)
    handed: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)

    def hand_on(self) -> None:
        """Also to processes that had not begun when the signal came."""
        if not self.numbers:
            return
        ends = len(self.numbers) > 1 or self.numbers[0] != signal.SIGINT
        number = signal.SIGTERM if ends else signal.SIGINT
        for file in self.folder.glob("*.pid"):
            pid = json.loads(file.read_text(encoding="utf-8"))
            if (pid, number) not in self.handed:
                self.handed.add((pid, number))
                _send(pid, number)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@contextmanager
def _signals(folder: Path) -> Iterator[_Asked]:
    asked = _Asked(folder)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(agent: _Agent, folder: Path, asked: Sequence[int]) -> int:
    """The failing process's; where it could not tell what happened, this tells it."""
    if agent.error is not None and asked:
        return INTERRUPTED if asked[0] == signal.SIGINT else TERMINATED
    if agent.error is not None:
        raise InputError(
            f"the processes could not be started: {agent.error}; with several machines, give all of them the"
            " same --nnodes, --rdzv-endpoint and --rdzv-id"
        )
    if not agent.failures:
        return 0
    failure = folder / processes.FAILURE
    if failure.exists():
        return int(json.loads(failure.read_text(encoding="utf-8"))["code"])
    codes = {each.exitcode for each in agent.failures.values()}
    if asked:
        return INTERRUPTED if INTERRUPTED in codes else TERMINATED
    if INTERRUPTED in codes:
        return INTERRUPTED
    # The agent itself ends the others by SIGTERM.
    order = {
        r: (each.exitcode >= 0, each.exitcode == -signal.SIGTERM, r) for r, each in agent.failures.items()
    }
    rank = min(order, key=order.__getitem__)
    return _tell(rank, agent.failures[rank].exitcode, folder, agent.place)


def _tell(rank: int, code: int, folder: Path, place: Place) -> int:
    """A process that was killed says nothing: where it was last seen, and how to go on."""
    if code >= 0:
        return code or 1
    name = signal.Signals(-code).name
    seen, advice = "", ""
    sign = folder / f"{rank}.json"
    if sign.exists():
        stage, run = json.loads(sign.read_text(encoding="utf-8"))
        seen = f" (last seen {stage})"
        if run is not None:
            advice = f"; go on from the last checkpoint with: {processes.resume_command(Path(run))}"
    who = processes.named(rank, place.nproc * place.nnodes)
    print(f"\nflowcredit: {visible(f'{who} was ended by {name}{seen}{advice}')}", file=sys.stderr)
    return 1
