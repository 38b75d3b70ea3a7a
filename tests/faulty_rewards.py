"""Rewards that misbehave in the second of two processes, or that take their time."""

import os
import signal
import time
from collections.abc import Sequence

from torch import Tensor

from simple_rewards import redness

calls = 0


def killing(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Its process dies at the third call, in the second iteration: the first is of the evaluation."""
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return redness(images, prompts)


def slow(images: Tensor, prompts: Sequence[str]) -> Tensor:
    time.sleep(0.2)
    return redness(images, prompts)
