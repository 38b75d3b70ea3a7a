"""Tries to break what `docs/reliability.md` promises of a single run, on tiny models, on the CPU.

    python reliability/survival.py kill [--kills 50] [--method all] [--lora both] [--seed 0]
    python reliability/survival.py corrupt [--trials 50] ...
    python reliability/survival.py full [--fills 50] ...
    python reliability/survival.py memory [--iterations 200] ...

`kill` ends real processes by SIGKILL at random moments and compares what the run ends in with one that was
never interrupted; `corrupt` damages files of a stopped run and resumes it; `full` lets the disk be full at
random moments; `memory` tells how a run's memory grows. Exit code 1 where a promise is broken. Several may
be named, with commas.
"""

import argparse
import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from survival_damage import corrupt, fill
from survival_kill import kill_until
from survival_memory import memory
from survival_world import build_world, cells


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", metavar="kill|corrupt|full|memory")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--fills", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--method", default="all", metavar="NAMES")
    parser.add_argument("--lora", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    wanted = chosen.what.split(",")
    if set(wanted) - {"kill", "corrupt", "full", "memory"}:
        parser.error(f"{chosen.what}: expected some of kill, corrupt, full, memory")
    _import_everything()
    with tempfile.TemporaryDirectory() as temporary:
        world = Path(temporary)
        build_world(world)
        broken = _survive(chosen, wanted, world)
        if "memory" in wanted:
            broken |= memory(cells(chosen.method, chosen.lora), chosen.iterations, world)
    return int(broken)


def _survive(chosen: argparse.Namespace, wanted: Sequence[str], world: Path) -> bool:
    """Whether a promise was broken by any of what is ``wanted``; after Ctrl-C, as far as it came."""
    broken = False
    for name, attempt, times in (
        ("kill", kill_until, chosen.kills),
        ("corrupt", corrupt, chosen.trials),
        ("full", fill, chosen.fills),
    ):
        if name in wanted:
            counts: Counter[str] = Counter()
            wrong: list[str] = []
            with suppress(KeyboardInterrupt):
                attempt(cells(chosen.method, chosen.lora), times, chosen.seed, world, counts, wrong)
            broken |= _tell(name, counts, wrong)
    return broken


def _tell(what: str, counts: Counter[str], wrong: list[str]) -> bool:
    for line in wrong:
        print(line)
    told = ", ".join(f"{name} {counts[name]}" for name in sorted(counts))
    print(f"{what}: {told}; mismatches {len(wrong)}", flush=True)
    return bool(wrong)


def _import_everything() -> None:
    """What a run imports on its way: then a fork has it already."""
    for name in ("flowcredit.trainer", "flowcredit.models.pipelines", "peft"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
