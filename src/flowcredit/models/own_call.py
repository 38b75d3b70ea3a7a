"""What plain diffusers makes of a prompt: the pipeline's own call, for comparison with the adapters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowcredit.models.compiling import as_written
from flowcredit.models.loading import PipelineFlow
from flowcredit.models.places import at_work
from flowcredit.quiet import quiet_libraries


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
            **model.call_arguments(len(prompts)),
        ).images
    return images.to(torch.float32)
