"""Losses that are no numbers in some iterations, each in one process of several."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flowcredit.policy_loss import clipped_loss
from flowcredit.update import update_policy


@contextmanager
def broken_losses(by_iteration: Mapping[int, int], rank: int | None) -> Iterator[None]:
    """``by_iteration``: the process whose losses are NaN in an iteration of the run, counted from 0.

    ``rank`` is this process's; None where it is the only one, and so every one of them.
    """
    state = {"iteration": -1}

    def counting(*args: Any, **keywords: Any) -> Any:
        state["iteration"] += 1
        return update_policy(*args, **keywords)

    def broken(*args: Any) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = clipped_loss(*args)
        victim = by_iteration.get(state["iteration"])
        return (loss * torch.nan if victim is not None and rank in (None, victim) else loss), metrics

    with (
        patch("flowcredit.trainer.update_policy", counting),
        patch("flowcredit.objectives.clipped_loss", broken),
    ):
        yield
