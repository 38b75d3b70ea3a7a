"""LoRA and full fine-tuning on a tiny Flux: what moves, what stays, and what plain diffusers loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.models.loading import PipelineFlow
from flowcredit.weights import (
    ATTENTION_TARGETS,
    EMA,
    adapter_disabled,
    prepare_weights,
    reference_copy,
    trainable_parameters,
    weights_replaced,
)
from tiny_flux import build_tiny_flux, load_tiny_flux

PROMPTS = ["a red circle", "a blue square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def model(folder: Path) -> PipelineFlow:
    return load_tiny_flux(folder)


def velocity_of(model: PipelineFlow) -> Tensor:
    x = model.initial_noise(2, torch.Generator().manual_seed(0))
    return model.velocity(x, torch.tensor([0.8, 0.4]), model.encode(PROMPTS))


def gradients_of(model: PipelineFlow) -> dict[str, Tensor]:
    model.network.zero_grad()
    velocity_of(model).square().mean().backward()
    return {
        name: value.grad.clone()
        for name, value in trainable_parameters(model.network).items()
        if value.grad is not None
    }


def move(network: nn.Module, size: float = 0.1, seed: int = 0) -> None:
    """Stand in for training: every trained parameter takes a random step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in trainable_parameters(network).values():
            value.add_(size * torch.randn(value.shape, generator=generator))


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def test_full_fine_tuning_trains_every_weight_in_float32(folder: Path) -> None:
    model = load_tiny_flux(folder, network_dtype=torch.bfloat16)
    prepare_weights(model.network, "full")
    parameters = dict(model.network.named_parameters())
    assert trainable_parameters(model.network).keys() == parameters.keys()
    assert {value.dtype for value in parameters.values()} == {torch.float32}
    assert gradients_of(model).keys() == parameters.keys()


def test_lora_trains_two_float32_matrices_for_each_target(folder: Path) -> None:
    model = load_tiny_flux(folder, network_dtype=torch.bfloat16)
    base = {name: value.dtype for name, value in model.network.named_parameters()}
    before = velocity_of(model)
    model.network.requires_grad_(True)
    prepare_weights(model.network, "lora", rank=3)
    trained = trainable_parameters(model.network)
    # One double block with all eight projections, one single block with q, k and v.
    assert len(trained) == 2 * (8 + 3)
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert {min(value.shape) for value in trained.values()} == {3}
    frozen = {n: v.dtype for n, v in model.network.named_parameters() if n not in trained}
    assert set(frozen.values()) == set(base.values()) == {torch.bfloat16}
    assert len(frozen) == len(base)
    assert torch.equal(velocity_of(model), before), "a fresh LoRA is the base"


def test_lora_starts_by_its_seed_and_leaves_global_randomness_alone(folder: Path) -> None:
    def start(seed: int) -> dict[str, Tensor]:
        network = load_tiny_flux(folder).network
        prepare_weights(network, "lora", rank=4, seed=seed)
        return snapshot(network)

    state = torch.get_rng_state()
    first = start(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(7)
    again, other = start(1), start(2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    changed = [name for name, value in first.items() if not torch.equal(value, other[name])]
    assert changed == [name for name in first if ".lora_A." in name]


def test_a_step_of_lora_moves_no_base_weight(model: PipelineFlow) -> None:
    prepare_weights(model.network, "lora", rank=4)
    before, start = snapshot(model.network), velocity_of(model)
    optimizer = torch.optim.AdamW(trainable_parameters(model.network).values(), lr=0.1)
    gradients_of(model)
    optimizer.step()
    moved = {n for n, v in model.network.named_parameters() if not torch.equal(v, before[n])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert (velocity_of(model) - start).abs().max() > 1e-3


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradient_checkpointing_keeps_every_gradient(
    folder: Path, method: Any, autocast: torch.dtype | None
) -> None:
    model = load_tiny_flux(folder, autocast=autocast)
    prepare_weights(model.network, method, rank=4)
    plain = gradients_of(model)
    blocks_run: list[int] = []
    block: nn.Module = model.pipeline.transformer.transformer_blocks[0]
    block.register_forward_pre_hook(lambda *_: blocks_run.append(1))
    model.set_gradient_checkpointing(True)
    checkpointed = gradients_of(model)
    assert len(blocks_run) == 2, "the block did not run again in the backward pass"
    model.set_gradient_checkpointing(False)
    gradients_of(model)
    assert len(blocks_run) == 3
    assert checkpointed.keys() == plain.keys() == trainable_parameters(model.network).keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, msg=name)
        if ".lora_B." in name:
            assert gradient.abs().max() > 0, name


def test_adapter_disabled_is_the_base_and_gives_the_lora_back(model: PipelineFlow) -> None:
    base = velocity_of(model)
    prepare_weights(model.network, "lora", rank=4)
    move(model.network)
    moved, trained = velocity_of(model), trainable_parameters(model.network)
    assert (moved - base).abs().max() > 1e-2
    with torch.no_grad(), adapter_disabled(model.network):
        assert torch.equal(velocity_of(model), base)
    assert torch.equal(velocity_of(model), moved)
    assert trainable_parameters(model.network).keys() == trained.keys()
    assert all(gradient.abs().max() > 0 for gradient in gradients_of(model).values())


def interrupted(network: nn.Module) -> None:
    with adapter_disabled(network):
        raise KeyboardInterrupt


def test_adapter_comes_back_after_an_interruption(model: PipelineFlow) -> None:
    prepare_weights(model.network, "lora", rank=4)
    move(model.network)
    moved = velocity_of(model)
    with pytest.raises(KeyboardInterrupt):
        interrupted(model.network)
    assert torch.equal(velocity_of(model), moved)


def test_reference_copy_is_the_policy_before_training(model: PipelineFlow) -> None:
    start = velocity_of(model).detach()
    prepare_weights(model.network, "full")
    reference = reference_copy(model.network)
    move(model.network)
    moved = velocity_of(model).detach()
    with torch.no_grad(), weights_replaced(model.network, reference):
        assert torch.equal(velocity_of(model), start)
    assert torch.equal(velocity_of(model), moved)
    assert (moved - start).abs().max() > 1e-2


def test_weights_of_another_model_are_refused(model: PipelineFlow) -> None:
    prepare_weights(model.network, "full")
    reference = reference_copy(model.network)
    name = next(iter(reference))
    del reference[name]
    with (
        pytest.raises(ValueError, match=f"1 of the weights' names .*{name}"),
        weights_replaced(model.network, reference),
    ):
        pass
    with pytest.raises(ValueError, match=r"same model and method"):
        EMA(model.network, 0.9).load_state_dict(reference)


def test_ema_follows_the_closed_form(model: PipelineFlow) -> None:
    prepare_weights(model.network, "lora", rank=2)
    start = reference_copy(model.network)
    average = EMA(model.network, decay=0.8)
    move(model.network)
    end = reference_copy(model.network)
    for _ in range(5):
        average.update(model.network)
    for name, shadow in average.state_dict().items():
        torch.testing.assert_close(shadow, end[name] + 0.8**5 * (start[name] - end[name]))


def test_ema_in_float32_does_not_stall_below_the_weights_precision() -> None:
    network = nn.Linear(4, 4, dtype=torch.bfloat16)
    nn.init.ones_(network.weight)
    average = EMA(network, decay=0.999)
    with torch.no_grad():
        network.weight.fill_(2.0)
    for _ in range(100):
        average.update(network)
    shadow = average.state_dict()["weight"]
    assert shadow.dtype == torch.float32
    torch.testing.assert_close(shadow, torch.full((4, 4), 2.0 - 0.999**100))


def test_ema_applied_and_given_back_bit_for_bit(model: PipelineFlow) -> None:
    prepare_weights(model.network, "full")
    start = velocity_of(model).detach()
    average = EMA(model.network, decay=0.5)
    move(model.network)
    before, moved = snapshot(model.network), velocity_of(model).detach()
    with average.applied(model.network):
        assert torch.equal(velocity_of(model), start)
    assert torch.equal(velocity_of(model), moved)
    assert all(torch.equal(value, before[name]) for name, value in model.network.named_parameters())


def test_ema_goes_on_from_its_state(model: PipelineFlow) -> None:
    prepare_weights(model.network, "lora", rank=2)
    one = EMA(model.network, decay=0.9)
    move(model.network, seed=1)
    one.update(model.network)
    two = EMA(model.network, decay=0.9)
    two.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    move(model.network, seed=2)
    one.update(model.network)
    two.update(model.network)
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_ema_decay_out_of_range(decay: float) -> None:
    with pytest.raises(InputError, match="expected 0 <= decay < 1"):
        EMA(nn.Linear(1, 1), decay)


def test_unknown_targets_name_the_nearest(model: PipelineFlow) -> None:
    network = model.network
    with pytest.raises(InputError, match=r"'attn\.to_qq' names no linear layer.*nearest: attn\.to_q"):
        prepare_weights(network, "lora", targets=[*ATTENTION_TARGETS, "attn.to_qq"])
    # A layer, but not a linear one; and part of a name is not the end of it.
    with pytest.raises(InputError, match=r"'attn\.norm_q' names no linear layer"):
        prepare_weights(network, "lora", targets=["attn.norm_q"])
    with pytest.raises(InputError, match="'o_q' names no linear layer"):
        prepare_weights(network, "lora", targets=["o_q"])
    with pytest.raises(InputError, match="targets are empty"):
        prepare_weights(network, "lora", targets=[])
    assert not any(".lora_" in name for name, _ in network.named_parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "lora", "rank": 0}, "rank is 0"),
        ({"method": "lora", "alpha": 0.0}, r"alpha is 0\.0"),
        ({"method": "lora", "alpha": float("nan")}, "alpha is nan"),
        ({"method": "qlora"}, "'qlora'; expected full or lora"),
    ],
)
def test_settings_without_a_meaning(model: PipelineFlow, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare_weights(model.network, **settings)


def test_wider_targets_reach_the_feed_forward_layers(model: PipelineFlow) -> None:
    prepare_weights(
        model.network, "lora", rank=2, targets=["ff.net.2", "single_transformer_blocks.0.proj_mlp"]
    )
    layers = {name.split(".lora_")[0] for name in trainable_parameters(model.network)}
    assert layers == {"transformer_blocks.0.ff.net.2", "single_transformer_blocks.0.proj_mlp"}
