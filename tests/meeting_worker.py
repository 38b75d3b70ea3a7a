"""One process of several that meet three times; one misbehaves. Started by ``test_failing_processes``.

... meeting_worker.py FOLDER raise|crash|kill|hang|interrupt|none [rank]
"""

import os
import signal
import sys
import time
from pathlib import Path

from flowcredit import cli
from flowcredit.distributed import joined
from flowcredit.errors import InputError

folder, how, *chosen = sys.argv[1:]


def misbehave() -> None:
    match how:
        case "raise":
            raise InputError("the scorer is out of paper")
        case "crash":
            raise ZeroDivisionError("no such share")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(300)
        case "interrupt":
            raise KeyboardInterrupt


def work(**_: object) -> None:
    with joined(timeout_s=4) as world:
        world.note_run(Path(folder))
        for iteration in range(1, 4):
            world.note("scoring", iteration)
            if iteration == 2 and world.rank == int(*chosen or (1,)):
                misbehave()
            world.summed([1])
    print("finished", flush=True)


if how == "early":
    cli.app = lambda **_: (_ for _ in ()).throw(InputError(f"bad recipe in {os.environ['RANK']}"))  # type: ignore[assignment]
else:
    cli.app = work  # type: ignore[assignment]
cli.main()
