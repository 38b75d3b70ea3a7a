"""Code is run for the user's own command or recipe alone: nothing else that is read can name some.

A model's index and configs, a service's answers and the rows of a prompt file are tried.
"""

import contextlib
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_clip
from fake_service import fake_service
from flowcredit.cli import main
from flowcredit.errors import InputError
from flowcredit.prompts import load_prompts
from flowcredit.rewards import load_reward
from flowcredit.scoring import score_images
from test_untrusted_files import canary, flux, load_flux

__all__ = ["canary", "flux"]

EVIL = "from pathlib import Path\nPath({!r}).mkdir()\n\nclass Evil:\n    pass\n"


def evil_module(folder: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the model's folder, which is the current one and on the import path."""
    (folder / "evil_of_the_model.py").write_text(EVIL.format(str(canary)))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return "evil_of_the_model"


@pytest.mark.parametrize("part", ["scheduler", "transformer", "tokenizer", "extra"])
def test_a_model_index_that_names_other_modules(
    flux: Path, canary: Path, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(flux, folder)
    (folder / "extra").mkdir()
    name = evil_module(folder, canary, monkeypatch)
    index = json.loads((folder / "model_index.json").read_text())
    for entry in ([name, "Evil"], ["os", "mkdir"], [name], ["../x", "Evil"], [1, 2], [name, None], []):
        (folder / "model_index.json").write_text(json.dumps({**index, part: entry}))
        with pytest.raises(InputError, match=rf"model_index\.json: {part} is .*never run"):
            load_flux(folder)
    assert name not in sys.modules
    for custom in (name, [name, "Evil"]):
        (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": custom}))
        with pytest.raises(InputError, match="has no adapter"):
            load_flux(folder)
    importlib.import_module(name)
    assert canary.exists(), "it could have been imported"
    canary.rmdir()
    del sys.modules[name]


def test_a_model_index_whose_parts_lie_elsewhere(flux: Path, tmp_path: Path) -> None:
    """An export copies parts by their names: none may lead out of its folder."""
    folder = tmp_path / "model"
    shutil.copytree(flux, folder)
    (tmp_path / "elsewhere").mkdir()
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps({**index, "../elsewhere": ["diffusers", "AutoencoderKL"]})
    )
    with pytest.raises(InputError, match=r"a part is called '\.\./elsewhere'"):
        load_flux(folder)


def test_code_that_a_config_points_to(canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto_map`` names code in the folder: neither run nor asked about."""
    clip = tiny_clip.make_clip(tmp_path / "clip")
    name = evil_module(clip, canary, monkeypatch)

    def asked(*words: Any) -> str:
        raise AssertionError("asked whether to run it")

    monkeypatch.setattr("builtins.input", asked)
    pointers = {
        f"Auto{kind}": f"{name}.Evil"
        for kind in ("Config", "Model", "ImageProcessor", "Processor", "ModelForObjectDetection")
    }
    pointers["AutoTokenizer"] = [f"{name}.Evil", f"{name}.Evil"]  # type: ignore[assignment]
    for file in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        content = json.loads((clip / file).read_text())
        content |= {"auto_map": pointers}
        (clip / file).write_text(json.dumps(content))
    load_reward("clip", {"path": str(clip)}, "cpu")
    own = {"model_type": "of_its_own"}
    (clip / "config.json").write_text(json.dumps({"auto_map": pointers, **own}))
    tokenizer = json.loads((clip / "tokenizer_config.json").read_text())
    (clip / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "tokenizer_class": "Evil"}))
    for reward, options in (
        ("geneval", {"detector": str(clip), "clip": str(clip)}),
        ("clip", {"path": str(clip)}),
    ):
        with pytest.raises(InputError, match="clip"):
            load_reward(reward, options, "cpu")


def test_looking_at_a_recipe_runs_nothing_of_it_and_using_it_does(
    canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that names ``module:attribute`` is code: whoever only plans it, or reads its run, is safe."""
    name = evil_module(tmp_path, canary, monkeypatch)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: x\nmodel: {{path: none}}\nprompts: {{train: none, heldout: none}}\n"
        f"rewards: [{{name: '{name}:Evil'}}]\ntrain: {{iterations: 2}}\n"
    )
    for words in (["plan", str(recipe)], ["plan", str(tmp_path)], ["report", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["flowcredit", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    assert name not in sys.modules
    assert not canary.exists()
    with pytest.raises(InputError):
        load_reward(f"{name}:Evil", {}, "cpu")
    canary.rmdir()
    del sys.modules[name]


@pytest.mark.parametrize("field", ["name", "version", "protocol", "columns"])
def test_no_answer_of_a_service_names_code(
    canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    name = f"{evil_module(tmp_path, canary, monkeypatch)}:Evil"
    health: dict[str, Any] = {"protocol": "flowcredit-reward/1", "name": "red", "version": "1"}
    health[field] = {"required": [name]} if field == "columns" else name
    with fake_service(lambda asked: health) as fake, contextlib.suppress(InputError):
        reward = load_reward("http", {"url": fake.url}, "cpu")
        score_images({"r": reward}, torch.zeros(1, 3, 4, 4), [name], {}, batch_size=1, on_error="skip")
    assert name.partition(":")[0] not in sys.modules


def test_rows_name_no_code(canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = evil_module(tmp_path, canary, monkeypatch)
    rows = [{"prompt": f"{name}:Evil", "reward": f"{name}:Evil", "module": name, f"{name}:Evil": name}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_prompts(tmp_path / "prompts.jsonl").prompts == (f"{name}:Evil",)
    assert name not in sys.modules
