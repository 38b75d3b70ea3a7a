"""The Qwen-Image adapter against diffusers' own QwenImagePipeline, and what it refuses."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import QwenImagePipeline

from adapters import train_stand_in, updated_once, velocities_by_row, with_and_without_checkpointing
from flowcredit.errors import InputError
from flowcredit.export import export_weights
from flowcredit.weights import prepare_weights
from tiny_flux import euler_images
from tiny_qwen_image import (
    TEXT_TOKENS,
    build_tiny_qwen_image,
    load_tiny_qwen_image,
    plain_images,
    tokenizer,
)

PROMPTS = ["a red circle", "a blue square left of a red circle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen_image(tmp_path_factory.mktemp("qwen"))


def load_plain(folder: Path) -> QwenImagePipeline:
    return QwenImagePipeline.from_pretrained(folder, local_files_only=True)


def test_the_tiny_tokenizer_reads_the_template_as_the_real_one_does(folder: Path) -> None:
    pipeline = load_plain(folder)
    head, _, tail = pipeline.prompt_template_encode.partition("{}")
    assert len(tokenizer()(head).input_ids) == pipeline.prompt_template_encode_start_idx
    assert len(tokenizer()(tail).input_ids) == 5


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 40)])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_without_noise_the_image_is_the_pipelines(
    folder: Path, guidance_scale: float, height: int, width: int
) -> None:
    plain = load_plain(folder)
    expected = plain_images(plain, PROMPTS, guidance_scale=guidance_scale, height=height, width=width)
    model = load_tiny_qwen_image(folder, guidance_scale=guidance_scale, height=height, width=width)
    images = euler_images(model, PROMPTS, num_steps=3)
    assert images.shape == (2, 3, height, width)
    assert expected.std() > 0.1, "a grey image would agree with anything"
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)


def test_parity_would_notice_guidance_and_text(folder: Path) -> None:
    images = euler_images(load_tiny_qwen_image(folder), PROMPTS, num_steps=3)
    negative = load_tiny_qwen_image(folder, negative_prompt="a red square")
    others = {
        "guidance": euler_images(load_tiny_qwen_image(folder, guidance_scale=3.0), PROMPTS, num_steps=3),
        "negative": euler_images(negative, PROMPTS, num_steps=3),
        "text": euler_images(load_tiny_qwen_image(folder), ["a red circles", PROMPTS[1]], num_steps=3),
    }
    for name, other in others.items():
        assert (images - other).abs().max() > 1e-3, name
    expected = plain_images(load_plain(folder), PROMPTS, negative_prompt="a red square")
    torch.testing.assert_close(others["negative"], expected, atol=1e-4, rtol=0)


def test_a_single_prompt_is_drawn_as_among_longer_ones(folder: Path) -> None:
    """The pipeline alone with the short prompt has no padding at all; here it always has."""
    expected = plain_images(load_plain(folder), PROMPTS[:1])
    images = euler_images(load_tiny_qwen_image(folder), PROMPTS[:1], num_steps=3)
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    model = load_tiny_qwen_image(folder)
    alone, among = model.encode(PROMPTS[:1]), model.encode([*PROMPTS[:1], "a" * 60])
    for name in ("prompt_embeds", "mask"):
        assert alone[name].shape[1] == TEXT_TOKENS
        torch.testing.assert_close(among[name][:1], alone[name], atol=1e-5, rtol=0)
    # Template's tail of five tokens, "a", " red", " circle".
    assert alone["mask"].sum() == 8
    assert among["mask"].sum(1).tolist() == [8, TEXT_TOKENS]


# Sums over threads are ordered by the batch.
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_a_rows_velocity_is_its_own(folder: Path, guidance_scale: float) -> None:
    model = load_tiny_qwen_image(folder, guidance_scale=guidance_scale)
    together, alone, under_another_text = velocities_by_row(model, [*PROMPTS, "a"])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert (under_another_text - alone).abs().flatten(1).amax(1).min() > 1e-3


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradient_checkpointing_keeps_every_gradient(
    folder: Path, method: Literal["full", "lora"], autocast: torch.dtype | None
) -> None:
    found = with_and_without_checkpointing(load_tiny_qwen_image(folder, autocast=autocast), method, PROMPTS)
    assert found.checkpointed_runs == 2 * found.plain_runs > 0, "the blocks did not run again"
    assert found.checkpointed.keys() == found.plain.keys()
    assert any(bool(gradient.any()) for gradient in found.plain.values())
    torch.testing.assert_close(found.checkpointed, found.plain)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_update_moves_the_trained_weights_alone(folder: Path, method: Literal["full", "lora"]) -> None:
    done = updated_once(load_tiny_qwen_image(folder), method, PROMPTS)
    assert done.metrics["on_policy_deviation"] == 0.0
    assert done.metrics["grad_norm"] > 0
    assert done.moved <= done.trained
    # Text leaves the last block of a joint transformer unused, and what leads there has no gradient.
    assert done.reached > 0.6


def test_autocast_stays_close(folder: Path) -> None:
    exact, reduced = load_tiny_qwen_image(folder), load_tiny_qwen_image(folder, autocast=torch.bfloat16)
    cond, x = exact.encode(PROMPTS), exact.initial_noise(2, torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.3])
    with torch.no_grad():
        v, rounded = exact.velocity(x, sigma, cond), reduced.velocity(x, sigma, cond)
    assert rounded.dtype == torch.float32
    assert 1e-4 < (v - rounded).norm() / v.norm() < 0.05


def test_exported_lora_has_the_same_strength_in_plain_diffusers(folder: Path, tmp_path: Path) -> None:
    model = load_tiny_qwen_image(folder)
    train_stand_in(model, "lora")
    images = euler_images(model, PROMPTS, num_steps=3)
    lora = export_weights(model, tmp_path / "lora")
    plain = load_plain(folder)
    assert (images - plain_images(plain, PROMPTS)).abs().max() > 0.02, "the LoRA does nothing"
    plain.load_lora_weights(lora)
    torch.testing.assert_close(plain_images(plain, PROMPTS), images, atol=1e-5, rtol=0)


def test_exported_pipeline_gives_the_trained_image(folder: Path, tmp_path: Path) -> None:
    model = load_tiny_qwen_image(folder)
    train_stand_in(model, "full")
    images = euler_images(model, PROMPTS, num_steps=3)
    export = export_weights(model, tmp_path / "export")
    torch.testing.assert_close(plain_images(load_plain(export), PROMPTS), images, atol=1e-5, rtol=0)
    assert (images - euler_images(load_tiny_qwen_image(folder), PROMPTS, num_steps=3)).abs().max() > 0.02


def test_truncated_prompts_are_counted(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = load_tiny_qwen_image(folder)
    fits, over = " red" * (TEXT_TOKENS - 5), " red" * (TEXT_TOKENS - 4)
    assert model.truncated([fits, over, " red" * 3000]) == {"qwen": 2}
    assert torch.isfinite(euler_images(model, [over, "a"], num_steps=2)).all()
    assert capfd.readouterr() == ("", "")
    assert caplog.messages == []


def test_a_terminal_shift_has_no_grid_of_one_step(folder: Path) -> None:
    model = load_tiny_qwen_image(folder)
    assert model.time_grid(4)[-2].item() == pytest.approx(0.02, abs=1e-6)
    with pytest.raises(
        InputError, match="scheduler: at 1 steps a time grid holds values that are not finite"
    ):
        model.time_grid(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 36}, "height is 36 pixels; .*multiples of 8, such as 32 or 40"),
        ({"max_sequence_length": 1025}, "max_sequence_length is 1025 tokens; expected 1 to 1024"),
        ({"guidance_scale": 1.0, "negative_prompt": "ugly"}, "negative_prompt is 'ugly', but this model"),
    ],
)
def test_settings_that_the_model_cannot_follow(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tiny_qwen_image(folder, **settings)


def test_other_networks_and_targets_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'img_mlp' names no linear layer of QwenImageTransformer2DModel"):
        prepare_weights(load_tiny_qwen_image(folder).network, "lora", targets=["img_mlp"])
    other = build_tiny_qwen_image(tmp_path)
    file = other / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"guidance_embeds": True}))
    with pytest.raises(InputError, match=r"config\.json: guidance_embeds is true"):
        load_tiny_qwen_image(other)
