"""What is trained and what it is compared with: full weights or a LoRA, their average, the reference.

LoRA: arXiv 2106.09685, through peft. Nothing here depends on a model family: a network is a diffusers
model (``ModelMixin`` with ``PeftAdapterMixin``), its parameters are addressed by name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.limits import check_targets
from flowcredit.sharding import own_part, parted

Method = Literal["full", "lora"]

ATTENTION_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Every projection of the joint attention, by the names of diffusers' Flux and SD3 blocks.

diffusers' own FLUX LoRA trainer adds ff.net.0.proj, ff.net.2, ff_context.net.0.proj, ff_context.net.2.
"""


def trainable_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name, in the network's own order."""
    return {name: value for name, value in network.named_parameters() if value.requires_grad}


def fingerprints(parameters: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Two sums of each tensor, which a change of any weight moves; no second copy of the weights is made.

    Of a network that is spread over processes, those of this one's part.
    """
    found = {}
    for name, parameter in parameters.items():
        values = own_part(parameter.detach()).flatten()
        ramp = torch.linspace(0.5, 1.5, len(values), device=values.device)
        found[name] = (
            float(values.sum(dtype=torch.float64)),
            float((values * ramp).sum(dtype=torch.float64)),
        )
    return found


def prepare_weights(
    network: Any,
    method: Method,
    *,
    rank: int = 32,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    seed: int = 0,
) -> None:
    """Choose what is trained, in place: every weight, or a LoRA on a frozen base; float32 either way.

    ``rank``, ``alpha`` (LoRA's strength is alpha / rank; None: alpha = rank), ``targets`` (ends of module
    names; None: ATTENTION_TARGETS) and ``seed`` are read for a LoRA only. The base keeps its dtype. Equal
    seeds give equal LoRA weights, and no global random state changes.

    Raises InputError for a target that names no linear layer, a rank below 1 or an alpha not above 0.
    """
    if method == "full":
        _train_in_float32(network.parameters())
        return
    if method != "lora":
        raise InputError(f"method is {method!r}; expected full or lora")
    if rank < 1:
        raise InputError(f"LoRA rank is {rank}; expected at least 1")
    if alpha is not None and not alpha > 0:
        raise InputError(f"LoRA alpha is {alpha}; expected a number above 0")
    chosen = tuple(targets) if targets is not None else ATTENTION_TARGETS
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    check_targets(linear, chosen, type(network).__name__)
    _add_lora(network, rank, float(rank) if alpha is None else alpha, chosen, seed)


def _add_lora(network: Any, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights="gaussian")
    # peft draws on the CPU from the global generator, whatever device the base stands on.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network.add_adapter(config)
    _train_in_float32(value for name, value in network.named_parameters() if ".lora_" in name)


def _train_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.float32)
        parameter.requires_grad_(True)


@contextmanager
def adapter_disabled(network: Any) -> Iterator[None]:
    """The network without its LoRA: the reference policy of a LoRA run. Not for use under a gradient."""
    network.disable_adapters()
    try:
        yield
    finally:
        network.enable_adapters()


def reference_copy(network: nn.Module) -> dict[str, Tensor]:
    """A copy of the trained parameters, by name: with ``weights_replaced`` the reference of a full run."""
    return {name: value.detach().clone() for name, value in trainable_parameters(network).items()}


@contextmanager
def weights_replaced(network: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The network with ``values`` as its trained parameters; on leaving, its own again, bit for bit.

    The values are copied in place, so a graph built before must not be walked backward afterwards.
    Raises ValueError if the names are not those of the trained parameters.
    """
    parameters = trainable_parameters(network)
    _check_names(values, parameters)
    own = {name: value.detach().clone() for name, value in parameters.items()}
    _copy_into(parameters, values)
    try:
        yield
    finally:
        _copy_into(parameters, own)


class EMA:
    """Exponential moving average of the trained parameters: shadow = decay shadow + (1 - decay) weights.

    The shadow is float32 whatever the weights are, and starts as a copy of them.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        """Raises InputError unless 0 <= decay < 1."""
        if not 0.0 <= decay < 1.0:
            raise InputError(f"EMA decay is {decay}; expected 0 <= decay < 1")
        self.decay = decay
        self._shadow = {
            name: value.detach().to(torch.float32, copy=True)
            for name, value in trainable_parameters(network).items()
        }

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Move the shadow one step towards the weights; call it once after each optimizer step."""
        for name, value in trainable_parameters(network).items():
            self._shadow[name].lerp_(value.detach().to(torch.float32), 1.0 - self.decay)

    @contextmanager
    def applied(self, network: nn.Module) -> Iterator[None]:
        """The network with the averaged weights; on leaving, its own again, bit for bit."""
        with weights_replaced(network, self._shadow):
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """The shadow by parameter name, float32; not a copy."""
        return dict(self._shadow)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a shadow saved by ``state_dict``. Raises ValueError if the names differ."""
        _check_names(state, self._shadow)
        with torch.no_grad():
            _copy_into(self._shadow, state)


@torch.no_grad()
def _copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(parted(values[name], target) if type(values[name]) is Tensor else values[name])


def _check_names(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    difference = sorted(found.keys() ^ expected.keys())
    if difference:
        raise ValueError(
            f"{len(difference)} of the weights' names differ from the trained parameters, such as "
            f"{difference[0]}; expected the weights of the same model and method"
        )
