"""A genuine AuraFlowPipeline folder with random weights: a class that has no adapter here."""

from pathlib import Path

import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel
from transformers import UMT5Config, UMT5EncoderModel

import tiny_parts

WIDTH = 16


def build_tiny_aura_flow(folder: Path, seed: int = 0) -> Path:
    """Write the pipeline to ``folder`` and return it; equal arguments give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = AuraFlowPipeline(
            tokenizer=tiny_parts.t5_tokenizer(),
            text_encoder=_umt5(),
            vae=tiny_parts.vae(),
            transformer=_transformer(),
            scheduler=tiny_parts.flow_scheduler(dynamic_shift=False, shift=1.73),
        )
    pipeline.save_pretrained(folder)
    return folder


def _umt5() -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=64,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.1,
    )
    return UMT5EncoderModel(config).eval()


def _transformer() -> AuraFlowTransformer2DModel:
    return AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=tiny_parts.LATENT_CHANNELS,
        out_channels=tiny_parts.LATENT_CHANNELS,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
