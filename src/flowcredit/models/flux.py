"""The FLUX.1 family: any folder of diffusers' FluxPipeline, of any size.

Axes: B rows in a batch, P prompts, C latent channels, h and w latent height and width, S = hw/4 image
tokens, L text tokens, H and W image height and width in pixels. A state is [B, S, 4C]: each token
holds a 2x2 patch of the latent image, as in diffusers.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from safetensors import SafetensorError
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.interfaces import Conditioning
from flowcredit.time_grid import check_grid

ENCODE_BATCH = 32
"""Prompts that the text encoders read at a time; bounds the memory of T5-XXL, not the result."""
LONGEST_SEQUENCE = 512
"""T5 tokens: FluxPipeline refuses more."""


class FluxFlow:
    """``interfaces.FlowModel`` on a FluxPipeline: same seed and no noise, same image as the pipeline's.

    ``network`` is the FluxTransformer2DModel. It, like every other part, starts frozen and in eval mode
    and stays in eval mode: dropout would move the on-policy ratio away from 1.
    """

    def __init__(
        self,
        pipeline: FluxPipeline,
        *,
        source: Path,
        height: int,
        width: int,
        guidance_scale: float,
        max_sequence_length: int,
        decode_batch_size: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Raises InputError for sizes that the model cannot make and schedulers of another kind."""
        scheduler = pipeline.scheduler
        if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            raise InputError(
                f"{source / 'scheduler'}: {type(scheduler).__name__}; "
                "expected FlowMatchEulerDiscreteScheduler"
            )
        _check_size("height", height, 2 * pipeline.vae_scale_factor)
        _check_size("width", width, 2 * pipeline.vae_scale_factor)
        if not 1 <= max_sequence_length <= LONGEST_SEQUENCE:
            raise InputError(
                f"max_sequence_length is {max_sequence_length} tokens; expected 1 to {LONGEST_SEQUENCE}"
            )
        if decode_batch_size < 1:
            raise InputError(f"decode_batch_size is {decode_batch_size}; expected at least 1")
        for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2):
            part.requires_grad_(False).eval()
        self.pipeline = pipeline
        self.source = source
        self.network: torch.nn.Module = pipeline.transformer
        self.autocast = autocast
        if autocast is not None:
            _use_up_norm_warning()
        self._max_sequence_length = max_sequence_length
        self._decode_batch_size = decode_batch_size
        self._device = pipeline.vae.device
        self._channels = pipeline.transformer.config.in_channels // 4
        self._latent_height = height // pipeline.vae_scale_factor
        self._latent_width = width // pipeline.vae_scale_factor
        self._image_ids = _token_positions(self._latent_height // 2, self._latent_width // 2).to(self._device)
        self._guidance: Tensor | None = None
        if pipeline.transformer.config.guidance_embeds:
            self._guidance = torch.tensor([guidance_scale], dtype=torch.float32, device=self._device)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        height: int,
        width: int,
        guidance_scale: float,
        max_sequence_length: int,
        dtype: torch.dtype,
        device: torch.device,
        decode_batch_size: int,
        network_dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ) -> Self:
        """``models.loading.load_model`` for this family; its arguments and errors."""
        try:
            pipeline = FluxPipeline.from_pretrained(
                folder, dtype={"default": dtype, "transformer": network_dtype}, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"model {folder}: not loadable as a FluxPipeline: {reason}") from error
        return cls(
            pipeline.to(device),
            source=folder,
            height=height,
            width=width,
            guidance_scale=guidance_scale,
            max_sequence_length=max_sequence_length,
            decode_batch_size=decode_batch_size,
            autocast=autocast,
        )

    @property
    def device(self) -> torch.device:
        """Where every part stands."""
        return self._device

    @property
    def image_tokens(self) -> int:
        """Image tokens of the transformer at this size."""
        return self._image_ids.shape[0]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Prompts to ``prompt_embeds`` [P, L, T5 width] and ``pooled`` [P, CLIP width], in their order."""
        chunks = [
            self._encode_batch(list(prompts[start : start + ENCODE_BATCH]))
            for start in range(0, len(prompts), ENCODE_BATCH)
        ]
        embeds, pooled = zip(*chunks, strict=True)
        return {"prompt_embeds": torch.cat(embeds), "pooled": torch.cat(pooled)}

    def _encode_batch(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        pipeline = self.pipeline
        clip = pipeline.tokenizer(
            prompts,
            padding="max_length",
            max_length=pipeline.tokenizer_max_length,
            truncation=True,
            return_tensors="pt",
        )
        t5 = pipeline.tokenizer_2(
            prompts,
            padding="max_length",
            max_length=self._max_sequence_length,
            truncation=True,
            return_tensors="pt",
        )
        pooled = pipeline.text_encoder(clip.input_ids.to(self._device)).pooler_output
        embeds = pipeline.text_encoder_2(t5.input_ids.to(self._device)).last_hidden_state
        return embeds, pooled

    def truncated(self, prompts: Sequence[str]) -> dict[str, int]:
        """How many prompts lose words to each text encoder's length, by its name: "clip" and "t5"."""
        limits = {
            "clip": (self.pipeline.tokenizer, self.pipeline.tokenizer_max_length),
            "t5": (self.pipeline.tokenizer_2, self._max_sequence_length),
        }
        return {
            name: sum(len(ids) > limit for ids in tokenizer(list(prompts), verbose=False).input_ids)
            for name, (tokenizer, limit) in limits.items()
        }

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """[B, S, 4C] float32, drawn on the generator's device as [B, C, h, w] like the pipeline's own."""
        shape = (count, self._channels, self._latent_height, self._latent_width)
        noise = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
        return pack_latents(noise).to(self._device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """[B, S, 4C] states at [B] sigmas to [B, S, 4C] float32; row i under row i of ``cond``.

        In reduced precision FLUX's own code rounds the time to that precision before embedding it;
        this function leaves it so, because the published weights are used that way.
        """
        dtype = next(self.network.parameters()).dtype
        text = cond["prompt_embeds"].to(dtype)
        # Float32 and in the scheduler's unit and back, as the pipeline does it: the same rounding.
        unit = self.pipeline.scheduler.config.num_train_timesteps
        timestep = sigma.to(torch.float32) * unit / 1000
        # Each weight is read once a call: a cache of cast weights would hold a second model in memory, and
        # under a caller's autocast it would outlive an optimizer step.
        with torch.autocast(
            self._device.type, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False
        ):
            velocity = self.network(
                hidden_states=x.to(dtype),
                timestep=timestep,
                guidance=None if self._guidance is None else self._guidance.expand(x.shape[0]),
                pooled_projections=cond["pooled"].to(dtype),
                encoder_hidden_states=text,
                txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
                img_ids=self._image_ids,
                return_dict=False,
            )[0]
        return velocity.to(torch.float32)

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """[B, S, 4C] to [B, 3, H, W] float32 in [0, 1], ``decode_batch_size`` images at a time."""
        return torch.cat([self._decode_batch(rows) for rows in x0.split(self._decode_batch_size)])

    def _decode_batch(self, x0: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = unpack_latents(x0.to(torch.float32), self._latent_height, self._latent_width)
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pixels = vae.decode(latents.to(vae.dtype), return_dict=False)[0].to(torch.float32)
        return (pixels / 2 + 0.5).clamp(0.0, 1.0)

    def time_grid(self, num_steps: int) -> Tensor:
        """The sigmas of ``FluxPipeline.__call__`` at this image size, [num_steps + 1] float64, 1 to 0.

        Raises InputError if the scheduler's settings make a grid that does not fall from 1 to 0.
        """
        if num_steps < 1:
            raise InputError(f"num_steps is {num_steps}; expected at least 1")
        # A fresh scheduler: the pipeline's own changes with every call that someone makes of it.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.pipeline.scheduler.config)
        config = scheduler.config
        shift = calculate_shift(
            self._image_ids.shape[0],
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=shift, device="cpu")
        grid = scheduler.sigmas.to(torch.float64)
        # The shift of 1 is 1 in exact arithmetic; in float32 it can miss by a unit in the last place.
        if abs(grid[0].item() - 1.0) < 1e-6:
            grid[0] = 1.0
        try:
            return check_grid(grid)
        except ValueError as error:
            raise InputError(f"{self.source / 'scheduler'}: at {num_steps} steps {error}") from error

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each block in the backward pass instead of keeping its activations, or not."""
        if enabled:
            self.pipeline.transformer.enable_gradient_checkpointing()
        else:
            self.pipeline.transformer.disable_gradient_checkpointing()


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


def _token_positions(rows: int, columns: int) -> Tensor:
    """[rows * columns, 3] float32: 0, row and column of each image token, for the rotary embedding."""
    positions = torch.zeros(rows, columns, 3)
    positions[..., 1] = torch.arange(rows)[:, None]
    positions[..., 2] = torch.arange(columns)[None, :]
    return positions.reshape(rows * columns, 3)


def _use_up_norm_warning() -> None:
    """Spend torch's one warning a process that a norm's float32 weight meets a reduced input.

    Autocast over float32 weights is meant here, and a user could do nothing about the warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.functional.rms_norm(torch.ones(1, dtype=torch.bfloat16), (1,), torch.ones(1))


def _check_size(name: str, pixels: int, unit: int) -> None:
    if pixels < unit or pixels % unit != 0:
        below = max(unit, pixels // unit * unit)
        raise InputError(
            f"{name} is {pixels} pixels; "
            f"this model makes multiples of {unit}, such as {below} or {below + unit}"
        )
