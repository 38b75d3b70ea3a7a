"""Whether a recipe and a model's files fit together, as far as configs and headers tell: no tensor is read.

What is refused here is refused when the model is loaded too; what cannot be told is let pass.
"""

from collections.abc import Mapping
from pathlib import Path

from flowcredit import limits
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.lora_file import check_lora
from flowcredit.memory.counts import is_known, network_shapes
from flowcredit.memory.families import FAMILIES, rows_per_evaluation, vae_scale
from flowcredit.memory.folders import Component, Pipeline
from flowcredit.pipeline_folder import Shapes, check_components, has_weights, no_weights, read_index

BUFFERS = ("pos_embed.pos_embed",)
"""In files of some networks, and no parameter of them."""
_EMBEDDED = {"QwenImagePipeline": "guidance_embeds", "StableDiffusionPipeline": "time_cond_proj_dim"}
"""Settings of networks whose guidance is an input, in families that are guided otherwise."""
NOT_LOADED = ("safety_checker", "feature_extractor", "image_encoder")
"""Parts of StableDiffusionPipeline that nothing here reads."""


def check_fit(recipe: Recipe, pipeline: Pipeline, folder: Path) -> list[str]:
    """What of the model's files is not there yet, a line each.

    Raises InputError for what is there and does not fit: sizes, targets, weights at odds with their config.
    """
    try:
        return _check_fit(recipe, pipeline, folder)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"model {recipe.model.path}: a config.json holds a value of another kind ({error}); expected the"
            " configs that diffusers writes"
        ) from None


def _check_fit(recipe: Recipe, pipeline: Pipeline, folder: Path) -> list[str]:
    family = FAMILIES[pipeline.kind]
    check_limits(recipe, pipeline)
    network = pipeline.parts[family.part]
    shapes = _shapes(network)
    if recipe.weights.method == "lora" and recipe.weights.targets is not None and shapes:
        linear = [
            n.removesuffix(".weight") for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2
        ]
        limits.check_targets(linear, recipe.weights.targets, network.kind)
    if recipe.model.lora is not None and Path(recipe.model.lora).exists():
        check_lora(Path(recipe.model.lora), family.part, network.kind, shapes)
    if pipeline.published is not None:
        return []
    check_components(folder)
    _check_scheduler(pipeline, folder)
    for part in pipeline.parts.values():
        _check_weights(part, folder / part.name)
    return [
        no_weights(folder / part.name)
        for part in pipeline.parts.values()
        if part.name not in NOT_LOADED and not has_weights(folder / part.name)
    ]


def check_limits(recipe: Recipe, pipeline: Pipeline) -> None:
    """InputError for a size, a length of text or a negative prompt that the model does not take."""
    model, kind = recipe.model, pipeline.kind
    network = pipeline.parts[FAMILIES[kind].part]
    patch = int(network.config["patch_size"]) if kind == "StableDiffusion3Pipeline" else 1
    unit = limits.size_unit(kind, vae_scale(pipeline), patch)
    squares = network.config.get("pos_embed_max_size") if kind == "StableDiffusion3Pipeline" else None
    limits.check_size(model.height, model.width, unit, None if squares is None else squares * unit)
    refused = _EMBEDDED.get(kind)
    if refused is not None and network.config.get(refused):
        raise InputError(
            f"{network.name}/config.json: a network with embedded guidance ({refused}); expected one with"
            " classifier-free guidance"
        )
    limits.check_text_length(model.max_sequence_length, limits.LONGEST_TEXT.get(kind))
    guided = rows_per_evaluation(pipeline, model) > 1
    limits.check_negative_prompt(model.negative_prompt, model.guidance_scale, guided)


def _check_scheduler(pipeline: Pipeline, folder: Path) -> None:
    entry = read_index(folder).get("scheduler")
    found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    if pipeline.kind != "StableDiffusionPipeline" and found != limits.FLOW_SCHEDULER:
        raise InputError(f"{folder / 'scheduler'}: {found}; expected {limits.FLOW_SCHEDULER}")


def _shapes(network: Component) -> Shapes:
    """Of the network's weights by name; empty where neither files nor config tell."""
    if network.shapes is not None:
        return network.shapes
    known = is_known(network.kind, network.config)
    return network_shapes(network.kind, network.config) if known else {}


def _check_weights(part: Component, where: Path) -> None:
    """InputError where the shapes in the files are not those of the config."""
    if part.shapes is None:
        return
    if is_known(part.kind, part.config):
        expected = network_shapes(part.kind, part.config)
        own = {name: shape for name, shape in part.shapes.items() if name not in BUFFERS}
        _refuse(part, where, "missing", sorted(expected.keys() - own.keys()))
        _refuse(part, where, "unknown", sorted(own.keys() - expected.keys()))
        misfits = {name: (shape, expected[name]) for name, shape in own.items() if shape != expected[name]}
    else:
        misfits = _told_by_config(part)
    shown = [f"{name} is {list(found)}, not {list(wanted)}" for name, (found, wanted) in misfits.items()]
    _refuse(part, where, "of another shape", sorted(shown))


def _refuse(part: Component, where: Path, fault: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InputError(
            f"{where}: weights that are {fault}: {', '.join(names[:3])}{more}; expected exactly those of a"
            f" {part.kind} of the sizes in its config.json"
        )


def _told_by_config(part: Component) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of a text encoder or a VAE the few weights whose shape its config gives outright."""
    assert part.shapes is not None
    found = {}
    for ending, sizes in _OUTRIGHT.get(part.kind, {}).items():
        config = part.config.get("text_config", part.config)
        wanted = tuple(_size(config, size) for size in sizes)
        for name, shape in part.shapes.items():
            known = len(shape) == len(wanted) and None not in wanted
            if known and (name == ending or name.endswith("." + ending)) and shape != wanted:
                found[name] = (shape, tuple(size for size in wanted if size is not None))
    return found


def _size(config: Mapping[str, object], key: str | int) -> int | None:
    value = key if isinstance(key, int) else config.get(key)
    if key == "block_out_channels" and isinstance(value, list | tuple):
        value = value[0]
    return value if isinstance(value, int) else None


_CLIP: Mapping[str, tuple[str | int, ...]] = {
    "embeddings.token_embedding.weight": ("vocab_size", "hidden_size"),
    "embeddings.position_embedding.weight": ("max_position_embeddings", "hidden_size"),
    "mlp.fc1.weight": ("intermediate_size", "hidden_size"),
    "text_projection.weight": ("projection_dim", "hidden_size"),
}
_OUTRIGHT: Mapping[str, Mapping[str, tuple[str | int, ...]]] = {
    "CLIPTextModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    "T5EncoderModel": {
        "shared.weight": ("vocab_size", "d_model"),
        "DenseReluDense.wo.weight": ("d_model", "d_ff"),
        "final_layer_norm.weight": ("d_model",),
    },
    "Qwen2_5_VLForConditionalGeneration": {"embed_tokens.weight": ("vocab_size", "hidden_size")},
    "AutoencoderKL": {"encoder.conv_in.weight": ("block_out_channels", "in_channels", 3, 3)},
}
