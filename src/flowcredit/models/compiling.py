"""``torch.compile`` of the trained network, in place, and the way around it."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from flowcredit.errors import InputError

Backend = str | Callable[..., Any]
BACKEND = "inductor"
"""torch.compile's own default."""
BLOCKS = ("transformer_blocks", "single_transformer_blocks")
"""The lists of blocks in the networks of all families; of a U-Net the attention's, not its convolutions."""


def compile_network(network: nn.Module, device: torch.device, backend: Backend | None = None) -> None:
    """Let the transformer blocks of a network run compiled code; its first calls compile it.

    Block by block, since a block's code then serves all blocks of its kind, and in place, so that parameters
    keep their names. To be called after adapters are added. Batches of all sizes share one graph
    (``dynamic``), so that a batch's result does not depend on which sizes came before: a resumed run sees
    other sizes first. A batch of one, and calls with and without gradients, have graphs of their own.

    Raises InputError where torch cannot compile for this device, such as for want of a C++ compiler.
    """
    chosen = BACKEND if backend is None else backend
    _try_out(device, chosen)
    lists = [module for name, module in network.named_modules() if name.rpartition(".")[2] in BLOCKS]
    blocks = [block for each in lists for block in each.children()]
    assert blocks, f"{type(network).__name__} has none of {BLOCKS}"
    for block in blocks:
        block.compile(backend=chosen, dynamic=True)


def as_written() -> AbstractContextManager[None]:
    """While entered, compiled networks run as they are written."""
    return torch.compiler.set_stance("force_eager")


def _try_out(device: torch.device, backend: Backend) -> None:
    """Compile and run one small function: where this works, the compilers and their headers are there."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return (x + x).sin()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Torch's own, of which a user can do nothing.
            torch.compile(doubled, backend=backend, dynamic=True)(torch.ones(8, device=device))
    except Exception as error:  # Each compiler fails in its own way.
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The first line names the compiler, the second what it said.
        reason = " ".join(said[:2]) if said else type(error).__name__
        raise InputError(
            f"model.compile is true, but torch cannot compile for {device}: {reason}; install what is missing"
            " (a C++ compiler such as g++ for the CPU, Triton for a GPU), or set model.compile=false"
        ) from None
