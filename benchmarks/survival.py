"""Tries to break what `docs/reliability.md` promises of a single run, on tiny models, on the CPU.

    python benchmarks/survival.py kill [--kills 50] [--method all] [--lora both] [--seed 0]

`kill` ends real processes by SIGKILL at random moments and compares what the run ends in with one that was
never interrupted. Exit code 1 where a promise is broken.
"""

import argparse
import importlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from survival_kill import Reference, kill_until, reference
from survival_world import build_world, cells


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("kill",))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--method", default="all", metavar="NAMES")
    parser.add_argument("--lora", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    _import_everything()
    with tempfile.TemporaryDirectory() as temporary:
        world = Path(temporary)
        build_world(world)
        began = time.monotonic()
        references = [reference(world, cell) for cell in cells(chosen.method, chosen.lora)]
        print(f"{len(references)} runs without interruption, {time.monotonic() - began:.0f} s", flush=True)
        return _kill(chosen, references, world)


def _kill(chosen: argparse.Namespace, references: list[Reference], world: Path) -> int:
    counts, wrong = kill_until(references, chosen.kills, chosen.seed, world)
    return _tell("kill", counts, wrong)


def _tell(what: str, counts: Counter[str], wrong: list[str]) -> int:
    for line in wrong:
        print(line)
    print(
        f"{what}: {', '.join(f'{name} {count}' for name, count in counts.items())}; mismatches {len(wrong)}"
    )
    return int(bool(wrong))


def _import_everything() -> None:
    """What a run imports on its way: then a fork has it already."""
    for name in ("flowcredit.trainer", "flowcredit.models.pipelines", "peft"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
