"""What multi-granularity advantages (MGAI) cost: G²RPO with several strides against G²RPO with one.

    python benchmarks/mgai.py [--prompts 32] [--iterations 5] [--batch-size 96]

The bundled world's recipe, rollout, scores and update as in training, with strides {1}, {1, 2} and {1, 2, 3}.
Iterations take turns, so that whatever else the machine does falls on all alike; a figure is the median over
iterations of the ratio to the iteration with one stride of the same turn. Memory is the most bytes in use at
once in a phase, beside weights and moments, by torch's profiler. Prints one ratio a line.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from allocations import peak_of
from memory import Iteration

from flowcredit.assembly import assemble
from flowcredit.quiet import quiet_libraries
from flowcredit.recipe_io import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "shapes_g2rpo.yaml"
STRIDES = ("[1]", "[1, 2]", "[1, 2, 3]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96)
    chosen = parser.parse_args()
    quiet_libraries()
    made = {strides: make(strides, chosen.prompts, chosen.batch_size) for strides in STRIDES}
    turns = [
        {name: run.phases(seconds)[:3] for name, run in made.items()} for _ in range(chosen.iterations + 1)
    ]
    turns.pop(0)  # The first one warms up.
    peaks = {name: max(run.phases(peak_of)[:3]) for name, run in made.items()}
    for name, run in made.items():
        line(name, "velocity evaluations", velocity_evaluations(run) / velocity_evaluations(made[STRIDES[0]]))
        for phase, place in (("rollout", 0), ("decoding and scoring", 1), ("update", 2)):
            line(
                name, phase, statistics.median(turn[name][place] / turn[STRIDES[0]][place] for turn in turns)
            )
        whole = [sum(turn[name]) / sum(turn[STRIDES[0]]) for turn in turns]
        line(name, "iteration", statistics.median(whole))
        line(name, f"memory of an iteration ({peaks[name] / 2**20:.0f} MiB)", peaks[name] / peaks[STRIDES[0]])


def make(strides: str, prompts: int, batch_size: int) -> Iteration:
    """The recipe with these strides, ready to iterate."""
    changes = [
        f"algorithm.strides={strides}",
        f"train.prompts_per_iteration={prompts}",
        f"rollout.batch_size={batch_size}",
        f"scoring.batch_size={batch_size}",
        f"train.micro_batch_size={batch_size}",
    ]
    return Iteration(assemble(load_recipe(RECIPE, changes)))


def velocity_evaluations(run: Iteration) -> int:
    """Of the rollout of one prompt."""
    return run.setup.algorithm.plan.velocity_evaluations


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def line(strides: str, what: str, ratio: float) -> None:
    """One figure."""
    print(f"strides {strides:<10} {what:<34} {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
