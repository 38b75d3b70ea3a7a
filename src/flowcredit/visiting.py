"""Modules that live in the CPU's memory and visit a device while they are needed."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch
from torch import Tensor, nn


@contextmanager
def visiting(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """The modules' weights on ``device`` while entered; afterwards those that were there before.

    Copies visit, the originals stay: nothing is copied back, and a change that is made meanwhile is lost. For
    frozen modules, then.
    """
    home = [(tensor, tensor.data) for tensor in _tensors(modules)]
    try:
        for tensor, data in home:
            tensor.data = _copy(data, device)
        yield
    finally:
        for tensor, data in home:
            tensor.data = data


class Guest:
    """Modules that visit for each of their users, who may come from several threads at once."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """From now on the modules live on the CPU."""
        self._modules = tuple(modules)
        self._device = device
        self._lock = Lock()
        self._users = 0
        self._visit = ExitStack()
        for tensor in _tensors(self._modules):
            tensor.data = tensor.data.cpu()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The modules on their device: from the first user's coming to the last one's leaving."""
        with self._lock:
            if self._users == 0:
                self._visit.enter_context(visiting(self._modules, self._device))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._visit.close()


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Weights and buffers, each once, whatever modules share them."""
    found = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return list({id(tensor): tensor for tensor in found}.values())


def _copy(data: Tensor, device: torch.device) -> Tensor:
    return data.to(device)
