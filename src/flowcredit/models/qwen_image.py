"""Qwen-Image: any folder of diffusers' QwenImagePipeline, of any size.

Axes: B rows in a batch, P prompts, C latent channels, h and w latent height and width, S = hw/4 image
tokens, L text tokens, E width of the language model, H and W image height and width in pixels. A state is
[B, S, 4C]: each token holds a 2x2 patch of the latent image, as in diffusers.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.interfaces import Conditioning
from flowcredit.limits import LONGEST_TEXT, size_unit
from flowcredit.models.pipelines import (
    JOINT_ATTENTION,
    Guidance,
    PipelineSettings,
    both_predictions,
    check_flow_scheduler,
    check_negative_prompt,
    check_settings,
    computing_in,
    count_truncated,
    decode_in_batches,
    encode_in_batches,
    encode_prompts,
    latent_noise,
    load_pipeline,
    pack_latents,
    scheduler_grid,
    set_checkpointing,
    unpack_latents,
)
from flowcredit.quiet import quiet_libraries

LONGEST_SEQUENCE = LONGEST_TEXT["QwenImagePipeline"]
"""Text tokens: QwenImagePipeline refuses more."""
PROMPTS_AT_ONCE = 4
"""Fewer than elsewhere: the language model scores every word of its vocabulary at every token."""


class QwenImageFlow:
    """``models.loading.PipelineFlow`` on a QwenImagePipeline: same seed and no noise, same image as its own.

    Classifier-free guidance ("true CFG", scaled back to the norm of the unguided prediction, token by token)
    is part of ``velocity``. ``network`` is the QwenImageTransformer2DModel.
    """

    part = "transformer"
    lora_targets: tuple[str, ...] = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    """As in Flow-GRPO's script for Qwen-Image: attention and feed-forward layers of image and text."""

    def __init__(self, pipeline: QwenImagePipeline, source: Path, settings: PipelineSettings) -> None:
        """Raises InputError for sizes that the model cannot make and schedulers of another kind."""
        check_flow_scheduler(pipeline.scheduler, source)
        check_settings(
            settings,
            unit=size_unit("QwenImagePipeline", pipeline.vae_scale_factor, 1),
            longest=LONGEST_SEQUENCE,
        )
        check_negative_prompt(settings, used=settings.guided)
        if pipeline.transformer.config.guidance_embeds:
            raise InputError(
                f"{source / 'transformer' / 'config.json'}: guidance_embeds is true; expected Qwen-Image with"
                " classifier-free guidance"
            )
        self.pipeline = pipeline
        self.source = source
        self.network: torch.nn.Module = pipeline.transformer
        self.settings = settings
        self._channels = pipeline.transformer.config.in_channels // 4
        self._latent_height = settings.height // pipeline.vae_scale_factor
        self._latent_width = settings.width // pipeline.vae_scale_factor
        self._guidance: Guidance | None = None
        if settings.guided:
            self._guidance = Guidance(settings.guidance_scale, self.encode([settings.negative_prompt]))

    @classmethod
    def from_folder(cls, folder: Path, settings: PipelineSettings) -> Self:
        """``models.loading.load_model`` for this family; its errors."""
        return cls(load_pipeline(QwenImagePipeline, folder, settings, cls.part), folder, settings)

    @property
    def device(self) -> torch.device:
        """Where every part stands."""
        return self.settings.device

    @property
    def image_tokens(self) -> int:
        """Image tokens of the transformer at this size."""
        return self._latent_height * self._latent_width // 4

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Prompts to ``prompt_embeds`` [P, L, E] and ``mask`` [P, L] bool, in their order.

        Every row has ``max_sequence_length`` tokens, padding included, so that a prompt's text does not
        depend on the longest beside it.
        """
        return encode_prompts(self._encode_batch, prompts, self.pipeline, self.settings, PROMPTS_AT_ONCE)

    def _encode_batch(self, prompts: list[str]) -> Conditioning:
        with quiet_libraries():
            embeds, mask = self.pipeline.encode_prompt(
                prompts, device=self.device, max_sequence_length=self.settings.max_sequence_length
            )
        # The pipeline gives no mask where every token counts.
        counts = torch.ones(embeds.shape[:2], dtype=torch.bool, device=self.device)
        mask = counts if mask is None else mask.to(torch.bool)
        missing = self.settings.max_sequence_length - embeds.shape[1]
        return {
            "prompt_embeds": torch.nn.functional.pad(embeds, (0, 0, 0, missing)),
            "mask": torch.nn.functional.pad(mask, (0, missing)),
        }

    def truncated(self, prompts: Sequence[str]) -> dict[str, int]:
        """How many prompts, in their template, are longer than the language model reads: "qwen"."""
        pipeline = self.pipeline
        limit = self.settings.max_sequence_length + pipeline.prompt_template_encode_start_idx
        whole = [pipeline.prompt_template_encode.format(prompt) for prompt in prompts]
        return count_truncated({"qwen": (pipeline.tokenizer, limit)}, whole)

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """[B, S, 4C] float32, drawn on the generator's device as [B, C, h, w] like the pipeline's own."""
        shape = (count, self._channels, self._latent_height, self._latent_width)
        return pack_latents(latent_noise(shape, generator)).to(self.device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """[B, S, 4C] states at [B] sigmas to guided float32 velocities; row i under row i of ``cond``."""
        if self._guidance is None:
            return self._predict(x, sigma, cond)
        without, with_text = both_predictions(self._predict, x, sigma, cond, self._guidance.negative)
        guided = without + self._guidance.scale * (with_text - without)
        return guided * (with_text.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def without_guidance(self) -> Self:
        """The same network under the rows' own text alone, whatever the guidance scale."""
        plain = copy.copy(self)
        plain._guidance = None
        return plain

    def _predict(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        dtype = next(self.network.parameters()).dtype
        # Float32 and in the scheduler's unit and back, as the pipeline does it: the same rounding.
        unit = self.pipeline.scheduler.config.num_train_timesteps
        shape = (1, self._latent_height // 2, self._latent_width // 2)
        with computing_in(self.settings):
            velocity = self.network(
                hidden_states=x.to(dtype),
                timestep=sigma.to(torch.float32) * unit / 1000,
                encoder_hidden_states=cond["prompt_embeds"].to(dtype),
                encoder_hidden_states_mask=cond["mask"],
                img_shapes=[[shape]] * len(x),
                return_dict=False,
            )[0]
        return velocity.to(torch.float32)

    def decode(self, x0: Tensor) -> Tensor:
        """[B, S, 4C] to [B, 3, H, W] float32 in [0, 1], ``decode_batch_size`` images at a time."""
        return decode_in_batches(self._decode_batch, x0, self.pipeline, self.settings)

    def _decode_batch(self, x0: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = unpack_latents(x0.to(torch.float32), self._latent_height, self._latent_width)
        mean, std = self._latent_moments(latents)
        # The VAE is one of videos: an image is their first frame.
        video = (latents * std + mean).to(vae.dtype).unsqueeze(2)
        return vae.decode(video, return_dict=False)[0][:, :, 0]

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, S, 4C] float32 states at sigma 0, as many at a time."""
        return encode_in_batches(self._encode_pixels, images, self.settings.decode_batch_size)

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video = pixels.to(vae.dtype).unsqueeze(2)
        latents = vae.encode(video).latent_dist.mode()[:, :, 0].to(torch.float32)
        mean, std = self._latent_moments(latents)
        return pack_latents((latents - mean) / std)

    def _latent_moments(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the VAE's latents, [C, 1, 1] each."""
        config = self.pipeline.vae.config
        mean = latents.new_tensor(config.latents_mean)[:, None, None]
        return mean, latents.new_tensor(config.latents_std)[:, None, None]

    def time_grid(self, num_steps: int) -> Tensor:
        """The sigmas of the pipeline's call at this image size, [num_steps + 1] float64, 1 to 0.

        Raises InputError if the scheduler's settings make a grid that does not fall from 1 to 0.
        """
        return scheduler_grid(self.pipeline.scheduler, self.source, num_steps, self.image_tokens, given=True)

    def call_arguments(self, count: int) -> dict[str, Any]:
        """See ``PipelineFlow``."""
        negative = [self.settings.negative_prompt] * count if self.settings.guided else None
        return {
            "true_cfg_scale": self.settings.guidance_scale,
            "negative_prompt": negative,
            "max_sequence_length": self.settings.max_sequence_length,
        }

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each block in the backward pass instead of keeping its activations, or not."""
        set_checkpointing(self.pipeline.transformer, enabled)
