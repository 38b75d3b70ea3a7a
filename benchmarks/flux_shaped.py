"""Models of FLUX.1's shape with random weights, on the device that they are made for; recipes that name them.

Axes: P prompts, L text tokens, E width of the text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from flowcredit import algorithms
from flowcredit.config import Recipe
from flowcredit.interfaces import Conditioning
from flowcredit.memory.estimate import Estimate, estimate
from flowcredit.models.flux import FluxFlow
from flowcredit.models.pipelines import PipelineSettings
from flowcredit.plan import Plan
from flowcredit.weights import prepare_weights

DOUBLE_BLOCKS = 19
"""Of FLUX.1, which has twice as many single ones."""
ROOM = 0.85
"""Share of the free memory that the plan may fill when blocks are chosen."""


@dataclass(frozen=True)
class Shape:
    """Fields of the configs, and sizes of the run: pixels, text tokens, states in a batch, prompts."""

    network: Mapping[str, Any]
    vae: Mapping[str, Any]
    pixels: int
    words: int
    batch_size: int
    group_size: int
    num_steps: int
    rank: int


VAE = {
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "out_channels": 3,
}
FLUX = Shape(
    {
        "in_channels": 64,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": [16, 56, 56],
    },
    {**VAE, "block_out_channels": [128, 256, 512, 512]},
    pixels=720,
    words=512,
    batch_size=8,
    group_size=6,
    num_steps=8,
    rank=64,
)
TINY = Shape(
    {
        **FLUX.network,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 14, 14],
    },
    {**VAE, "block_out_channels": [32, 32], "layers_per_block": 1, "norm_num_groups": 8},
    pixels=32,
    words=16,
    batch_size=4,
    group_size=2,
    num_steps=4,
    rank=4,
)


class RandomTexts:
    """A FluxFlow whose texts are random numbers, the same for the same prompt: no text encoder is needed."""

    def __init__(self, flow: FluxFlow, shape: Shape) -> None:
        self.flow, self.shape = flow, shape
        self.network, self.device = flow.network, flow.device
        self.image_tokens = flow.image_tokens
        self.velocity, self.decode = flow.velocity, flow.decode
        self.initial_noise, self.time_grid = flow.initial_noise, flow.time_grid

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        words, config = self.shape.words, self.shape.network
        rows = []
        for prompt in prompts:
            generator = torch.Generator().manual_seed(sum(prompt.encode()))
            rows.append(
                (
                    torch.randn(words, config["joint_attention_dim"], generator=generator),
                    torch.randn(config["pooled_projection_dim"], generator=generator),
                )
            )
        dtype = self.flow.settings.dtype
        texts, pooled = (torch.stack(part).to(self.device, dtype) for part in zip(*rows, strict=True))
        return {"prompt_embeds": texts, "pooled": pooled}


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that costs nothing."""
    return images.mean((1, 2, 3))


def recipe_for(shape: Shape, folder: Path, blocks: int, method: str, device: str) -> Recipe:
    """The recipe that is planned and run; ``folder`` is given the configs that the plan reads."""
    network = {**shape.network, "num_layers": blocks, "num_single_layers": 2 * blocks}
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for name, content in (("transformer", network), ("vae", shape.vae)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    lora = {"method": "lora", "rank": shape.rank, "alpha": 2 * shape.rank}
    return Recipe.model_validate(
        {
            "name": "gpu",
            "model": {
                "path": str(folder),
                "height": shape.pixels,
                "width": shape.pixels,
                "max_sequence_length": shape.words,
                "dtype": "bfloat16",
                "decode_batch_size": shape.batch_size,
                "device": device,
            },
            "prompts": {"train": "none", "heldout": "none"},
            "algorithm": {
                "name": "g2rpo",
                "num_steps": shape.num_steps,
                "group_size": shape.group_size,
                "strides": [1, 2],
            },
            "rewards": [{"name": "gpu:brightness"}],
            "rollout": {"batch_size": shape.batch_size},
            "scoring": {"batch_size": shape.batch_size},
            "train": {
                "prompts_per_iteration": 2,
                "gradient_checkpointing": True,
                "mixed_precision": "bf16",
                "micro_batch_size": 1,
            },
            "weights": lora if method == "lora" else {"method": "full"},
        }
    )


def plan_of(recipe: Recipe) -> tuple[Plan, Estimate]:
    plan = algorithms.build(recipe.algorithm).plan
    found = estimate(recipe)
    assert found is not None
    return plan, found


def blocks_that_fit(shape: Shape, folder: Path, method: str, device: torch.device) -> int:
    """Double blocks, at most FLUX.1's own. One where nothing fits: then torch itself says what is missing."""
    if device.type == "cpu":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    for blocks in range(DOUBLE_BLOCKS, 1, -1):
        _, found = plan_of(recipe_for(shape, folder, blocks, method, device.type))
        if found.peak is not None and found.peak < ROOM * free:
            return blocks
    return 1


def build(shape: Shape, recipe: Recipe, blocks: int, device: torch.device) -> RandomTexts:
    """The model as a run has it: frozen parts in bfloat16, all weights in float32 where all are trained."""
    lora = recipe.weights.method == "lora"
    network = {**shape.network, "num_layers": blocks, "num_single_layers": 2 * blocks}
    levels = len(shape.vae["block_out_channels"])
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16 if lora else torch.float32)
        with device:
            transformer = FluxTransformer2DModel(**network)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            vae = AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * levels,
                up_block_types=("UpDecoderBlock2D",) * levels,
                **shape.vae,
            )
    finally:
        torch.set_default_dtype(before)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.requires_grad_(False).eval(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer.requires_grad_(False).eval(),
    )
    settings = PipelineSettings(
        height=shape.pixels,
        width=shape.pixels,
        guidance_scale=3.5,
        negative_prompt="",
        max_sequence_length=shape.words,
        dtype=torch.bfloat16,
        device=device,
        decode_batch_size=recipe.model.decode_batch_size,
        network_dtype=torch.bfloat16 if lora else torch.float32,
        autocast=torch.bfloat16,
        text_cache=None,
        lora=None,
    )
    flow = FluxFlow(pipeline, Path(recipe.model.path), settings)
    rank, alpha = recipe.weights.rank, recipe.weights.alpha
    prepare_weights(flow.network, recipe.weights.method, rank=rank, alpha=alpha, targets=flow.lora_targets)
    flow.set_gradient_checkpointing(True)
    return RandomTexts(flow, shape)
