"""A genuine QwenImagePipeline folder with random weights, and what plain diffusers makes of it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from flowcredit.models.loading import PipelineFlow, load_model

TEXT_TOKENS = 24
WIDTH = 16
CHANNELS = 4
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
FIRST_WORDS = ("system", "user", "assistant", "Describe")
LATER_WORDS = (
    "the",
    "image",
    "by",
    "detailing",
    "color",
    "shape",
    "size",
    "texture",
    "quantity",
    "text",
    "spatial",
    "relationships",
    "of",
    "objects",
    "and",
    "background",
    "red",
    "blue",
    "circle",
    "square",
    "left",
)
WORDS = (*FIRST_WORDS, *("Ġ" + word for word in LATER_WORDS))
"""Words of one token each: those of the pipeline's template, which must be 34 tokens, and a few more."""


def build_tiny_qwen_image(folder: Path, *, shift_terminal: float | None = 0.02, seed: int = 0) -> Path:
    """Write the pipeline to ``folder`` and return it; equal arguments give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            scheduler=_scheduler(shift_terminal),
            vae=_vae(),
            text_encoder=_language_model(),
            tokenizer=tokenizer(),
            transformer=_transformer(),
        )
    pipeline.save_pretrained(folder)
    return folder


def load_tiny_qwen_image(
    folder: Path,
    *,
    height: int = 32,
    width: int = 32,
    guidance_scale: float = 4.0,
    negative_prompt: str = "",
    max_sequence_length: int = TEXT_TOKENS,
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
        autocast=autocast,
    )


def plain_images(
    pipeline: QwenImagePipeline,
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
        true_cfg_scale=guidance_scale,
        negative_prompt=[negative_prompt] * len(prompts) if guidance_scale > 1 else None,
        max_sequence_length=TEXT_TOKENS,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images


def tokenizer() -> Qwen2Tokenizer:
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        merges += [(word[:end], word[end]) for end in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    pieces = dict.fromkeys([*sorted(ByteLevel.alphabet()), *(a + b for a, b in merges), *SPECIAL])
    return Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        extra_special_tokens=list(SPECIAL[1:]),
        model_max_length=4096,
    )


def _language_model() -> Qwen2_5_VLForConditionalGeneration:
    words = tokenizer()
    token = dict(zip(SPECIAL, words.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
            "bos_token_id": token["<|endoftext|>"],
            "eos_token_id": token["<|im_end|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
        },
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
        image_token_id=token["<|vision_start|>"],
        video_token_id=token["<|vision_end|>"],
        initializer_range=0.3,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _scheduler(shift_terminal: float | None) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=8,
        max_image_seq_len=64,
        base_shift=0.5,
        max_shift=0.9,
        shift_terminal=shift_terminal,
    )


def _vae() -> AutoencoderKLQwenImage:
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.7, 0.4, 0.1, -0.2],
        latents_std=[2.8, 1.4, 0.9, 1.7],
    )
    # Random decoders are nearly grey; a wider last layer makes images whose differences can be seen.
    with torch.no_grad():
        for value in vae.decoder.conv_out.parameters():
            value.mul_(3.0)
    return vae.eval()


def _transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
