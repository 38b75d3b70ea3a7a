"""A LoRA's file, by its header: is it one, and is it one for this network? No tensor is read."""

from pathlib import Path

from flowcredit.errors import InputError
from flowcredit.pipeline_folder import Shapes, read_header

LORA_FILE = "pytorch_lora_weights.safetensors"
DOWN = ".lora_A.weight"
"""End of the names of the matrices that read a layer's input, as diffusers writes them."""


def check_lora(lora: Path, part: str, kind: str, shapes: Shapes) -> None:
    """InputError where a LoRA in diffusers' layout is not one for this network.

    ``part`` is the network's name in the pipeline, ``kind`` its class, ``shapes`` those of its weights by
    name; with none nothing but the names is looked at. Files in other layouts, which diffusers converts, are
    let pass.
    """
    file = find_lora(lora)
    if file is None:
        return
    try:
        names = read_header(file)
    except InputError as error:
        raise InputError(f"model.lora {error}") from None
    ours = {name.removeprefix(f"{part}."): shape for name, shape in names.items() if name.startswith(part)}
    others = sorted({name.partition(".")[0] for name in names} & {"transformer", "unet"})
    if not ours and others:
        raise misfit(lora, kind, f"its layers are those of a {others[0]}, not of a {part}")
    for name, shape in ours.items():
        if not name.endswith(DOWN) or not shapes:
            continue
        layer = name.removesuffix(DOWN)
        own = shapes.get(f"{layer}.weight")
        if own is None:
            raise misfit(lora, kind, f"it adapts {layer}, which that does not have")
        if len(shape) == len(own) == 2 and shape[1] != own[1]:
            raise misfit(lora, kind, f"{layer} has {own[1]} inputs there, {shape[1]} in the LoRA")


def find_lora(lora: Path) -> Path | None:
    """The file of weights in a LoRA's folder, or the file itself; None where diffusers has to look."""
    file = lora / LORA_FILE if lora.is_dir() else lora
    return file if file.is_file() and file.suffix == ".safetensors" else None


def misfit(lora: Path, kind: str, why: str) -> InputError:
    """A LoRA that is another model's."""
    return InputError(
        f"model.lora {lora}: is no LoRA for this {kind}: {why}; expected one that was trained on this model"
    )
