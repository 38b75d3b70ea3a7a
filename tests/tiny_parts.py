"""Small parts with random weights that the tiny pipelines of the tests are made of."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

CLIP_TOKENS = 40
"""Length of CLIP's sequences, start and end tokens included."""
LATENT_CHANNELS = 4


def flow_scheduler(dynamic_shift: bool, shift: float) -> FlowMatchEulerDiscreteScheduler:
    # A base length far from FLUX.1-dev's own, so that a shift computed with the wrong numbers shows.
    return FlowMatchEulerDiscreteScheduler(
        shift=shift,
        use_dynamic_shifting=dynamic_shift,
        base_image_seq_len=8,
        max_image_seq_len=64,
        base_shift=0.4,
        max_shift=1.3,
    )


def vae() -> AutoencoderKL:
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.36,
        shift_factor=0.12,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    # Random decoders are nearly grey; a wider last layer makes images whose differences can be seen.
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(2.0)
    return vae


def clip_tokenizer() -> CLIPTokenizer:
    characters = sorted(ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>"), ("b", "l"), ("bl", "u"), ("blu", "e</w>"), ("a", "n")]
    pieces = [*characters, *(c + "</w>" for c in characters), *(a + b for a, b in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        model_max_length=CLIP_TOKENS,
    )


def clip_config(projection: int = 16) -> CLIPTextConfig:
    tokenizer = clip_tokenizer()
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=projection,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def clip_text() -> CLIPTextModel:
    return CLIPTextModel(clip_config()).eval()


def t5_tokenizer() -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -3.0)]
    pieces += [(chr(code), -5.0) for code in range(ord("a"), ord("z") + 1)]
    pieces += [(word, -2.0) for word in ("▁a", "▁red", "▁blue", "▁circle", "▁square", "▁of", "▁left")]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def t5(width: int = 16) -> T5EncoderModel:
    config = T5Config(
        vocab_size=64,
        d_model=width,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.1,
    )
    return T5EncoderModel(config).eval()
