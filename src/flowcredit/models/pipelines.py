"""What the adapters of diffusers' pipelines share: settings, checks, loading, grid, guidance, decoding.

Axes: B rows in a batch, P prompts, C latent channels, h and w latent height and width, H and W image height
and width in pixels, *D latent dimensions.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from torch import Tensor

from flowcredit import limits
from flowcredit.errors import InputError
from flowcredit.interfaces import Conditioning
from flowcredit.lora_file import check_lora
from flowcredit.models.parts import check_finite, load_modules, not_loadable
from flowcredit.models.places import at_work, divide_decoding, settle
from flowcredit.models.text_cache import TextCache
from flowcredit.time_grid import check_grid

ENCODE_BATCH = 32
"""Prompts that the text encoders read at a time; bounds the memory of T5-XXL, not the result."""

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""LoRA's layers in blocks that attend over image and text together, as in Flow-GRPO's runs (arXiv 2505.05470)
on SD3.5-M: the projections of both."""

Predict = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""A network's own prediction: [B, *D] states, [B] times in its own unit and B rows of text to [B, *D]."""


@dataclass(frozen=True)
class PipelineSettings:
    """How a pipeline folder is used; the arguments of ``models.loading.load_model``, in its words."""

    height: int
    width: int
    guidance_scale: float
    negative_prompt: str
    max_sequence_length: int
    dtype: torch.dtype
    device: torch.device
    decode_batch_size: int
    network_dtype: torch.dtype
    autocast: torch.dtype | None
    text_cache: TextCache | None
    lora: Path | None
    offload: frozenset[str] = frozenset()
    vae_slicing: bool = False
    vae_tiling: bool = False

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance has an effect: above a scale of 1, as in diffusers."""
        return self.guidance_scale > 1


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance (arXiv 2207.12598) in diffusers' convention: without + scale (with - without).

    ``negative`` is the text of the negative prompt, one row.
    """

    scale: float
    negative: Conditioning


def load_pipeline(
    kind: Any, folder: Path, settings: PipelineSettings, part: str, absent: Sequence[str] = ()
) -> Any:
    """``kind.from_pretrained`` on the settings' device, no network access; every part frozen, in eval mode.

    ``part`` names the trained network, ``absent`` the parts that are not to be loaded. They stay in eval
    mode: dropout would move the on-policy ratio away from 1.
    Raises InputError for files that are missing, damaged or do not fit their config, and for a VAE that
    cannot decode as the settings ask.
    """
    modules = load_modules(kind, folder, {part: settings.network_dtype}, settings.dtype, absent)
    try:
        pipeline = kind.from_pretrained(folder, local_files_only=True, **modules, **dict.fromkeys(absent))
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise InputError(not_loadable(folder, kind, error)) from error
    if settings.lora is not None:
        _fuse_lora(pipeline, settings.lora, part)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    if settings.autocast is not None:
        _use_up_norm_warning()
    divide_decoding(pipeline, settings)
    settle(pipeline, settings)
    return pipeline


def _fuse_lora(pipeline: Any, lora: Path, part: str) -> None:
    """Add a LoRA, as diffusers' ``save_lora_weights`` writes it, to the weights."""
    if not lora.exists():
        raise InputError(f"model.lora {lora}: nothing there; expected a LoRA's folder or .safetensors file")
    network = pipeline.components[part]
    shapes = {name: tuple(value.shape) for name, value in network.named_parameters()}
    check_lora(lora, part, type(network).__name__, shapes)
    file = {} if lora.is_dir() else {"weight_name": lora.name}
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(logging.CRITICAL)  # What it logs is in the exception.
    try:
        with warnings.catch_warnings():
            # That of a LoRA for another network only a part fits is a warning there.
            warnings.simplefilter("error", RuntimeWarning)
            pipeline.load_lora_weights(lora if lora.is_dir() else lora.parent, local_files_only=True, **file)
        pipeline.fuse_lora()
    except (OSError, ValueError, RuntimeError, RuntimeWarning, KeyError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, RuntimeWarning):
            # The libraries' warning goes on to say that all may be well.
            reason = f"none, or a part alone, of its layers are those of the {part}"
        kind = type(pipeline).__name__
        raise InputError(f"model.lora {lora}: cannot be put on this {kind}: {reason}") from error
    finally:
        diffusers_logging.set_verbosity(level)
    pipeline.unload_lora_weights()
    check_finite(network, f"model.lora {lora}")


def check_flow_scheduler(scheduler: object, source: Path) -> None:
    """InputError unless the pipeline samples a flow by Euler steps."""
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise InputError(
            f"{source / 'scheduler'}: {type(scheduler).__name__}; expected FlowMatchEulerDiscreteScheduler"
        )


def check_settings(
    settings: PipelineSettings, *, unit: int, longest: int | None, largest: int | None = None
) -> None:
    """InputError for sizes that are no multiples of ``unit`` pixels, and for other settings out of range.

    ``longest`` is the most text tokens that the pipeline takes; None where it has one length only.
    """
    limits.check_size(settings.height, settings.width, unit, largest)
    limits.check_text_length(settings.max_sequence_length, longest)
    if settings.decode_batch_size < 1:
        raise InputError(f"decode_batch_size is {settings.decode_batch_size}; expected at least 1")


def check_negative_prompt(settings: PipelineSettings, *, used: bool) -> None:
    """InputError for a negative prompt that nothing would read."""
    limits.check_negative_prompt(settings.negative_prompt, settings.guidance_scale, used)


def encode_prompts(
    encode: Callable[[list[str]], Conditioning],
    prompts: Sequence[str],
    pipeline: Any,
    settings: PipelineSettings,
    size: int = ENCODE_BATCH,
) -> Conditioning:
    """``encode`` on ``size`` prompts at a time, joined along the rows; through the cache if there is one.

    The pipeline's text encoders are on the device while ``encode`` reads.
    """

    def read(chosen: Sequence[str]) -> Conditioning:
        with at_work(pipeline, settings, "text_encoders"):
            return _encode_in_batches(encode, chosen, size)

    if settings.text_cache is None:
        return read(prompts)
    return settings.text_cache.through(read, prompts, settings.device)


def _encode_in_batches(
    encode: Callable[[list[str]], Conditioning], prompts: Sequence[str], size: int
) -> Conditioning:
    chunks = [encode(list(prompts[start : start + size])) for start in range(0, len(prompts), size)]
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def count_truncated(limits: Mapping[str, tuple[Any, int]], prompts: Sequence[str]) -> dict[str, int]:
    """How many prompts have more tokens than each (tokenizer, limit) keeps, by the encoder's name."""
    return {
        name: sum(len(ids) > limit for ids in tokenizer(list(prompts), verbose=False).input_ids)
        for name, (tokenizer, limit) in limits.items()
    }


def both_predictions(
    predict: Predict, x: Tensor, time: Tensor, cond: Conditioning, negative: Conditioning
) -> tuple[Tensor, Tensor]:
    """Predictions under the negative prompt and under the rows' own text, in one batch of twice the rows."""
    rows = len(x)
    both = {
        name: torch.cat([negative[name].to(own.dtype).expand(rows, *own.shape[1:]), own])
        for name, own in cond.items()
    }
    without, with_text = predict(torch.cat([x, x]), torch.cat([time, time]), both).chunk(2)
    return without, with_text


def guided_prediction(
    predict: Predict, x: Tensor, time: Tensor, cond: Conditioning, guidance: Guidance | None
) -> Tensor:
    """The guided prediction; without guidance the network's own, in a batch of the rows alone."""
    if guidance is None:
        return predict(x, time, cond)
    without, with_text = both_predictions(predict, x, time, cond, guidance.negative)
    return without + guidance.scale * (with_text - without)


def computing_in(settings: PipelineSettings) -> AbstractContextManager[Any]:
    """Autocast to the settings' type, or none, whatever the caller's own.

    Each weight is read once a call: a cache of cast weights would hold a second model in memory, and under a
    caller's autocast it would outlive an optimizer step.
    """
    return torch.autocast(
        settings.device.type,
        dtype=settings.autocast,
        enabled=settings.autocast is not None,
        cache_enabled=False,
    )


def scheduler_grid(
    scheduler: FlowMatchEulerDiscreteScheduler, source: Path, num_steps: int, tokens: int, *, given: bool
) -> Tensor:
    """The sigmas of the pipeline's own call for an image of so many tokens, [num_steps + 1] float64, 1 to 0.

    Pipelines differ in what they hand to the scheduler: evenly spaced sigmas (``given``), or the number of
    steps alone, which makes another grid. The shift is the scheduler's, dynamic where it asks for that.
    Raises InputError if the scheduler's settings make a grid that does not fall from 1 to 0.
    """
    if num_steps < 1:
        raise InputError(f"num_steps is {num_steps}; expected at least 1")
    # A fresh scheduler: the pipeline's own changes with every call that someone makes of it.
    fresh = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    config = fresh.config
    shift = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    # A terminal shift divides by zero at one step; the grid is checked below, in words.
    with np.errstate(invalid="ignore", divide="ignore"):
        if given:
            fresh.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=shift, device="cpu")
        else:
            fresh.set_timesteps(num_steps, mu=shift, device="cpu")
    grid = fresh.sigmas.to(torch.float64)
    # The shift of 1 is 1 in exact arithmetic; in float32 it can miss by a unit in the last place.
    if abs(grid[0].item() - 1.0) < 1e-6:
        grid[0] = 1.0
    try:
        return check_grid(grid)
    except ValueError as error:
        raise InputError(f"{source / 'scheduler'}: at {num_steps} steps {error}") from error


def latent_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal float32, drawn on the generator's device, as the pipelines draw theirs."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


@torch.no_grad()
def decode_in_batches(
    decode: Callable[[Tensor], Tensor], x0: Tensor, pipeline: Any, settings: PipelineSettings
) -> Tensor:
    """[B, *D] to [B, 3, H, W] float32 in [0, 1], the settings' number of rows at a time.

    ``decode`` gives -1 to 1, with the pipeline's VAE on the device.
    """
    with at_work(pipeline, settings, "vae"):
        parts = [decode(rows).to(torch.float32) for rows in x0.split(settings.decode_batch_size)]
    return torch.cat([(part / 2 + 0.5).clamp(0.0, 1.0) for part in parts])


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """[B, C, h, w] latents of an AutoencoderKL to [B, 3, H, W] pixels in [-1, 1]."""
    unscaled = latents.to(torch.float32) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return vae.decode(unscaled.to(vae.dtype), return_dict=False)[0]


@torch.no_grad()
def encode_in_batches(encode: Callable[[Tensor], Tensor], images: Tensor, size: int) -> Tensor:
    """[B, 3, H, W] in [0, 1] to float32 states, ``size`` at a time; ``encode`` is given -1 to 1."""
    return torch.cat([encode(rows * 2 - 1).to(torch.float32) for rows in images.split(size)])


def encode_latents(vae: Any, pixels: Tensor) -> Tensor:
    """[B, 3, H, W] in [-1, 1] to [B, C, h, w] latents of an AutoencoderKL: the mode, nothing is drawn."""
    latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode().to(torch.float32)
    return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def set_checkpointing(network: Any, enabled: bool) -> None:
    """Recompute a diffusers network's blocks in the backward pass instead of keeping activations, or not."""
    if enabled:
        network.enable_gradient_checkpointing()
    else:
        network.disable_gradient_checkpointing()


def pack_latents(latents: Tensor) -> Tensor:
    """[B, C, h, w] to [B, hw/4, 4C]: each 2x2 patch a token, its values in the order channel, row, column."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, channels * 4)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of ``pack_latents``; ``height`` and ``width`` are those of the latent image."""
    batch, _, features = tokens.shape
    patches = tokens.reshape(batch, height // 2, width // 2, features // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, features // 4, height, width)


def _use_up_norm_warning() -> None:
    """Spend torch's one warning a process that a norm's float32 weight meets a reduced input.

    Autocast over float32 weights is meant here, and a user could do nothing about the warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.functional.rms_norm(torch.ones(1, dtype=torch.bfloat16), (1,), torch.ones(1))
