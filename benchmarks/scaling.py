"""What a second process gives: time, what the processes send each other, memory of each.

    python benchmarks/scaling.py [--processes 2] [--prompts 8] [--iterations 3]

The same iterations of a recipe on the bundled model, the same work in total, on one process and on several of
one thread each (gloo), replicated and sharded. Prints one ratio a line; each also says what it is made of.
Times are the best of the iterations, taken in one run on one machine. Bytes are counted in torch's own
dispatcher, collective by collective, as a ring sends them: of N processes each sends 2 (N - 1) / N of what is
summed, (N - 1) / N of what is scattered or gathered. The least there can be, replicated: each optimizer step
sums the trained weights' gradients once, and each process sends its scores once to every other.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from allocations import peak_of
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowcredit import scaling
from flowcredit.assembly import Setup, assemble
from flowcredit.config import Recipe
from flowcredit.console import Monitor
from flowcredit.distributed import World, joined
from flowcredit.experience import Experience, collect
from flowcredit.memory.estimate import estimate
from flowcredit.progress import start
from flowcredit.prompts import iteration_prompts
from flowcredit.quiet import quiet_libraries
from flowcredit.recipe_io import load_recipe
from flowcredit.sharding import own_part
from flowcredit.update import update_policy

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "shapes_g2rpo.yaml"
SMALL = ("algorithm.num_steps=8", "algorithm.group_size=6", "train.mixed_precision=no")
LAYOUTS = ("replicated", "sharded")


@dataclass
class Sent(TorchDispatchMode):
    """Bytes that this process sends in a ring of ``size``, by collective, while entered."""

    size: int
    bytes_by_name: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._count(name.partition("::")[2].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        share = (self.size - 1) / self.size
        tensors = _bytes(_tensors(args[0]))
        match name:
            case "allreduce":
                sent = 2 * share * tensors
            case "allgather" | "allgather_base" | "all_gather_into_tensor":
                sent = share * tensors  # The first argument is what all of them have together.
            case "reduce_scatter_base" | "reduce_scatter_tensor":
                sent = share * _bytes(_tensors(args[1]))
            case "broadcast":
                sent = tensors
            case "barrier" | "wait_tensor":
                return
            case _:
                raise AssertionError(f"a collective that is not counted: {name}")
        self.bytes_by_name[name] = self.bytes_by_name.get(name, 0.0) + sent


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


class Trial:
    """A recipe's parts on one process of some, and its iterations."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        self.recipe, self.world = recipe, world
        self.setup: Setup = assemble(recipe, world)
        progress = start(self.setup, world)
        self.parameters, self.optimizer = progress.parameters, progress.optimizer
        self.gradients = 0
        self.optimizer.register_step_pre_hook(self._look)
        self.steps = 0

    def _look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.steps += 1
        grads = [each.grad for each in self.parameters.values() if each.grad is not None]
        self.gradients = _bytes(own_part(grad) for grad in grads)

    def iterate(self, iteration: int) -> Experience:
        setup, settings = self.setup, self.recipe.train
        count = settings.prompts_per_iteration
        places = iteration_prompts(len(setup.train_prompts), self.recipe.seed, iteration, count)
        monitor = Monitor(Console(quiet=True), 1, 0, 1)
        found = collect(setup, setup.train_prompts.take(places), iteration, monitor, self.world)
        update_policy(
            setup.trained_flow,
            found.cond,
            found.sets,
            self.optimizer,
            settings,
            lambda: None,
            setup.reference,
            self.world,
            found.own,
        )
        return found

    def measure(self, iterations: int) -> dict[str, Any]:
        self.iterate(0)
        seconds = []
        for iteration in range(1, iterations + 1):
            began = time.perf_counter()
            self.iterate(iteration)
            seconds.append(time.perf_counter() - began)
        peak = peak_of(lambda: self.iterate(iterations + 2))
        self.steps = 0
        with Sent(self.world.size) as sent:
            found = self.iterate(iterations + 1)
        scores = _bytes(found.scores.values()) / self.world.size
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v.ndim > 0]
        return {
            "seconds": min(seconds, default=None),
            "evaluations": found.velocity_evaluations,
            "sent": sent.bytes_by_name,
            "steps": self.steps,
            "scores": scores,
            "trained": sum(each.numel() for each in self.parameters.values()),
            "memory": {
                "weights": _bytes(own_part(each) for each in self.parameters.values()),
                "gradients": self.gradients,
                "Adam's moments": _bytes(own_part(each) for each in moments),
                "the most at once beside weights and moments": peak,
            },
        }


def work(overrides: list[str], iterations: int, out: Path) -> None:
    """One process of some: measures, and the first writes what all found."""
    torch.set_num_threads(1)
    with joined(timeout_s=600) as world, quiet_libraries():
        found = Trial(load_recipe(RECIPE, overrides), world).measure(iterations)
        told = world.told(found)
        if world.first:
            out.write_text(json.dumps(told), encoding="utf-8")


def run(processes: int, overrides: list[str], iterations: int) -> list[dict[str, Any]]:
    """What each of so many processes found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        options = ["--work", str(out), "--iterations", str(iterations), "--overrides", *overrides]
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, "-m", *torchrun, str(Path(__file__)), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        content: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return content


def least(found: Mapping[str, Any], processes: int) -> float:
    """The fewest bytes that a process can send in a replicated iteration."""
    summed = 4 * found["trained"] * found["steps"]
    return 2 * (processes - 1) / processes * summed + (processes - 1) * found["scores"]


def derived(processes: int, overrides: list[str]) -> float:
    """The bytes that `flowcredit plan --gpus` derives."""
    recipe = load_recipe(RECIPE, overrides)
    counted = scaling.counts(recipe, estimate(recipe, processes))
    assert counted is not None
    return scaling.sent(counted, processes).total


def report(processes: int, prompts: int, iterations: int) -> None:
    same = [*SMALL, f"train.prompts_per_iteration={prompts}"]
    alone = run(1, same, iterations)[0]
    several = {
        layout: run(processes, [*same, f"parallel.sharding={layout}"], iterations) for layout in LAYOUTS
    }
    for layout, found in several.items():
        seconds = max(each["seconds"] for each in found)
        assert found[0]["evaluations"] == alone["evaluations"], "not the same work"
        print(
            f"throughput, {processes} processes {layout} / 1: {alone['seconds'] / seconds:.2f}"
            f"   ({alone['seconds']:.2f} s and {seconds:.2f} s an iteration of {prompts} prompts)"
        )
    for layout, found in several.items():
        sent = max(sum(each["sent"].values()) for each in found)
        fewest = least(found[0], processes)
        print(
            f"bytes sent, {layout} / the least when replicated: {sent / fewest:.4f}"
            f"   ({sent:,.0f} and {fewest:,.0f}; optimizer steps: {found[0]['steps']},"
            f" trained weights: {found[0]['trained']:,})"
        )
        planned = derived(processes, [*same, f"parallel.sharding={layout}"])
        print(f"bytes sent, {layout} / as flowcredit plan --gpus derives: {sent / planned:.4f}")
    for found in several.values():
        for each in found:
            # The peak holds the gradients.
            each["memory"]["all"] = sum(size for name, size in each["memory"].items() if name != "gradients")
    for name in several["sharded"][0]["memory"]:
        whole = max(each["memory"][name] for each in several["replicated"])
        part = max(each["memory"][name] for each in several["sharded"])
        print(
            f"memory of a process, {name}, sharded / replicated: {part / whole:.3f}"
            f"   ({part:,} and {whole:,} bytes)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--overrides", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.overrides, args.iterations, args.work)
    else:
        report(args.processes, args.prompts, args.iterations)


if __name__ == "__main__":
    main()
