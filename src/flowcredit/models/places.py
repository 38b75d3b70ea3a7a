"""Where a pipeline's parts are: on the device, or on the CPU until they work; and how its VAE decodes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from flowcredit.errors import InputError
from flowcredit.visiting import visiting

if TYPE_CHECKING:
    from flowcredit.models.pipelines import PipelineSettings

BEGINNINGS = {"text_encoders": "text_encoder", "vae": "vae"}
"""Groups of parts that can wait on the CPU, to how their names in a pipeline begin."""


def settle(pipeline: Any, settings: "PipelineSettings") -> None:
    """Move every network of the pipeline to the device, but those that wait on the CPU."""
    waiting = {id(module) for group in settings.offload for module in _members(pipeline, group)}
    for module in pipeline.components.values():
        if isinstance(module, nn.Module) and id(module) not in waiting:
            module.to(settings.device)


def at_work(pipeline: Any, settings: "PipelineSettings", *groups: str) -> AbstractContextManager[None]:
    """Groups of parts on the device while entered."""
    waiting = [group for group in groups if group in settings.offload]
    modules = [module for group in waiting for module in _members(pipeline, group)]
    return visiting(modules, settings.device)


def divide_decoding(pipeline: Any, settings: "PipelineSettings") -> None:
    """Slices and tiles, where they are asked for. Raises InputError if the VAE has none."""
    vae = pipeline.vae
    for asked, setting, method in (
        (settings.vae_slicing, "vae_slicing", "enable_slicing"),
        (settings.vae_tiling, "vae_tiling", "enable_tiling"),
    ):
        if asked:
            _turn_on(vae, setting, method)


def _turn_on(vae: Any, setting: str, method: str) -> None:
    try:
        enable: Callable[[], None] = getattr(vae, method)
        enable()
    except (AttributeError, NotImplementedError):
        raise InputError(
            f"model.{setting} is true, but {type(vae).__name__} has no {method}; expected false (a smaller"
            " model.decode_batch_size needs less memory too)"
        ) from None


def _members(pipeline: Any, group: str) -> list[nn.Module]:
    beginning = BEGINNINGS[group]
    parts = pipeline.components.items()
    return [part for name, part in parts if name.startswith(beginning) and isinstance(part, nn.Module)]
