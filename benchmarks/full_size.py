"""The plan's activations beside a dry run by torch itself, at full size: no weights, no GPU, little memory.

    python benchmarks/full_size.py [--model FLUX.1-dev] [--method lora]

torch's fake tensors run every operation of diffusers' own network, forward and backward, with shapes and
types but without numbers; what is alive is counted from outside. So published models are checked at their
width and depth, by the rules of a CPU. Prints a Markdown table, a minute or two for each model.
"""

import argparse
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flowcredit.config import ModelSettings
from flowcredit.memory.activations import Passes
from flowcredit.memory.families import FAMILIES, Inputs, inputs_of, network_of
from flowcredit.memory.folders import Component, Pipeline, published_pipeline
from flowcredit.quiet import quiet_libraries
from flowcredit.weights import prepare_weights

RANK = 64
MODELS = {
    "FLUX.1-dev": (720, 512),
    "stable-diffusion-3.5-medium": (512, 256),
    "stable-diffusion-3.5-large": (1024, 256),
    "Qwen-Image": (1024, 512),
}
"""Pixels and text tokens, by the names of published models."""

Method = Literal["full", "lora"]


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most there were; ``known`` ones are left out."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {id(t.untyped_storage()): t.untyped_storage() for t in known}
        self._counted: set[int] = set()

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        self._counted.discard(key)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key, size = id(storage), storage.nbytes()
                if key not in self._seen and key not in self._counted:
                    self._counted.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, key, size)
        return out


@dataclass(frozen=True)
class Case:
    """A published model, or one of its shape with fewer blocks, and how it is trained."""

    pipeline: Pipeline
    settings: ModelSettings
    method: Method
    checkpoints: bool

    @property
    def component(self) -> Component:
        return self.pipeline.parts[FAMILIES[self.pipeline.kind].part]

    @property
    def targets(self) -> tuple[str, ...]:
        return FAMILIES[self.pipeline.kind].targets


def make_case(name: str, method: Method, checkpoints: bool, blocks: Mapping[str, Any] | None = None) -> Case:
    """``blocks`` are fields that replace those of the published config."""
    found = published_pipeline(Path(name))
    assert found is not None
    pixels, words = MODELS[name]
    part = FAMILIES[found.kind].part
    old = found.parts[part]
    new = Component(part, old.kind, {**old.config, **(blocks or {})}, None)
    settings = ModelSettings(path=name, height=pixels, width=pixels, max_sequence_length=words)
    return Case(Pipeline(found.kind, {**found.parts, part: new}), settings, method, checkpoints)


def planned(case: Case) -> int:
    """Bytes of one state's forward and backward pass as the plan has them, by the rules of a CPU."""
    network = network_of(case.pipeline)
    assert network is not None
    full = case.method == "full"
    passes = Passes(
        network,
        case.component,
        inputs_of(case.pipeline, case.settings),
        4 if full else 2,
        2,
        False,
        full,
        0 if full else RANK,
        lambda name: any(name.endswith("." + target) for target in case.targets),
        case.checkpoints,
    )
    return passes.training(1, accumulating=False)[0]


def faked(case: Case) -> int:
    """The same by torch's fake tensors."""
    dtype = torch.float32 if case.method == "full" else torch.bfloat16
    fields = {k: v for k, v in case.component.config.items() if k != "_class_name"}
    with torch.device("meta"), quiet_libraries():
        network: Any = getattr(diffusers, case.component.kind)(**fields).to(dtype)
    network.requires_grad_(False).eval()
    prepare_weights(network, case.method, rank=RANK, targets=case.targets)
    if case.checkpoints:
        network.enable_gradient_checkpointing()
    with FakeTensorMode():
        _fill(network)
        given = _arguments(case, dtype)
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        alive = Alive([*network.parameters(), *network.buffers()])
        with alive, warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            # Autocast over float32 weights is meant, in norms too.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            out = network(**given, return_dict=False)[0].float()
        with alive:
            out.backward(torch.ones_like(out))
    return alive.peak + sum(value.untyped_storage().nbytes() for value in tensors)


def _fill(network: nn.Module) -> None:
    """Fake tensors on the CPU in the place of those on the meta device."""
    for module in network.modules():
        for name, value in module.named_parameters(recurse=False):
            fake = torch.empty(value.shape, dtype=value.dtype)
            module.register_parameter(name, nn.Parameter(fake, requires_grad=value.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
        for name, value in list(vars(module).items()):
            # Tables that are no buffers, such as Qwen-Image's positions.
            if isinstance(value, Tensor):
                setattr(module, name, torch.empty(value.shape, dtype=value.dtype))


def _arguments(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    inputs: Inputs = inputs_of(case.pipeline, case.settings)
    words, width = inputs.text
    given: dict[str, Any] = {
        "hidden_states": torch.empty(1, *inputs.state, dtype=dtype),
        "encoder_hidden_states": torch.empty(1, words, width, dtype=dtype),
        "timestep": torch.ones(1),
    }
    if inputs.pooled:
        given["pooled_projections"] = torch.empty(1, inputs.pooled, dtype=dtype)
    if case.pipeline.kind == "FluxPipeline":
        given |= {"txt_ids": torch.zeros(words, 3), "img_ids": torch.zeros(inputs.state[0], 3)}
        given["guidance"] = torch.ones(1)
    if case.pipeline.kind == "QwenImagePipeline":
        _, height, width = inputs.latent
        given["encoder_hidden_states_mask"] = torch.ones(1, words, dtype=torch.bool)
        given["img_shapes"] = [[(1, height // 2, width // 2)]]
    return given


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="one model alone")
    parser.add_argument("--method", choices=("lora", "full"), help="one method alone")
    args = parser.parse_args()
    methods: tuple[Method, ...] = ("lora", "full") if args.method is None else (args.method,)
    print("| model | training | planned, MiB | fake tensors, MiB | planned / fake |")
    print("|---|---|---|---|---|")
    for name in MODELS if args.model is None else (args.model,):
        for method in methods:
            for checkpoints in (True, False):
                case = make_case(name, method, checkpoints)
                ours, theirs = planned(case), faked(case)
                how = f"{method}, {'checkpointing' if checkpoints else 'all kept'}"
                sizes = f"{ours >> 20:,} | {theirs >> 20:,} | {ours / theirs:.3f}"
                print(f"| {name}, {case.settings.height} px | {how} | {sizes} |")


if __name__ == "__main__":
    main()
