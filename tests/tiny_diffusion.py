"""A genuine StableDiffusionPipeline folder with random weights, and what plain diffusers makes of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import Tensor

import tiny_parts
from flowcredit.models.loading import PipelineFlow, load_model


def build_tiny_diffusion(folder: Path, *, seed: int = 0, **scheduler: Any) -> Path:
    """Write the pipeline to ``folder`` and return it; by default with the scheduler of SD 1.5."""
    settings = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "steps_offset": 1,
        "set_alpha_to_one": False,
    }
    kind = DDIMScheduler if "rescale_betas_zero_snr" in scheduler else PNDMScheduler
    clip = {"clip_sample": False} if kind is DDIMScheduler else {"skip_prk_steps": True}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = StableDiffusionPipeline(
            scheduler=kind(**{**settings, **clip, **scheduler}),
            vae=_vae(),
            text_encoder=tiny_parts.clip_text(),
            tokenizer=tiny_parts.clip_tokenizer(),
            unet=_unet(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def load_tiny_diffusion(
    folder: Path,
    *,
    height: int = 32,
    width: int = 32,
    guidance_scale: float = 5.0,
    negative_prompt: str = "",
    autocast: torch.dtype | None = None,
) -> PipelineFlow:
    """The adapter on such a folder, on the CPU."""
    return load_model(
        folder,
        height=height,
        width=width,
        guidance_scale=guidance_scale,
        negative_prompt=negative_prompt,
        max_sequence_length=512,
        dtype=torch.float32,
        device="cpu",
        decode_batch_size=4,
        autocast=autocast,
    )


def load_plain(folder: Path) -> StableDiffusionPipeline:
    """The folder as plain diffusers loads it, sampled by DDIM from the last timestep on."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.scheduler = DDIMScheduler.from_config(
        pipeline.scheduler.config, timestep_spacing="trailing", clip_sample=False
    )
    return pipeline


def plain_images(
    pipeline: StableDiffusionPipeline,
    prompts: Sequence[str],
    *,
    height: int = 32,
    width: int = 32,
    num_steps: int = 4,
    guidance_scale: float = 5.0,
    negative_prompt: str = "",
    seed: int = 0,
) -> Tensor:
    """What plain diffusers makes of the same seed, [P, 3, H, W]."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        list(prompts),
        height=height,
        width=width,
        num_inference_steps=num_steps,
        guidance_scale=guidance_scale,
        negative_prompt=[negative_prompt] * len(prompts),
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images


def _vae() -> AutoencoderKL:
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        latent_channels=tiny_parts.LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.18215,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(2.0)
    return vae


def _unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=tiny_parts.LATENT_CHANNELS,
        out_channels=tiny_parts.LATENT_CHANNELS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=2,
        norm_num_groups=4,
        cross_attention_dim=16,
    )
