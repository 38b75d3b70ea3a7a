"""Trained weights as files that plain diffusers loads, without this project."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from flowcredit.disk import writing
from flowcredit.errors import InputError
from flowcredit.lora_file import LORA_FILE
from flowcredit.models.loading import PipelineFlow
from flowcredit.pipeline_folder import components, sort_metadata
from flowcredit.quiet import quiet_libraries

__all__ = ["LORA_FILE", "export_weights"]

WEIGHT_FILES = "diffusion_pytorch_model{suffix}.safetensors"
"""As diffusers names them; of large networks several, with an index."""


def export_weights(
    model: PipelineFlow,
    folder: str | Path,
    trained: Mapping[str, Tensor] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the trained weights of ``model`` to ``folder`` and return it.

    ``trained``: whole tensors by parameter name, in place of the network's own where other processes hold
    parts of these.

    Full fine-tuning: a whole pipeline folder for ``from_pretrained``; all but the network is copied file by
    file from the folder that the model came from, so its precision is that of the source. LoRA: the
    folder for ``load_lora_weights``, with rank and alpha in the file, without which diffusers takes
    alpha = rank and the LoRA has another strength.

    Equal weights give equal bytes. The folder appears whole or not at all. Raises InputError where the disk
    is full, where the folder exists with files in it, unless ``overwrite``, and always if it is the folder
    that the model was loaded from.
    """
    target = Path(folder)
    if target.resolve() == model.source.resolve():
        raise InputError(f"export to {target}: the model was loaded from there; choose another folder")
    if target.is_file():
        raise InputError(f"export to {target}: it is a file; choose another folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise InputError(f"export to {target}: the folder is not empty; remove it or choose another")
    write = _write_lora if _is_lora(model) else _write_pipeline
    state = {**model.network.state_dict(), **(trained or {})}
    with quiet_libraries():
        _write_whole(target, lambda partial: write(model, state, partial))
    return target


def _is_lora(model: PipelineFlow) -> bool:
    return any(".lora_" in name for name, _ in model.network.named_parameters())


def _write_lora(model: PipelineFlow, state: Mapping[str, Tensor], folder: Path) -> None:
    from peft import get_peft_model_state_dict

    network = model.pipeline.components[model.part]
    adapter = network.peft_config["default"].to_dict()
    layers = {
        f"{model.part}_lora_layers": get_peft_model_state_dict(network, dict(state)),
        # The order of a set differs from one process to the next.
        f"{model.part}_lora_adapter_metadata": {
            name: sorted(value) if isinstance(value, set) else value for name, value in adapter.items()
        },
    }
    model.pipeline.save_lora_weights(folder, weight_name=LORA_FILE, **layers)
    sort_metadata(folder / LORA_FILE)


def _write_pipeline(model: PipelineFlow, state: Mapping[str, Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    part = model.part
    for name in components(model.source):
        if name != part:
            shutil.copytree(model.source / name, folder / name)
    shutil.copyfile(model.source / "model_index.json", folder / "model_index.json")
    (folder / part).mkdir()
    save_torch_state_dict(dict(state), folder / part, filename_pattern=WEIGHT_FILES, max_shard_size="10GB")
    # Training changes no setting of the network.
    shutil.copyfile(model.source / part / "config.json", folder / part / "config.json")


def _write_whole(target: Path, write: Callable[[Path], None]) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with writing(target, SafetensorError):
            partial.mkdir(parents=True)
            write(partial)
    except InputError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(target)
    partial.replace(target)
