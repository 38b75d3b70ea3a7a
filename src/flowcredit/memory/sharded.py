"""What ``parallel.sharding=sharded`` (FSDP2) leaves on each process, and what it gathers for a while."""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

from flowcredit.memory.counts import is_known, network_shapes
from flowcredit.memory.folders import Component
from flowcredit.memory.tape import FLOAT

_BLOCK = re.compile(r"^.*?\.\d+(?=\.)")
"""A block is what is numbered first in a weight's name: "transformer_blocks.3"."""


@dataclass(frozen=True)
class Shares:
    """How a network's weights, gradients and optimizer state lie on each of so many processes.

    ``gathered``: bytes of whole weights while the network runs: those outside the blocks, a block, and the
    one after it. ``arriving``: bytes of a block's whole gradients before they are spread.
    """

    processes: int = 1
    gathered: int = 0
    arriving: int = 0

    def of(self, size: int | None) -> int | None:
        """One process's share of what all of them hold."""
        return None if size is None else -(-size // self.processes)


def shares(network: Component, processes: int, width: int) -> Shares:
    """``width``: bytes of a number of the weights as they are gathered."""
    shapes = network.shapes
    if shapes is None:
        known = is_known(network.kind, network.config)
        shapes = network_shapes(network.kind, network.config) if known else {}
    blocks: Counter[str] = Counter()
    for name, shape in shapes.items():
        found = _BLOCK.match(name)
        blocks["" if found is None else found[0]] += prod(shape)
    outside = blocks.pop("", 0)
    largest = max(blocks.values(), default=0)
    return Shares(processes, (outside + 2 * largest) * width, largest * FLOAT)
