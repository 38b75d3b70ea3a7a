"""Several processes of one run: who takes which prompts, and what they tell each other.

``flowcredit launch`` or ``torchrun`` starts them, one for each device. Without these there is one, and
nothing here communicates. What is exchanged are numbers, tensors and JSON, never pickled objects.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from flowcredit import processes
from flowcredit.errors import InputError
from flowcredit.heartbeat import Heartbeat, connect

MARGIN_S = 60.0
"""How much longer torch's own limit is: the heartbeat's message comes first, and says more."""
MESSAGE = 2**25
"""Numbers in one message of gradients: the copy that is sent is no larger."""


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
    heartbeat: Heartbeat | None = field(default=None, compare=False, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def note(self, stage: str, iteration: int | None = None) -> None:
        """Where this process is, for the others' messages should it not come to them."""
        if self.heartbeat is not None:
            self.heartbeat.note(stage, iteration)

    def note_run(self, run: Path) -> None:
        """The folder of the run, for the advice on how to go on with it."""
        if self.heartbeat is not None:
            self.heartbeat.run = run

    def _meeting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.heartbeat is None else self.heartbeat.meeting()

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
        with self._meeting():
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
        with self._meeting():
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
        with self._meeting():
            dist.all_gather(parts, padded)
        return [json.loads(bytes(p[:n].tolist())) for p, n in zip(parts, sizes, strict=True)]

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add up the gradients of all processes in place, in messages of one type and device.

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
            for part in messages(grads):
                flat = torch.cat([grad.flatten() for grad in part])
                with self._meeting():
                    dist.all_reduce(flat)
                for grad, summed in zip(part, flat.split([g.numel() for g in part]), strict=True):
                    grad.copy_(summed.view_as(grad))

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.size > 1:
            with self._meeting():
                dist.barrier()


def messages(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in order, so many together that they are ``MESSAGE`` numbers, or one that has more alone."""
    part: list[Tensor] = []
    count = 0
    for grad in grads:
        if part and count + grad.numel() > MESSAGE:
            yield part
            part, count = [], 0
        part.append(grad)
        count += grad.numel()
    if part:
        yield part


ALONE = World()

_heartbeats: list[Heartbeat] = []
"""That of this process, while it is one of several."""


def join(environment: Mapping[str, str] = os.environ, timeout_s: float = 600.0) -> World:
    """Join the processes that were started together, or be the only one.

    Raises InputError where the environment names several processes and they cannot be joined, or where
    several seem to be wanted of which each would be alone.
    """
    processes.refuse_pretence(environment)
    size = processes.size(environment)
    if size == 1:
        return World()
    if "RANK" not in environment:
        raise InputError(f"WORLD_SIZE says {size} processes, but RANK is not set; start them by torchrun")
    rank = processes.number("RANK", 0, environment)
    local = processes.number("LOCAL_RANK", rank, environment)
    if not dist.is_initialized():
        _join(rank, size, local, timeout_s, environment)
    if dist.get_world_size() != size:
        raise InputError(
            f"WORLD_SIZE says {size} processes, {dist.get_world_size()} have joined; start them by torchrun"
        )
    return World(rank, size, local, _heartbeats[-1] if _heartbeats else None)


def _join(rank: int, size: int, local: int, timeout_s: float, environment: Mapping[str, str]) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        heartbeat = Heartbeat(connect(timeout_s, environment), rank, size, timeout_s)
        heartbeat.start()
        _heartbeats.append(heartbeat)
        with heartbeat.meeting():
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s + MARGIN_S),
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"it cannot join the other processes: {reason}") from error


@contextmanager
def joined(timeout_s: float) -> Iterator[World]:
    """The processes that were started together, while entered; see `join`.

    An error that ends one of them ends all: it is raised in that process, with its number; in the others
    SystemExit with its exit code.
    """
    mine = not dist.is_initialized()
    try:
        world = join(timeout_s=timeout_s)
        try:
            yield world
        except BaseException as error:
            if not mine or world.heartbeat is None:
                raise
            settled = world.heartbeat.settle(error)
            if settled is error:
                raise
            raise settled from (error if isinstance(error, InputError) else None)
    finally:
        if mine:
            _part()


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    while _heartbeats:
        _heartbeats.pop().stop()
