"""A pipeline's networks, each loaded from its folder with every weight accounted for.

Left to itself diffusers only logs that weights are missing, and draws them at random.
"""

import importlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from flowcredit.errors import InputError
from flowcredit.pipeline_folder import has_weights, no_weights

LIBRARIES = ("diffusers", "transformers")
"""Whose networks are loaded here."""
UNCOUNTED = "position_ids"
"""The end of names that older versions of transformers saved, and that no network reads: 0, 1, 2, ..."""


def load_modules(
    kind: Any, folder: Path, dtypes: Mapping[str, torch.dtype], other: torch.dtype, absent: Collection[str]
) -> dict[str, nn.Module]:
    """The networks of a pipeline folder by name, but the ``absent`` ones; no network access.

    ``dtypes`` are those of some parts, ``other`` that of the rest; ``kind`` is the pipeline's class.
    Raises InputError for weights that are missing, unknown, damaged, not finite, or of another shape.
    """
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    modules = {}
    for name, entry in index.items():
        if name in absent or not isinstance(entry, list):
            continue
        part = _class_of(entry)
        if part is not None:
            modules[name] = _load(kind, folder, name, part, dtypes.get(name, other))
    return modules


def not_loadable(folder: Path, kind: Any, error: Exception) -> str:
    """One line for what a library raised."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"model {folder}: not loadable as a {kind.__name__}: {reason}"


def _class_of(entry: list[Any]) -> Any:
    """The network's class that an entry of model_index.json names; None for what is no network."""
    library, name = entry
    if library not in LIBRARIES:
        return None
    found = getattr(importlib.import_module(library), str(name), None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _load(kind: Any, folder: Path, name: str, part: Any, dtype: torch.dtype) -> nn.Module:
    where = folder / name
    _check_files(where)
    # Shapes that do not fit: transformers lists them only if they are let pass, diffusers names the first.
    listing = {"ignore_mismatched_sizes": True} if part.__module__.startswith("transformers.") else {}
    try:
        module, report = part.from_pretrained(
            where, dtype=dtype, local_files_only=True, output_loading_info=True, **listing
        )
    except UnpicklingError as error:
        raise InputError(
            f"{where}: weights that hold more than tensors, and are not unpickled; expected safetensors"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError, TypeError, KeyError, AttributeError) as error:
        # The last three come from a config.json whose values are of other types.
        if (found := _SHAPES.search(str(error))) is not None:
            raise InputError(
                _misfit(where, part, f"of another shape: {found[1]} is {found[3]}, not {found[2]}")
            ) from error
        raise InputError(f"{not_loadable(folder, kind, error)} (in {name}/)") from error
    strangers = [key for key in report["unexpected_keys"] if not key.endswith(UNCOUNTED)]
    misfits = [f"{key} is {list(it)}, not {list(own)}" for key, it, own in report["mismatched_keys"]]
    for names, fault in (
        (sorted(report["missing_keys"]), "missing"),
        (sorted(strangers), "unknown"),
        (sorted(misfits), "of another shape"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(_misfit(where, part, f"{fault}: {', '.join(names[:3])}{more}"))
    check_finite(module, str(where))
    return module


def check_finite(module: nn.Module, where: str) -> None:
    """InputError where weights hold NaN or infinity, as those of a run that diverged do."""
    bad = [
        name
        for name, value in module.named_parameters()
        # The sum of a tensor shows it in one pass; only where it is not finite each number is looked at.
        if not value.sum(dtype=torch.float32).isfinite() and not value.isfinite().all()
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InputError(
            f"{where}: weights that hold NaN or infinity: {', '.join(bad[:3])}{more}; expected finite"
            " numbers: the file is damaged, or of a run that diverged"
        )


def _check_files(where: Path) -> None:
    """InputError for files that are not there, break off or are of another format; headers alone are read."""
    if not has_weights(where):
        raise InputError(no_weights(where))
    for file in sorted(where.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"{file}: no whole safetensors file of {file.stat().st_size:,} bytes ({reason}); was its"
                " download cut short, or is it a pointer to a file that was never fetched?"
            ) from error


def _misfit(where: Path, part: Any, fault: str) -> str:
    return (
        f"{where}: weights that are {fault}; expected exactly those of a {part.__name__} of the sizes in its"
        " config.json"
    )


_SHAPES = re.compile(
    r"because (\S+) expected shape torch\.Size\((\[.*?\])\), but got torch\.Size\((\[.*?\])\)"
)
