"""A genuine StableDiffusion3Pipeline folder with random weights, and what plain diffusers makes of it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from transformers import CLIPTextModelWithProjection

import tiny_parts
from flowcredit.models.loading import PipelineFlow, load_model

T5_TOKENS = 12
WIDTH = 32
"""Width of T5: that of both CLIPs side by side, as in SD3, where T5 is wider still."""


def build_tiny_sd3(
    folder: Path, *, t5: bool = True, dynamic_shift: bool = False, shift: float = 3.0, seed: int = 0
) -> Path:
    """Write the pipeline to ``folder`` and return it; equal arguments give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            scheduler=tiny_parts.flow_scheduler(dynamic_shift, shift),
            vae=tiny_parts.vae(),
            text_encoder=CLIPTextModelWithProjection(tiny_parts.clip_config(12)).eval(),
            tokenizer=tiny_parts.clip_tokenizer(),
            text_encoder_2=CLIPTextModelWithProjection(tiny_parts.clip_config(20)).eval(),
            tokenizer_2=tiny_parts.clip_tokenizer(),
            text_encoder_3=tiny_parts.t5(WIDTH) if t5 else None,
            tokenizer_3=tiny_parts.t5_tokenizer() if t5 else None,
            transformer=_transformer(),
        )
    pipeline.save_pretrained(folder)
    return folder


def load_tiny_sd3(
    folder: Path,
    *,
    height: int = 32,
    width: int = 32,
    guidance_scale: float = 4.0,
    negative_prompt: str = "",
    max_sequence_length: int = T5_TOKENS,
    network_dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
) -> PipelineFlow:
    """The adapter on such a folder, on the CPU."""
    return load_model(
        folder,
        height=height,
        width=width,
        guidance_scale=guidance_scale,
        negative_prompt=negative_prompt,
        max_sequence_length=max_sequence_length,
        dtype=torch.float32,
        device="cpu",
        decode_batch_size=4,
        network_dtype=network_dtype,
        autocast=autocast,
    )


def load_plain(folder: Path, *, t5: bool = True) -> StableDiffusion3Pipeline:
    """The folder as plain diffusers loads it."""
    absent = {} if t5 else {"text_encoder_3": None, "tokenizer_3": None}
    return StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, **absent)


def plain_images(
    pipeline: StableDiffusion3Pipeline,
    prompts: Sequence[str],
    *,
    height: int = 32,
    width: int = 32,
    num_steps: int = 3,
    guidance_scale: float = 4.0,
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
        max_sequence_length=T5_TOKENS,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=tiny_parts.LATENT_CHANNELS,
        out_channels=tiny_parts.LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=12 + 20,
        pos_embed_max_size=8,
        # As in SD3.5 medium.
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
