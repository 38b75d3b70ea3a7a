"""`model.lora`: a LoRA from a file is part of the weights before anything else happens, in every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters import train_stand_in
from flowcredit.errors import InputError
from flowcredit.export import LORA_FILE, export_weights
from flowcredit.models.loading import PipelineFlow, load_model
from flowcredit.weights import prepare_weights
from tiny_diffusion import build_tiny_diffusion
from tiny_flux import build_tiny_flux, euler_images
from tiny_qwen_image import build_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3

PROMPTS = ["a red circle", "a blue square"]
FAMILIES: list[Callable[[Path], Path]] = [
    build_tiny_flux,
    build_tiny_sd3,
    build_tiny_qwen_image,
    build_tiny_diffusion,
]


def load(folder: Path, lora: Path | None = None) -> PipelineFlow:
    settings: dict[str, Any] = {
        "height": 32,
        "width": 32,
        "guidance_scale": 1.0,
        "max_sequence_length": 24,
        "dtype": torch.float32,
        "device": "cpu",
        "decode_batch_size": 4,
    }
    return load_model(folder, lora=lora, **settings)


def images(model: PipelineFlow) -> Tensor:
    return euler_images(model, PROMPTS, num_steps=4)


@pytest.mark.parametrize("build", FAMILIES)
def test_a_lora_that_a_run_left_is_loaded_at_its_strength(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = build(tmp_path / "model")
    first = load(folder)
    plain = images(first)
    train_stand_in(first, "lora")
    expected = images(first)
    lora = export_weights(first, tmp_path / "lora")
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(images(load(folder, lora)), expected, atol=1e-5, rtol=0)
    named = load(folder, lora / LORA_FILE)
    torch.testing.assert_close(images(named), expected, atol=1e-5, rtol=0)
    # Training can go on from there: with a new LoRA, which begins without an effect, or in full.
    prepare_weights(named.network, "lora", rank=2, alpha=2.0, targets=named.lora_targets)
    torch.testing.assert_close(images(named), expected, atol=1e-5, rtol=0)
    assert not any(".lora_" in name for name, _ in load(folder, lora).network.named_parameters())


def test_what_is_no_lora_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_flux(tmp_path / "model")
    with pytest.raises(InputError, match=r"model\.lora .*absent: nothing there"):
        load(folder, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"model\.lora .*empty: cannot be put on this FluxPipeline"):
        load(folder, tmp_path / "empty")
    other = load(build_tiny_sd3(tmp_path / "sd3"))
    train_stand_in(other, "lora")
    lora = export_weights(other, tmp_path / "lora")
    # Told by the names in its file, not by what the libraries say of it ("safe to ignore").
    with pytest.raises(InputError, match=r"lora: is no LoRA for this FluxTransformer2DModel: it adapts \S+"):
        load(folder, lora)


def test_a_lora_that_holds_no_numbers_is_named(tmp_path: Path) -> None:
    folder = build_tiny_flux(tmp_path / "model")
    model = load(folder)
    train_stand_in(model, "lora")
    file = export_weights(model, tmp_path / "lora") / LORA_FILE
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(InputError, match=r"^model\.lora \S*lora: weights that hold NaN or infinity: "):
        load(folder, tmp_path / "lora")
