"""A run of a second: the bundled world's text encoders and VAE with a tiny random network, for every method.

Every cell, a method with all weights or with adapters, has a recipe of its own in the world's folder.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import FluxTransformer2DModel
from PIL import Image
from torch import Tensor

from flowcredit.methods import METHODS
from flowcredit.quiet import quiet_libraries
from flowcredit.shapes import bundled_path

PROMPTS = ("a red circle", "a blue square", "a green cross")
FROM_FILE = "dpo_file"
"""DPO on pairs of images that a file names, beside DPO on the run's own."""

TREES: Mapping[str, Mapping[str, Any]] = {
    "g2rpo": {"train_steps": [0, 1], "strides": [1, 2]},
    "flow_grpo_fast": {"window_size": 2},
    "mix_grpo": {"window_size": 1, "iterations_per_position": 2, "window_order": "random"},
    "tempflow_grpo": {"seeds": 2},
    "branch_grpo": {"split_steps": [0, 1], "group_size": 4},
    "neighbor_grpo": {"anchors": 2, "train_steps": [0, 1], "group_size": 3},
    "dpo": {"draws": 2},
}
"""What a method needs beside a grid of 3 steps and groups of 2."""


def nuance(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Red minus green and a little of blue: no two images of a group are alike to it."""
    means = images.mean((2, 3))
    return means[:, 0] - means[:, 1] + 0.1 * means[:, 2]


@dataclass(frozen=True)
class Cell:
    """A method, and whether adapters or all weights are trained."""

    method: str
    lora: bool

    def __str__(self) -> str:
        return f"{self.method}{' lora' if self.lora else ''}"

    @property
    def name(self) -> str:
        return f"{self.method}{'-lora' if self.lora else ''}"


def cells(methods: str, lora: str) -> list[Cell]:
    """``methods``: names with commas, or all; ``lora``: yes, no or both. SystemExit for another name."""
    known = [*METHODS, FROM_FILE]
    chosen = known if methods == "all" else methods.split(",")
    for name in chosen:
        if name not in known:
            raise SystemExit(f"--method {name}: expected all, or some of {', '.join(known)}")
    variants = {"both": (False, True), "yes": (True,), "no": (False,)}[lora]
    return [Cell(name, adapters) for name in chosen for adapters in variants]


def build_world(folder: Path) -> None:
    """The pipeline's folder, the prompts and the pairs of images, in ``folder``."""
    source = Path(bundled_path("bundled:shapes"))
    shutil.copytree(source, folder / "pipeline", ignore=shutil.ignore_patterns("transformer"))
    with torch.random.fork_rng(), quiet_libraries():
        torch.manual_seed(0)
        network = FluxTransformer2DModel(
            patch_size=1,
            in_channels=32,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            guidance_embeds=False,
            axes_dims_rope=(4, 6, 6),
        )
        network.save_pretrained(folder / "pipeline" / "transformer")
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    lines = ["prompt,chosen,rejected"]
    for number, prompt in enumerate(PROMPTS):
        for kind, colour in (("chosen", (200, 40 * number, 30)), ("rejected", (40, 200, 90 * number))):
            Image.new("RGB", (16, 16), colour).save(folder / f"{kind}{number}.png")
        lines.append(f"{prompt},chosen{number}.png,rejected{number}.png")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_recipe(folder: Path, cell: Cell, iterations: int) -> Path:
    """The cell's recipe in the world's ``folder``; its runs lie in ``runs/run`` of the current one."""
    path = folder / f"{cell.name}.yaml"
    path.write_text(yaml.safe_dump(_recipe(folder, cell, iterations), sort_keys=False), encoding="utf-8")
    return path


def _recipe(folder: Path, cell: Cell, iterations: int) -> dict[str, Any]:
    method = "dpo" if cell.method == FROM_FILE else cell.method
    tree = {"name": method, "num_steps": 3, "group_size": 2, **TREES.get(method, {})}
    prompts = dict.fromkeys(("train", "heldout"), str(folder / "prompts.txt"))
    rewards: list[str] = ["survival_world:nuance"]
    watch: list[str] = []
    if cell.method == FROM_FILE:
        tree["pairs"], prompts["train"] = "file", str(folder / "pairs.csv")
        rewards, watch = watch, rewards
    return {
        "name": "run",
        "seed": int.from_bytes(hashlib.sha256(cell.name.encode()).digest()[:2], "big"),
        "model": {
            "path": str(folder / "pipeline"),
            "height": 16,
            "width": 16,
            "max_sequence_length": 8,
            "dtype": "float32",
        },
        "prompts": prompts,
        "algorithm": tree,
        "rewards": rewards,
        "watch": watch,
        "train": {
            "iterations": iterations,
            "prompts_per_iteration": 2,
            "learning_rate": 1e-3,
            "lr_schedule": "cosine",
            "warmup_iterations": 1,
            "mixed_precision": "no",
            "micro_batch_size": 8,
            "ema_decay": 0.9,
        },
        "weights": {"method": "lora", "rank": 2, "alpha": 4} if cell.lora else {"method": "full"},
        "checkpoint": {"every": 1 + (cell.lora and iterations > 3), "keep_last": 2},
        "evaluation": {"every": 2, "prompts": 2, "images": 2},
    }
