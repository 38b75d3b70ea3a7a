"""Parameters of models by their config.json alone, for those whose files are not there."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from flowcredit.memory.convolutions import decoder, encoder
from flowcredit.memory.qwen import qwen_image
from flowcredit.memory.tape import FLOAT, Meter, Tape, Value
from flowcredit.memory.transformers import flux, sd3
from flowcredit.memory.unet import is_plain_unet, unet

Config = Mapping[str, Any]
Network = Callable[[Tape, Config, Value, Value, Value], Value]

NETWORKS: Mapping[str, Network] = {
    "FluxTransformer2DModel": flux,
    "SD3Transformer2DModel": sd3,
    "QwenImageTransformer2DModel": qwen_image,
    "UNet2DConditionModel": unet,
}


def is_known(kind: str, config: Config) -> bool:
    """Whether the dry run can run a network of this class and config."""
    return kind in NETWORKS and (kind != "UNet2DConditionModel" or is_plain_unet(config))


def network_shapes(kind: str, config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a network's weights, buffers left out; KeyError for a class that is not known."""
    return network_tape(kind, config).parameters


def network_tape(kind: str, config: Config) -> Tape:
    """A tape over which the network has run on the smallest input there is."""
    tape = Tape(Meter(), FLOAT)
    channels = config["in_channels"]
    side = 2 ** len(config.get("block_out_channels", ())) * int(config.get("patch_size", 1))
    is_image = kind in ("SD3Transformer2DModel", "UNet2DConditionModel")
    x = tape.new((1, channels, side, side) if is_image else (1, 1, channels), FLOAT)
    text = tape.new((1, 1, config.get("joint_attention_dim") or config["cross_attention_dim"]), FLOAT)
    pooled = tape.new((1, config.get("pooled_projection_dim", 1)), FLOAT)
    NETWORKS[kind](tape, config, x, text, pooled)
    return tape


def count_parameters(kind: str, config: Config) -> int | None:
    """How many there are, buffers in the files included; None for a class that is not known here."""
    if is_known(kind, config):
        buffers = 0
        if kind == "SD3Transformer2DModel":
            width = config["num_attention_heads"] * config["attention_head_dim"]
            buffers = config["pos_embed_max_size"] ** 2 * width
        return sum(prod(shape) for shape in network_shapes(kind, config).values()) + buffers
    known = {
        "AutoencoderKL": _autoencoder,
        "T5EncoderModel": _t5,
        "CLIPTextModel": _clip_text,
        "CLIPTextModelWithProjection": _clip_text_projected,
        "CLIPModel": _clip,
        "Qwen2_5_VLForConditionalGeneration": _qwen,
    }
    return known[kind](config) if kind in known else None


def _autoencoder(config: Config) -> int:
    tape = Tape(Meter(), FLOAT)
    size = 2 ** len(config["block_out_channels"])
    decoder(tape, config, tape.new((1, config["latent_channels"], 1, 1), FLOAT))
    encoder(tape, config, tape.new((1, 3, size, size), FLOAT))
    return sum(prod(shape) for shape in tape.parameters.values())


def _t5(config: Config) -> int:
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    matrices = 3 if str(config["feed_forward_proj"]).startswith("gated") else 2
    layer = 4 * width * inner + matrices * width * config["d_ff"] + 2 * width
    bias = config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    return config["vocab_size"] * width + config["num_layers"] * layer + bias + width


def _clip_layers(config: Config) -> int:
    width, inner = config["hidden_size"], config["intermediate_size"]
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    return config["num_hidden_layers"] * layer


def _clip_text(config: Config) -> int:
    width = config["hidden_size"]
    tables = (config["vocab_size"] + config["max_position_embeddings"]) * width
    return tables + _clip_layers(config) + 2 * width


def _clip_text_projected(config: Config) -> int:
    return _clip_text(config) + config["hidden_size"] * config["projection_dim"]


def _clip(config: Config) -> int:
    text, vision, projected = config["text_config"], config["vision_config"], config["projection_dim"]
    width = vision["hidden_size"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    seeing = width + 3 * vision["patch_size"] ** 2 * width + (patches + 1) * width + 4 * width
    projections = (text["hidden_size"] + width) * projected
    return _clip_text(text) + seeing + _clip_layers(vision) + projections + 1


def clip_flops(config: Config) -> int:
    """Additions and multiplications of a CLIPModel for one image and its text, attention included."""
    text, vision = config["text_config"], config["vision_config"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    width = vision["hidden_size"]
    embedding = 2 * patches * 3 * vision["patch_size"] ** 2 * width
    projections = 2 * (text["hidden_size"] + width) * config["projection_dim"]
    return (
        embedding
        + _clip_pass(vision, patches + 1)
        + _clip_pass(text, text["max_position_embeddings"])
        + projections
    )


def _clip_pass(config: Config, tokens: int) -> int:
    width, inner = config["hidden_size"], config["intermediate_size"]
    layer = 2 * tokens * (4 * width * width + 2 * width * inner) + 4 * tokens * tokens * width
    return config["num_hidden_layers"] * layer


def _qwen(config: Config) -> int:
    """Qwen2.5-VL: the language model with its scores of words, and the vision tower."""
    text, vision = config["text_config"], config["vision_config"]
    width, inner = text["hidden_size"], text["intermediate_size"]
    small = width // text["num_attention_heads"] * text["num_key_value_heads"]
    attention = 2 * width * width + 2 * width * small + width + 2 * small
    layer = attention + 3 * width * inner + 2 * width
    words = text["vocab_size"] * width * (1 if config.get("tie_word_embeddings", False) else 2)
    seeing, middle, merged = vision["hidden_size"], vision["intermediate_size"], 4 * vision["hidden_size"]
    sight = 4 * seeing * seeing + 4 * seeing + 3 * seeing * middle + 2 * middle + seeing + 2 * seeing
    patch = 3 * 2 * vision["patch_size"] ** 2 * seeing
    merger = (
        seeing + merged * merged + merged + merged * vision["out_hidden_size"] + vision["out_hidden_size"]
    )
    return words + text["num_hidden_layers"] * layer + width + vision["depth"] * sight + patch + merger
