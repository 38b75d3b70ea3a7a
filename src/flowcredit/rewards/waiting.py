"""A reward whose networks wait in the CPU's memory and are on the device only while it scores.

Axes: B images, H and W their height and width.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowcredit.interfaces import HoldsModules, Reward
from flowcredit.visiting import Guest


@dataclass(frozen=True)
class WaitingReward:
    """The reward ``reward``, which is called as before; ``guest`` are its networks."""

    reward: Reward
    guest: Guest

    @property
    def __signature__(self) -> inspect.Signature:
        """The columns are those of the reward."""
        return inspect.signature(self.reward)

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32, as the reward has it."""
        with self.guest.on_device():
            return self.reward(images=images, prompts=prompts, **columns)


def waiting(reward: Reward, device: torch.device) -> Reward:
    """The reward with its networks moved to the CPU; itself if it has none."""
    if not isinstance(reward, HoldsModules):
        return reward
    modules = tuple(reward.modules())
    return WaitingReward(reward, Guest(modules, device)) if modules else reward


def itself(reward: Reward) -> Reward:
    """The reward without its wrapping: what it offers besides being called."""
    return reward.reward if isinstance(reward, WaitingReward) else reward
