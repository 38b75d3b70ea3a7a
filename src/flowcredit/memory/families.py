"""What the dry run must know of each pipeline class: its network, the shapes of its inputs, its adapters.

The same facts stand in the adapters of `models`, which import torch; a test holds the two together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flowcredit.config import ModelSettings
from flowcredit.memory.counts import NETWORKS, Network, is_known
from flowcredit.memory.folders import Pipeline

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT = (
    *(f"attn.{name}" for name in ATTENTION),
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
MLP = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")


@dataclass(frozen=True)
class Family:
    """``part`` is the trained network; ``targets`` its layers with adapters where a recipe names none."""

    part: str
    targets: tuple[str, ...]
    classifier_free: bool


FAMILIES: Mapping[str, Family] = {
    "FluxPipeline": Family("transformer", ATTENTION, classifier_free=False),
    "StableDiffusion3Pipeline": Family("transformer", JOINT, classifier_free=True),
    "QwenImagePipeline": Family("transformer", (*JOINT, *MLP), classifier_free=True),
    "StableDiffusionPipeline": Family("unet", ATTENTION, classifier_free=True),
}


@dataclass(frozen=True)
class Inputs:
    """Shapes of one row: the network's state, text and pooled text; the VAE's latent image."""

    state: tuple[int, ...]
    text: tuple[int, int]
    pooled: int
    latent: tuple[int, int, int]

    @property
    def latent_count(self) -> int:
        channels, height, width = self.latent
        return channels * height * width


def network_of(pipeline: Pipeline) -> Network | None:
    """The dry run's network, if there is one for this class."""
    part = pipeline.parts[FAMILIES[pipeline.kind].part]
    return NETWORKS[part.kind] if is_known(part.kind, part.config) else None


def rows_per_evaluation(pipeline: Pipeline, settings: ModelSettings) -> int:
    """2 where classifier-free guidance evaluates each state with and without its text, else 1."""
    return 2 if FAMILIES[pipeline.kind].classifier_free and settings.guidance_scale > 1 else 1


def vae_scale(pipeline: Pipeline) -> int:
    """Side of the square of pixels behind one latent."""
    vae = pipeline.parts["vae"].config
    of_videos = "temperal_downsample" in vae
    return 2 ** (len(vae["temperal_downsample"]) if of_videos else len(vae["block_out_channels"]) - 1)


def inputs_of(pipeline: Pipeline, settings: ModelSettings) -> Inputs:
    """Shapes at a recipe's size; KeyError where a config lacks what its class always has."""
    config = pipeline.parts[FAMILIES[pipeline.kind].part].config
    scale = vae_scale(pipeline)
    height, width = settings.height // scale, settings.width // scale
    channels = config["in_channels"]
    if pipeline.kind in ("FluxPipeline", "QwenImagePipeline"):
        tokens = (height // 2) * (width // 2)
        text = (settings.max_sequence_length, config["joint_attention_dim"])
        pooled = config.get("pooled_projection_dim", 0)
        return Inputs((tokens, channels), text, pooled, (channels // 4, height, width))
    words = pipeline.parts["text_encoder"].config["max_position_embeddings"]
    state = (channels, height, width)
    if pipeline.kind == "StableDiffusion3Pipeline":
        text = (words + settings.max_sequence_length, config["joint_attention_dim"])
        return Inputs(state, text, config["pooled_projection_dim"], state)
    return Inputs(state, (words, config["cross_attention_dim"]), 0, state)
