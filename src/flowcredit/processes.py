"""What the environment says of the processes of a run: who started them, how many, how to start them again.

Read without torch. `distributed` joins them, `launch` starts them.
"""

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from flowcredit.errors import InputError
from flowcredit.visible import visible

FOLDER = "FLOWCREDIT_LAUNCH_FOLDER"
"""Variable with the folder in which processes tell `flowcredit launch` who they are and what has happened."""
COMMAND = "FLOWCREDIT_LAUNCH_COMMAND"
"""Variable with the beginning of the command that started them, up to `train`."""
FAILURE = "failure.json"

BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
BY_ACCELERATE = "ACCELERATE_DYNAMO_MODE"
"""Variables that mpirun and `accelerate launch` give to what they start."""

PARENT = "FLOWCREDIT_ENDS_WITH"
"""Variable with the number of the process that started this one, and without which it is not to go on."""
LOST_S = 0.5
"""How often a process looks whether that one is still there."""
Environment = Mapping[str, str]


def size(environment: Environment = os.environ) -> int:
    """How many processes there are. InputError for what is no number."""
    return number("WORLD_SIZE", 1, environment)


def number(name: str, default: int, environment: Environment = os.environ) -> int:
    """A variable that holds a whole number. InputError for what is none."""
    value = environment.get(name, str(default))
    if not value.isdecimal():
        raise InputError(f"environment variable {name} is {value!r}; expected a whole number")
    return int(value)


def named(rank: int, of: int) -> str:
    """A process as messages name it."""
    return f"process {rank} of {of}"


def refuse_pretence(environment: Environment = os.environ) -> None:
    """InputError where several processes seem to be wanted, of which each would think itself alone."""
    if "WORLD_SIZE" in environment:
        return
    for name in BY_MPI:
        if number(name, 1, environment) > 1:
            raise InputError(
                f"{name} says {environment[name]} processes, but without WORLD_SIZE each of them would train"
                " alone; start them by flowcredit launch --nproc N train ..., or by torchrun"
            )
    if BY_ACCELERATE in environment:
        raise InputError(
            "accelerate launch has started one process here, whatever its --num_processes says; start"
            " several by flowcredit launch --nproc N train ..., one by flowcredit train ..."
        )


def resume_command(run: Path, environment: Environment = os.environ) -> str:
    """The command that goes on with a run as it was started: alone, by `flowcredit launch` or by torchrun."""
    folder = shlex.quote(str(run))
    if COMMAND in environment:
        return f"{environment[COMMAND]} train --resume {folder}"
    count = size(environment)
    if count == 1:
        return f"flowcredit train --resume {folder}"
    here = number("LOCAL_WORLD_SIZE", count, environment)
    where = "--standalone" if here == count else f"--nnodes={count // here} --rdzv-endpoint=..."
    return f"torchrun {where} --nproc-per-node={here} -m flowcredit train --resume {folder}"


def register(environment: Environment = os.environ) -> None:
    """Tell `flowcredit launch`, if it started this process, under which number it can be reached.

    Of several processes, keep torch's own traces of broken connections out of what they print.
    """
    if "WORLD_SIZE" in environment:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if FOLDER in environment:
        write(f"{environment.get('RANK', '0')}.pid", os.getpid(), environment)
    # Not for what this process starts in its turn.
    parent = os.environ.pop(PARENT, None)
    if parent is not None and parent.isdecimal():
        threading.Thread(target=_end_without, args=(int(parent),), daemon=True).start()


def _end_without(parent: int) -> None:
    """A SIGTERM to this process once its parent is gone, as by a SIGKILL: nobody else would end it."""
    while os.getppid() == parent:
        time.sleep(LOST_S)
    os.kill(os.getpid(), signal.SIGTERM)


def tell(failure: Mapping[str, Any], environment: Environment = os.environ) -> None:
    """Leave a failure to whoever started this process: `flowcredit launch`, or torchrun, which quotes it."""
    write(FAILURE, dict(failure), environment)
    file = environment.get("TORCHELASTIC_ERROR_FILE")
    if file is None or FOLDER in environment:
        return
    line = visible(str(failure["line"]))
    # torchrun takes the earliest for the cause, in whole seconds: who ends quietly shall not tie with it.
    extra = {"py_callstack": line, "timestamp": str(int(time.time()) - 1)}
    Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")


def write(name: str, value: Any, environment: Environment = os.environ) -> None:
    """A JSON file in the launch's folder, if there is one; whole or not there."""
    folder = environment.get(FOLDER)
    if folder is None or not os.path.isdir(folder):
        return
    partial = Path(folder) / f".{name}.{os.getpid()}"
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(Path(folder) / name)


@contextmanager
def finishing() -> Iterator[None]:
    """What is entered is finished before a SIGTERM ends the process, as those who start several send it when
    one of them has ended."""
    asked: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    try:
        before = signal.signal(signal.SIGTERM, hold)
    except ValueError:  # Signals belong to the main thread.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)


def ending() -> None:
    """This process ends by itself from here on: a SIGTERM, because others were faster, is not needed."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except ValueError:
        return
