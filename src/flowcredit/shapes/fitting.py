"""The loop that trains the bundled world's networks: seeded batches, cosine rates, averages, resumable."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


def batch_rows(count: int, size: int, seed: int, step: int) -> Tensor:
    """Rows of the step's batch: the same at every run, whatever was run before."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(count, (size,), generator=generator)


def rate_share(step: int, end: int, warmup: int = 200) -> float:
    """Learning rate of a step as a share of its peak: a warm-up, then a cosine down to step ``end``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, end - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + float(np.cos(np.pi * progress)))


class Averages:
    """Exponential moving averages of a module's parameters."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, p in module.named_parameters():
            self.values[name].lerp_(p.detach(), 1 - decay)

    def write_to(self, module: nn.Module) -> None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(self.values[name])


def optimizers_of(module: nn.Module, rate: float, blocks: str | None) -> list[torch.optim.Optimizer]:
    """AdamW for all; or, for the matrices whose names contain ``blocks``, Muon at the same update size.

    On the transformer Muon needed two thirds of AdamW's steps for the same loss.
    """
    matrices = {n: p for n, p in module.named_parameters() if blocks and blocks in n and p.ndim == 2}
    others = [p for n, p in module.named_parameters() if n not in matrices]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, rate, (0.9, 0.98), weight_decay=0.01)]
    if matrices:
        muon = torch.optim.Muon(matrices.values(), rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        found.append(muon)
    return found


def finished(work: Path, name: str, steps: int) -> bool:
    """Whether a stage was trained to its end."""
    state_file = work / f"{name}.pt"
    return state_file.exists() and torch.load(state_file, weights_only=True)["step"] >= steps


def fit(
    name: str,
    module: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    work: Path,
    *,
    steps: int,
    rate_ends: int | None = None,
    learning_rate: float,
    decay: float = 0.999,
    blocks: str | None = None,
    save_every: int = 250,
) -> None:
    """A cosine schedule, to ``rate_ends`` or the last step; leaves averaged weights in the module."""
    state_file, log_file = work / f"{name}.pt", work / f"{name}.jsonl"
    optimizers = optimizers_of(module, learning_rate, blocks)
    averages = Averages(module, decay)
    first, seconds = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        module.load_state_dict(state["module"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        averages.values = state["averages"]
        first, seconds = state["step"], state["seconds"]
    started, smooth = time.monotonic() - seconds, 0.0
    for step in range(first, steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate * rate_share(step, rate_ends or steps)
        loss = loss_of_step(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        module.zero_grad()
        averages.update(module, step)
        value = loss.item()
        smooth = value if smooth == 0 else 0.99 * smooth + 0.01 * value
        if (step + 1) % save_every == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"module": module.state_dict(), "optimizers": states}
            state |= {"averages": averages.values, "step": step + 1, "seconds": seconds}
            torch.save(state, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
            left = seconds / (step + 1) * (steps - step - 1)
            line = {"step": step + 1, "loss": round(smooth, 5), "seconds": round(seconds, 1)}
            with log_file.open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(f"{name} {step + 1}/{steps} loss {smooth:.5f}, {left / 60:.1f} min left", flush=True)
    averages.write_to(module)
