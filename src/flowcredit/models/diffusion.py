"""Stable Diffusion 1 and 2 seen as a flow: any folder of diffusers' StableDiffusionPipeline.

The network was trained on x_t = a x0 + b eps with a² + b² = 1, t from 0 to T - 1. Divided by a + b these
states lie on straight lines z = (1 - s) x0 + s eps with s = b / (a + b), and DDIM without noise (arXiv
2010.02502) is Euler's method along them. Training ends before pure noise (a is 0.07 at the last step of SD
1.5), and many schedulers end sampling before the pure image (``set_alpha_to_one`` false: at t = 0). So sigma
is s counted from the one end of the sampler to the other, s = s_end + sigma (s_start - s_end), and the state
is z in a unit in which the state at sigma 1 is the noise that the pipeline begins with, of variance 1. Euler
steps stay what they are; the stochastic steps take the first state for pure noise and the last for the pure
image, the first as the pipeline itself does.

Axes: B rows in a batch, P prompts, C latent channels, h and w latent height and width, L text tokens, E
width of CLIP, T training timesteps, H and W image height and width in pixels. A state is [B, C, h, w].
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.interfaces import Conditioning
from flowcredit.limits import size_unit
from flowcredit.models.pipelines import (
    Guidance,
    PipelineSettings,
    check_negative_prompt,
    check_settings,
    computing_in,
    count_truncated,
    decode_in_batches,
    decode_latents,
    encode_in_batches,
    encode_latents,
    encode_prompts,
    guided_prediction,
    latent_noise,
    load_pipeline,
    set_checkpointing,
)
from flowcredit.quiet import quiet_libraries
from flowcredit.time_grid import check_grid

PREDICTIONS = ("epsilon", "v_prediction")
NOT_LOADED = ("safety_checker", "feature_extractor", "image_encoder")
"""Parts that judge or steer by images; nothing here reads them. An export copies them with the folder."""


@dataclass(frozen=True)
class Schedule:
    """The straight lines of a diffusion model; ``s`` [T] float64 rises with t."""

    s: Tensor
    start: float
    end: float

    @property
    def unit(self) -> float:
        """States are z times this: a + b at the start."""
        return 1 / math.hypot(1 - self.start, self.start)

    def position(self, sigma: Tensor) -> Tensor:
        """Sigma from 1 to 0 to s, float64."""
        return self.end + sigma.to(torch.float64) * (self.start - self.end)

    def timestep(self, position: Tensor) -> Tensor:
        """s to t, float32, linear between training's timesteps, kept within them.

        To the hundredth: float32 sigmas resolve little more, and a sampler's own timesteps come back whole.
        """
        table = self.s.to(position.device)
        after = torch.searchsorted(table, position).clamp(1, len(table) - 1)
        before = after - 1
        share = ((position - table[before]) / (table[after] - table[before])).clamp(0.0, 1.0)
        return ((before + share) * 100).round().div(100).to(torch.float32)


def schedule_of(scheduler: DDIMScheduler) -> Schedule:
    """What a DDIMScheduler's noise levels are on the straight lines, and where it ends."""
    alphas = scheduler.alphas_cumprod.to(torch.float64)
    last = float(scheduler.final_alpha_cumprod)
    s = _place(alphas)
    return Schedule(s, float(s[-1]), float(_place(torch.tensor(last, dtype=torch.float64))))


def _place(alpha_bar: Tensor) -> Tensor:
    a, b = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    return b / (a + b)


class DiffusionFlow:
    """``models.loading.PipelineFlow`` on a StableDiffusionPipeline whose sampler is DDIM without noise.

    The folder's scheduler gives the noise levels and the prediction type. ``pipeline.scheduler`` becomes the
    DDIMScheduler of these with "trailing" timesteps, which begins at the last one (arXiv 2305.08891): where
    sigma is 1 may not depend on the number of steps. With it the pipeline gives the same image for the same
    seed, at numbers of steps that divide T; at others DDIMScheduler itself steps to other timesteps than it
    then evaluates. Classifier-free guidance is part of ``velocity``. ``network`` is the UNet2DConditionModel.
    """

    part = "unet"
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """As in the LoRA scripts of diffusers."""

    def __init__(self, pipeline: StableDiffusionPipeline, source: Path, settings: PipelineSettings) -> None:
        """Raises InputError for sizes that the model cannot make and schedulers of another kind."""
        scheduler = _ddim(pipeline.scheduler, source)
        check_settings(
            settings, unit=size_unit("StableDiffusionPipeline", pipeline.vae_scale_factor, 1), longest=None
        )
        check_negative_prompt(settings, used=settings.guided)
        if pipeline.unet.config.time_cond_proj_dim is not None:
            raise InputError(
                f"{source / 'unet' / 'config.json'}: a network with embedded guidance (time_cond_proj_dim);"
                " expected one with classifier-free guidance"
            )
        pipeline.scheduler = scheduler
        self.pipeline = pipeline
        self.source = source
        self.network: torch.nn.Module = pipeline.unet
        self.settings = settings
        self._schedule = schedule_of(scheduler)
        self._predicts_v = scheduler.config.prediction_type == "v_prediction"
        if self._schedule.start == 1.0 and not self._predicts_v:
            raise InputError(
                f"{source / 'scheduler'}: pure noise at the last timestep (rescale_betas_zero_snr) with"
                " prediction_type 'epsilon', from which no image can be told; expected 'v_prediction'"
            )
        self._latent_shape = (
            pipeline.unet.config.in_channels,
            settings.height // pipeline.vae_scale_factor,
            settings.width // pipeline.vae_scale_factor,
        )
        self._guidance: Guidance | None = None
        if settings.guided:
            self._guidance = Guidance(settings.guidance_scale, self.encode([settings.negative_prompt]))

    @classmethod
    def from_folder(cls, folder: Path, settings: PipelineSettings) -> Self:
        """``models.loading.load_model`` for this family; its errors."""
        pipeline = load_pipeline(StableDiffusionPipeline, folder, settings, cls.part, NOT_LOADED)
        return cls(pipeline, folder, settings)

    @property
    def device(self) -> torch.device:
        """Where every part stands."""
        return self.settings.device

    @property
    def image_tokens(self) -> int:
        """2x2 patches of the latent image: a U-Net has no tokens, a transformer would have these."""
        return self._latent_shape[1] * self._latent_shape[2] // 4

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Prompts to ``prompt_embeds`` [P, L, E], in their order."""
        return encode_prompts(self._encode_batch, prompts, self.pipeline, self.settings)

    def _encode_batch(self, prompts: list[str]) -> Conditioning:
        with quiet_libraries():
            embeds, _ = self.pipeline.encode_prompt(prompts, self.device, 1, False)
        return {"prompt_embeds": embeds}

    def truncated(self, prompts: Sequence[str]) -> dict[str, int]:
        """How many prompts lose words to the text encoder's length: "clip"."""
        tokenizer = self.pipeline.tokenizer
        return count_truncated({"clip": (tokenizer, tokenizer.model_max_length)}, prompts)

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """[B, C, h, w] float32, drawn on the generator's device like the pipeline's own."""
        return latent_noise((count, *self._latent_shape), generator).to(self.device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """[B, C, h, w] states at [B] sigmas to guided float32 velocities; row i under row i of ``cond``."""
        schedule = self._schedule
        position = schedule.position(sigma)
        length = torch.hypot(1 - position, position)
        a, b, scale = (
            factor.to(torch.float32)[:, None, None, None]
            for factor in ((1 - position) / length, position / length, 1 / (schedule.unit * length))
        )
        noisy = x.to(torch.float32) * scale
        predicted = guided_prediction(self._predict, noisy, schedule.timestep(position), cond, self._guidance)
        # eps - x0, from v = a eps - b x0 or from eps.
        if self._predicts_v:
            difference = (a + b) * predicted + (b - a) * noisy
        else:
            difference = ((a + b) * predicted - noisy) / a
        return schedule.unit * (schedule.start - schedule.end) * difference

    def without_guidance(self) -> Self:
        """The same network under the rows' own text alone, whatever the guidance scale."""
        plain = copy.copy(self)
        plain._guidance = None
        return plain

    def _predict(self, noisy: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        dtype = next(self.network.parameters()).dtype
        with computing_in(self.settings):
            predicted = self.network(
                noisy.to(dtype),
                timestep,
                encoder_hidden_states=cond["prompt_embeds"].to(dtype),
                return_dict=False,
            )[0]
        return predicted.to(torch.float32)

    def decode(self, x0: Tensor) -> Tensor:
        """[B, C, h, w] to [B, 3, H, W] float32 in [0, 1], ``decode_batch_size`` images at a time."""
        return decode_in_batches(
            lambda rows: decode_latents(self.pipeline.vae, rows / self._image_unit),
            x0,
            self.pipeline,
            self.settings,
        )

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, C, h, w] float32 states at sigma 0, as many at a time.

        As in decoding, the state at sigma 0 is taken for the pure image.
        """
        return encode_in_batches(
            lambda rows: encode_latents(self.pipeline.vae, rows) * self._image_unit,
            images,
            self.settings.decode_batch_size,
        )

    @property
    def _image_unit(self) -> float:
        """States at sigma 0 are the VAE's latents times this."""
        end = self._schedule.end
        return self._schedule.unit * math.hypot(1 - end, end)

    def time_grid(self, num_steps: int) -> Tensor:
        """The sigmas of DDIM's trailing timesteps, [num_steps + 1] float64, 1 to 0.

        Raises InputError for more steps than training had timesteps.
        """
        longest = len(self._schedule.s)
        if not 1 <= num_steps <= longest:
            raise InputError(f"num_steps is {num_steps}; expected 1 to {longest}, the timesteps of training")
        fresh = DDIMScheduler.from_config(self.pipeline.scheduler.config)
        fresh.set_timesteps(num_steps)
        schedule = self._schedule
        sigmas = (schedule.s[fresh.timesteps] - schedule.end) / (schedule.start - schedule.end)
        # Where sampling ends at t = 0, a grid of every timestep has come to 0 one step early.
        steps = sigmas[sigmas > 0]
        try:
            return check_grid(torch.cat([steps, steps.new_zeros(num_steps + 1 - len(steps))]))
        except ValueError as error:
            raise InputError(f"{self.source / 'scheduler'}: at {num_steps} steps {error}") from error

    def call_arguments(self, count: int) -> dict[str, Any]:
        """See ``PipelineFlow``."""
        return {
            "guidance_scale": self.settings.guidance_scale,
            "negative_prompt": [self.settings.negative_prompt] * count,
        }

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each block in the backward pass instead of keeping its activations, or not."""
        set_checkpointing(self.pipeline.unet, enabled)


def _ddim(scheduler: Any, source: Path) -> DDIMScheduler:
    """The DDIMScheduler of a folder's noise levels, whatever sampler it names; InputError for none."""
    config, where = scheduler.config, source / "scheduler"
    if config.get("beta_schedule") is None:
        raise InputError(
            f"{where}: {type(scheduler).__name__} has no noise levels of a diffusion model (beta_schedule);"
            " expected a scheduler such as DDIMScheduler"
        )
    if config.get("prediction_type", "epsilon") not in PREDICTIONS:
        raise InputError(
            f"{where}: prediction_type is {config['prediction_type']!r}; expected {' or '.join(PREDICTIONS)}"
        )
    if config.get("thresholding", False):
        raise InputError(f"{where}: thresholding is true, which no flow can follow; expected false")
    # clip_sample is for images of pixels; StableDiffusionPipeline turns it off as well.
    return DDIMScheduler.from_config(config, timestep_spacing="trailing", clip_sample=False)
