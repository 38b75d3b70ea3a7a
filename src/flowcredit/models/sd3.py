"""The Stable Diffusion 3 family (SD3, SD3.5 medium and large): any folder of StableDiffusion3Pipeline.

Axes: B rows in a batch, P prompts, C latent channels, h and w latent height and width, L text tokens (those
of CLIP, then those of T5), E width of T5, H and W image height and width in pixels. A state is [B, C, h, w].
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from flowcredit.interfaces import Conditioning
from flowcredit.limits import LONGEST_TEXT, size_unit
from flowcredit.models.pipelines import (
    JOINT_ATTENTION,
    Guidance,
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
    guided_prediction,
    latent_noise,
    load_pipeline,
    scheduler_grid,
    set_checkpointing,
)
from flowcredit.pipeline_folder import absent_components
from flowcredit.quiet import quiet_libraries

LONGEST_SEQUENCE = LONGEST_TEXT["StableDiffusion3Pipeline"]
"""T5 tokens: StableDiffusion3Pipeline refuses more."""


class SD3Flow:
    """``models.loading.PipelineFlow`` on a StableDiffusion3Pipeline: same seed and no noise, same image.

    Classifier-free guidance is part of ``velocity``. A pipeline without T5 (``text_encoder_3`` null in its
    model_index.json) reads zeros in its place, as in diffusers. ``network`` is the SD3Transformer2DModel.
    """

    part = "transformer"
    lora_targets: tuple[str, ...] = JOINT_ATTENTION

    def __init__(self, pipeline: StableDiffusion3Pipeline, source: Path, settings: PipelineSettings) -> None:
        """Raises InputError for sizes that the model cannot make and schedulers of another kind."""
        check_flow_scheduler(pipeline.scheduler, source)
        config = pipeline.transformer.config
        unit = size_unit("StableDiffusion3Pipeline", pipeline.vae_scale_factor, config.patch_size)
        # Positions are cut from a learned or fixed square, which ends here.
        largest = config.pos_embed_max_size * unit
        check_settings(settings, unit=unit, longest=LONGEST_SEQUENCE, largest=largest)
        check_negative_prompt(settings, used=settings.guided)
        self.pipeline = pipeline
        self.source = source
        self.network: torch.nn.Module = pipeline.transformer
        self.settings = settings
        self._latent_shape = (
            config.in_channels,
            settings.height // pipeline.vae_scale_factor,
            settings.width // pipeline.vae_scale_factor,
        )
        self._image_tokens = (settings.height // unit) * (settings.width // unit)
        self._guidance: Guidance | None = None
        if settings.guided:
            self._guidance = Guidance(settings.guidance_scale, self.encode([settings.negative_prompt]))

    @classmethod
    def from_folder(cls, folder: Path, settings: PipelineSettings) -> Self:
        """``models.loading.load_model`` for this family; its errors."""
        absent = [name for name in ("text_encoder_3", "tokenizer_3") if name in absent_components(folder)]
        pipeline = load_pipeline(StableDiffusion3Pipeline, folder, settings, cls.part, absent)
        return cls(pipeline, folder, settings)

    @property
    def device(self) -> torch.device:
        """Where every part stands."""
        return self.settings.device

    @property
    def image_tokens(self) -> int:
        """Image tokens of the transformer at this size."""
        return self._image_tokens

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Prompts to ``prompt_embeds`` [P, L, E] and ``pooled`` [P, both CLIPs' widths], in their order."""
        return encode_prompts(self._encode_batch, prompts, self.pipeline, self.settings)

    def _encode_batch(self, prompts: list[str]) -> Conditioning:
        # The pipeline logs what it cuts off; ``truncated`` tells it once for the whole set.
        with quiet_libraries():
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                prompts,
                None,
                None,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.settings.max_sequence_length,
            )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def truncated(self, prompts: Sequence[str]) -> dict[str, int]:
        """How many prompts lose words to each text encoder's length: "clip", "clip_2" and, if any, "t5"."""
        pipeline = self.pipeline
        limits = {
            "clip": (pipeline.tokenizer, pipeline.tokenizer_max_length),
            "clip_2": (pipeline.tokenizer_2, pipeline.tokenizer_max_length),
        }
        if pipeline.text_encoder_3 is not None:
            limits["t5"] = (pipeline.tokenizer_3, self.settings.max_sequence_length)
        return count_truncated(limits, prompts)

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """[B, C, h, w] float32, drawn on the generator's device like the pipeline's own."""
        return latent_noise((count, *self._latent_shape), generator).to(self.device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """[B, C, h, w] states at [B] sigmas to guided float32 velocities; row i under row i of ``cond``."""
        return guided_prediction(self._predict, x, sigma, cond, self._guidance)

    def without_guidance(self) -> Self:
        """The same network under the rows' own text alone, whatever the guidance scale."""
        plain = copy.copy(self)
        plain._guidance = None
        return plain

    def _predict(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        dtype = next(self.network.parameters()).dtype
        with computing_in(self.settings):
            velocity = self.network(
                hidden_states=x.to(dtype),
                timestep=sigma.to(torch.float32) * self.pipeline.scheduler.config.num_train_timesteps,
                encoder_hidden_states=cond["prompt_embeds"].to(dtype),
                pooled_projections=cond["pooled"].to(dtype),
                return_dict=False,
            )[0]
        return velocity.to(torch.float32)

    def decode(self, x0: Tensor) -> Tensor:
        """[B, C, h, w] to [B, 3, H, W] float32 in [0, 1], ``decode_batch_size`` images at a time."""
        return decode_in_batches(
            lambda rows: decode_latents(self.pipeline.vae, rows), x0, self.pipeline, self.settings
        )

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, C, h, w] float32 states at sigma 0, as many at a time."""
        return encode_in_batches(
            lambda rows: encode_latents(self.pipeline.vae, rows), images, self.settings.decode_batch_size
        )

    def time_grid(self, num_steps: int) -> Tensor:
        """The sigmas of the pipeline's call at this image size, [num_steps + 1] float64, 1 to 0.

        Raises InputError if the scheduler's settings make a grid that does not fall from 1 to 0.
        """
        scheduler = self.pipeline.scheduler
        return scheduler_grid(scheduler, self.source, num_steps, self.image_tokens, given=False)

    def call_arguments(self, count: int) -> dict[str, Any]:
        """See ``PipelineFlow``."""
        return {
            "guidance_scale": self.settings.guidance_scale,
            "negative_prompt": [self.settings.negative_prompt] * count,
            "max_sequence_length": self.settings.max_sequence_length,
        }

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each block in the backward pass instead of keeping its activations, or not."""
        set_checkpointing(self.pipeline.transformer, enabled)
