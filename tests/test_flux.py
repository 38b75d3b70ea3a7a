"""The Flux adapter against diffusers' own FluxPipeline, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

import tiny_flux
from flowcredit import time_grid
from flowcredit.errors import InputError
from flowcredit.models.loading import load_model
from tiny_flux import build_tiny_flux, euler_images, load_tiny_flux, pipeline_images

PROMPTS = ["a red circle", "a blue square left of a red circle"]

Folder = Callable[[bool, bool], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A pipeline folder by (guidance_embeds, dynamic_shift), built once."""
    built: dict[tuple[bool, bool], Path] = {}

    def folder(guidance_embeds: bool, dynamic_shift: bool) -> Path:
        key = (guidance_embeds, dynamic_shift)
        if key not in built:
            built[key] = build_tiny_flux(
                tmp_path_factory.mktemp("flux"), guidance_embeds=guidance_embeds, dynamic_shift=dynamic_shift
            )
        return built[key]

    return folder


@pytest.fixture(scope="module")
def folder(folder_of: Folder) -> Path:
    return folder_of(True, False)


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 40)])
@pytest.mark.parametrize("dynamic_shift", [False, True])
@pytest.mark.parametrize("guidance_embeds", [False, True])
def test_without_noise_the_image_is_the_pipelines(
    folder_of: Folder, guidance_embeds: bool, dynamic_shift: bool, height: int, width: int
) -> None:
    folder = folder_of(guidance_embeds, dynamic_shift)
    expected = pipeline_images(
        FluxPipeline.from_pretrained(folder, local_files_only=True), PROMPTS, height=height, width=width
    )
    images = euler_images(load_tiny_flux(folder, height=height, width=width), PROMPTS)
    assert images.shape == (2, 3, height, width)
    assert expected.std() > 0.1, "a grey image would agree with anything"
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)


def test_parity_would_notice_guidance_shift_and_text(folder_of: Folder) -> None:
    images = euler_images(load_tiny_flux(folder_of(True, False)), PROMPTS)
    others = {
        "guidance": euler_images(load_tiny_flux(folder_of(True, False), guidance_scale=3.0), PROMPTS),
        "shift": euler_images(load_tiny_flux(folder_of(True, True)), PROMPTS),
        "text": euler_images(load_tiny_flux(folder_of(True, False)), ["a red circles", PROMPTS[1]]),
    }
    for name, other in others.items():
        assert (images - other).abs().max() > 2e-4, name


def test_constant_shift_grid(folder: Path) -> None:
    grid = load_tiny_flux(folder).time_grid(4)
    assert grid.dtype == torch.float64
    torch.testing.assert_close(grid, torch.tensor([1, 0.9, 0.75, 0.5, 0], dtype=torch.float64))


@pytest.mark.parametrize(("height", "width", "tokens"), [(32, 32, 16), (24, 40, 15), (16, 64, 16)])
def test_dynamic_shift_grid_follows_the_image_size(
    folder_of: Folder, height: int, width: int, tokens: int
) -> None:
    grid = load_tiny_flux(folder_of(False, True), height=height, width=width).time_grid(7)
    shift = time_grid.resolution_shift(tokens, base_tokens=8, max_tokens=64, base_shift=0.4, max_shift=1.3)
    torch.testing.assert_close(grid, time_grid.shifted_linear(7, shift), atol=1e-6, rtol=0)


def test_grid_does_not_depend_on_what_was_sampled_before(folder: Path) -> None:
    model = load_tiny_flux(folder)
    before = model.time_grid(6)
    pipeline_images(model.pipeline, PROMPTS, num_steps=3)
    model.pipeline.scheduler.set_shift(1.0)
    assert torch.equal(model.time_grid(6), before)


def test_grid_starts_at_exactly_one_whatever_the_rounding(tmp_path: Path) -> None:
    folder = build_tiny_flux(tmp_path)
    for shift in (0.3011, 0.303):  # float32 misses 1 by one unit, below and above
        edit_json(folder / "scheduler" / "scheduler_config.json", shift=shift)
        assert load_tiny_flux(folder).time_grid(9)[0] == 1.0


def test_scheduler_settings_that_break_the_convention_are_refused(tmp_path: Path) -> None:
    folder = build_tiny_flux(tmp_path)
    edit_json(folder / "scheduler" / "scheduler_config.json", invert_sigmas=True)
    with pytest.raises(InputError, match=r"scheduler.*from 0\.0 to 1\.0.*expected from 1"):
        load_tiny_flux(folder).time_grid(4)


def test_rows_of_the_conditioning_follow_the_prompts_across_batches(folder: Path) -> None:
    model = load_tiny_flux(folder)
    prompts = [f"a {'red' if i % 2 else 'blue'} {chr(97 + i % 26)} {i // 26}" for i in range(40)]
    cond = model.encode(prompts)
    for row in (0, 1, 33, 39):
        alone = model.encode([prompts[row]])
        for key, rows in cond.items():
            torch.testing.assert_close(rows[row : row + 1], alone[key], atol=1e-5, rtol=0)
            assert (rows[row] - rows[row - 1]).abs().max() > 1e-2
            assert not rows.requires_grad


def test_truncated_prompts_are_counted_for_each_encoder(folder: Path) -> None:
    model = load_tiny_flux(folder)
    long = " ".join(["red"] * 300)
    # "▁red" is one token to T5, which adds its end; "red" is one to CLIP, which adds start and end.
    fits_t5, over_t5 = " ".join(["red"] * (tiny_flux.T5_TOKENS - 1)), " ".join(["red"] * tiny_flux.T5_TOKENS)
    fits_clip = " ".join(["red"] * (tiny_flux.CLIP_TOKENS - 2))
    over_clip = fits_clip + " red"
    assert model.truncated([fits_t5]) == {"clip": 0, "t5": 0}
    assert model.truncated([over_t5]) == {"clip": 0, "t5": 1}
    assert model.truncated([fits_clip]) == {"clip": 0, "t5": 1}
    assert model.truncated([over_clip]) == {"clip": 1, "t5": 1}
    assert model.truncated(["a red circle", long, over_t5, long]) == {"clip": 2, "t5": 3}


def test_long_prompts_are_sampled_and_nothing_is_printed(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = load_tiny_flux(folder)
    long = "one word of three hundred, " * 60
    model.truncated([long])
    assert torch.isfinite(euler_images(model, [long, "a red circle"])).all()
    assert capfd.readouterr() == ("", "")
    assert caplog.messages == []


def test_autocast_reduces_the_computation_and_nothing_else(folder: Path) -> None:
    exact, reduced = load_tiny_flux(folder), load_tiny_flux(folder, autocast=torch.bfloat16)
    cond = exact.encode(PROMPTS)
    x = exact.initial_noise(2, torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.3])
    for parameter in reduced.network.parameters():
        parameter.requires_grad_(True)
    v, v_reduced = exact.velocity(x, sigma, cond), reduced.velocity(x, sigma, cond)
    v_reduced.square().mean().backward()
    error = (v - v_reduced).norm() / v.norm()
    assert v_reduced.dtype == torch.float32
    assert 1e-4 < error < 0.05
    assert all(
        p.dtype == torch.float32 == p.grad.dtype for p in reduced.network.parameters() if p.grad is not None
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(exact.velocity(x, sigma, cond), v), "the caller's autocast changes the policy"


def test_autocast_of_the_caller_keeps_no_old_weights(folder: Path) -> None:
    model = load_tiny_flux(folder, autocast=torch.bfloat16)
    model.network.requires_grad_(True)
    cond = model.encode(PROMPTS)
    x = model.initial_noise(2, torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.3])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.velocity(x, sigma, cond)
        for parameter in model.network.parameters():
            parameter.zero_()
        assert model.velocity(x, sigma, cond).abs().max() == 0.0


def test_frozen_base_in_bfloat16_gives_float32_velocities(folder: Path) -> None:
    exact = load_tiny_flux(folder)
    model = load_tiny_flux(folder, dtype=torch.bfloat16, network_dtype=torch.bfloat16)
    x = exact.initial_noise(2, torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.3])
    v, expected = (
        model.velocity(x, sigma, model.encode(PROMPTS)),
        exact.velocity(x, sigma, exact.encode(PROMPTS)),
    )
    assert v.dtype == torch.float32
    assert (v - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_is_the_same_in_any_batch_and_clamped(folder: Path, dtype: torch.dtype) -> None:
    noise = load_tiny_flux(folder).initial_noise(5, torch.Generator().manual_seed(2))
    whole = load_tiny_flux(folder, decode_batch_size=5).decode(noise)
    images = load_tiny_flux(folder, decode_batch_size=2, dtype=dtype).decode(noise)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, whole, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)
    strong = load_tiny_flux(folder, dtype=dtype).decode(30 * noise)
    assert strong.min() == 0.0
    assert strong.max() == 1.0


def test_everything_starts_frozen_in_eval_mode(folder: Path) -> None:
    model = load_tiny_flux(folder)
    parts = [part for part in model.pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert model.network in parts
    assert len(parts) == 4
    for part in parts:
        assert not any(parameter.requires_grad for parameter in part.parameters())
        assert not any(module.training for module in part.modules())


def test_dtypes_of_network_and_frozen_parts_are_separate(folder: Path) -> None:
    model = load_tiny_flux(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.network.parameters()} == {torch.float32}
    for name in ("vae", "text_encoder", "text_encoder_2"):
        parameters = model.pipeline.components[name].named_parameters()
        # Older versions of transformers keep this layer of T5 in float32.
        dtypes = {p.dtype for key, p in parameters if not key.endswith("DenseReluDense.wo.weight")}
        assert dtypes == {torch.bfloat16}, name


@pytest.mark.parametrize(("height", "width", "found"), [(36, 32, "height is 36"), (32, 4, "width is 4")])
def test_sizes_that_the_model_cannot_make(folder: Path, height: int, width: int, found: str) -> None:
    with pytest.raises(InputError, match=f"{found} pixels.*multiples of 8, such as"):
        load_tiny_flux(folder, height=height, width=width)


def test_missing_or_wrong_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: nothing there; expected a folder"):
        load_tiny_flux(tmp_path / "absent")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="a file; expected a folder"):
        load_tiny_flux(tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match=r"no model_index\.json \(the folder has weights\.safetensors\)"):
        load_tiny_flux(tmp_path)
    with pytest.raises(InputError, match=r"no model_index\.json \(the folder has config\.json, diffusion"):
        load_tiny_flux(folder / "transformer")


def test_pipelines_of_another_kind_are_named(folder: Path, tmp_path: Path) -> None:
    other = copy_of(folder, tmp_path / "other")
    edit_json(other / "model_index.json", _class_name="PixArtAlphaPipeline")
    with pytest.raises(
        InputError, match=r"'PixArtAlphaPipeline' has no adapter; expected one of .*FluxPipeline"
    ):
        load_tiny_flux(other)
    (other / "model_index.json").write_text('{"_class_name": "FluxPipeline",')
    with pytest.raises(InputError, match=r"model_index\.json: not valid JSON .*line 1"):
        load_tiny_flux(other)
    (other / "model_index.json").write_text('["FluxPipeline"]')
    with pytest.raises(InputError, match="a JSON list; expected an object"):
        load_tiny_flux(other)


def test_incomplete_downloads_are_named(folder: Path, tmp_path: Path) -> None:
    partial = copy_of(folder, tmp_path / "partial")
    (partial / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"transformer: no weights; expected diffusion_pytorch_model"):
        load_tiny_flux(partial)
    shutil.rmtree(partial / "vae")
    with pytest.raises(InputError, match=r"vae missing; model_index\.json lists .*text_encoder"):
        load_tiny_flux(partial)


@pytest.mark.parametrize(
    "file_name", ["vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"]
)
def test_cut_off_weight_files_are_named(folder: Path, tmp_path: Path, file_name: str) -> None:
    cut = copy_of(folder, tmp_path / "cut")
    file = cut / file_name
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match=f"{file_name}: no whole safetensors file of 1,000 bytes"):
        load_tiny_flux(cut)


@pytest.mark.parametrize(
    ("part", "setting"), [("transformer", "num_attention_heads"), ("text_encoder_2", "d_model")]
)
def test_weights_that_do_not_fit_their_config_are_named(
    folder: Path, tmp_path: Path, part: str, setting: str
) -> None:
    other = copy_of(folder, tmp_path / "other")
    edit_json(other / part / "config.json", **{setting: 3 if part == "transformer" else 24})
    with pytest.raises(InputError, match=f"{part}: weights that are of another shape: .* is .*, not "):
        load_tiny_flux(other)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
def test_tokenizers_without_a_vocabulary_are_named(folder: Path, tmp_path: Path, name: str) -> None:
    partial = copy_of(folder, tmp_path / "partial")
    (partial / name / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=rf"{name}: no vocabulary \(found tokenizer_config\.json\)"):
        load_tiny_flux(partial)


@pytest.mark.parametrize("length", [0, 513])
def test_sequence_lengths_that_flux_refuses(folder: Path, length: int) -> None:
    with pytest.raises(InputError, match=f"max_sequence_length is {length} tokens; expected 1 to 512"):
        load_model(
            folder,
            height=32,
            width=32,
            guidance_scale=1.0,
            max_sequence_length=length,
            dtype=torch.float32,
            device="cpu",
            decode_batch_size=1,
        )
