"""What a GPU does with FLUX.1's shape, with random weights: one GPU, nothing to download.

    python benchmarks/gpu.py            # a FLUX.1 of as many blocks as fit, 19 double to 38 single
    python benchmarks/gpu.py --tiny     # a small one on the CPU, to see that it works

Prints a Markdown block to keep in docs/gpu.md: the wavefront against the naive schedule and against a bare
loop (benchmarks/rollout.py), the on-policy ratio in bf16, peak memory against `flowcredit plan`, and the time
of a training step with a LoRA and with all weights. docs/gpu.md says what each line means.
"""

import argparse
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from allocations import peak_of
from flux_shaped import (
    FLUX,
    TINY,
    RandomTexts,
    Shape,
    blocks_that_fit,
    brightness,
    build,
    plan_of,
    recipe_for,
)
from rollout import Bench, limit, naive, seconds, wavefront
from torch import Tensor, nn

from flowcredit.config import Recipe
from flowcredit.memory.estimate import Estimate
from flowcredit.objectives import policy_sets
from flowcredit.prompts import PromptSet
from flowcredit.rollout import KeyedNoise, Rollout, rollout
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import make_kernel
from flowcredit.update import UpdateMetrics, update_policy
from flowcredit.weights import trainable_parameters

BAD_INPUT = 2


@dataclass(frozen=True)
class Job:
    """A model with its recipe and plan, an optimizer as training makes it, and a place to write lines."""

    model: RandomTexts
    recipe: Recipe
    bench: Bench
    planned: Estimate
    optimizer: torch.optim.Optimizer
    write: Callable[[str, str], None]

    def roll_out(self) -> Rollout:
        bench = self.bench
        cond = self.model.encode(bench.prompts.prompts)
        noise = KeyedNoise(self.model, 0, 0, range(len(bench.prompts)))
        return rollout(self.model, bench.plan, cond, bench.grid, bench.kernel, noise, bench.batch_size)

    def update(self, done: Rollout) -> UpdateMetrics:
        """One optimizer step on the first transition, its states one by one."""
        first = done.transitions[0]
        generator = torch.Generator().manual_seed(0)
        advantages = {first.segment: torch.randn(first.log_prob.flatten(1).shape, generator=generator)}
        cond, kernel = self.model.encode(self.bench.prompts.prompts), self.bench.kernel
        settings = self.recipe.train
        sets = policy_sets([first], advantages, kernel, settings)
        return update_policy(self.model, cond, sets, self.optimizer, settings, lambda: None)

    def peak(self, run: Callable[[], Any], *kept: Tensor) -> int:
        """The most bytes of tensors at once while ``run`` lasts, all that stands included."""
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)
            run()
            return torch.cuda.max_memory_allocated(self.model.device)
        parts: list[nn.Module] = [self.model.network, self.model.flow.pipeline.vae]
        standing = [*kept, *(value for part in parts for value in part.parameters())]
        standing += [v for state in self.optimizer.state.values() for v in state.values()]
        sizes = {each.data_ptr(): each.untyped_storage().nbytes() for each in standing}
        return sum(sizes.values()) + peak_of(run)


def make_job(
    shape: Shape, folder: Path, method: str, device: torch.device, write: Callable[[str, str], None]
) -> Job:
    blocks = blocks_that_fit(shape, folder, method, device)
    recipe = recipe_for(shape, folder, blocks, method, device.type)
    plan, planned = plan_of(recipe)
    model = build(shape, recipe, blocks, device)
    trained = trainable_parameters(model.network)
    count = sum(value.numel() for value in model.network.parameters())
    write(f"{method}: blocks", f"{blocks} double, {2 * blocks} single; {count / 1e6:,.1f} million parameters")
    assert planned.trained == sum(value.numel() for value in trained.values())
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-6)
    # The optimizer makes its moments in its first step: what is measured is a later one.
    for value in trained.values():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    grid = shifted_linear(plan.num_steps, 3.0)
    kernel = make_kernel("flow_sde", grid, 0.7)
    prompts = PromptSet(("a red circle", "a blue square"))
    bench = Bench(model, prompts, shape.batch_size, {"brightness": brightness}, plan, grid, kernel)
    return Job(model, recipe, bench, planned, optimizer, write)


def compare_schedules(job: Job) -> None:
    """The wavefront against the naive schedule and the bare loop, on one prompt."""
    bench = replace(job.bench, prompts=job.bench.prompts.take([0]))
    shared = wavefront(bench)  # Also warms up.
    fast = statistics.median(seconds(lambda: wavefront(bench)) for _ in range(3))
    latents = torch.cat([each.flatten(0, 1) for each in shared.values()])
    bare = statistics.median(seconds(lambda: limit(bench, latents)) for _ in range(3))
    alone: dict[int, Tensor] = {}
    slow = seconds(lambda: alone.update(naive(bench)))
    difference = max(float((shared[key] - alone[key]).abs().max()) for key in shared)
    job.write("naive / wavefront, time", f"{slow / fast:.2f}")
    job.write("wavefront / bare forwards, time", f"{fast / bare:.3f}")
    job.write("velocity evaluations a second", f"{bench.plan.velocity_evaluations / fast:.2f}")
    spread = float(latents.std())
    job.write("largest difference of a latent", f"{difference:.1e} (their deviation: {spread:.2f})")


def train(job: Job, method: str) -> None:
    """Peaks of rollout and training against the plan, the ratio before an update, the time of a step."""
    done: list[Rollout] = []
    seen: list[UpdateMetrics] = []
    rolled = job.peak(lambda: done.append(job.roll_out()))
    _write_peak(job, f"{method}: peak of rollout", rolled, job.planned.phases["rollout"])
    kept = [t for step in done[0].transitions for t in (step.x, step.v, step.x_next, step.log_prob)]
    trained = job.peak(lambda: seen.append(job.update(done[0])), *kept, *done[0].leaves.values())
    _write_peak(job, f"{method}: peak of training", trained, job.planned.phases["training"])
    job.write(
        f"{method}: ratio on a fresh rollout, its largest distance from 1",
        f"{seen[0]['on_policy_deviation']:.1e}",
    )
    taken = statistics.median(seconds(lambda: job.update(done[0])) for _ in range(3))
    states = len(job.bench.prompts)
    job.write(f"{method}: a training step ({states} states)", f"{taken:.3f} s")


def _write_peak(job: Job, name: str, measured: int, planned: int) -> None:
    sizes = f"{measured / 2**20:,.1f} MiB, planned {planned / 2**20:,.1f}"
    job.write(name, f"{sizes} (planned / measured {planned / measured:.3f})")


def run(shape: Shape, device: torch.device, line: Callable[[str], None]) -> None:
    """The whole Markdown block."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    size = f"{shape.pixels} x {shape.pixels} pixels, {shape.words} text tokens, bf16"
    line(f"### {card}, {date.today().isoformat()}, torch {torch.__version__}")
    line("")
    line(
        f"{size}; batches of {shape.batch_size}; G²RPO, {shape.num_steps} steps, {shape.group_size} branches"
    )
    line("")
    line("| what | measured |")
    line("|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for method in ("lora", "full"):
            job = make_job(
                shape, Path(folder), method, device, lambda name, value: line(f"| {name} | {value} |")
            )
            if method == "lora":
                compare_schedules(job)
            train(job, method)
            del job
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU if there is no GPU")
    parser.add_argument("--size", type=int, metavar="PIXELS", help="side of the images")
    args = parser.parse_args(words)
    gpu = torch.cuda.is_available()
    if not gpu and not args.tiny:
        print("gpu.py: torch sees no GPU; --tiny tries a small model on the CPU", file=sys.stderr)
        return BAD_INPUT
    shape = TINY if args.tiny else FLUX
    if args.size is not None:
        shape = replace(shape, pixels=args.size)
    with warnings.catch_warnings():
        # Autocast over float32 weights is meant, in norms too.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        run(shape, torch.device("cuda" if gpu else "cpu"), print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
