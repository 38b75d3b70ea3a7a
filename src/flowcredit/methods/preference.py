"""Settings of the methods that learn from pairs of images, the better one and the worse."""

from typing import ClassVar, Literal

from flowcredit.methods.common import Grid, MethodSettings
from flowcredit.sections import Count, Positive, Text


class DPOSettings(MethodSettings):
    """Diffusion-DPO on flows: of two images the better is to be denoised better than the model before
    training does it, the worse one worse (arXiv 2311.12908)."""

    others: ClassVar = {"train": {"update": "accumulated"}}
    unread: ClassVar = ("kl_weight", "ratio", "step_weights")
    reads_noise: ClassVar = False
    name: Literal["dpo"] = "dpo"
    """The method; it decides which further settings there are."""
    num_steps: Grid = 40
    """Steps T of the sampling grid, on which noise levels are drawn too; 40 as in Flow-GRPO's DPO script."""
    pairs: Literal["group", "file"] = "group"
    """Whence pairs come: the best and the worst of a `group` of each prompt's images by the rewards, or two
    images that the training prompts' `file` names; then nothing is sampled, and no reward is trained."""
    chosen_column: Text = "chosen"
    """Column of `prompts.train` with the path of the preferred image, relative to the file; for pairs from a
    `file`."""
    rejected_column: Text = "rejected"
    """Column of `prompts.train` with the path of the other image; for pairs from a `file`."""
    beta: Positive = 100.0
    """Weight β of the differences in error, each a mean over latent dimensions; 100 as in Flow-GRPO's DPO
    script for SD3.5-M (5000 in Diffusion-DPO's scripts for SD 1.5 and SDXL, on errors of the noise)."""
    draws: Count = 39
    """Noises and noise levels drawn for each pair, each an optimizer step if `train.update` is per_step; 39
    as in Flow-GRPO's DPO script, 1 in Diffusion-DPO's."""

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards tell what is learned."""
        return self.pairs == "group"
