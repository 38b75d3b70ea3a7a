"""What plain diffusers makes of a prompt: the pipeline's own call, for comparison with the adapters."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowcredit.models.compiling import as_written
from flowcredit.models.loading import PipelineFlow
from flowcredit.models.places import at_work
from flowcredit.quiet import quiet_libraries

if TYPE_CHECKING:
    from flowcredit.models.pipelines import PipelineSettings

Arguments = dict[str, Any]


def _flux(settings: "PipelineSettings", count: int) -> Arguments:
    return {
        "guidance_scale": settings.guidance_scale,
        "max_sequence_length": settings.max_sequence_length,
    }


def _qwen_image(settings: "PipelineSettings", count: int) -> Arguments:
    return {
        "true_cfg_scale": settings.guidance_scale,
        "negative_prompt": [settings.negative_prompt] * count if settings.guided else None,
        "max_sequence_length": settings.max_sequence_length,
    }


def _sd3(settings: "PipelineSettings", count: int) -> Arguments:
    return {**_diffusion(settings, count), "max_sequence_length": settings.max_sequence_length}


def _diffusion(settings: "PipelineSettings", count: int) -> Arguments:
    return {
        "guidance_scale": settings.guidance_scale,
        "negative_prompt": [settings.negative_prompt] * count,
    }


ARGUMENTS: Mapping[str, Callable[["PipelineSettings", int], Arguments]] = {
    "FluxPipeline": _flux,
    "QwenImagePipeline": _qwen_image,
    "StableDiffusion3Pipeline": _sd3,
    "StableDiffusionPipeline": _diffusion,
}
"""By the pipeline's class, what its call takes beside prompts, size, steps and generator."""


@torch.no_grad()
def pipeline_images(
    model: PipelineFlow,
    prompts: Sequence[str],
    num_steps: int,
    generator: torch.Generator,
) -> Tensor:
    """[P, 3, H, W] float32 in [0, 1], one image for each prompt, by ``model.pipeline``'s own call."""
    pipeline, settings = model.pipeline, model.settings
    pipeline.set_progress_bar_config(disable=True)
    special = ARGUMENTS[type(pipeline).__name__](settings, len(prompts))
    with (
        quiet_libraries(),
        as_written(),
        at_work(pipeline, settings, "text_encoders", "vae"),
        torch.autocast(settings.device.type, dtype=settings.autocast, enabled=settings.autocast is not None),
    ):
        images: Tensor = pipeline(
            list(prompts),
            height=settings.height,
            width=settings.width,
            num_inference_steps=num_steps,
            generator=generator,
            output_type="pt",
            **special,
        ).images
    return images.to(torch.float32)
