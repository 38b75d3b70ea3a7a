"""A pipeline's networks, each loaded from its folder with every weight accounted for.

Left to itself diffusers only logs that weights are missing, and draws them at random.
"""

import importlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from flowcredit.errors import InputError

LIBRARIES = ("diffusers", "transformers")
UNCOUNTED = "position_ids"
"""The end of names that older versions of transformers saved, and that no network reads: 0, 1, 2, ..."""


def load_modules(
    kind: Any, folder: Path, dtypes: Mapping[str, torch.dtype], other: torch.dtype, absent: Collection[str]
) -> dict[str, nn.Module]:
    """The networks of a pipeline folder by name, but the ``absent`` ones; no network access.

    ``dtypes`` are those of some parts, ``other`` that of the rest; ``kind`` is the pipeline's class.
    Raises InputError for weights that are missing, unknown, damaged, or of another shape.
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
    try:
        module, report = part.from_pretrained(
            folder / name, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(not_loadable(folder, kind, error)) from error
    missing = sorted(report["missing_keys"])
    extra = sorted(key for key in report["unexpected_keys"] if not key.endswith(UNCOUNTED))
    for names, fault in ((missing, "missing"), (extra, "unknown")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(
                f"{folder / name}: weights that are {fault}: {', '.join(names[:3])}{more}; expected exactly"
                f" those of a {part.__name__} of the sizes in its config.json"
            )
    return module
