"""Numbers that are not finite and rewards that fail, with the batch in which that was first seen.

A fault is kept in the run's folder so that `flowcredit replay` can bring it about again:
``faults/000012-gradient/`` holds the recipe, the trained weights of that moment, and for each process that
saw it ``batch-RANK.safetensors`` and ``fault-RANK.json``.

Axes: B rows of a batch, *D latent dimensions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcredit.config import Recipe
from flowcredit.disk import writing
from flowcredit.errors import InputError
from flowcredit.recipe_io import dump_recipe

KEPT = 3
"""Faults that a run keeps: each may hold a copy of the trained weights."""

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Fault:
    """What was not finite, and in which batch.

    ``kind`` is "velocity", "loss", "gradient" or "reward". ``tensors`` of the first three: ``x`` [B, *D],
    ``sigma`` [B], ``cond/NAME`` [B, ...], ``v`` [B, *D], and ``grad_v`` [B, *D], the loss's gradient there;
    of a reward: ``images`` [B, 3, H, W]. ``details`` is JSON: a reward's name, prompts and columns.
    """

    kind: str
    message: str
    tensors: Mapping[str, Tensor]
    details: Mapping[str, Any] = field(default_factory=dict)


class FaultError(InputError):
    """A run that cannot go on for a fault; ``fault`` is None where its batch is not known."""

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class NonFinite(FaultError):
    """A velocity, a loss or a gradient that is no finite number: training has diverged."""


def place_for(folder: Path, kind: str, iteration: int) -> Path | None:
    """Where below ``folder`` a fault of an ``iteration`` is kept; None once `KEPT` are there."""
    place = folder / f"{iteration:06d}-{kind}"
    full = len(list(folder.glob("[0-9]*"))) >= KEPT
    return None if full and not place.exists() else place


def keep_fault(
    place: Path,
    fault: Fault | None,
    iteration: int,
    rank: int,
    recipe: Recipe,
    weights: Mapping[str, Tensor],
) -> None:
    """Write a fault to ``place``, to which other processes may write theirs.

    ``weights`` may be empty. One process of several may have no batch, but the weights. Raises InputError
    where the disk is full.
    """
    with writing(place, SafetensorError):
        place.mkdir(parents=True, exist_ok=True)
        if rank == 0 or fault is not None:
            (place / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        if weights:
            save_file(_plain(weights), place / WEIGHTS)
        if fault is not None:
            save_file(_plain(fault.tensors), place / f"batch-{rank}.safetensors")
            content = {"kind": fault.kind, "message": fault.message, "iteration": iteration, **fault.details}
            text = json.dumps(content, indent=1, ensure_ascii=False, default=str)
            (place / f"fault-{rank}.json").write_text(text, encoding="utf-8")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


@dataclass(frozen=True)
class KeptFault:
    """A fault as it was kept: of the process ``rank``; ``weights`` are empty where none were kept."""

    fault: Fault
    rank: int
    iteration: int
    recipe: Path
    weights: Mapping[str, Tensor]


def read_faults(place: Path) -> list[KeptFault]:
    """What `keep_fault` wrote to ``place``. Raises InputError, naming the file, for anything else."""
    files = sorted(place.glob("fault-*.json"))
    if not files:
        raise InputError(
            f"{place}: holds no fault-*.json; expected a folder of faults/ in the folder of a run, as its"
            " error named it"
        )
    weights = _tensors(place / WEIGHTS) if (place / WEIGHTS).exists() else {}
    return [_read_fault(place, file, weights) for file in files]


def _read_fault(place: Path, file: Path, weights: Mapping[str, Tensor]) -> KeptFault:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rank = int(file.stem.removeprefix("fault-"))
        kind, message, iteration = content.pop("kind"), content.pop("message"), int(content.pop("iteration"))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{file}: cannot be read as a fault ({error})") from error
    tensors = _tensors(place / f"batch-{rank}.safetensors")
    return KeptFault(Fault(kind, message, tensors, content), rank, iteration, place / "recipe.yaml", weights)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from error


def velocity_fault(x: Tensor, sigma: float, cond: Mapping[str, Tensor], v: Tensor) -> NonFinite:
    """Velocities of a rollout that are not finite: ``x``, ``v`` [B, *D] and the conditioning of B rows."""
    bad = ~v.isfinite().flatten(1).all(dim=1)
    message = (
        f"{int(bad.sum())} of {len(v)} velocities at sigma {sigma:.4g} contain NaN or infinity: training"
        " has diverged, or the weights are damaged; go back to an earlier checkpoint and lower"
        " train.learning_rate"
    )
    sigmas = torch.full((len(x),), sigma, dtype=x.dtype, device=x.device)
    return NonFinite(message, Fault("velocity", message, batch_tensors(x, sigmas, cond, v)))


def batch_tensors(x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor], v: Tensor) -> dict[str, Tensor]:
    """A batch that the network saw, by the names of `Fault`."""
    return {"x": x, "sigma": sigma, "v": v, **{f"cond/{name}": value for name, value in cond.items()}}
