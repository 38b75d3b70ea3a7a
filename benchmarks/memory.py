"""What `flowcredit plan` says of memory, beside what a run on the CPU takes, on tiny pipelines.

    python benchmarks/memory.py [--case NAME]

Each case builds a random pipeline in the genuine layout, plans its recipe, then loads it as a run does and
sums the memory of its tensors. For what a phase takes beside, torch's profiler tells every allocation and
release; rollout, scoring and update are those of training. Prints a Markdown table. The sums are of bytes,
not of times: they are the same on every call.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from allocations import peak_of

import tiny_diffusion
import tiny_flux
import tiny_qwen_image
import tiny_sd3
from flowcredit.advantages import credit_steps
from flowcredit.assembly import Setup, assemble
from flowcredit.config import Recipe
from flowcredit.leaf_scoring import score_leaves
from flowcredit.memory.estimate import estimate
from flowcredit.objectives import policy_sets
from flowcredit.quiet import quiet_libraries
from flowcredit.rollout import KeyedNoise, Rollout, rollout
from flowcredit.update import update_policy
from flowcredit.weights import EMA, trainable_parameters

Measure = TypeVar("Measure")

SIZES = {"num_attention_heads": 4, "attention_head_dim": 32}
NETWORKS: Mapping[str, Callable[[], Any]] = {
    "flux": lambda: FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 14, 14),
        **SIZES,
    ),
    "sd3": lambda: SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        joint_attention_dim=32,
        caption_projection_dim=128,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
        **SIZES,
    ),
    "qwen": lambda: QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        joint_attention_dim=16,
        axes_dims_rope=(4, 14, 14),
        **SIZES,
    ),
    "sd1": lambda: UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=2,
        attention_head_dim=4,
        norm_num_groups=8,
        cross_attention_dim=16,
    ),
}
"""Wider than the tests' own, so that tensors weigh more than what lies around them."""
BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "flux": tiny_flux.build_tiny_flux,
    "sd3": tiny_sd3.build_tiny_sd3,
    "qwen": tiny_qwen_image.build_tiny_qwen_image,
    "sd1": tiny_diffusion.build_tiny_diffusion,
}

PARTS = {"sd1": "unet"}
"""The trained network's folder, where it is not "transformer"."""

LORA = {"method": "lora", "rank": 8, "alpha": 16}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "flux, full, float32": ("flux", {"train": {"mixed_precision": "no"}}),
    "flux, full, bf16, checkpointing, average, KL": (
        "flux",
        {"train": {"gradient_checkpointing": True, "ema_decay": 0.9, "kl_weight": 0.01}},
    ),
    "flux, LoRA, bf16": ("flux", {"weights": LORA, "model": {"dtype": "bfloat16"}}),
    "sd3, LoRA, bf16, checkpointing, guidance": (
        "sd3",
        {"weights": LORA, "model": {"dtype": "bfloat16"}, "train": {"gradient_checkpointing": True}},
    ),
    "sd3, full, bf16, guidance": ("sd3", {"train": {"micro_batch_size": 1}}),
    "qwen, LoRA, float32, guidance": ("qwen", {"weights": LORA, "train": {"mixed_precision": "no"}}),
    "sd1, LoRA, float32, checkpointing, guidance": (
        "sd1",
        {"weights": LORA, "train": {"mixed_precision": "no", "gradient_checkpointing": True}},
    ),
}


@dataclass(frozen=True)
class Compared:
    """Bytes by the name of a part or phase: as planned and as measured. A phase's own are those that it takes
    beside what stands between phases."""

    planned: dict[str, int]
    measured: dict[str, int]


def make_recipe(folder: Path, family: str, changes: Mapping[str, Any]) -> Recipe:
    """A pipeline of a family in ``folder`` and a recipe for it."""
    BUILDERS[family](folder)
    torch.manual_seed(0)
    NETWORKS[family]().save_pretrained(folder / PARTS.get(family, "transformer"))
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle\na blue square\na red square\n", encoding="utf-8")
    settings: dict[str, Any] = {
        "name": "memory",
        "model": {
            "path": str(folder),
            "height": 96,
            "width": 96,
            "guidance_scale": 4.0,
            "max_sequence_length": 64,
            "dtype": "float32",
            "decode_batch_size": 3,
            "device": "cpu",
        },
        "prompts": {"train": str(prompts), "heldout": str(prompts)},
        "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 4, "strides": [1], "train_steps": [0]},
        "rewards": [{"name": "clip", "options": {"path": "bundled:shapes-clip"}}],
        "rollout": {"batch_size": 6},
        "scoring": {"batch_size": 6},
        "train": {"prompts_per_iteration": 3, "micro_batch_size": 2},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values}
    return Recipe.model_validate(settings)


def compare(recipe: Recipe) -> Compared:
    """Plan a recipe, then run one iteration of it and measure."""
    planned = estimate(recipe)
    assert planned is not None
    setup = assemble(recipe)
    measured = Iteration(setup).iterate()
    sizes = {part.name: part.size for part in planned.parts if part.size is not None}
    phases = dict(planned.phases)
    # The reference's velocities are computed within the update.
    phases["training"] = max(phases["training"], phases.get("reference", 0))
    standing = sum(sizes[name] for name in measured if name in sizes)
    for name, size in phases.items():
        sizes |= {f"phase: {name}": size, f"{name}'s own": size - standing}
    return Compared(sizes, {name: size for name, size in measured.items() if name in sizes})


class Iteration:
    """An iteration of training that is not the first, and what its parts take."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.parameters = trainable_parameters(setup.model.network)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5)
        decay = setup.recipe.train.ema_decay
        self.ema = EMA(setup.model.network, decay) if decay > 0 else None
        # The optimizer makes its moments in its first step: that of an earlier iteration.
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def iterate(self) -> dict[str, int]:
        """Bytes by the plan's names of parts and phases, and each phase's own."""
        standing = self._standing()
        resident = sum(standing.values())
        rolled, scored, trained, texts, kept = self.phases(peak_of)
        own = {"rollout": texts + rolled, "scoring": kept + scored, "training": kept + trained}
        phases = {f"phase: {name}": resident + size for name, size in own.items()}
        return standing | {f"{name}'s own": size for name, size in own.items()} | phases

    def phases(
        self, measure: Callable[[Callable[[], None]], Measure]
    ) -> tuple[Measure, Measure, Measure, int, int]:
        """What ``measure`` gives for rollout, scoring and update; the bytes of the texts, and of what a
        rollout leaves with them."""
        setup, recipe = self.setup, self.setup.recipe
        prompts = setup.train_prompts.take(range(recipe.train.prompts_per_iteration))
        cond = setup.model.encode(prompts.prompts)
        noise = KeyedNoise(setup.model, 0, 0, range(len(prompts)))
        plan = setup.algorithm.plan
        done: list[Rollout] = []
        scores: list[dict[int, Tensor]] = []

        def roll_out() -> None:
            done.append(
                rollout(setup.model, plan, cond, setup.grid, setup.kernel, noise, recipe.rollout.batch_size)
            )

        def score() -> None:
            scores.append(
                score_leaves(
                    setup.model,
                    done[0].leaves,
                    prompts.prompts,
                    prompts.columns,
                    setup.rewards,
                    batch_size=recipe.scoring.batch_size,
                )[0]
            )

        rolled = measure(roll_out)
        kept = _bytes([*_tensors(done[0]), *cond.values()])
        scored = measure(score)
        advantages = credit_steps(plan, scores[0], setup.reward_weights)

        def update() -> None:
            update_policy(
                setup.model,
                cond,
                policy_sets(done[0].transitions, advantages, setup.kernel, recipe.train),
                self.optimizer,
                recipe.train,
                lambda: None if self.ema is None else self.ema.update(setup.model.network),
                setup.reference,
            )

        return rolled, scored, measure(update), _bytes(cond.values()), kept

    def _standing(self) -> dict[str, int]:
        """Bytes of what is there between phases, by the plan's names of parts."""
        model = self.setup.model
        components = {k: v for k, v in model.pipeline.components.items() if isinstance(v, nn.Module)}
        adapters = [value for name, value in self.parameters.items() if ".lora_" in name]
        weights = _bytes([*model.network.parameters(), *model.network.buffers()]) - _bytes(adapters)
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v.ndim > 0]
        clip = next(iter(self.setup.rewards.values()))
        found = {
            f"{model.part} weights": weights,
            "text encoders": sum(_of(m) for k, m in components.items() if k.startswith("text_encoder")),
            "VAE": _of(components["vae"]),
            "reward clip": sum(_of(v) for v in vars(clip).values() if isinstance(v, nn.Module)),
            "Adam's moments": _bytes(moments),
        }
        if adapters:
            found["adapter weights"] = _bytes(adapters)
        if self.ema is not None:
            found["moving average"] = _bytes(self.ema.state_dict().values())
        if self.setup.reference is not None and not adapters:
            found["reference copy"] = _bytes(self.parameters.values())
        return found


def _of(module: nn.Module) -> int:
    return _bytes([*module.parameters(), *module.buffers()])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _tensors(done: Rollout) -> list[Tensor]:
    steps = [t for step in done.transitions for t in (step.x, step.v, step.x_next, step.log_prob)]
    return [*steps, *done.leaves.values()]


def write_table(cases: Iterable[str], write: Callable[[str], None]) -> None:
    """The cases as a Markdown table, line by line."""
    write("| case | part or phase | planned, KiB | measured, KiB | planned / measured |")
    write("|---|---|---|---|---|")
    for name in cases:
        family, changes = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            found = compare(make_recipe(Path(folder), family, changes))
        for part, size in found.measured.items():
            planned = found.planned[part]
            write(f"| {name} | {part} | {planned >> 10:,} | {size >> 10:,} | {planned / size:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, help="one case alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with quiet_libraries():
        write_table(CASES if args.case is None else (args.case,), print)


if __name__ == "__main__":
    main()
