"""A CLIP of random weights in the files of a published one, and transformers' own processor beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPConfig, CLIPModel
from transformers.models.clip.tokenization_clip import CLIPTokenizer

CONTEXT = 12
SIDE = 24


def byte_symbols() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE vocabularies are made of."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return [chr(code) for code in [*kept, *(256 + i for i in range(len(others)))]]


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Save a CLIP tokenizer of 514 tokens, one a letter; the special ones last, as published."""
    symbols = byte_symbols()
    words = [*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_clip(
    folder: Path, *, width: int = 16, heads: int = 2, act: str = "quick_gelu", seed: int = 0
) -> Path:
    """Save model, tokenizer and image processor."""
    tokenizer = make_tokenizer(folder)
    tower = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "hidden_act": act,
    }
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    config = CLIPConfig(
        text_config={**tower, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT},
        vision_config={**tower, "image_size": SIDE, "patch_size": 8},
        projection_dim=8,
    )
    CLIPModel(config).eval().save_pretrained(folder)
    write_preprocessor(
        folder, {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    )
    return folder


def write_preprocessor(folder: Path, config: dict[str, Any]) -> None:
    """The file as transformers writes it: CLIP's defaults beside the given entries."""
    processor(config).save_pretrained(folder)


def processor(config: dict[str, Any]) -> Any:
    """Transformers' own processor that works through Pillow; its name differs between versions 4 and 5."""
    try:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(**config)
    except ImportError:
        from transformers.models.clip.image_processing_clip import CLIPImageProcessor

        return CLIPImageProcessor(**config)


def as_pil(images: Tensor) -> list[Image.Image]:
    pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(np.ascontiguousarray(image)) for image in pixels]


def random_images(count: int, height: int, width: int, seed: int = 1) -> Tensor:
    """Smooth random colours with some noise: resizing changes them, yet leaves most of them."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return (smooth + 0.2 * torch.rand(count, 3, height, width, generator=generator)).clamp(0, 1)
