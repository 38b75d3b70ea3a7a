"""What a pipeline's folder holds, from its JSON files and the headers of its weights: no tensor is read.

The files are those that loading takes: ``model`` or ``diffusion_pytorch_model`` in safetensors, whole or in
shards. Files of a variant, such as ``model.fp16.safetensors``, are not loaded, and so not read here.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError
from flowcredit.memory.counts import clip_flops, count_parameters

STEMS = ("diffusion_pytorch_model", "model")
LONGEST_HEADER = 100_000_000
"""Bytes: the safetensors library refuses longer ones."""
TIED = {"encoder.embed_tokens.weight": "shared.weight", "lm_head.weight": "model.embed_tokens.weight"}
"""Weights that are another where a file has both, as T5 writes them."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Component:
    """A part of a pipeline: its class, its config.json, the shapes of its weights where files were read."""

    name: str
    kind: str
    config: Mapping[str, Any]
    shapes: Shapes | None

    @cached_property
    def count(self) -> int | None:
        """Elements of its weights, buffers in the file included; None where neither files nor config tell."""
        if self.shapes is None:
            return count_parameters(self.kind, self.config)
        return sum(
            prod(shape)
            for name, shape in self.shapes.items()
            if not (name in TIED and self.shapes.get(TIED[name]) == shape and self.kind.startswith("T5"))
        )


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's class and parts; ``published`` names the model whose config stands in for files."""

    kind: str
    parts: Mapping[str, Component]
    published: str | None = None


def read_pipeline(folder: Path) -> Pipeline:
    """A folder in diffusers' layout. Raises InputError for JSON or headers that cannot be read."""
    index = _read_json(folder / "model_index.json")
    parts = {}
    for name, value in index.items():
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)):
            continue
        config = folder / name / "config.json"
        if config.is_file():
            parts[name] = Component(name, value[1], _read_json(config), read_shapes(folder / name))
    return Pipeline(str(index.get("_class_name")), parts)


def published_pipeline(folder: Path) -> Pipeline | None:
    """The model of a folder's name, by its published config; None for a name that is not known."""
    models = _read_json(Path(__file__).parent / "published.json")["models"]
    for name, model in models.items():
        if folder.name.lower() in (name.lower(), *(other.lower() for other in model.get("also", ()))):
            parts = {
                part: Component(part, config["_class_name"], config, None)
                for part, config in model["parts"].items()
            }
            return Pipeline(model["_class_name"], parts, name)
    return None


def published_reward(file: Path) -> int | None:
    """Parameters of a reward's model by the name of its file or folder; None for a name that is not known."""
    config = _published_clip(file)
    return None if config is None else count_parameters("CLIPModel", config)


def reward_flops(file: Path) -> int | None:
    """Of scoring one image with the CLIP model in a folder, or of a published one's name; None for others."""
    own = file / "config.json"
    config = _read_json(own) if own.is_file() else _published_clip(file)
    if config is None or config.get("model_type", "clip") != "clip":
        return None
    try:
        return clip_flops(config)
    except KeyError:  # A config may leave out what is its class's default.
        return None


def _published_clip(file: Path) -> Mapping[str, Any] | None:
    for config in _read_json(Path(__file__).parent / "published.json")["rewards"]:
        if file.name.lower() in config["names"]:
            return dict(config)
    return None


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the weights in a component's or a model's folder; None where there is no file."""
    for stem in STEMS:
        whole, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if whole.is_file():
            return read_header(whole)
        if index.is_file():
            shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing:
                raise InputError(
                    f"{index}: names {missing[0]}, which is not there; download the folder whole"
                )
            return {name: shape for shard in shards for name, shape in read_header(folder / shard).items()}
    return None


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file: eight bytes of length, then JSON. InputError if it is none."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= LONGEST_HEADER:
            raise InputError(f"{file}: no safetensors file (its header would be {length} bytes long)")
        text = stream.read(length)
    try:
        header = json.loads(text)
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{file}: no safetensors file (its header is no table of tensors)") from None


def _read_json(file: Path) -> Any:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise InputError(f"{file}: a JSON {type(found).__name__}; expected an object")
    return found
