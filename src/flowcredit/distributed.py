"""Several processes of one run: who takes which prompts, and what they tell each other.

``torchrun`` starts them, one for each device. Without it there is one, and nothing here communicates. What is
exchanged are numbers, tensors and JSON, never pickled objects.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowcredit.errors import InputError


@dataclass(frozen=True)
class Share:
    """The prompts of one process: places in the whole iteration, and how many of them are its own.

    All processes have equally many places; those past ``own`` repeat one, so that every process evaluates
    equally many states, and count for nothing.
    """

    places: tuple[int, ...]
    own: int


@dataclass(frozen=True)
class World:
    """The processes of a run: this one's ``rank`` among ``size``, and the device of its own."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def share(self, count: int) -> Share:
        """This process's part of ``count`` prompts, in order: the earlier processes take the larger parts."""
        each = -(-count // self.size)
        begin = min(self.rank * each, count)
        own = min(each, count - begin)
        places = range(begin, begin + own)
        spare = [min(begin, count - 1)] * (each - own)
        return Share((*places, *spare), own)

    def gathered(self, rows: Tensor, dim: int = 0) -> Tensor:
        """The rows of all processes along ``dim``, joined in the order of their ranks; any number from
        each."""
        if self.size == 1:
            return rows
        sizes = self._sizes(rows.shape[dim])
        shape = list(rows.shape)
        shape[dim] = max(sizes)
        padded = rows.new_zeros(shape)
        padded.narrow(dim, 0, rows.shape[dim]).copy_(rows)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)

    def _sizes(self, own: int) -> list[int]:
        """One number of each process, by rank."""
        return self.summed([own if rank == self.rank else 0 for rank in range(self.size)])

    def largest(self, values: Sequence[int]) -> list[int]:
        """For each position the largest value of any process."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def summed(self, values: Sequence[int]) -> list[int]:
        """For each position the sum over processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Sequence[int], how: Any) -> list[int]:
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(numbers, how)
        return numbers.tolist()

    def told(self, value: Any) -> list[Any]:
        """What each process tells, by rank: anything that JSON holds."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self._sizes(len(own))
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [json.loads(bytes(p[:n].tolist())) for p, n in zip(parts, sizes, strict=True)]

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add up the gradients of all processes in place, one message for each type and device.

        A parameter without a gradient counts as 0: all processes hold the same parameters. Of a network that
        is spread over them, the backward pass has added them up.
        """
        if self.size == 1 or any(isinstance(each, DTensor) for each in parameters):
            return
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            groups.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
        for grads in groups.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.size > 1:
            dist.barrier()


ALONE = World()


def join(environment: Mapping[str, str] = os.environ, timeout_s: float = 600.0) -> World:
    """Join the processes that torchrun started, or be the only one.

    Raises InputError where the environment names several processes and they cannot be joined.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    rank, local = int(environment["RANK"]), int(environment.get("LOCAL_RANK", environment["RANK"]))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(local)
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise InputError(f"process {rank} of {size} cannot join the others: {error}") from error
    if dist.get_world_size() != size:
        raise InputError(
            f"WORLD_SIZE says {size} processes, {dist.get_world_size()} have joined; start them by torchrun"
        )
    return World(rank, size, local)


@contextmanager
def joined(timeout_s: float) -> Iterator[World]:
    """The processes that torchrun started, while entered; see `join`."""
    mine = not dist.is_initialized()
    world = join(timeout_s=timeout_s)
    try:
        yield world
    finally:
        if mine and dist.is_initialized():
            dist.destroy_process_group()
