"""The SD3 adapter against diffusers' own StableDiffusion3Pipeline, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from adapters import train_stand_in, updated_once, velocities_by_row, with_and_without_checkpointing
from flowcredit.errors import InputError
from flowcredit.export import export_weights
from flowcredit.models.loading import load_model
from flowcredit.weights import prepare_weights
from tiny_flux import euler_images
from tiny_sd3 import T5_TOKENS, build_tiny_sd3, load_plain, load_tiny_sd3, plain_images

PROMPTS = ["a red circle", "a blue square left of a red circle"]

Folder = Callable[[bool, bool], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A pipeline folder by (t5, dynamic_shift), built once."""
    built: dict[tuple[bool, bool], Path] = {}

    def folder(t5: bool, dynamic_shift: bool) -> Path:
        key = (t5, dynamic_shift)
        if key not in built:
            built[key] = build_tiny_sd3(tmp_path_factory.mktemp("sd3"), t5=t5, dynamic_shift=dynamic_shift)
        return built[key]

    return folder


@pytest.fixture(scope="module")
def folder(folder_of: Folder) -> Path:
    return folder_of(True, False)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 40)])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize(("t5", "dynamic_shift"), [(True, False), (True, True), (False, False)])
def test_without_noise_the_image_is_the_pipelines(
    folder_of: Folder, t5: bool, dynamic_shift: bool, guidance_scale: float, height: int, width: int
) -> None:
    folder = folder_of(t5, dynamic_shift)
    plain = load_plain(folder, t5=t5)
    expected = plain_images(plain, PROMPTS, guidance_scale=guidance_scale, height=height, width=width)
    model = load_tiny_sd3(folder, guidance_scale=guidance_scale, height=height, width=width)
    images = euler_images(model, PROMPTS, num_steps=3)
    assert images.shape == (2, 3, height, width)
    assert expected.std() > 0.1, "a grey image would agree with anything"
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)


def test_negative_prompt_is_the_pipelines(folder: Path) -> None:
    expected = plain_images(load_plain(folder), PROMPTS, negative_prompt="a red square")
    images = euler_images(load_tiny_sd3(folder, negative_prompt="a red square"), PROMPTS, num_steps=3)
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    assert (images - euler_images(load_tiny_sd3(folder), PROMPTS, num_steps=3)).abs().max() > 1e-3


def test_parity_would_notice_guidance_shift_and_text(folder_of: Folder) -> None:
    model = load_tiny_sd3(folder_of(True, False))
    images = euler_images(model, PROMPTS, num_steps=3)
    others = {
        "guidance": euler_images(
            load_tiny_sd3(folder_of(True, False), guidance_scale=3.5), PROMPTS, num_steps=3
        ),
        "shift": euler_images(load_tiny_sd3(folder_of(True, True)), PROMPTS, num_steps=3),
        "text": euler_images(model, ["a red circles", PROMPTS[1]], num_steps=3),
    }
    for name, other in others.items():
        assert (images - other).abs().max() > 1e-3, name


def test_guidance_at_one_evaluates_each_row_once(folder: Path) -> None:
    rows: list[int] = []
    for scale, expected in ((0.0, 2), (1.0, 2), (1.5, 4)):
        model = load_tiny_sd3(folder, guidance_scale=scale)
        model.network.register_forward_pre_hook(
            lambda _module, _args, given: rows.append(len(given["hidden_states"])), with_kwargs=True
        )
        x = model.initial_noise(2, torch.Generator().manual_seed(0))
        model.velocity(x, torch.tensor([0.8, 0.4]), model.encode(PROMPTS))
        assert rows.pop() == expected
        assert not rows


# Sums over threads are ordered by the batch.
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_a_rows_velocity_is_its_own(folder: Path, guidance_scale: float) -> None:
    model = load_tiny_sd3(folder, guidance_scale=guidance_scale)
    together, alone, under_another_text = velocities_by_row(model, [*PROMPTS, "a"])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert (under_another_text - alone).abs().flatten(1).amax(1).min() > 1e-3


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_update_moves_the_trained_weights_alone(folder: Path, method: Literal["full", "lora"]) -> None:
    done = updated_once(load_tiny_sd3(folder), method, PROMPTS)
    assert done.metrics["on_policy_deviation"] == 0.0
    assert done.metrics["grad_norm"] > 0
    assert done.moved <= done.trained
    # Text leaves the last block of a joint transformer unused, and what leads there has no gradient.
    assert done.reached > 0.6


def test_gradients_under_guidance_pass_through_both_halves(folder: Path) -> None:
    """d|v|²/dw of the guided velocity, against the same built from two calls without guidance."""
    guided = load_tiny_sd3(folder, negative_prompt="a red square")
    bare = load_tiny_sd3(folder, guidance_scale=1.0)
    x = guided.initial_noise(2, torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.8, 0.4])
    weights = []
    for model in (guided, bare):
        prepare_weights(model.network, "full")
        weights.append(dict(model.network.named_parameters())["proj_out.weight"])
    v = guided.velocity(x, sigma, guided.encode(PROMPTS))
    own = bare.velocity(x, sigma, bare.encode(PROMPTS))
    away = bare.velocity(x, sigma, bare.encode(["a red square"] * 2))
    by_hand = 4.0 * own - 3.0 * away
    torch.testing.assert_close(v, by_hand, atol=1e-5, rtol=1e-5)
    (found,) = torch.autograd.grad(v.square().sum(), weights[0])
    (expected,) = torch.autograd.grad(by_hand.square().sum(), weights[1])
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-4)


def test_autocast_and_a_base_in_bfloat16_stay_close(folder: Path) -> None:
    exact = load_tiny_sd3(folder)
    cond, x = exact.encode(PROMPTS), exact.initial_noise(2, torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.3])
    with torch.no_grad():
        v = exact.velocity(x, sigma, cond)
        for model in (
            load_tiny_sd3(folder, autocast=torch.bfloat16),
            load_tiny_sd3(folder, network_dtype=torch.bfloat16),
        ):
            reduced = model.velocity(x, sigma, cond)
            assert reduced.dtype == torch.float32
            assert 1e-4 < (v - reduced).norm() / v.norm() < 0.05


@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradient_checkpointing_keeps_every_gradient(folder: Path, method: Literal["full", "lora"]) -> None:
    found = with_and_without_checkpointing(load_tiny_sd3(folder), method, PROMPTS)
    assert found.checkpointed_runs == 2 * found.plain_runs > 0, "the blocks did not run again"
    assert found.checkpointed.keys() == found.plain.keys()
    assert any(bool(gradient.any()) for gradient in found.plain.values())
    torch.testing.assert_close(found.checkpointed, found.plain)


@pytest.mark.parametrize("t5", [True, False])
def test_exported_lora_has_the_same_strength_in_plain_diffusers(
    folder_of: Folder, tmp_path: Path, t5: bool
) -> None:
    folder = folder_of(t5, False)
    model = load_tiny_sd3(folder)
    train_stand_in(model, "lora")
    images = euler_images(model, PROMPTS, num_steps=3)
    lora = export_weights(model, tmp_path / "lora")
    plain = load_plain(folder, t5=t5)
    assert (images - plain_images(plain, PROMPTS)).abs().max() > 0.02, "the LoRA does nothing"
    plain.load_lora_weights(lora)
    torch.testing.assert_close(plain_images(plain, PROMPTS), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("t5", [True, False])
def test_exported_pipeline_gives_the_trained_image(folder_of: Folder, tmp_path: Path, t5: bool) -> None:
    folder = folder_of(t5, False)
    model = load_tiny_sd3(folder)
    train_stand_in(model, "full")
    images = euler_images(model, PROMPTS, num_steps=3)
    export = export_weights(model, tmp_path / "export")
    torch.testing.assert_close(plain_images(load_plain(export, t5=t5), PROMPTS), images, atol=1e-5, rtol=0)
    assert (images - euler_images(load_tiny_sd3(folder), PROMPTS, num_steps=3)).abs().max() > 0.02


def test_truncated_prompts_are_counted_for_each_encoder_there_is(
    folder_of: Folder, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    over_t5, over_all = " ".join(["red"] * T5_TOKENS), " ".join(["red"] * 300)
    model = load_tiny_sd3(folder_of(True, False))
    assert model.truncated(["a red circle", over_t5, over_all]) == {"clip": 1, "clip_2": 1, "t5": 2}
    without = load_tiny_sd3(folder_of(False, False))
    assert without.truncated(["a red circle", over_t5, over_all]) == {"clip": 1, "clip_2": 1}
    assert torch.isfinite(euler_images(model, [over_all, "a"], num_steps=2)).all()
    assert capfd.readouterr() == ("", "")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 36}, "height is 36 pixels; .*multiples of 8, such as 32 or 40"),
        ({"width": 72}, "width is 72 pixels; this model makes at most 64"),
        ({"max_sequence_length": 513}, "max_sequence_length is 513 tokens; expected 1 to 512"),
        (
            {"guidance_scale": 1.0, "negative_prompt": "ugly"},
            "negative_prompt is 'ugly', but this model reads none at guidance_scale 1; expected an empty",
        ),
    ],
)
def test_settings_that_the_model_cannot_follow(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tiny_sd3(folder, **settings)


def test_flux_reads_no_negative_prompt(tmp_path: Path) -> None:
    from tiny_flux import build_tiny_flux

    with pytest.raises(InputError, match="negative_prompt is 'ugly', but this model reads none"):
        load_model(
            build_tiny_flux(tmp_path),
            height=32,
            width=32,
            guidance_scale=3.5,
            negative_prompt="ugly",
            max_sequence_length=12,
            dtype=torch.float32,
            device="cpu",
            decode_batch_size=1,
        )


def test_other_schedulers_and_targets_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'attn\.to_qq' names no linear layer of SD3Transformer2DModel"):
        prepare_weights(load_tiny_sd3(folder).network, "lora", targets=["attn.to_qq"])
    other = build_tiny_sd3(tmp_path)
    index = json.loads((other / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    (other / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(
        InputError, match="scheduler: DDIMScheduler; expected FlowMatchEulerDiscreteScheduler"
    ):
        load_tiny_sd3(other)
