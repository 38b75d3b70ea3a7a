"""ImageReward v1.0: how well people like an image for a prompt, by a BLIP that reads both.

Xu et al., "ImageReward: Learning and Evaluating Human Preferences for Text-to-Image Generation", arXiv
2304.05977. The image goes through a ViT-L/16, the prompt through BERT-base with cross-attention to every
patch; the state of the first token goes through five linear layers without activations. The score is
normalised with the mean and standard deviation that stand in the authors' code: about -2 to 2.

Axes: B images, H and W image height and width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.rewards.clip import load_tokenizer
from flowcredit.rewards.files import (
    Source,
    Tensors,
    count_layers,
    gather,
    head_sources,
    linear_head,
    read_tensors,
    shape_of,
)
from flowcredit.rewards.preprocessing import CLIP_MEAN, CLIP_STD, Preprocessing

MEAN = 0.16717362830052426
STD = 1.0333394966054072
CONTEXT = 35
"""Tokens to which every prompt is padded, and at which longer ones are cut."""
VISION_HEADS = 16
TEXT_HEADS = 12
"""Of ViT-L (width 1024) and BERT-base (width 768): what the tensors do not tell."""


@dataclass(frozen=True)
class ImageReward:
    """The reward: normalised, without bounds."""

    vision: Any
    text: Any
    head: nn.Module
    tokenizer: Any
    preprocessing: Preprocessing
    device: torch.device

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32."""
        pixels = self.preprocessing(images).to(self.device)
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt"
        ).to(self.device)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            patches = self.vision(pixel_values=pixels).last_hidden_state
            states = self.text(
                input_ids=tokens["input_ids"],
                attention_mask=tokens["attention_mask"],
                encoder_hidden_states=patches,
                encoder_attention_mask=torch.ones(patches.shape[:2], dtype=torch.long, device=self.device),
            ).last_hidden_state
            scores: Tensor = self.head(states[:, 0]).squeeze(-1)
        return (scores - MEAN) / STD

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many of the prompts are longer than `CONTEXT`, so that their end is not scored."""
        return sum(len(ids) > CONTEXT for ids in self.tokenizer(list(prompts))["input_ids"])

    def modules(self) -> tuple[nn.Module, ...]:
        """The networks, for `interfaces.HoldsModules`."""
        return (self.vision, self.text, self.head)


def load_image_reward(path: str, tokenizer: str, device: torch.device) -> ImageReward:
    """Load ImageReward from local files.

    Args:
        path: ``ImageReward.pt`` as published under ``THUDM/ImageReward`` (BLIP's names; read without
            unpickling).
        tokenizer: the folder of ``google-bert/bert-base-uncased``'s tokenizer in transformers' layout. As in
            the authors' code, ``[DEC]`` and ``[ENC]`` are added to it as special tokens.

    Raises:
        InputError: a file or folder that is missing, not complete, or of another model.
    """
    from transformers import BlipTextModel, BlipVisionModel

    file = Path(path)
    tensors = read_tensors(file, "the checkpoint of ImageReward v1.0")
    head = linear_head({name: t for name, t in tensors.items() if name.startswith(_HEAD)}, _HEAD, file)
    image_config, text_config = _image_config(tensors, file), _text_config(tensors, file)
    with torch.device("meta"):
        image_wanted = BlipVisionModel(image_config).state_dict()
        text_wanted = BlipTextModel(text_config, add_pooling_layer=False).state_dict()
    image_sources = dict(_image_sources(image_config.num_hidden_layers))
    text_sources = {name: (f"{_TEXT}{name}", torch.clone) for name in text_wanted}
    wanted = {**_below("image.", image_wanted), **_below("text.", text_wanted)}
    sources = {**_below("image.", image_sources), **_below("text.", text_sources)}
    used_by_head = [name for name, _ in head_sources(_HEAD).values()]
    state = gather(wanted, tensors, sources, file, ignored=(*_UNUSED, *used_by_head))
    image_state = {name: state[f"image.{name}"] for name in image_wanted}
    text_state = {name: state[f"text.{name}"] for name in text_wanted}
    vision = BlipVisionModel.from_pretrained(None, config=image_config, state_dict=image_state)
    text = BlipTextModel.from_pretrained(
        None, config=text_config, state_dict=text_state, add_pooling_layer=False
    )
    return ImageReward(
        vision=vision.float().to(device).eval().requires_grad_(False),
        text=text.float().to(device).eval().requires_grad_(False),
        head=head.to(device),
        tokenizer=_tokenizer(Path(tokenizer), text_config.vocab_size),
        preprocessing=_preprocessing(image_config.image_size),
        device=device,
    )


def _tokenizer(folder: Path, vocabulary: int) -> Any:
    tokenizer = load_tokenizer(folder, vocabulary)
    tokenizer.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)
    if len(tokenizer) != vocabulary:
        raise InputError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens with [DEC] and [ENC], but the model knows "
            f"{vocabulary}; expected that of bert-base-uncased"
        )
    return tokenizer


def _preprocessing(side: int) -> Preprocessing:
    """The authors' transforms on Pillow images: shorter side to ``side``, then the square in the centre."""
    bicubic = int(Image.Resampling.BICUBIC)
    return Preprocessing(side, None, bicubic, (side, side), 1 / 255, CLIP_MEAN, CLIP_STD, rounded_centre=True)


def _image_config(tensors: Tensors, file: Path) -> Any:
    from transformers import BlipVisionConfig

    width, _, patch, _ = shape_of(tensors, f"{_IMAGE}patch_embed.proj.weight", 4, file)
    _, places, _ = shape_of(tensors, f"{_IMAGE}pos_embed", 3, file)
    grid = math.isqrt(places - 1)
    if grid * grid != places - 1:
        raise InputError(
            f"{file}: '{_IMAGE}pos_embed' has {places} places; expected one more than a square number"
        )
    return BlipVisionConfig(
        hidden_size=_divisible(width, VISION_HEADS, "ViT-L", file),
        intermediate_size=shape_of(tensors, f"{_IMAGE}blocks.0.mlp.fc1.weight", 2, file)[0],
        num_hidden_layers=count_layers(tensors, f"{_IMAGE}blocks."),
        num_attention_heads=VISION_HEADS,
        image_size=patch * grid,
        patch_size=patch,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )


def _text_config(tensors: Tensors, file: Path) -> Any:
    from transformers import BlipTextConfig

    words, width = shape_of(tensors, f"{_TEXT}embeddings.word_embeddings.weight", 2, file)
    layer = f"{_TEXT}encoder.layer.0."
    return BlipTextConfig(
        vocab_size=words,
        hidden_size=_divisible(width, TEXT_HEADS, "BERT-base", file),
        encoder_hidden_size=shape_of(tensors, f"{layer}crossattention.self.key.weight", 2, file)[1],
        intermediate_size=shape_of(tensors, f"{layer}intermediate.dense.weight", 2, file)[0],
        num_hidden_layers=count_layers(tensors, f"{_TEXT}encoder.layer."),
        num_attention_heads=TEXT_HEADS,
        max_position_embeddings=shape_of(tensors, f"{_TEXT}embeddings.position_embeddings.weight", 2, file)[
            0
        ],
        hidden_act="gelu",
        layer_norm_eps=1e-12,
        bos_token_id=words - 2,
        is_decoder=True,  # this is what makes transformers build the cross-attention
    )


def _divisible(width: int, heads: int, model: str, file: Path) -> int:
    if width % heads:
        raise InputError(f"{file}: a width of {width}; expected a multiple of {heads}, the heads of {model}")
    return width


def _image_sources(layers: int) -> Iterator[tuple[str, Source]]:
    """For each weight of the ``BlipVisionModel``, its name in BLIP."""
    yield "embeddings.class_embedding", (f"{_IMAGE}cls_token", torch.clone)
    yield "embeddings.position_embedding", (f"{_IMAGE}pos_embed", torch.clone)
    for kind in ("weight", "bias"):
        yield f"embeddings.patch_embedding.{kind}", (f"{_IMAGE}patch_embed.proj.{kind}", torch.clone)
        yield f"post_layernorm.{kind}", (f"{_IMAGE}norm.{kind}", torch.clone)
        for layer in range(layers):
            for mine, theirs in _IN_BLOCK.items():
                source = f"{_IMAGE}blocks.{layer}.{theirs}.{kind}"
                yield f"encoder.layers.{layer}.{mine}.{kind}", (source, torch.clone)


def _below(prefix: str, names: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in names.items()}


_IMAGE = "blip.visual_encoder."
_TEXT = "blip.text_encoder."
_HEAD = "mlp.layers."
_UNUSED = (
    *(f"blip.{name}.{kind}" for name in ("vision_proj", "text_proj") for kind in ("weight", "bias")),
    "blip.text_encoder.embeddings.position_ids",
)
"""In the checkpoint, but not in the score: BLIP's contrastive projections, the numbers of the positions."""
_IN_BLOCK: Mapping[str, str] = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
