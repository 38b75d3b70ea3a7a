"""What a model can be asked for, told from plain numbers and names: the same words before anything is loaded
and while it is."""

import difflib
from collections.abc import Collection, Sequence
from math import lcm

from flowcredit.errors import InputError

FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
LONGEST_TEXT = {"FluxPipeline": 512, "StableDiffusion3Pipeline": 512, "QwenImagePipeline": 1024}
"""Tokens of the long text encoder: the pipelines refuse more. The others have one length only."""


def size_unit(kind: str, vae_scale: int, patch: int) -> int:
    """Pixels of which a pipeline class makes multiples: ``vae_scale`` behind a latent, ``patch`` latents."""
    if kind == "StableDiffusionPipeline":
        return lcm(8, vae_scale)
    return vae_scale * (patch if kind == "StableDiffusion3Pipeline" else 2)


def check_size(height: int, width: int, unit: int, largest: int | None = None) -> None:
    """InputError unless both are multiples of ``unit`` pixels and, where there is an end, within it."""
    for name, pixels in (("height", height), ("width", width)):
        if pixels < unit or pixels % unit != 0:
            below = max(unit, pixels // unit * unit)
            raise InputError(
                f"{name} is {pixels} pixels; "
                f"this model makes multiples of {unit}, such as {below} or {below + unit}"
            )
        if largest is not None and pixels > largest:
            raise InputError(f"{name} is {pixels} pixels; this model makes at most {largest}")


def check_text_length(tokens: int, longest: int | None) -> None:
    """InputError for more tokens than a pipeline takes; ``longest`` None where it has one length only."""
    if longest is not None and not 1 <= tokens <= longest:
        raise InputError(f"max_sequence_length is {tokens} tokens; expected 1 to {longest}")


def check_negative_prompt(prompt: str, scale: float, used: bool) -> None:
    """InputError for a negative prompt that nothing would read."""
    if prompt and not used:
        raise InputError(
            f"negative_prompt is {prompt!r}, but this model reads none at guidance_scale"
            f" {scale:g}; expected an empty one, or classifier-free guidance above 1"
        )


def check_targets(linear: Collection[str], targets: Sequence[str], kind: str) -> None:
    """InputError for a LoRA target that is the end of no linear layer's name; ``kind`` is the network's."""
    if not targets:
        raise InputError("LoRA targets are empty; expected ends of module names such as attn.to_q")
    for target in targets:
        if any(ends_in((target,), name) for name in linear):
            continue
        # Names without their block, "attn.to_q" for "transformer_blocks.3.attn.to_q": what a target is.
        ends = dict.fromkeys(_without_block(name) for name in linear)
        near = difflib.get_close_matches(target, ends, n=3, cutoff=0.0)
        raise InputError(
            f"LoRA target {target!r} names no linear layer of {kind}; nearest: {', '.join(near)}"
        )


def ends_in(targets: Collection[str], name: str) -> bool:
    """Whether a layer's name is one of the targets, or ends in one."""
    return any(name == target or name.endswith("." + target) for target in targets)


def _without_block(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[2:]) if len(parts) > 2 and parts[1].isdigit() else name
