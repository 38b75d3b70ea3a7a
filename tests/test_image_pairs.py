"""Images of pairs: found, refused, cut and scaled; and to latents by every family's VAE."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.image_pairs import check_pairs, read_pairs
from flowcredit.models.loading import ADAPTERS, PipelineFlow, load_model
from flowcredit.prompts import PromptSet, load_prompts
from tiny_diffusion import build_tiny_diffusion
from tiny_flux import build_tiny_flux
from tiny_qwen_image import TEXT_TOKENS, build_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3

COLUMNS = ("chosen", "rejected")


def picture(path: Path, width: int = 32, height: int = 24, seed: int = 0) -> np.ndarray:
    """Write a PNG of random colours; its pixels [H, W, 3]."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def pairs_file(folder: Path, *rows: dict[str, Any]) -> PromptSet:
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "a", **row}) for row in rows))
    return load_prompts(file)


def test_pixels_come_back_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    first = picture(tmp_path / "images" / "a.png", seed=1)
    second = picture(tmp_path / "b.png", seed=2)
    prompts = pairs_file(
        tmp_path,
        {"chosen": "images/a.png", "rejected": "b.png"},
        {"chosen": str(tmp_path / "b.png"), "rejected": "images/a.png"},
    )
    check_pairs(prompts, COLUMNS, 24, 32)
    read = read_pairs(prompts, COLUMNS, 24, 32)
    assert read.shape == (2, 2, 3, 24, 32)
    for row, pair in enumerate([(first, second), (second, first)]):
        for got, pixels in zip(read[row], pair, strict=True):
            torch.testing.assert_close(got * 255, torch.from_numpy(pixels).permute(2, 0, 1).float())


def test_larger_images_are_cut_around_their_centre_and_scaled_down(tmp_path: Path) -> None:
    """As a whole image scaled to the shorter side, and then cut."""
    wide = picture(tmp_path / "wide.png", 128, 64)
    Image.fromarray(wide.transpose(1, 0, 2)).convert("RGBA").save(tmp_path / "tall.png")
    prompts = pairs_file(tmp_path, {"chosen": "wide.png", "rejected": "tall.png"})
    scaled = Image.fromarray(wide).resize((32, 16), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.asarray(scaled)[:, 8:24].copy()).permute(2, 0, 1)
    read = read_pairs(prompts, COLUMNS, 16, 16)[0] * 255
    torch.testing.assert_close(read[0], expected.float(), atol=1e-4, rtol=0)
    # On its side it is scaled in the other order, and each way is rounded: a level of 255, in some versions.
    torch.testing.assert_close(read[1], expected.transpose(1, 2).float(), atol=1.0, rtol=0)
    assert expected.float().std() > 5


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    pixels = picture(tmp_path / "up.png", 24, 32)
    rotated = Image.fromarray(np.rot90(pixels).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # Shown turned by a quarter, clockwise.
    rotated.save(tmp_path / "on its side.png", exif=exif)
    prompts = pairs_file(tmp_path, {"chosen": "up.png", "rejected": "on its side.png"})
    check_pairs(prompts, COLUMNS, 32, 24)
    upright, turned = read_pairs(prompts, COLUMNS, 32, 24)[0]
    assert torch.equal(turned, upright)


BAD = {
    "missing": (lambda folder: None, "no such file; paths are relative"),
    "a folder": (lambda folder: (folder / "bad.png").mkdir(), "not readable as an image"),
    "a text": (lambda folder: (folder / "bad.png").write_text("no"), "not an image that Pillow knows"),
    "deep": (
        lambda folder: Image.new("I;16", (40, 40), 999).save(folder / "bad.png"),
        "more than 8 bits a channel",
    ),
    "small": (lambda folder: picture(folder / "bad.png", 32, 23), "32 x 23 pixels, smaller than .* 32 x 24"),
}


@pytest.mark.parametrize(("make", "told"), BAD.values(), ids=BAD)
def test_bad_images_are_named_by_line_before_a_run(
    tmp_path: Path, make: Callable[[Path], Any], told: str
) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    make(tmp_path)
    prompts = pairs_file(
        tmp_path, {"chosen": "a.png", "rejected": "b.png"}, {"chosen": "a.png", "rejected": "bad.png"}
    )
    for look in (check_pairs, read_pairs):
        with pytest.raises(InputError, match=rf'pairs\.jsonl:2: "rejected" \S*bad\.png: {told}'):
            look(prompts, COLUMNS, 24, 32)


@pytest.mark.parametrize("other", ["a.png", "./a.png", "linked.png"])
def test_a_pair_of_one_file_is_refused(tmp_path: Path, other: str) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    (tmp_path / "linked.png").symlink_to(tmp_path / "a.png")
    prompts = pairs_file(
        tmp_path, {"chosen": "b.png", "rejected": "a.png"}, {"chosen": "a.png", "rejected": other}
    )
    with pytest.raises(InputError, match=r'pairs\.jsonl:2: "rejected" \S+: is the file of "chosen" too'):
        check_pairs(prompts, COLUMNS, 24, 32)


def test_an_image_cut_short_is_named_when_it_is_read(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "bad.png").write_bytes(whole[: len(whole) // 2])
    prompts = pairs_file(tmp_path, {"chosen": "bad.png", "rejected": "a.png"})
    check_pairs(prompts, COLUMNS, 24, 32)
    with pytest.raises(InputError, match=r'pairs\.jsonl:1: "chosen" \S*bad\.png: not readable as an image'):
        read_pairs(prompts.take([0, 0]), COLUMNS, 24, 32)


def test_rows_without_paths_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    for value, got in [(None, "null"), ("  ", "an empty text"), (3, "a number")]:
        prompts = pairs_file(tmp_path, {"chosen": "a.png", "rejected": value})
        with pytest.raises(InputError, match=rf'pairs\.jsonl:1: "rejected" must be the path .*, got {got}'):
            check_pairs(prompts, COLUMNS, 24, 32)
    with pytest.raises(InputError, match=r"no column 'best', .*: prompt, chosen, rejected; .*chosen_column"):
        check_pairs(prompts, ("best", "rejected"), 24, 32)
    from_the_hub = PromptSet(("a",), dict.fromkeys(COLUMNS, ("a.png",)), source="hf:owner/name")
    with pytest.raises(InputError, match="which has no folder; expected an absolute path"):
        check_pairs(from_the_hub, COLUMNS, 24, 32)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "FluxPipeline": build_tiny_flux,
    "QwenImagePipeline": build_tiny_qwen_image,
    "StableDiffusion3Pipeline": build_tiny_sd3,
    "StableDiffusionPipeline": build_tiny_diffusion,
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


def load(folder: Path, guidance_scale: float) -> PipelineFlow:
    return load_model(
        folder,
        height=32,
        width=48,
        guidance_scale=guidance_scale,
        max_sequence_length=TEXT_TOKENS,
        dtype=torch.float32,
        device="cpu",
        decode_batch_size=2,
    )


def test_every_family_is_covered() -> None:
    assert FAMILIES.keys() == ADAPTERS.keys()


@torch.no_grad()
def round_trip(vae: Any, images: Tensor) -> Tensor:
    """What the VAE itself keeps of images, one by one and without its latents' scale."""
    kept = []
    for image in images:
        pixels = image[None] * 2 - 1
        if type(vae).__name__ == "AutoencoderKLQwenImage":
            pixels = pixels.unsqueeze(2)
        decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
        kept.append(decoded.reshape(1, 3, 32, 48))
    return (torch.cat(kept) / 2 + 0.5).clamp(0, 1)


def test_images_go_to_latents_and_back_as_in_the_vae_itself(folder: Path) -> None:
    """How ``decode`` scales latents is held to the pipeline's own call elsewhere; ``encode_images`` undoes
    it."""
    model = load(folder, 1.0)
    images = torch.rand(3, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    images[1] = images[1] * 0.1 + 0.8
    latents = model.encode_images(images)
    assert latents.shape == model.initial_noise(3, torch.Generator()).shape
    assert latents.dtype == torch.float32
    assert not latents.requires_grad
    expected = round_trip(model.pipeline.vae, images)
    torch.testing.assert_close(model.decode(latents), expected, atol=5e-5, rtol=0)
    assert (expected[0] - expected[1]).abs().max() > 0.01
    again = model.encode_images(images)
    assert torch.equal(again, latents)


def test_without_guidance_a_model_is_that_of_a_scale_of_1(folder: Path) -> None:
    prompts = ["a red circle", "a blue square"]
    guided, plain = load(folder, 4.0), load(folder, 1.0)
    x = guided.initial_noise(2, torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.3])
    cond = guided.encode(prompts)
    with torch.no_grad():
        expected = plain.velocity(x, sigma, cond)
        before = guided.velocity(x, sigma, cond)
        bare = guided.without_guidance().velocity(x, sigma, cond)
        assert torch.equal(guided.velocity(x, sigma, cond), before)
    torch.testing.assert_close(bare, expected, atol=1e-6, rtol=0)
    if type(guided.pipeline).__name__ == "FluxPipeline":
        assert torch.equal(bare, before)
    else:
        assert (bare - before).abs().max() > 1e-3
    assert guided.without_guidance().network is guided.network


def test_embedded_guidance_stays(tmp_path: Path) -> None:
    model = load(build_tiny_flux(tmp_path, guidance_embeds=True), 3.5)
    x, sigma = model.initial_noise(1, torch.Generator().manual_seed(0)), torch.tensor([0.5])
    cond = model.encode(["a red circle"])
    assert torch.equal(model.without_guidance().velocity(x, sigma, cond), model.velocity(x, sigma, cond))
