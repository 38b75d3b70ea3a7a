"""PickScore against the model's own forward pass, and folders that are not complete."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPModel
from transformers.models.clip.tokenization_clip import CLIPTokenizer

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.scoring import score_images
from tiny_clip import CONTEXT, SIDE, as_pil, make_clip, make_tokenizer, processor, random_images

PROMPTS = ["a red cat", "two blue dogs in the snow", "a red cat", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_clip(tmp_path_factory.mktemp("pickscore"), act="gelu")
    # The published scale is not the one of an untrained CLIP.
    model = CLIPModel.from_pretrained(folder)
    with torch.no_grad():
        model.logit_scale.fill_(3.21)
    model.save_pretrained(folder)
    return folder


def test_pickscore_is_the_models_own_logit(folder: Path) -> None:
    images = random_images(4, 33, 47)
    model = CLIPModel.from_pretrained(folder).eval()
    tokens = CLIPTokenizer.from_pretrained(folder)(
        PROMPTS, padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt"
    )
    config = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    pixels = processor(config)(images=as_pil(images), return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokens, **pixels).logits_per_image.diagonal()
    reward: Any = load_reward("pickscore", {"path": str(folder)}, "cpu")
    scores = reward(images, PROMPTS)
    assert scores.std() > 0.02
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert reward.truncated(PROMPTS) == 1


def test_pickscore_of_a_batch_is_that_of_its_images_under_autocast_too(folder: Path) -> None:
    images = random_images(4, 30, 30)
    rewards = {"pickscore": load_reward("pickscore", {"path": str(folder)}, "cpu")}
    together = score_images(rewards, images, PROMPTS, {}, batch_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = score_images(rewards, images, PROMPTS, {}, batch_size=1)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)


def test_the_processor_may_lie_in_a_folder_of_its_own(folder: Path, tmp_path: Path) -> None:
    model, files = tmp_path / "model", tmp_path / "processor"
    for name in ("config.json", "model.safetensors"):
        model.mkdir(exist_ok=True)
        (model / name).write_bytes((folder / name).read_bytes())
    make_tokenizer(files)
    (files / "preprocessor_config.json").write_bytes((folder / "preprocessor_config.json").read_bytes())
    images = random_images(4, 30, 40)
    apart: Any = load_reward("pickscore", {"path": str(model), "processor": str(files)}, "cpu")
    whole: Any = load_reward("pickscore", {"path": str(folder)}, "cpu")
    torch.testing.assert_close(apart(images, PROMPTS), whole(images, PROMPTS), atol=0, rtol=0)
    with pytest.raises(InputError, match=r"processor_config\.json: cannot be read"):
        load_reward("pickscore", {"path": str(model)}, "cpu")


def change_weights(folder: Path, more: dict[str, torch.Tensor], drop: str | None = None) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != drop}
    save_file({**tensors, **more}, file, metadata={"format": "pt"})


def test_weights_that_are_missing_or_unknown_are_named(folder: Path, tmp_path: Path) -> None:
    """Transformers fills in what is missing at random, and only warns."""
    copytree(folder, tmp_path / "less")
    change_weights(tmp_path / "less", {}, drop="visual_projection.weight")
    with pytest.raises(InputError, match=r"'visual_projection\.weight' is missing"):
        load_reward("pickscore", {"path": str(tmp_path / "less")}, "cpu")
    copytree(folder, tmp_path / "more")
    change_weights(tmp_path / "more", {"head": torch.ones(2), "second": torch.ones(2)})
    with pytest.raises(InputError, match=r"'head', 'second' are unknown"):
        load_reward("pickscore", {"path": str(tmp_path / "more")}, "cpu")
    copytree(folder, tmp_path / "other")
    change_weights(tmp_path / "other", {"visual_projection.weight": torch.ones(3, 3)})
    with pytest.raises(InputError, match="not a complete CLIP model"):
        load_reward("pickscore", {"path": str(tmp_path / "other")}, "cpu")


def test_positions_saved_by_old_versions_are_no_fault(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path / "old")
    change_weights(
        tmp_path / "old", {"text_model.embeddings.position_ids": torch.arange(CONTEXT).expand(1, -1)}
    )
    images = random_images(4, 30, 40)
    old: Any = load_reward("pickscore", {"path": str(tmp_path / "old")}, "cpu")
    new: Any = load_reward("pickscore", {"path": str(folder)}, "cpu")
    torch.testing.assert_close(old(images, PROMPTS), new(images, PROMPTS), atol=0, rtol=0)


def test_a_tokenizer_that_is_missing_or_anothers_is_refused(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path / "none")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (tmp_path / "none" / name).unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"no tokenizer\.json, vocab\.json or vocab\.txt"):
        load_reward("pickscore", {"path": str(tmp_path / "none")}, "cpu")
    copytree(folder, tmp_path / "long")
    longer = CLIPTokenizer.from_pretrained(folder)
    longer.add_tokens(["<a>", "<b>"])
    longer.save_pretrained(tmp_path / "long")
    with pytest.raises(InputError, match="516 tokens, but the model knows 514"):
        load_reward("pickscore", {"path": str(tmp_path / "long")}, "cpu")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "needs the option 'path': the folder of PickScore's CLIPModel"),
        ({"path": 3}, "option 'path' is 3; expected the folder of PickScore's CLIPModel"),
        ({"path": "x", "procesor": "y"}, "did you mean 'processor'"),
        ({"path": "/nowhere"}, "/nowhere/config.json: cannot be read"),
    ],
)
def test_wrong_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_reward("pickscore", options, "cpu")
