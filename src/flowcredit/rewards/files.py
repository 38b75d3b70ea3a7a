"""What rewards read from a user's disk: JSON, checkpoints (never unpickled), weights put into a model."""

import importlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flowcredit.errors import InputError

Tensors = Mapping[str, Tensor]
Source = tuple[str, Callable[[Tensor], Tensor]]
"""Where a weight of a model comes from: its name in the checkpoint, and what is done to the tensor there."""


def read_json(folder: Path, name: str) -> Mapping[str, Any]:
    """The object in ``folder / name``; InputError if there is none."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{folder / name}: cannot be read ({error.strerror}); expected the folder of a transformers "
            "CLIPModel with its tokenizer and image processor"
        ) from error
    except ValueError as error:
        raise InputError(f"{folder / name}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{folder / name}: holds {type(content).__name__}, expected an object")
    return content


def read_tensors(file: Path, what: str) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file, or of a torch checkpoint read with ``weights_only=True``.

    A checkpoint that keeps its weights under ``state_dict`` is opened there, and the prefix ``module.`` that
    distributed training leaves on every name is taken off.

    Args:
        what: the file's part, for the messages.

    Raises:
        InputError: no such file, not a checkpoint, one that holds more than tensors.
    """
    if not file.is_file():
        found = "is a folder" if file.is_dir() else "no such file"
        raise InputError(f"{file}: {found}; expected {what}")
    try:
        if file.suffix == ".safetensors":
            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # each kind of damage raises another type
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{file}: cannot be read as {what} without running code from it ({reason}); expected a torch "
            "checkpoint of tensors alone, or a .safetensors file"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise InputError(f"{file}: holds {type(content).__name__}, expected {what}: tensors by name")
    others = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise InputError(f"{file}: {listed(others)} no tensor; expected {what}: tensors by name")
    if all(name.startswith("module.") for name in content):
        content = {name.removeprefix("module."): tensor for name, tensor in content.items()}
    return content


def shape_of(tensors: Tensors, name: str, dimensions: int, file: Path) -> tuple[int, ...]:
    """The shape of a tensor from which a size is inferred; InputError if it is missing or of another kind."""
    if name not in tensors:
        raise InputError(
            f"{file}: has no {name!r}, so it is no checkpoint of this reward; found {_few(tensors)}"
        )
    shape = tuple(tensors[name].shape)
    if len(shape) != dimensions:
        raise InputError(f"{file}: {name!r} has the shape {list(shape)}, expected {dimensions} dimensions")
    return shape


def count_layers(tensors: Tensors, prefix: str) -> int:
    """How many numbered layers stand under ``prefix``, from the largest number."""
    numbers = [name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)]
    return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)


def gather(
    wanted: Tensors,
    tensors: Tensors,
    sources: Mapping[str, Source],
    file: Path,
    ignored: Collection[str] = (),
) -> dict[str, Tensor]:
    """A model's whole state in float32, taken from a checkpoint with names of its own.

    Args:
        wanted: the model's state, for its names and shapes; it may be on the meta device.
        tensors: the checkpoint's.
        sources: for every name of ``wanted``, where it comes from.
        ignored: names of the checkpoint that the model has no use for.

    Raises:
        InputError: names of the checkpoint that are missing, unknown, or of another shape.
    """
    assert sources.keys() == wanted.keys(), sources.keys() ^ wanted.keys()
    used = {name for name, _ in sources.values()}
    missing = [name for name in sorted(used) if name not in tensors]
    extra = [name for name in tensors if name not in used and name not in ignored]
    if missing or extra:
        faults = [f"{listed(missing)} missing"] if missing else []
        faults += [f"{listed(extra)} unknown"] if extra else []
        raise InputError(
            f"{file}: {', and '.join(faults)}; expected exactly the weights of this reward's model"
        )
    state = {}
    for name, (source, change) in sources.items():
        found = change(tensors[source]).to(torch.float32).contiguous()
        if found.shape != wanted[name].shape:
            raise InputError(
                f"{file}: {source!r} has the shape {list(tensors[source].shape)}, which does not fit the "
                f"sizes of its other tensors: {list(wanted[name].shape)} was expected from it"
            )
        state[name] = found
    return state


def linear_head(tensors: Tensors, prefix: str, file: Path) -> nn.Sequential:
    """The head of the aesthetic predictor and of ImageReward: five linear layers with nothing in between.

    Their numbers leave room for the dropout of training, which is off here. The sizes are the tensors' own.
    """
    shapes = [shape_of(tensors, f"{prefix}{number}.weight", 2, file) for number in _HEAD_LAYERS]
    sizes = [shapes[0][1], *(outputs for outputs, _ in shapes)]
    if sizes[-1] != 1:
        raise InputError(f"{file}: its last layer gives {sizes[-1]} numbers; expected one, the score")
    head = nn.Sequential(*(nn.Linear(sizes[place], sizes[place + 1]) for place in range(len(shapes))))
    head.load_state_dict(gather(head.state_dict(), tensors, head_sources(prefix), file))
    return head.requires_grad_(False).eval()


def head_sources(prefix: str) -> dict[str, Source]:
    """Where the weights of `linear_head` lie in a checkpoint."""
    return {
        f"{place}.{kind}": (f"{prefix}{number}.{kind}", torch.clone)
        for place, number in enumerate(_HEAD_LAYERS)
        for kind in ("weight", "bias")
    }


_HEAD_LAYERS = (0, 2, 4, 6, 7)


def need_module(name: str, reward: str, extra: str) -> ModuleType:
    """Import a module that comes with an extra; InputError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"reward {reward!r} needs the package that provides {name!r} ({error}); install it with: "
            f"pip install 'flowcredit[{extra}]'"
        ) from error


def loading_reason(error: Exception) -> str:
    """Why transformers' ``from_pretrained`` raised, in a line."""
    if isinstance(error, UnpicklingError):
        return "its weights hold more than tensors, and are not unpickled"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def loading_fault(report: Mapping[str, Any]) -> str | None:
    """What is wrong by the report of transformers' ``from_pretrained``: weights missing or unknown; or None.

    What is missing would be drawn at random.
    """
    # Older versions also saved the numbers of the positions, and detectors count batches that no one reads.
    uncounted = ("position_ids", "num_batches_tracked")
    missing = sorted(report["missing_keys"])
    extra = sorted(key for key in report["unexpected_keys"] if not key.endswith(uncounted))
    for names, fault in ((missing, "missing"), (extra, "unknown")):
        if names:
            return f"{listed(names)} {fault}"
    return None


def listed(names: Collection[str]) -> str:
    """The first few names and how many more, with the verb."""
    return f"{_few(names)} {'is' if len(names) == 1 else 'are'}"


def _few(names: Collection[str]) -> str:
    some = [repr(name) for name in names][:3]
    more = f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
    return ", ".join(some) + more
