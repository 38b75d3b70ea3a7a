"""Prompt embeddings from disk: the same as fresh ones, and never those of another encoder or setting."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcredit.models.loading import PipelineFlow, load_model
from tiny_diffusion import build_tiny_diffusion
from tiny_flux import build_tiny_flux
from tiny_qwen_image import build_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3

PROMPTS = ["a red circle", "a blue square", "a red circle", "green"]
FAMILIES: list[Callable[[Path], Path]] = [
    build_tiny_flux,
    build_tiny_sd3,
    build_tiny_qwen_image,
    build_tiny_diffusion,
]


def load(folder: Path, cache: Path | None, **changes: Any) -> PipelineFlow:
    settings: dict[str, Any] = {
        "height": 32,
        "width": 32,
        "guidance_scale": 1.0,
        "max_sequence_length": 24,
        "dtype": torch.float32,
        "device": "cpu",
        "decode_batch_size": 4,
    }
    return load_model(folder, text_cache_folder=cache, **{**settings, **changes})


def counted(model: PipelineFlow) -> list[int]:
    """Grows by one with every call of the first text encoder."""
    calls: list[int] = []
    model.pipeline.text_encoder.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("build", FAMILIES)
def test_cached_embeddings_are_the_fresh_ones(build: Callable[[Path], Path], tmp_path: Path) -> None:
    folder, cache = build(tmp_path / "model"), tmp_path / "cache"
    fresh = load(folder, None).encode(PROMPTS)
    first = load(folder, cache)
    calls = counted(first)
    filled = first.encode(PROMPTS)
    assert len(calls) == 1
    again = first.encode(list(reversed(PROMPTS)))
    assert len(calls) == 1
    later = load(folder, cache)
    calls = counted(later)
    read = later.encode(PROMPTS)
    assert not calls
    assert fresh.keys() == read.keys()
    for name, value in fresh.items():
        torch.testing.assert_close(read[name], value, atol=1e-6, rtol=0)
        assert torch.equal(read[name], filled[name])
        assert torch.equal(again[name].flip(0), filled[name])
        assert not torch.equal(value[0], value[1]) or value.dtype == torch.bool


def test_only_what_is_missing_is_encoded(tmp_path: Path) -> None:
    model = load(build_tiny_flux(tmp_path / "model"), tmp_path / "cache")
    seen: list[int] = []
    model.pipeline.text_encoder.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    model.encode(PROMPTS[:1])
    model.encode(PROMPTS)
    assert seen == [1, 2]
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 3
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_another_encoder_or_setting_has_rows_of_its_own(tmp_path: Path) -> None:
    folder, cache = build_tiny_flux(tmp_path / "model"), tmp_path / "cache"
    wide = load(folder, cache).encode(PROMPTS)["prompt_embeds"]
    narrow = load(folder, cache, max_sequence_length=8).encode(PROMPTS)["prompt_embeds"]
    assert (wide.shape[1], narrow.shape[1]) == (24, 8)
    half = load(folder, cache, dtype=torch.bfloat16).encode(PROMPTS)["prompt_embeds"]
    assert half.dtype == torch.bfloat16
    file = folder / "text_encoder_2" / "model.safetensors"
    os.utime(file, ns=(0, 0))
    changed = load(folder, cache)
    calls = counted(changed)
    changed.encode(PROMPTS)
    assert calls
    assert len(list(cache.iterdir())) == 4


def test_a_damaged_row_is_written_anew(tmp_path: Path) -> None:
    model = load(build_tiny_flux(tmp_path / "model"), tmp_path / "cache")
    whole = model.encode(PROMPTS[:1])["pooled"]
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:40])
    assert torch.equal(model.encode(PROMPTS[:1])["pooled"], whole)
    assert torch.equal(load(tmp_path / "model", tmp_path / "cache").encode(PROMPTS[:1])["pooled"], whole)
