"""A genuine FluxPipeline folder with random weights, small enough to build in every test session."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from flowcredit.models.loading import PipelineFlow, load_model

CLIP_TOKENS = 40
"""Length of CLIP's sequences in the tiny pipeline, start and end tokens included."""
T5_TOKENS = 12
PIXELS_PER_TOKEN = 8
"""Side of the square of pixels behind one image token: VAE factor 4, patches of 2."""
LATENT_CHANNELS = 4


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
            scheduler=_scheduler(dynamic_shift, shift),
            vae=_vae(),
            text_encoder=_clip_text(),
            tokenizer=_clip_tokenizer(),
            text_encoder_2=_t5(),
            tokenizer_2=_t5_tokenizer(),
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


def _scheduler(dynamic_shift: bool, shift: float) -> FlowMatchEulerDiscreteScheduler:
    # A base length far from FLUX.1-dev's own, so that a shift computed with the wrong numbers shows.
    return FlowMatchEulerDiscreteScheduler(
        shift=shift,
        use_dynamic_shifting=dynamic_shift,
        base_image_seq_len=8,
        max_image_seq_len=64,
        base_shift=0.4,
        max_shift=1.3,
    )


def _vae() -> AutoencoderKL:
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


def _clip_tokenizer() -> CLIPTokenizer:
    characters = sorted(ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>"), ("b", "l"), ("bl", "u"), ("blu", "e</w>"), ("a", "n")]
    pieces = [*characters, *(c + "</w>" for c in characters), *(a + b for a, b in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        model_max_length=CLIP_TOKENS,
    )


def _clip_text() -> CLIPTextModel:
    tokenizer = _clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def _t5_tokenizer() -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -3.0)]
    pieces += [(chr(code), -5.0) for code in range(ord("a"), ord("z") + 1)]
    pieces += [(word, -2.0) for word in ("▁a", "▁red", "▁blue", "▁circle", "▁square", "▁of", "▁left")]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def _t5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.1,
    )
    return T5EncoderModel(config).eval()


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
