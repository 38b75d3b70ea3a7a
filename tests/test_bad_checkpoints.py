"""Checkpoints whose weights do not fit: one line that names the file or folder, never weights at random."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTextModel

import tiny_clip
from flowcredit.cli import main
from flowcredit.errors import InputError
from flowcredit.models.loading import PipelineFlow
from flowcredit.rewards import load_reward
from tiny_diffusion import build_tiny_diffusion, load_tiny_diffusion
from tiny_flux import build_tiny_flux, load_tiny_flux
from tiny_qwen_image import build_tiny_qwen_image, load_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3, load_tiny_sd3

Load = Callable[[Path], PipelineFlow]
FAMILIES: dict[str, tuple[Callable[[Path], Path], Load]] = {
    "flux": (build_tiny_flux, load_tiny_flux),
    "sd3": (build_tiny_sd3, load_tiny_sd3),
    "qwen": (build_tiny_qwen_image, load_tiny_qwen_image),
    "diffusion": (build_tiny_diffusion, load_tiny_diffusion),
}
PARTS = (
    ("flux", "transformer"),
    ("flux", "text_encoder_2"),
    ("sd3", "transformer"),
    ("sd3", "text_encoder"),
    ("qwen", "text_encoder"),
    ("qwen", "vae"),
    ("diffusion", "unet"),
    ("diffusion", "vae"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = FAMILIES[family][0](tmp_path_factory.mktemp(family) / "model")
        return folders[family]

    return folder


def changed(folder: Path, target: Path, part: str, change: Callable[[dict[str, Tensor], str], None]) -> Path:
    """A copy of the pipeline in which the weights of a part are changed; ``change`` gets one name of them."""
    shutil.copytree(folder, target)
    (file,) = (target / part).glob("*.safetensors")
    tensors = load_file(file)
    change(tensors, sorted(tensors)[len(tensors) // 2])
    save_file(tensors, file, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_weights_that_do_not_fit_are_named(
    built: Callable[[str], Path], tmp_path: Path, family: str, part: str
) -> None:
    folder, load = built(family), FAMILIES[family][1]
    load(folder)
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[len(tensors) // 2]
    # Its end alone: transformers renames some weights as it loads.
    last, shape = name.rpartition(".")[2], list(tensors[name].shape)

    def wider(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name] = torch.zeros([size + 1 for size in tensors[name].shape])

    for title, change, fault in (
        ("less", lambda t, n: t.pop(n), rf"missing: \S+\.{last}"),
        ("more", lambda t, n: t.update(new=torch.zeros(1)), "unknown: new"),
        ("wider", wider, rf"of another shape: \S+\.{last} is \[.*\], not {re.escape(str(shape))}"),
    ):
        bad = changed(folder, tmp_path / title, part, change)
        pattern = rf"{title}/{part}: weights that are {fault}; expected exactly those of a \w+ of"
        with pytest.raises(InputError, match=pattern) as caught:
            load(bad)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None]
)
@pytest.mark.parametrize(("family", "part"), [("flux", "transformer"), ("qwen", "text_encoder")])
def test_a_file_that_is_not_whole_is_named(
    built: Callable[[str], Path], tmp_path: Path, family: str, part: str, content: bytes | None
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(built(family), folder)
    (file,) = (folder / part).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    size = f"{file.stat().st_size:,}"
    with pytest.raises(InputError, match=rf"{file.name}: no whole safetensors file of {size} bytes \(.*cut"):
        FAMILIES[family][1](folder)


def test_numbers_of_positions_that_old_versions_saved_are_let_pass(
    built: Callable[[str], Path], tmp_path: Path
) -> None:
    def add(tensors: dict[str, Tensor], name: str) -> None:
        tensors["text_model.embeddings.position_ids"] = torch.arange(40)[None]

    folder = changed(built("diffusion"), tmp_path / "old", "text_encoder", add)
    old, new = load_tiny_diffusion(folder), load_tiny_diffusion(built("diffusion"))
    assert torch.equal(old.encode(["a"])["prompt_embeds"], new.encode(["a"])["prompt_embeds"])
    assert isinstance(old.pipeline.text_encoder, CLIPTextModel)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda t, n: t.pop(n), "is missing"), (lambda t, n: t.update(new=torch.zeros(1)), "'new' is unknown")],
)
@pytest.mark.parametrize("name", ["clip", "pickscore", "hps"])
def test_a_rewards_weights_that_do_not_fit_are_named(
    tmp_path: Path, name: str, change: Any, expected: str
) -> None:
    folder = tiny_clip.make_clip(tmp_path / "whole" / "clip")
    bad = changed(tmp_path / "whole", tmp_path / "copy", "clip", change) / "clip"
    load_reward(name, {"path": str(folder)}, "cpu")
    with pytest.raises(InputError, match=rf"copy/clip: not a complete CLIP model \(.*{expected}\)"):
        load_reward(name, {"path": str(bad)}, "cpu")


def test_the_command_ends_with_one_line(
    built: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    folder = changed(built("flux"), tmp_path / "bad", "transformer", lambda t, n: t.update(new=torch.ones(1)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: bad\nmodel: {{path: {folder}, height: 32, width: 32, max_sequence_length: 12}}\n"
        f"prompts: {{train: {tmp_path}/prompts.txt, heldout: {tmp_path}/prompts.txt}}\n"
        "rewards: ['simple_rewards:redness']\n"
    )
    monkeypatch.setattr(sys, "argv", ["flowcredit", "check", str(recipe)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert [line for line in said if "weights that are unknown: new" in line] == said[-1:]


def test_a_config_of_other_types_is_one_line(built: Callable[[str], Path], tmp_path: Path) -> None:
    target = tmp_path / "model"
    shutil.copytree(built("flux"), target)
    file = target / "transformer" / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "num_attention_heads": "two"}))
    with pytest.raises(InputError, match=r"not loadable as a FluxPipeline: .* \(in transformer/\)"):
        load_tiny_flux(target)


def test_an_index_that_is_no_object_is_told_by_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_index.json").write_text("[]")
    recipe = Path(__file__).parent.parent / "recipes" / "shapes_g2rpo.yaml"
    monkeypatch.setattr(sys, "argv", ["flowcredit", "plan", str(recipe), f"model.path={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "model_index.json: a JSON list; expected an object" in capsys.readouterr().err
