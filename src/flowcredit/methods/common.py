"""What the settings of methods have in common."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from flowcredit.sections import Positive, Section, Steps, Whole, refuse

Grid = Annotated[Whole, Field(ge=2, le=1000)]
Group = Annotated[Whole, Field(ge=2, le=4096)]
Share = Annotated[str, Field(pattern=r"^t/[1-9][0-9]{0,2}$")]
FinishSteps = Literal["all"] | Steps | Share
"""Euler steps to sigma 0: all that remain on the grid, at most a number, or a share of them as `t/2`."""
InitialNoise = Literal["shared", "separate"]


def finish_length(steps: int | str, remaining: int) -> int:
    """Euler steps to sigma 0 where ``remaining`` grid steps are left."""
    if steps == "all":
        return remaining
    if isinstance(steps, int):
        return min(steps, remaining)
    return max(1, math.ceil(remaining / int(steps.removeprefix("t/"))))


class MethodSettings(Section):
    """What every method has; each states its own defaults."""

    others: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """What the method expects of other sections of a recipe, where that does not say otherwise."""

    unread: ClassVar[tuple[str, ...]] = ()
    """Settings of ``train`` that the method does not read; a recipe that sets one is refused."""

    reads_noise: ClassVar[bool] = True
    """Whether it samples with the noise that the recipe's ``noise`` sets; where not, that is told."""

    num_steps: Grid = 10
    """Steps T of the sampling grid; 10 as in Flow-GRPO's runs on SD3.5-M."""
    group_size: Group = 24
    """Images G of each prompt that are compared; 24 as in Flow-GRPO's runs."""
    advantage_clamp: Positive = 5.0
    """Advantages are cut to plus and minus this; 5 as in Flow-GRPO's released code."""

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards tell what is learned."""
        return True


class WindowSettings(MethodSettings):
    """A method whose noise is confined to a window of consecutive steps."""

    window_size: Steps = 4
    """Steps of the window, each stochastic and trained; 4 as in MixGRPO's runs."""

    @model_validator(mode="after")
    def _window_fits(self) -> "WindowSettings":
        last = self.num_steps - 1
        if self.window_size > last:
            refuse(
                "window_size",
                f"{self.window_size} steps on a grid of {self.num_steps}, whose last takes no noise (it would"
                " stay in the image)",
                f"at most {last}",
            )
        return self
