"""A checkpoint in open_clip's names as a transformers ``CLIPModel``, its sizes read from the tensors.

The two differ in names, in the queries, keys and values that open_clip keeps in one matrix, and in the
projections, which open_clip multiplies from the right. The activation is the exact GELU.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards.files import Source, Tensors, count_layers, gather, shape_of

HEADS = 16
"""Of both towers of ViT-H-14 (widths 1280 and 1024): the one size that the tensors do not tell."""

_VISION = "visual.transformer.resblocks."
_TEXT = "transformer.resblocks."


def clip_from_open_clip(tensors: Tensors, file: Path) -> Any:
    """Make the ``CLIPModel`` in float32.

    Raises:
        InputError: a tensor that is missing, unknown, or does not fit the others.
    """
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(**_sizes(tensors, file))
    with torch.device("meta"):
        wanted = CLIPModel(config).state_dict()
    sources = dict(_sources(config))
    state = gather(wanted, tensors, sources, file, ignored=("attn_mask",))
    return CLIPModel.from_pretrained(None, config=config, state_dict=state)


def _sizes(tensors: Tensors, file: Path) -> dict[str, Any]:
    """The configuration of both towers."""
    width, _, patch, _ = shape_of(tensors, "visual.conv1.weight", 4, file)
    places, _ = shape_of(tensors, "visual.positional_embedding", 2, file)
    words, text_width = shape_of(tensors, "token_embedding.weight", 2, file)
    context, _ = shape_of(tensors, "positional_embedding", 2, file)
    _, embedding = shape_of(tensors, "text_projection", 2, file)
    grid = math.isqrt(places - 1)
    if grid * grid != places - 1:
        raise InputError(
            f"{file}: 'visual.positional_embedding' has {places} rows; expected one more than a square number"
        )
    vision = _tower(tensors, _VISION, width, file)
    text = _tower(tensors, _TEXT, text_width, file)
    # In CLIP's vocabulary the tokens of start and end are the last two.
    ids = {"vocab_size": words, "bos_token_id": words - 2, "eos_token_id": words - 1, "pad_token_id": 0}
    return {
        "vision_config": {**vision, "patch_size": patch, "image_size": patch * grid},
        "text_config": {**text, **ids, "max_position_embeddings": context},
        "projection_dim": embedding,
    }


def _tower(tensors: Tensors, prefix: str, width: int, file: Path) -> dict[str, Any]:
    if width % HEADS:
        raise InputError(
            f"{file}: a tower of width {width}; expected a multiple of {HEADS}, the heads of ViT-H-14"
        )
    return {
        "hidden_size": width,
        "intermediate_size": shape_of(tensors, f"{prefix}0.mlp.c_fc.weight", 2, file)[0],
        "num_hidden_layers": count_layers(tensors, prefix),
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
    }


def _sources(config: Any) -> Iterator[tuple[str, Source]]:
    """For each weight of the ``CLIPModel``, its name in open_clip and the change it needs."""
    for name, source in _PLAIN.items():
        yield name, (source, torch.clone)
    for name, source in _NORMS.items():
        for kind in ("weight", "bias"):
            yield f"{name}.{kind}", (f"{source}.{kind}", torch.clone)
    yield "visual_projection.weight", ("visual.proj", torch.t)
    yield "text_projection.weight", ("text_projection", torch.t)
    towers = (("vision_model", _VISION, config.vision_config), ("text_model", _TEXT, config.text_config))
    for mine, theirs, sizes in towers:
        for layer in range(sizes.num_hidden_layers):
            yield from _layer(f"{mine}.encoder.layers.{layer}", f"{theirs}{layer}")


def _layer(mine: str, theirs: str) -> Iterator[tuple[str, Source]]:
    for kind in ("weight", "bias"):
        for name, source in _IN_LAYER.items():
            yield f"{mine}.{name}.{kind}", (f"{theirs}.{source}.{kind}", torch.clone)
        for part, letter in enumerate("qkv"):
            source = f"{theirs}.attn.in_proj_{kind}"
            yield f"{mine}.self_attn.{letter}_proj.{kind}", (source, partial(_third, part=part))


def _third(fused: Tensor, part: int) -> Tensor:
    size = fused.shape[0] // 3
    return fused[part * size : (part + 1) * size]


_PLAIN: Mapping[str, str] = {
    "logit_scale": "logit_scale",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
}
_NORMS: Mapping[str, str] = {
    "text_model.final_layer_norm": "ln_final",
    "vision_model.pre_layrnorm": "visual.ln_pre",
    "vision_model.post_layernorm": "visual.ln_post",
}
_IN_LAYER: Mapping[str, str] = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
