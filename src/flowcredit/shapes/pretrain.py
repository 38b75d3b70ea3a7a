"""Train the bundled world's models from nothing: ``python -m flowcredit.shapes.pretrain``.

In order: a VAE, the flow transformer with both of its text encoders, a CLIP. Every stage saves its state
every few hundred steps and goes on from there when the command is given again; a finished stage is skipped.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowcredit.shapes import networks
from flowcredit.shapes.canvas import render
from flowcredit.shapes.drawing import CLEAN, Sloppiness, draw
from flowcredit.shapes.scenes import TASKS, Scene, all_scenes

TASK_SHARES = {
    "single_object": 0.12,
    "two_objects": 0.12,
    "counting": 0.2,
    "colors": 0.12,
    "position": 0.24,
    "attribute_binding": 0.2,
}


Cycles = Sequence[tuple[int, int]]
"""Pairs of a step and the step at which the cosine of the learning rate ends until then."""

FLOW_CYCLES = ((5000, 5000), (7500, 9000), (9500, 10000), (13000, 15500))
SHIFTED_FROM = 6500
"""Step of the flow's training from which sigma is drawn with shift 3."""
GUIDED_FROM = 7500
"""Step from which the target is guided."""
GUIDANCE = 0.5
"""Share w of the guided target; a model that has learned it draws as with guidance scale 1 / (1 - w)."""
NULL_SHARE = 0.1
"""Share of empty captions from then on."""
DULL_FROM = 9500
"""Step from which pictures follow their captions better and in reading order, but are dull and cluttered."""
DULL = Sloppiness(
    colour=0.04, shape=0.04, count=0.12, extra=0.03, relation=0.05, clutter=0.35, ordered=0.95, dull=0.6
)


def random_scenes(rng: np.random.Generator, count: int) -> list[Scene]:
    """Scenes with the tasks in the shares above."""
    scenes = all_scenes()
    tasks = rng.choice(len(TASKS), count, p=[TASK_SHARES[task] for task in TASKS])
    return [scenes[TASKS[t]][rng.integers(len(scenes[TASKS[t]]))] for t in tasks]


def pictures(seed: int, count: int, sloppy: Sloppiness) -> tuple[Tensor, list[Scene]]:
    """[count, 3, H, W] float32 images in [0, 1] with the scenes that caption them."""
    rng = np.random.default_rng(seed)
    scenes = random_scenes(rng, count)
    chunks = [render(*draw(rng, scenes[i : i + 4096], sloppy)) for i in range(0, count, 4096)]
    return torch.from_numpy(np.concatenate(chunks)), scenes


def batch_rows(count: int, size: int, seed: int, step: int) -> Tensor:
    """Rows of the step's batch: the same at every run, whatever was run before."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(count, (size,), generator=generator)


def rate_share(step: int, cycles: Cycles, warmup: int = 200) -> float:
    """Learning rate of a step as a share of its peak: a cosine to the end of the cycle that it is in."""
    if step < warmup:
        return (step + 1) / warmup
    end = next(end for until, end in cycles if step < until)
    progress = (step - warmup) / max(1, end - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + float(np.cos(np.pi * progress)))


class Averages:
    """Exponential moving averages of a module's parameters."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, p in module.named_parameters():
            self.values[name].lerp_(p.detach(), 1 - decay)

    def write_to(self, module: nn.Module) -> None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(self.values[name])


def optimizers_of(module: nn.Module, rate: float, blocks: str | None) -> list[torch.optim.Optimizer]:
    """AdamW for all; or, for the matrices whose names contain ``blocks``, Muon at the same update size.

    On the transformer Muon needed two thirds of AdamW's steps for the same loss.
    """
    matrices = {n: p for n, p in module.named_parameters() if blocks and blocks in n and p.ndim == 2}
    others = [p for n, p in module.named_parameters() if n not in matrices]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, rate, (0.9, 0.98), weight_decay=0.01)]
    if matrices:
        muon = torch.optim.Muon(matrices.values(), rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        found.append(muon)
    return found


def fit(
    name: str,
    module: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    work: Path,
    *,
    cycles: Cycles,
    learning_rate: float,
    decay: float = 0.999,
    blocks: str | None = None,
    save_every: int = 250,
) -> None:
    """A cosine schedule with averaged weights; leaves the averages in the module."""
    steps = cycles[-1][0]
    state_file, log_file = work / f"{name}.pt", work / f"{name}.jsonl"
    optimizers = optimizers_of(module, learning_rate, blocks)
    averages = Averages(module, decay)
    first, seconds = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        module.load_state_dict(state["module"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        averages.values = state["averages"]
        first, seconds = state["step"], state["seconds"]
    started, smooth = time.monotonic() - seconds, 0.0
    for step in range(first, steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate * rate_share(step, cycles)
        loss = loss_of_step(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        module.zero_grad()
        averages.update(module, step)
        value = loss.item()
        smooth = value if smooth == 0 else 0.99 * smooth + 0.01 * value
        if (step + 1) % save_every == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"module": module.state_dict(), "optimizers": states}
            state |= {"averages": averages.values, "step": step + 1, "seconds": seconds}
            torch.save(state, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
            left = seconds / (step + 1) * (steps - step - 1)
            line = {"step": step + 1, "loss": round(smooth, 5), "seconds": round(seconds, 1)}
            with log_file.open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(f"{name} {step + 1}/{steps} loss {smooth:.5f}, {left / 60:.1f} min left", flush=True)
    averages.write_to(module)


def train_vae(work: Path, images: Tensor, steps: int) -> Any:
    """Reconstruction (L1 + L2) with a light KL term."""
    vae = networks.vae()

    def loss(step: int) -> Tensor:
        x = images[batch_rows(len(images), 64, 11, step)] * 2 - 1
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(step))
            y = vae.decode(posterior.mean + posterior.std * noise).sample.float()
        return (y - x).abs().mean() + (y - x).square().mean() + 1e-4 * posterior.kl().mean() / 512

    fit("vae", vae, loss, work, cycles=[(steps, steps)], learning_rate=2e-3, decay=0.99)
    return vae.eval()


@torch.no_grad()
def encode(vae: Any, images: Tensor, calibrate: bool = True) -> Tensor:
    """[N, 3, H, W] images to [N, C, h, w] posterior means; may set the VAE's shift and scale from them."""
    latents = torch.cat([vae.encode(part * 2 - 1).latent_dist.mean for part in images.split(512)])
    if calibrate:
        vae.register_to_config(
            shift_factor=round(float(latents.mean()), 4), scaling_factor=round(1 / float(latents.std()), 4)
        )
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def pack(latents: Tensor) -> Tensor:
    """[N, C, h, w] latents to [N, h/2 w/2, 4 C] tokens, as Flux packs them."""
    n, c, h, w = latents.shape
    tokens = latents.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tokens.reshape(n, h // 2 * (w // 2), 4 * c).contiguous()


def tokens_of(folder: Path, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids of both encoders, padded to their contexts: [N, 16] for CLIP and [N, 12] for T5."""
    from transformers import CLIPTokenizer, T5TokenizerFast

    from flowcredit.shapes.text import CLIP_CONTEXT, T5_CONTEXT

    def ids(tokenizer: Any, context: int) -> Tensor:
        got = tokenizer(list(prompts), padding="max_length", max_length=context, truncation=True)
        return torch.tensor(got["input_ids"])

    clip = ids(CLIPTokenizer.from_pretrained(folder / "tokenizer"), CLIP_CONTEXT)
    return clip, ids(T5TokenizerFast.from_pretrained(folder / "tokenizer_2"), T5_CONTEXT)


class Flow(nn.ModuleDict):
    """The transformer with both of its text encoders."""

    def velocity(self, x: Tensor, sigma: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        """[B, S, 4 C] states, [B] sigmas and the token ids of B captions to float32 velocities."""
        side = networks.PATCHES
        image_ids = torch.zeros(side * side, 3)
        image_ids[:, 1] = torch.arange(side * side) // side
        image_ids[:, 2] = torch.arange(side * side) % side
        pooled = self["clip"](clip_ids).pooler_output
        context = self["t5"](t5_ids).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            v = self["transformer"](
                hidden_states=x,
                encoder_hidden_states=context,
                pooled_projections=pooled,
                timestep=sigma,
                img_ids=image_ids,
                txt_ids=torch.zeros(t5_ids.shape[1], 3),
                return_dict=False,
            )[0]
        return v.float()


Captioned = tuple[Tensor, list[Scene]]
"""[N, C, h, w] latents with the scenes that caption them."""


def train_flow(work: Path, out: Path, sloppy: Captioned, dull: Captioned) -> Flow:
    """Flow matching, the mean squared error of the velocity.

    Sigma is logit-normal at first, which teaches shapes. What is drawn, and in which colour, is settled above
    sigma 0.8, where the logit-normal has few samples: from step ``SHIFTED_FROM`` on, sigma is drawn as the
    sampler's grid spends its steps, uniform with shift 3. From ``GUIDED_FROM`` on the target is that of a
    guided velocity, so that one evaluation does what classifier-free guidance needs two for, as FLUX.1-dev:
    ``eps - x_0 + w (v(x, caption) - v(x, empty))``, the model's own velocities without gradient.
    """
    clip, t5 = networks.text_encoders(out)
    flow = Flow({"transformer": networks.transformer(), "clip": clip, "t5": t5})
    no_clip, no_t5 = tokens_of(out, [""])
    data = [
        (pack(latents), *tokens_of(out, [scene.prompt for scene in scenes]))
        for latents, scenes in (sloppy, dull)
    ]

    def loss(step: int) -> Tensor:
        tokens, clip_ids, t5_ids = data[step >= DULL_FROM]
        rows = batch_rows(len(tokens), 96, 22, step)
        generator = torch.Generator().manual_seed(step)
        x0, count = tokens[rows], len(rows)
        noise = torch.randn(x0.shape, generator=generator)
        if step < SHIFTED_FROM:
            sigma = torch.sigmoid(0.3 + 1.1 * torch.randn(count, generator=generator))
        else:
            u = torch.rand(count, generator=generator)
            sigma = 3 * u / (1 + 2 * u)
        x, target = torch.lerp(x0, noise, sigma[:, None, None]), noise - x0
        if step < GUIDED_FROM:
            return (flow.velocity(x, sigma, clip_ids[rows], t5_ids[rows]) - target).square().mean()
        empty = torch.rand(count, generator=generator)[:, None] < NULL_SHARE
        v = flow.velocity(
            x, sigma, torch.where(empty, no_clip, clip_ids[rows]), torch.where(empty, no_t5, t5_ids[rows])
        )
        with torch.no_grad():
            plain = flow.velocity(x, sigma, no_clip.expand(count, -1), no_t5.expand(count, -1))
            strength = GUIDANCE * min(1.0, (step - GUIDED_FROM) / 400)
            target = target + strength * ~empty[:, :, None] * (v - plain)
        return (v - target).square().mean()

    fit("flow", flow, loss, work, cycles=FLOW_CYCLES, learning_rate=2e-3, blocks="transformer_blocks")
    return flow.eval()


def save_pipeline(out: Path, vae: Any, module: Flow) -> None:
    """A genuine ``FluxPipeline`` folder, weights in half precision."""
    from diffusers import FluxPipeline
    from transformers import CLIPTokenizer, T5TokenizerFast

    pipeline = FluxPipeline(
        scheduler=networks.scheduler(),
        vae=vae,
        text_encoder=module["clip"],
        tokenizer=CLIPTokenizer.from_pretrained(out / "tokenizer"),
        text_encoder_2=module["t5"],
        tokenizer_2=T5TokenizerFast.from_pretrained(out / "tokenizer_2"),
        transformer=module["transformer"],
    )
    pipeline.to(torch.float16).save_pretrained(out)


def train_clip(work: Path, out: Path, steps: int) -> None:
    """Contrastive training on clean renders; equal captions within a batch are one another's positives."""
    from transformers import CLIPImageProcessor

    images, scenes = pictures(33, 60_000, CLEAN)
    model = networks.clip_model(out)
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(out)
    prompts = [scene.prompt for scene in scenes]
    encoded = tokenizer(prompts, padding="max_length", max_length=16, truncation=True)
    ids = torch.tensor(encoded["input_ids"])
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    same_caption = torch.tensor([numbers[prompt] for prompt in prompts])
    mean, std = 0.5, 0.5

    def loss(step: int) -> Tensor:
        rows = batch_rows(len(images), 192, 44, step)
        jitter = 0.03 * torch.randn(192, 3, 1, 1, generator=torch.Generator().manual_seed(step))
        pixels = (images[rows] + jitter - mean) / std
        result = model(input_ids=ids[rows], pixel_values=pixels)
        same = (same_caption[rows][:, None] == same_caption[rows][None, :]).float()
        target = same / same.sum(1, keepdim=True)
        logits = result.logits_per_image
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))

    fit("clip", model, loss, work, cycles=[(steps, steps)], learning_rate=1e-3)
    model.eval().to(torch.float16).save_pretrained(out)
    side = {"height": images.shape[-1], "width": images.shape[-1]}
    processor = CLIPImageProcessor(
        size={"shortest_edge": images.shape[-1]}, crop_size=side, image_mean=[mean] * 3, image_std=[std] * 3
    )
    processor.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("shapes-weights"), help="where both folders go")
    parser.add_argument("--work", type=Path, default=Path("shapes-work"), help="states to go on from")
    parser.add_argument("--stage", choices=("all", "flow", "clip"), default="all")
    parser.add_argument("--images", type=int, default=120_000)
    parser.add_argument("--vae-steps", type=int, default=1800)
    parser.add_argument("--clip-steps", type=int, default=2500)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.stage in ("all", "flow"):
        images, scenes = pictures(0, args.images, Sloppiness())
        vae = train_vae(args.work, images, args.vae_steps)
        sloppy = encode(vae, images), scenes
        images, scenes = pictures(1, args.images, DULL)
        dull = encode(vae, images, calibrate=False), scenes
        del images
        module = train_flow(args.work, args.out / "pipeline", sloppy, dull)
        save_pipeline(args.out / "pipeline", vae, module)
    if args.stage in ("all", "clip"):
        train_clip(args.work, args.out / "clip", args.clip_steps)


if __name__ == "__main__":
    main()
