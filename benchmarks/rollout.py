"""How fast the rollout is: against the naive schedule of public code, and against the limit.

    python benchmarks/rollout.py [--method dense_grpo] [--model FOLDER] [--prompts 4] [--batch-size 96]

The naive schedule runs every branch, stride and probe for itself, one sample at a time, as released G2RPO
code does; it draws the same noises, so its images must be the same. The limit is the same number of velocity
evaluations, decodes and scores at the same batch size in a bare loop. Prints one ratio a line, measured in
one run on one machine, and the peak memory of each schedule, measured in a process of its own (off a GPU,
resident memory as Linux counts it).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowcredit.algorithms import build
from flowcredit.interfaces import FlowModel
from flowcredit.leaf_scoring import score_leaves
from flowcredit.methods import AlgorithmSettings, DenseGRPOSettings, G2RPOSettings
from flowcredit.models.loading import load_model
from flowcredit.plan import Plan
from flowcredit.prompts import PromptSet, load_prompts
from flowcredit.rewards.loading import load_reward
from flowcredit.rollout import KeyedNoise, rollout, rows_of
from flowcredit.scoring import score_images
from flowcredit.shapes import bundled_path
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import Kernel, euler, make_kernel

METHODS: dict[str, AlgorithmSettings] = {"g2rpo": G2RPOSettings(), "dense_grpo": DenseGRPOSettings()}
"""Published settings: T = 16, M = 0..7, G = 12, strides 1, 2, 3; and T = 10, G = 24, every step probed."""
ETA = 0.7


@dataclass(frozen=True)
class Bench:
    """What both schedules run on."""

    model: FlowModel
    prompts: PromptSet
    batch_size: int
    rewards: dict[str, Any]
    plan: Plan
    grid: Tensor
    kernel: Kernel

    def score(self, images: Tensor, rows: Sequence[int]) -> Tensor:
        chosen = self.prompts.take(rows)
        return score_images(self.rewards, images, chosen.prompts, chosen.columns, batch_size=self.batch_size)


def load(model: str, method: str, prompts: int, batch_size: int, precision: str) -> Bench:
    flow = load_model(
        bundled_path(model),
        height=32,
        width=32,
        guidance_scale=3.5,
        max_sequence_length=12,
        dtype=torch.float32,
        device="cuda" if torch.cuda.is_available() else "cpu",
        decode_batch_size=batch_size,
        autocast=torch.bfloat16 if precision == "bf16" else None,
    )
    rewards = {"shapes": load_reward("shapes", {}, flow.device)}
    plan = build(METHODS[method]).plan
    grid = shifted_linear(plan.num_steps, 3.0)
    kernel = make_kernel("flow_sde", grid, ETA)
    chosen = load_prompts("bundled:shapes/heldout").take(range(prompts))
    return Bench(flow, chosen, batch_size, rewards, plan, grid, kernel)


def wavefront(bench: Bench) -> dict[int, Tensor]:
    """This package's schedule; latents by scored segment, [P, W, *D]."""
    cond = bench.model.encode(bench.prompts.prompts)
    noise = KeyedNoise(bench.model, 0, 0, range(len(bench.prompts)))
    done = rollout(bench.model, bench.plan, cond, bench.grid, bench.kernel, noise, bench.batch_size)
    score_leaves(
        bench.model,
        done.leaves,
        bench.prompts.prompts,
        bench.prompts.columns,
        bench.rewards,
        batch_size=bench.batch_size,
    )
    return done.leaves


@torch.no_grad()
def naive(bench: Bench) -> dict[int, Tensor]:
    """Public code's schedule: every segment for itself, batch 1, nothing shared."""
    cond = bench.model.encode(bench.prompts.prompts)
    rows = [naive_prompt(bench, cond, row) for row in range(len(bench.prompts))]
    return {leaf: torch.stack([ends[leaf] for ends in rows]) for leaf in bench.plan.scored}


def naive_prompt(bench: Bench, cond: Any, row: int) -> dict[int | None, Tensor]:
    """The ends of all segments for one prompt; a trunk that only serves branches is finished for an image."""
    model, plan, sigmas = bench.model, bench.plan, bench.grid.tolist()
    own = rows_of(cond, torch.tensor([row]))
    noise = KeyedNoise(model, 0, 0, [row])
    ends: dict[int | None, Tensor] = {None: noise.initial(plan.root_width)[0].to(model.device)}
    evaluated = 0

    def velocity(x: Tensor, k: int) -> Tensor:
        nonlocal evaluated
        evaluated += 1
        return model.velocity(x, x.new_full((1,), sigmas[k]), own)

    for i, segment in enumerate(plan.segments):
        drawn = noise.step(i, plan.width(i))[0].to(model.device) if segment.stochastic else None
        found = []
        for sample in range(plan.width(i)):
            x = ends[segment.parent][sample // segment.fan_out][None]
            for a, b in pairwise(segment.path):
                v = velocity(x, a)
                if drawn is None:
                    x = euler(x, v, sigmas[a], sigmas[b])
                else:
                    x = bench.kernel(x, v, a, b).draw(drawn[sample : sample + 1])
            if segment.scored:
                bench.score(model.decode(x), [row])
            found.append(x)
        ends[i] = torch.cat(found)
    left = plan.naive_velocity_evaluations - evaluated
    if left:
        trunks = [i for i, each in enumerate(plan.segments) if not (each.stochastic or each.scored)]
        x = ends[trunks[-1] if trunks else None]
        for k in range(plan.num_steps - left, plan.num_steps):
            x = euler(x, velocity(x, k), sigmas[k], sigmas[k + 1])
        bench.score(model.decode(x), [row])
    return ends


@torch.no_grad()
def limit(bench: Bench, latents: Tensor) -> None:
    """As many velocity evaluations, decodes and scores as the wavefront, in full batches, in a bare loop.

    ``latents`` [N, *D] are the wavefront's: what a checker costs depends on what it sees.
    """
    plan, model, count = bench.plan, bench.model, len(bench.prompts)
    x = model.initial_noise(bench.batch_size, torch.Generator().manual_seed(0))
    rows = [i % count for i in range(bench.batch_size)]
    cond = rows_of(model.encode(bench.prompts.prompts), torch.tensor(rows))
    sigma = torch.full((bench.batch_size,), 0.5, device=model.device)
    for size in _batches(count * plan.velocity_evaluations, bench.batch_size):
        model.velocity(x[:size], sigma[:size], {name: value[:size] for name, value in cond.items()})
    for size in _batches(count * plan.decodes, bench.batch_size):
        chosen = latents[torch.arange(size) % len(latents)]
        bench.score(model.decode(chosen), [i % count for i in range(size)])


def _batches(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_memory(schedule: str, arguments: tuple[Any, ...]) -> tuple[int, int]:
    """MiB before and at the peak of one schedule; to be called in a fresh process."""
    bench = load(*arguments)
    run = {"wavefront": wavefront, "naive": naive}[schedule]
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        run(bench)
        return before >> 20, torch.cuda.max_memory_allocated() >> 20
    before = resident_kib("VmRSS")
    # Loading has a peak of its own: Linux forgets it when 5 is written here.
    Path("/proc/self/clear_refs").write_text("5")
    run(bench)
    return before >> 10, resident_kib("VmHWM") >> 10


def resident_kib(field: str) -> int:
    """KiB of this process that are in memory (VmRSS), or were at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])


def measure(arguments: tuple[Any, ...], precision: str, rounds: int) -> None:
    bench = load(*arguments)
    shared = wavefront(bench)
    latents = torch.cat([each.flatten(0, 1) for each in shared.values()])
    alone: dict[int, Tensor] = {}
    slow = seconds(lambda: alone.update(naive(bench)))
    difference = max(float((shared[key] - alone[key]).abs().max()) for key in shared)
    fast, bare = [], []
    for _ in range(rounds):
        bare.append(seconds(lambda: limit(bench, latents)))
        fast.append(seconds(lambda: wavefront(bench)))
    over = statistics.median(f / b for f, b in zip(fast, bare, strict=True))
    print(f"{precision}: naive / wavefront time = {slow / statistics.median(fast):.2f}")
    print(f"{precision}: wavefront / limit time = {over:.3f}")
    spread = float(latents.std())
    print(f"{precision}: largest difference of any latent = {difference:.1e} (their deviation: {spread:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled:shapes", help="a FluxPipeline folder")
    parser.add_argument("--method", choices=METHODS, default="g2rpo")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("bf16", "fp32", "both"), default="both")
    args = parser.parse_args()
    for precision in ("bf16", "fp32") if args.precision == "both" else (args.precision,):
        arguments = (args.model, args.method, args.prompts, args.batch_size, precision)
        measure(arguments, precision, args.rounds)
        for schedule in ("wavefront", "naive"):
            if not torch.cuda.is_available() and not Path("/proc/self/clear_refs").exists():
                print(f"{precision}: peak memory of {schedule} is not measured: it needs Linux or a GPU")
                continue
            with get_context("spawn").Pool(1) as pool:
                before, peak = pool.apply(peak_memory, (schedule, arguments))
            print(
                f"{precision}: peak memory of {schedule} = {peak} MiB, of which {peak - before} for the run"
            )


if __name__ == "__main__":
    main()
