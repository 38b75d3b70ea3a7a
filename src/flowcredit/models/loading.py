"""From a folder in diffusers' layout to the adapter of its family."""

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.interfaces import FlowModel
from flowcredit.models.parts import LIBRARIES
from flowcredit.own_code import import_own
from flowcredit.pipeline_folder import check_components, read_index
from flowcredit.quiet import quiet_libraries

if TYPE_CHECKING:
    from flowcredit.models.pipelines import PipelineSettings
    from flowcredit.models.text_cache import TextCache

ADAPTERS: Mapping[str, str] = {
    "FluxPipeline": "flowcredit.models.flux:FluxFlow",
    "QwenImagePipeline": "flowcredit.models.qwen_image:QwenImageFlow",
    "StableDiffusion3Pipeline": "flowcredit.models.sd3:SD3Flow",
    "StableDiffusionPipeline": "flowcredit.models.diffusion:DiffusionFlow",
}
"""The ``_class_name`` of a model_index.json to the adapter for it, as "module:class"."""
EXAMPLE = "'my_adapter:MyFlow' for the class MyFlow in my_adapter.py"


class PipelineFlow(FlowModel, Protocol):
    """A flow model that stands on a diffusers pipeline: what training needs beyond ``FlowModel``."""

    pipeline: Any
    """The diffusers pipeline; its component ``part`` is the trained network, unwrapped."""
    source: Path
    """The folder that the pipeline was loaded from."""
    settings: "PipelineSettings"
    """How the pipeline is used."""
    part: str
    """The trained network's name in the pipeline, in its folder and in LoRA files: "transformer", "unet"."""
    lora_targets: tuple[str, ...]
    """Ends of the names of the layers that a LoRA adapts where the recipe names none."""

    def truncated(self, prompts: Sequence[str]) -> dict[str, int]:
        """How many prompts are longer than each text encoder reads."""
        ...

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] images in [0, 1] to [B, *D] float32 states at sigma 0; no gradient.

        ``decode`` makes of them what the VAE keeps of the images; its mode is taken, so nothing is drawn.
        """
        ...

    def without_guidance(self) -> Self:
        """The same flow, on the same network, whose ``velocity`` is free of classifier-free guidance."""
        ...

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute the blocks in the backward pass instead of keeping their activations, or not."""
        ...

    def call_arguments(self, count: int) -> Mapping[str, Any]:
        """What the pipeline's own call takes for ``count`` prompts, beside prompts, size, steps and
        generator."""
        ...


@runtime_checkable
class Adapter(Protocol):
    """What makes a ``PipelineFlow`` of a folder: a class with this as its classmethod."""

    def from_folder(self, folder: Path, settings: "PipelineSettings") -> PipelineFlow:
        """The model, loaded and checked. InputError for a folder or settings that it cannot take."""
        ...


def load_model(
    path: str | Path,
    *,
    height: int,
    width: int,
    guidance_scale: float,
    max_sequence_length: int,
    dtype: torch.dtype,
    device: torch.device | str,
    decode_batch_size: int,
    network_dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    negative_prompt: str = "",
    text_cache_folder: str | Path | None = None,
    lora: str | Path | None = None,
    offload: Sequence[str] = (),
    vae_slicing: bool = False,
    vae_tiling: bool = False,
    adapter: str | None = None,
) -> PipelineFlow:
    """Load a pipeline folder as written by diffusers' ``save_pretrained``; no network access.

    ``height`` and ``width`` are pixels, ``max_sequence_length`` tokens of the long text encoder,
    ``decode_batch_size`` images. ``guidance_scale`` is embedded or classifier-free, as the family has it;
    ``negative_prompt`` is for the latter alone. ``dtype`` is that of the frozen parts, ``network_dtype``
    that of the network: float32 unless only a LoRA on it is trained. ``autocast`` is the type that
    ``velocity`` computes in. ``text_cache_folder`` is where prompt embeddings are kept, if anywhere.
    ``lora`` is a LoRA's folder or file in diffusers' layout, added to the weights before anything else.
    ``offload`` names parts that stay on the CPU while they do nothing: "text_encoders", "vae".
    ``vae_slicing`` and ``vae_tiling`` are diffusers' own. ``adapter``, ``module:attribute``, is one of the
    user's own in place of that for the folder's pipeline class (docs/porting.md).
    Everything is frozen and in eval mode; ``weights.prepare_weights`` chooses what is trained.

    Raises InputError for a folder that is missing or incomplete, weights that are missing, unknown or of
    another shape, a pipeline class without an adapter, or a size that the model cannot make.
    """
    folder = Path(path)
    chosen = _check_folder(folder, adapter)
    with quiet_libraries():
        from flowcredit.models.pipelines import PipelineSettings

        cache = _cache(text_cache_folder, folder, adapter, max_sequence_length, dtype, device, lora)
        settings = PipelineSettings(
            height=height,
            width=width,
            guidance_scale=guidance_scale,
            negative_prompt=negative_prompt,
            max_sequence_length=max_sequence_length,
            dtype=dtype,
            device=torch.device(device),
            decode_batch_size=decode_batch_size,
            network_dtype=network_dtype,
            autocast=autocast,
            lora=None if lora is None else Path(lora),
            text_cache=cache,
            offload=frozenset(offload),
            vae_slicing=vae_slicing,
            vae_tiling=vae_tiling,
        )
        return _own_model(chosen, folder, settings) if adapter else _known_model(chosen, folder, settings)


def _check_folder(folder: Path, own: str | None) -> str:
    """The entry of ADAPTERS for a folder, or one's ``own``; InputError unless all of its parts are there."""
    index = read_index(folder)
    name = str(index.get("_class_name"))
    if own is None and name not in ADAPTERS:
        raise InputError(
            f"{folder / 'model_index.json'}: pipeline class {name!r} has no adapter; "
            f"expected one of {', '.join(sorted(ADAPTERS))}, or an adapter of your own in model.adapter"
        )
    _check_libraries(folder, index)
    check_components(folder)
    return ADAPTERS[name] if own is None else own


def _known_model(name: str, folder: Path, settings: "PipelineSettings") -> PipelineFlow:
    module, _, attribute = name.partition(":")
    model: PipelineFlow = vars(importlib.import_module(module))[attribute].from_folder(folder, settings)
    return model


def _own_model(name: str, folder: Path, settings: "PipelineSettings") -> PipelineFlow:
    """The model that a user's own adapter makes. InputError where it lacks something."""
    adapter = import_own("model.adapter", name, EXAMPLE)
    if not isinstance(adapter, Adapter):
        raise InputError(
            f"model.adapter {name!r} has no from_folder(folder, settings); expected a class with it, as"
            " docs/porting.md shows"
        )
    model = adapter.from_folder(folder, settings)
    missing = sorted(_members(FlowModel, PipelineFlow) - set(dir(model)))
    if missing:
        raise InputError(
            f"model.adapter {name!r}: its model has no {', '.join(missing)}; expected everything of"
            " flowcredit.models.loading.PipelineFlow"
        )
    return model


def _members(*protocols: type) -> set[str]:
    names = {name for each in protocols for name in (*inspect.get_annotations(each), *vars(each))}
    return {name for name in names if not name.startswith("_")}


def _cache(root: str | Path | None, folder: Path, own: str | None, *readings: object) -> "TextCache | None":
    """The cache of prompt embeddings below ``root``; on ``readings`` they depend beside the files, and on the
    user's ``own`` adapter where there is one."""
    from flowcredit.models.text_cache import text_cache

    return (
        None if root is None else text_cache(Path(root), folder, [*map(str, readings), *filter(None, [own])])
    )


def _check_libraries(folder: Path, index: Mapping[str, Any]) -> None:
    """InputError for a part whose class lies elsewhere: diffusers would import whatever module is named.

    Some parts, such as a safety checker, lie in a pipeline's own folder within diffusers.
    """
    import diffusers

    own = Path(diffusers.__file__).parent / "pipelines"
    for name, entry in index.items():
        if not isinstance(entry, list):
            continue
        if not name.isidentifier():
            raise InputError(
                f"{folder / 'model_index.json'}: a part is called {name!r}; expected the name of a folder"
                " beside it, in letters, digits and underscores"
            )
        if entry[:1] == [None]:
            continue
        library = entry[0] if len(entry) == 2 and all(isinstance(word, str) for word in entry) else None
        if library in LIBRARIES or (
            library is not None and library.isidentifier() and (own / library / "__init__.py").is_file()
        ):
            continue
        raise InputError(
            f"{folder / 'model_index.json'}: {name} is {json.dumps(entry)[:80]}; expected a class of"
            " diffusers or transformers: code of other modules, or from the folder itself, is never run"
        )
