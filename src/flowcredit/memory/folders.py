"""What a pipeline's folder holds, from its JSON files and the headers of its weights: no tensor is read.

The files are those that loading takes: ``model`` or ``diffusion_pytorch_model`` in safetensors, whole or in
shards. Files of a variant, such as ``model.fp16.safetensors``, are not loaded, and so not read here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError
from flowcredit.memory.counts import clip_flops, count_parameters
from flowcredit.pipeline_folder import Shapes, read_header, read_json, weight_files

TIED = {"encoder.embed_tokens.weight": "shared.weight", "lm_head.weight": "model.embed_tokens.weight"}
"""Weights that are another where a file has both, as T5 writes them."""
NETWORKS = ("transformer", "unet", "vae", "text_encoder")
"""Parts with these beginnings have a config.json."""


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


class Config(dict[str, Any]):
    """A config.json; what it lacks is told with its file."""

    def __init__(self, file: Path) -> None:
        super().__init__(read_json(file))
        self.file = file

    def __missing__(self, key: str) -> Any:
        raise InputError(f"{self.file}: lacks {key!r}; expected the config that diffusers writes")


def read_pipeline(folder: Path) -> Pipeline:
    """A folder in diffusers' layout. Raises InputError for JSON or headers that cannot be read."""
    index = read_json(folder / "model_index.json")
    parts = {}
    for name, value in index.items():
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)):
            continue
        config = folder / name / "config.json"
        if config.is_file() or name.startswith(NETWORKS):
            parts[name] = Component(name, value[1], Config(config), read_shapes(folder / name))
    return Pipeline(str(index.get("_class_name")), parts)


def published_pipeline(folder: Path) -> Pipeline | None:
    """The model of a folder's name, by its published config; None for a name that is not known."""
    models = read_json(Path(__file__).parent / "published.json")["models"]
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
    config = read_json(own) if own.is_file() else _published_clip(file)
    if config is None or config.get("model_type", "clip") != "clip":
        return None
    try:
        return clip_flops(config)
    except KeyError:  # A config may leave out what is its class's default.
        return None


def _published_clip(file: Path) -> Mapping[str, Any] | None:
    for config in read_json(Path(__file__).parent / "published.json")["rewards"]:
        if file.name.lower() in config["names"]:
            return dict(config)
    return None


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the weights in a component's or a model's folder; None where there is no file."""
    files = weight_files(folder)
    return {name: shape for file in files for name, shape in read_header(file).items()} if files else None
