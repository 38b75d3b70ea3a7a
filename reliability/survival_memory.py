"""How the memory of a run grows over its iterations, in a process of its own."""

import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from survival_lives import live
from survival_world import Cell, write_recipe

from flowcredit.run_folder import RunFolder

SETTLED = 50
"""Iterations in which a run may still take memory: caches fill, the allocator finds its size."""
PAGE = os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    """Tensors that something still holds."""
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def own_objects() -> int:
    """Objects of the project's own types that something still holds."""
    return sum(str(type(each).__module__).startswith("flowcredit.") for each in gc.get_objects())


def _samples(folder: Path, recipe: Path) -> list[dict[str, float]]:
    """The memory of a run after each of its iterations: bytes, tensors, own objects."""
    file = folder / "samples.jsonl"
    append = RunFolder.append_log

    def noted(self: RunFolder, record: Mapping[str, Any]) -> None:
        append(self, record)
        gc.collect()
        if not file.exists():
            gc.freeze()  # What is there after the first iteration need not be counted in each.
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        sample = {"resident": resident, "tensors": live_tensors(), "objects": own_objects()}
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(sample) + "\n")

    life = live(folder, recipe, within=lambda: setattr(RunFolder, "append_log", noted))
    if life.code != 0:
        raise SystemExit(f"the run failed:\n{life.said}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def memory(chosen: list[Cell], iterations: int, world: Path) -> bool:
    """Run each cell, print its growth; whether tensors or objects grew in any."""
    grew = False
    for cell in chosen:
        folder = world / "memory" / cell.name
        folder.mkdir(parents=True)
        samples = _samples(folder, write_recipe(world, cell, iterations))
        settled = min(SETTLED, len(samples) // 2)
        first, last = samples[settled - 1], samples[-1]
        mib = (last["resident"] - first["resident"]) / 2**20
        over = len(samples) - settled
        tensors, objects = (last[name] - first[name] for name in ("tensors", "objects"))
        print(
            f"memory of {cell}: {first['resident'] / 2**20:.1f} MiB at iteration {settled},"
            f" {mib:+.2f} MiB by iteration {len(samples)} ({1024 * mib / over:+.2f} KiB an iteration);"
            f" tensors {tensors:+.0f}, own objects {objects:+.0f}",
            flush=True,
        )
        grew |= tensors > 0 or objects > 0
    return grew
