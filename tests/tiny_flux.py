"""A genuine FluxPipeline folder with random weights, small enough to build in every test session."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor

import tiny_parts
from flowcredit.models.loading import PipelineFlow, load_model
from tiny_parts import LATENT_CHANNELS

CLIP_TOKENS = tiny_parts.CLIP_TOKENS
T5_TOKENS = 12
PIXELS_PER_TOKEN = 8
"""Side of the square of pixels behind one image token: VAE factor 4, patches of 2."""


def build_tiny_flux(
    folder: Path,
    *,
    guidance_embeds: bool = False,
    dynamic_shift: bool = False,
    shift: float = 3.0,
    seed: int = 0,
) -> Path:
    """Write the pipeline to ``folder`` and return it; equal arguments give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = FluxPipeline(
            scheduler=tiny_parts.flow_scheduler(dynamic_shift, shift),
            vae=tiny_parts.vae(),
            text_encoder=tiny_parts.clip_text(),
            tokenizer=tiny_parts.clip_tokenizer(),
            text_encoder_2=tiny_parts.t5(),
            tokenizer_2=tiny_parts.t5_tokenizer(),
            transformer=_transformer(guidance_embeds),
        )
    pipeline.save_pretrained(folder)
    return folder


def load_tiny_flux(
    folder: Path,
    *,
    height: int = 32,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    network_dtype: torch.dtype = torch.float32,
    guidance_scale: float = 3.5,
    decode_batch_size: int = 4,
    autocast: torch.dtype | None = None,
) -> PipelineFlow:
    """The adapter on such a folder, on the CPU, with 12 T5 tokens."""
    return load_model(
        folder,
        height=height,
        width=width,
        guidance_scale=guidance_scale,
        max_sequence_length=T5_TOKENS,
        dtype=dtype,
        device="cpu",
        decode_batch_size=decode_batch_size,
        network_dtype=network_dtype,
        autocast=autocast,
    )


@torch.no_grad()
def euler_images(model: PipelineFlow, prompts: Sequence[str], *, num_steps: int = 5, seed: int = 0) -> Tensor:
    """One image a prompt by plain Euler steps over the model's own grid, [P, 3, H, W]."""
    cond = model.encode(prompts)
    x = model.initial_noise(len(prompts), torch.Generator().manual_seed(seed))
    grid = model.time_grid(num_steps)
    for sigma, sigma_next in itertools.pairwise(grid):
        x = x + float(sigma_next - sigma) * model.velocity(x, sigma.expand(len(prompts)), cond)
    return model.decode(x)


def pipeline_images(
    pipeline: FluxPipeline,
    prompts: Sequence[str],
    *,
    height: int = 32,
    width: int = 32,
    num_steps: int = 5,
    seed: int = 0,
) -> Tensor:
    """What plain diffusers makes of the same seed, [P, 3, H, W]; guidance 3.5, 12 T5 tokens."""
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        list(prompts),
        height=height,
        width=width,
        num_inference_steps=num_steps,
        guidance_scale=3.5,
        max_sequence_length=T5_TOKENS,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def _transformer(guidance_embeds: bool) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
