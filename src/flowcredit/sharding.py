"""A network whose weights are spread over the processes of a run (FSDP2), and its tensors made whole again.

Every process calls these functions together: whole tensors are gathered, and taken apart, by all of them.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowcredit.distributed import World
from flowcredit.errors import InputError


def shard(network: nn.Module, world: World, device: torch.device, compute: torch.dtype | None) -> None:
    """Spread the weights of ``network`` over the processes, block by block, in place.

    Each keeps its part of the weights, gradients and optimizer state in the weights' own type. ``compute``:
    type in which weights are gathered for a forward pass; their own if None. Gradients are averaged over the
    processes in float32. InputError for a single process.
    """
    if world.size == 1:
        raise InputError(
            "parallel.sharding is 'sharded', but there is one process; start several by torchrun, or set it"
            " to replicated"
        )
    mesh = init_device_mesh(device.type, (world.size,))
    # Inputs keep their type: a time in bfloat16 would be another time.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in _blocks(network):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Taken apart again after every forward pass: weights are read and replaced between them.
    fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # torch warns of in-place changes of a block's output, which nothing here makes.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a diffusers network: what its own loading does not split over devices."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    inside: set[nn.Module] = set()
    for module in network.modules():
        if type(module).__name__ in names and module not in inside:
            inside.update(module.modules())
            yield module


def whole(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The tensors as if there were one process, on the CPU of the first; the others get nothing.

    What is whole and there already is not copied.
    """
    found = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if world.first:
            found[name] = value.cpu()
    return found


def parted(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor laid out, and placed, as ``like`` is."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_scale(parameters: Sequence[Tensor], world: World) -> int:
    """What a process's share of a loss is multiplied by, so that its gradients add up over the processes."""
    return world.size if any(isinstance(each, DTensor) for each in parameters) else 1


def as_number(tensor: Tensor) -> float:
    """The value of a tensor of one number, wherever its parts are."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
