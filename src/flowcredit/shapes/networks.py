"""The bundled world's networks: a small Flux, its VAE and text encoders, and a small CLIP, untrained."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from flowcredit.shapes.canvas import SIZE
from flowcredit.shapes.text import CLIP_CONTEXT, write_clip_tokenizer, write_t5_tokenizer

LATENT_CHANNELS = 8
PATCHES = SIZE // 8
"""Image tokens along a side: the VAE takes 4 pixels, the transformer 2 latents."""
TEXT_WIDTH = 64


def vae() -> AutoencoderKL:
    """32 x 32 pixels to 8 x 8 latents of 8 channels."""
    torch.manual_seed(1)
    blocks = 3
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def transformer() -> FluxTransformer2DModel:
    """3.2 M parameters: one double and three single blocks, six heads of 32."""
    torch.manual_seed(2)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1-dev's own settings."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def _clip_text_settings(vocabulary: dict[str, int]) -> dict[str, int]:
    return {
        "vocab_size": len(vocabulary),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CLIP_CONTEXT,
        "bos_token_id": vocabulary["<|startoftext|>"],
        "eos_token_id": vocabulary["<|endoftext|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
    }


def text_encoders(folder: Path) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Both encoders of the pipeline; writes their tokenizers to ``tokenizer`` and ``tokenizer_2``."""
    vocabulary = write_clip_tokenizer(folder / "tokenizer")
    pieces = write_t5_tokenizer(folder / "tokenizer_2")
    torch.manual_seed(3)
    clip = CLIPTextModel(CLIPTextConfig(**_clip_text_settings(vocabulary)))
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=pieces,
            d_model=TEXT_WIDTH,
            d_kv=32,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            is_encoder_decoder=False,
            use_cache=False,
        )
    )
    return clip.eval(), t5.eval()


def clip_model(folder: Path) -> CLIPModel:
    """A CLIP of two small towers on 4 x 4 patches; writes its tokenizer to ``folder``."""
    vocabulary = write_clip_tokenizer(folder)
    torch.manual_seed(4)
    vision = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": SIZE,
        "patch_size": 4,
    }
    config = CLIPConfig(
        text_config=_clip_text_settings(vocabulary), vision_config=vision, projection_dim=TEXT_WIDTH
    )
    return CLIPModel(config).eval()
