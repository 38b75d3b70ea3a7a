"""Exported weights, read back by plain diffusers: same image, same strength."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.export import LORA_FILE, export_weights
from flowcredit.models.loading import PipelineFlow
from flowcredit.pipeline_folder import sort_metadata
from flowcredit.weights import EMA, prepare_weights, trainable_parameters
from tiny_flux import build_tiny_flux, euler_images, load_tiny_flux, pipeline_images

PROMPTS = ["a red circle", "a blue square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_flux(tmp_path_factory.mktemp("flux"))


def trained(folder: Path, method: str, dtype: torch.dtype = torch.float32) -> PipelineFlow:
    """A model whose trained weights have moved far enough to change the image."""
    model = load_tiny_flux(folder, dtype=dtype)
    if method == "lora":
        prepare_weights(model.network, "lora", rank=4, alpha=20.0)
    else:
        prepare_weights(model.network, "full")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in trainable_parameters(model.network).values():
            value.add_(0.05 * torch.randn(value.shape, generator=generator))
    return model


def plain_diffusers(folder: Path, lora: Path | None = None) -> Tensor:
    pipeline = FluxPipeline.from_pretrained(folder, local_files_only=True)
    if lora is not None:
        pipeline.load_lora_weights(lora)
    return pipeline_images(pipeline, PROMPTS)


def test_exported_lora_has_the_same_strength_in_plain_diffusers(folder: Path, tmp_path: Path) -> None:
    model = trained(folder, "lora")
    images = euler_images(model, PROMPTS)
    lora = export_weights(model, tmp_path / "lora")
    assert [file.name for file in lora.iterdir()] == [LORA_FILE]
    torch.testing.assert_close(plain_diffusers(folder, lora), images, atol=1e-5, rtol=0)
    assert (images - plain_diffusers(folder)).abs().max() > 0.05, "the LoRA does nothing"
    # The same file without its metadata: diffusers takes alpha = rank, and the test above would see it.
    weights = load_file(lora / LORA_FILE)
    bare = tmp_path / "bare"
    bare.mkdir()
    save_file(weights, bare / LORA_FILE, metadata={"format": "pt"})
    assert (images - plain_diffusers(folder, bare)).abs().max() > 1e-2


EXPORTS = """
import sys
from pathlib import Path
from test_export import trained
from flowcredit.export import export_weights
export_weights(trained(Path(sys.argv[1]), "lora"), sys.argv[2])
"""


def test_equal_lora_weights_are_equal_bytes_in_every_process(folder: Path, tmp_path: Path) -> None:
    """Sets and tables have another order in each process; a resumed run is another one."""
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", EXPORTS, str(folder), str(tmp_path / seed)]
        subprocess.run(words, env=environment, check=True, capture_output=True)
    here = export_weights(trained(folder, "lora"), tmp_path / "here") / LORA_FILE
    first, second = ((tmp_path / seed / LORA_FILE).read_bytes() for seed in ("1", "2"))
    assert first == second == here.read_bytes()
    # Nothing but the order is changed by it.
    names = load_file(here)
    save_file(names, tmp_path / "plain", metadata={"b": "ö", "a": '"', "format": "pt"})
    sort_metadata(tmp_path / "plain")
    with safe_open(tmp_path / "plain", framework="pt") as file:
        assert file.metadata() == {"b": "ö", "a": '"', "format": "pt"}
        assert all(torch.equal(file.get_tensor(name), value) for name, value in names.items())


def test_lora_file_says_rank_alpha_and_targets(folder: Path, tmp_path: Path) -> None:
    lora = export_weights(trained(folder, "lora"), tmp_path / "lora")
    with safe_open(lora / LORA_FILE, framework="pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        names = list(file.keys())
    assert metadata["transformer.r"] == 4
    assert metadata["transformer.lora_alpha"] == 20.0
    assert "attn.to_q" in metadata["transformer.target_modules"]
    assert all(name.startswith("transformer.") for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_pipeline_gives_the_trained_image(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model = trained(folder, "full", dtype)
    export = export_weights(model, tmp_path / "export")
    saved = load_tiny_flux(export, dtype=dtype)
    torch.testing.assert_close(euler_images(saved, PROMPTS), euler_images(model, PROMPTS), atol=1e-5, rtol=0)
    assert (plain_diffusers(export) - plain_diffusers(folder)).abs().max() > 0.05
    # Everything else is the source's, byte for byte, whatever precision it was used in.
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        relative = file.relative_to(folder)
        same = (export / relative).read_bytes() == file.read_bytes()
        assert same != (relative.parts == ("transformer", "diffusion_pytorch_model.safetensors")), relative


def test_averaged_weights_are_exported_while_they_are_applied(folder: Path, tmp_path: Path) -> None:
    model = load_tiny_flux(folder)
    prepare_weights(model.network, "full")
    start = euler_images(model, PROMPTS)
    average = EMA(model.network, 0.9)
    with torch.no_grad():
        for value in trainable_parameters(model.network).values():
            value.mul_(1.5)
    with average.applied(model.network):
        export = export_weights(model, tmp_path / "export")
    torch.testing.assert_close(plain_diffusers(export), start, atol=1e-5, rtol=0)


def test_export_never_overwrites_by_itself(folder: Path, tmp_path: Path) -> None:
    model = trained(folder, "lora")
    with pytest.raises(InputError, match="the model was loaded from there"):
        export_weights(model, folder, overwrite=True)
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="the folder is not empty; remove it or choose another"):
        export_weights(model, target)
    assert (target / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="it is a file"):
        export_weights(model, target / "notes.txt")
    export_weights(model, target, overwrite=True)
    assert [file.name for file in target.iterdir()] == [LORA_FILE]


def test_equal_adapters_are_equal_files(folder: Path, tmp_path: Path) -> None:
    """Byte for byte, also where the library's own order of the header's notes falls otherwise."""
    model = trained(folder, "lora")
    target = tmp_path / "out"
    files = set()
    for _ in range(12):
        export_weights(model, target, overwrite=True)
        files.add((target / LORA_FILE).read_bytes())
    (content,) = files
    length = int.from_bytes(content[:8], "little")
    notes = json.loads(content[8 : 8 + length])["__metadata__"]
    assert list(notes) == sorted(notes)
    settings = json.loads(notes["lora_adapter_metadata"])
    targets = settings["transformer.target_modules"]
    assert len(targets) > 1
    assert targets == sorted(targets)


def test_a_failed_export_leaves_what_was_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    export_weights(trained(folder, "lora"), target)
    before = (target / LORA_FILE).read_bytes()
    full = trained(folder, "full")

    def disk_full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", disk_full)
    with pytest.raises(InputError, match=r"out: cannot be written \(.*No space left"):
        export_weights(full, target, overwrite=True)
    assert [file.name for file in target.iterdir()] == [LORA_FILE]
    assert (target / LORA_FILE).read_bytes() == before
    monkeypatch.undo()
    export_weights(full, target, overwrite=True)
    assert (target / "model_index.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
