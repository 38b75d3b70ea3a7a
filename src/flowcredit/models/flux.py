"""The FLUX.1 family: any folder of diffusers' FluxPipeline, of any size.

Axes: B rows in a batch, P prompts, C latent channels, h and w latent height and width, S = hw/4 image
tokens, L text tokens, H and W image height and width in pixels. A state is [B, S, 4C]: each token
holds a 2x2 patch of the latent image, as in diffusers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import FluxPipeline
from torch import Tensor

from flowcredit.interfaces import Conditioning
from flowcredit.limits import LONGEST_TEXT, size_unit
from flowcredit.models.pipelines import (
    PipelineSettings,
    check_flow_scheduler,
    check_negative_prompt,
    check_settings,
    computing_in,
    count_truncated,
    decode_in_batches,
    decode_latents,
    encode_in_batches,
    encode_latents,
    encode_prompts,
    latent_noise,
    load_pipeline,
    pack_latents,
    scheduler_grid,
    set_checkpointing,
    unpack_latents,
)

LONGEST_SEQUENCE = LONGEST_TEXT["FluxPipeline"]
"""T5 tokens: FluxPipeline refuses more."""


class FluxFlow:
    """``models.loading.PipelineFlow`` on a FluxPipeline: same seed and no noise, same image as its own.

    ``network`` is the FluxTransformer2DModel. It, like every other part, starts frozen and in eval mode.
    """

    part = "transformer"
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """As in the LoRA scripts of diffusers."""

    def __init__(self, pipeline: FluxPipeline, source: Path, settings: PipelineSettings) -> None:
        """Raises InputError for sizes that the model cannot make and schedulers of another kind."""
        check_flow_scheduler(pipeline.scheduler, source)
        check_settings(
            settings, unit=size_unit("FluxPipeline", pipeline.vae_scale_factor, 1), longest=LONGEST_SEQUENCE
        )
        # FLUX's guidance is an input of the network: no second evaluation, no negative prompt.
        check_negative_prompt(settings, used=False)
        self.pipeline = pipeline
        self.source = source
        self.network: torch.nn.Module = pipeline.transformer
        self.settings = settings
        self._channels = pipeline.transformer.config.in_channels // 4
        self._latent_height = settings.height // pipeline.vae_scale_factor
        self._latent_width = settings.width // pipeline.vae_scale_factor
        positions = _token_positions(self._latent_height // 2, self._latent_width // 2)
        self._image_ids = positions.to(settings.device)
        self._guidance: Tensor | None = None
        if pipeline.transformer.config.guidance_embeds:
            scale = settings.guidance_scale
            self._guidance = torch.tensor([scale], dtype=torch.float32, device=settings.device)

    @classmethod
    def from_folder(cls, folder: Path, settings: PipelineSettings) -> Self:
        """``models.loading.load_model`` for this family; its errors."""
        return cls(load_pipeline(FluxPipeline, folder, settings, cls.part), folder, settings)

    @property
    def device(self) -> torch.device:
        """Where every part stands."""
        return self.settings.device

    @property
    def image_tokens(self) -> int:
        """Image tokens of the transformer at this size."""
        return self._image_ids.shape[0]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Prompts to ``prompt_embeds`` [P, L, T5 width] and ``pooled`` [P, CLIP width], in their order."""
        return encode_prompts(self._encode_batch, prompts, self.pipeline, self.settings)

    def _encode_batch(self, prompts: list[str]) -> Conditioning:
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
            max_length=self.settings.max_sequence_length,
            truncation=True,
            return_tensors="pt",
        )
        return {
            "prompt_embeds": pipeline.text_encoder_2(t5.input_ids.to(self.device)).last_hidden_state,
            "pooled": pipeline.text_encoder(clip.input_ids.to(self.device)).pooler_output,
        }

    def truncated(self, prompts: Sequence[str]) -> dict[str, int]:
        """How many prompts lose words to each text encoder's length, by its name: "clip" and "t5"."""
        limits = {
            "clip": (self.pipeline.tokenizer, self.pipeline.tokenizer_max_length),
            "t5": (self.pipeline.tokenizer_2, self.settings.max_sequence_length),
        }
        return count_truncated(limits, prompts)

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """[B, S, 4C] float32, drawn on the generator's device as [B, C, h, w] like the pipeline's own."""
        shape = (count, self._channels, self._latent_height, self._latent_width)
        return pack_latents(latent_noise(shape, generator)).to(self.device)

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
        with computing_in(self.settings):
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

    def without_guidance(self) -> Self:
        """Itself: the guidance that FLUX embeds is an input of its network, which has no other velocity."""
        return self

    def decode(self, x0: Tensor) -> Tensor:
        """[B, S, 4C] to [B, 3, H, W] float32 in [0, 1], ``decode_batch_size`` images at a time."""
        return decode_in_batches(self._decode_batch, x0, self.pipeline, self.settings)

    def _decode_batch(self, x0: Tensor) -> Tensor:
        latents = unpack_latents(x0, self._latent_height, self._latent_width)
        return decode_latents(self.pipeline.vae, latents)

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, S, 4C] float32 states at sigma 0, as many at a time."""
        return encode_in_batches(
            lambda rows: pack_latents(encode_latents(self.pipeline.vae, rows)),
            images,
            self.settings.decode_batch_size,
        )

    def time_grid(self, num_steps: int) -> Tensor:
        """The sigmas of ``FluxPipeline.__call__`` at this image size, [num_steps + 1] float64, 1 to 0.

        Raises InputError if the scheduler's settings make a grid that does not fall from 1 to 0.
        """
        return scheduler_grid(self.pipeline.scheduler, self.source, num_steps, self.image_tokens, given=True)

    def call_arguments(self, count: int) -> dict[str, Any]:
        """See ``PipelineFlow``."""
        return {
            "guidance_scale": self.settings.guidance_scale,
            "max_sequence_length": self.settings.max_sequence_length,
        }

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each block in the backward pass instead of keeping its activations, or not."""
        set_checkpointing(self.pipeline.transformer, enabled)


def _token_positions(rows: int, columns: int) -> Tensor:
    """[rows * columns, 3] float32: 0, row and column of each image token, for the rotary embedding."""
    positions = torch.zeros(rows, columns, 3)
    positions[..., 1] = torch.arange(rows)[:, None]
    positions[..., 2] = torch.arange(columns)[None, :]
    return positions.reshape(rows * columns, 3)
