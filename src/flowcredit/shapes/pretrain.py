"""Train the bundled world's models from nothing: ``python -m flowcredit.shapes.pretrain``.

In order: both text encoders, a VAE, the flow transformer, a CLIP. Every stage saves its state
every few hundred steps and goes on from there when the command is given again; a finished stage is skipped.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowcredit.shapes import networks
from flowcredit.shapes.canvas import render
from flowcredit.shapes.drawing import CLEAN, Sloppiness, draw
from flowcredit.shapes.fitting import batch_rows, finished, fit
from flowcredit.shapes.language import noun_ids, train_language
from flowcredit.shapes.scenes import TASKS, Scene, all_scenes

TASK_SHARES = {
    "single_object": 0.12,
    "two_objects": 0.12,
    "counting": 0.2,
    "colors": 0.12,
    "position": 0.24,
    "attribute_binding": 0.2,
}


FLOW_STEPS = 9000
FLOW_RATE_ENDS = 9300
"""Step at which the cosine of the learning rate would end: the last steps still learn."""
SHIFTED_FROM = 3000
"""Step of the flow's training from which sigma is drawn with shift 3."""
GUIDED_FROM = 7000
"""Step from which the target is guided."""
GUIDANCE = 0.5
"""Share w of the guided target; a model that has learned it draws as with guidance scale 1 / (1 - w)."""
NULL_SHARE = 0.1
"""Share of empty captions from then on."""

WEB = Sloppiness(
    colour=0.05,
    shape=0.05,
    count=0.1,
    extra=0.03,
    relation=0.08,
    ragged=0.35,
    clutter=0.25,
    ordered=0.9,
    dull=(0.25, 0.5),
)
"""What the flow model learns from: careless, cluttered and dull, as pictures from the web are."""
VIVID_TO_DULL = replace(WEB, dull=(0.0, 0.6))
"""What the VAE learns from: every colour that alignment may want."""


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


def train_vae(work: Path, make_images: Callable[[], Tensor], steps: int) -> Any:
    """Reconstruction (L1 + L2) with a light KL term; no images are made for a VAE that is trained already."""
    vae = networks.vae()
    images = torch.empty(0) if finished(work, "vae", steps) else make_images()

    def loss(step: int) -> Tensor:
        x = images[batch_rows(len(images), 64, 11, step)] * 2 - 1
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(step))
            y = vae.decode(posterior.mean + posterior.std * noise).sample.float()
        return (y - x).abs().mean() + (y - x).square().mean() + 1e-4 * posterior.kl().mean() / 512

    fit("vae", vae, loss, work, steps=steps, learning_rate=2e-3, decay=0.99)
    return vae.eval()


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """[N, 3, H, W] images to [N, C, h, w] posterior means; sets the VAE's shift and scale from them."""
    latents = torch.cat([vae.encode(part * 2 - 1).latent_dist.mean for part in images.split(512)])
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


class Flow(nn.Module):
    """The transformer beside its text encoders, which are frozen: each caption is encoded once."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def velocity(self, x: Tensor, sigma: Tensor, pooled: Tensor, context: Tensor) -> Tensor:
        """[B, S, 4 C] states, [B] sigmas and B captions' encodings to float32 velocities."""
        side = networks.PATCHES
        image_ids = torch.zeros(side * side, 3)
        image_ids[:, 1] = torch.arange(side * side) // side
        image_ids[:, 2] = torch.arange(side * side) % side
        with torch.autocast("cpu", torch.bfloat16):
            v = self.transformer(
                hidden_states=x,
                encoder_hidden_states=context,
                pooled_projections=pooled,
                timestep=sigma,
                img_ids=image_ids,
                txt_ids=torch.zeros(context.shape[1], 3),
                return_dict=False,
            )[0]
        return v.float()


def train_text(work: Path, out: Path, steps: int) -> tuple[Any, Any]:
    """Both text encoders, CLIP and T5, taught what captions mean; see ``language``."""
    from transformers import T5TokenizerFast

    clip, t5 = networks.text_encoders(out)
    state_file = work / "text.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        clip.load_state_dict(state["clip"])
        t5.load_state_dict(state["t5"])
        return clip.requires_grad_(False), t5.requires_grad_(False)
    scenes = random_scenes(np.random.default_rng(55), 20_000)
    clip_ids, t5_ids = tokens_of(out, [scene.prompt for scene in scenes])
    nouns = noun_ids(T5TokenizerFast.from_pretrained(out / "tokenizer_2"))
    began = time.monotonic()
    share = train_language(clip, t5, clip_ids, t5_ids, nouns, scenes, steps)
    print(f"text: {share:.1%} of the nouns understood after {time.monotonic() - began:.0f} s", flush=True)
    torch.save({"clip": clip.state_dict(), "t5": t5.state_dict()}, state_file)
    return clip, t5


@torch.no_grad()
def encodings_of(out: Path, clip: Any, t5: Any, prompts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled [M, W] and context [M, L, W] of the M distinct prompts, and each prompt's row among them."""
    distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    clip_ids, t5_ids = tokens_of(out, list(distinct))
    pooled = torch.cat([clip(part).pooler_output for part in clip_ids.split(256)])
    context = torch.cat([t5(part).last_hidden_state for part in t5_ids.split(256)])
    return pooled, context, torch.tensor([distinct[prompt] for prompt in prompts])


def train_flow(work: Path, out: Path, clip: Any, t5: Any, latents: Tensor, scenes: list[Scene]) -> Flow:
    """Flow matching, the mean squared error of the velocity.

    Sigma is logit-normal at first, which teaches shapes. What is drawn, and in which colour, is settled above
    sigma 0.8, where the logit-normal has few samples: from step ``SHIFTED_FROM`` on, sigma is drawn as the
    sampler's grid spends its steps, uniform with shift 3. From ``GUIDED_FROM`` on the target is that of a
    guided velocity, so that one evaluation does what classifier-free guidance needs two for, as FLUX.1-dev:
    ``eps - x_0 + w (v(x, caption) - v(x, empty))``, the model's own velocities without gradient.
    """
    flow = Flow(networks.transformer())
    pooled, context, caption = encodings_of(out, clip, t5, ["", *(scene.prompt for scene in scenes)])
    tokens, caption = pack(latents), caption[1:]

    def loss(step: int) -> Tensor:
        rows = batch_rows(len(tokens), 96, 22, step)
        generator = torch.Generator().manual_seed(step)
        x0, count, asked = tokens[rows], len(rows), caption[rows]
        noise = torch.randn(x0.shape, generator=generator)
        if step < SHIFTED_FROM:
            sigma = torch.sigmoid(0.3 + 1.1 * torch.randn(count, generator=generator))
        else:
            u = torch.rand(count, generator=generator)
            sigma = 3 * u / (1 + 2 * u)
        x, target = torch.lerp(x0, noise, sigma[:, None, None]), noise - x0
        if step < GUIDED_FROM:
            return (flow.velocity(x, sigma, pooled[asked], context[asked]) - target).square().mean()
        empty = torch.rand(count, generator=generator) < NULL_SHARE
        asked = torch.where(empty, 0, asked)
        v = flow.velocity(x, sigma, pooled[asked], context[asked])
        with torch.no_grad():
            nothing = torch.zeros_like(asked)
            plain = flow.velocity(x, sigma, pooled[nothing], context[nothing])
            strength = GUIDANCE * min(1.0, (step - GUIDED_FROM) / 400)
            target = target + strength * ~empty[:, None, None] * (v - plain)
        return (v - target).square().mean()

    fit(
        "flow",
        flow,
        loss,
        work,
        steps=FLOW_STEPS,
        rate_ends=FLOW_RATE_ENDS,
        learning_rate=2e-3,
        blocks="transformer_blocks",
    )
    return flow.eval()


def save_pipeline(out: Path, vae: Any, clip: Any, t5: Any, flow: Flow) -> None:
    """A genuine ``FluxPipeline`` folder, weights in half precision."""
    from diffusers import FluxPipeline
    from transformers import CLIPTokenizer, T5TokenizerFast

    pipeline = FluxPipeline(
        scheduler=networks.scheduler(),
        vae=vae,
        text_encoder=clip,
        tokenizer=CLIPTokenizer.from_pretrained(out / "tokenizer"),
        text_encoder_2=t5,
        tokenizer_2=T5TokenizerFast.from_pretrained(out / "tokenizer_2"),
        transformer=flow.transformer,
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

    fit("clip", model, loss, work, steps=steps, learning_rate=1e-3)
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
    parser.add_argument("--text-steps", type=int, default=1500)
    parser.add_argument("--clip-steps", type=int, default=2500)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.stage in ("all", "flow"):
        folder = args.out / "pipeline"
        clip, t5 = train_text(args.work, folder, args.text_steps)
        vae = train_vae(args.work, lambda: pictures(0, args.images // 2, VIVID_TO_DULL)[0], args.vae_steps)
        images, scenes = pictures(1, args.images, WEB)
        latents = encode(vae, images)
        del images
        save_pipeline(folder, vae, clip, t5, train_flow(args.work, folder, clip, t5, latents, scenes))
    if args.stage in ("all", "clip"):
        train_clip(args.work, args.out / "clip", args.clip_steps)


if __name__ == "__main__":
    main()
