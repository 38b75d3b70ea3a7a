"""Rewards: found by name or by module, refused with a reason, and CLIP's arithmetic against transformers'."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPModel
from transformers.models.clip.tokenization_clip import CLIPTokenizer

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward, required_columns
from flowcredit.rewards.clip import ClipScore, load_clip_score
from flowcredit.rewards.preprocessing import read_preprocessing
from flowcredit.scoring import check_columns, columns_of, score_images
from tiny_clip import CONTEXT, as_pil, make_clip, processor, write_preprocessor

PROMPTS = [
    "a red circle",
    "two blue squares",
    "a red circle",
    "a green star left of a white ring",
]


def score_one(name: str, reward: Any, **columns: Sequence[Any]) -> list[float]:
    images = torch.full((2, 3, 4, 4), 0.5)
    scores = score_images({name: reward}, images, ["a", "b"], columns, batch_size=2)
    return [float(score) for score in scores[0]]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module in the current folder, as a user does, and give its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made: list[str] = []

    def write(source: str) -> str:
        name = f"own_reward_{tmp_path.name}_{len(made)}".replace("-", "_")
        made.append(name)
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_own_function_gets_its_columns_and_may_return_none(own: Any) -> None:
    module = own("def f(images, prompts, answer): return [None if a is None else a * 2 for a in answer]\n")
    reward = load_reward(f"{module}:f", {}, "cpu")
    assert required_columns(reward) == ("answer",)
    first, second = score_one("f", reward, answer=[3, None], unused=["x", "y"])
    assert first == 6.0
    assert math.isnan(second)


def test_options_are_bound_and_are_no_longer_columns(own: Any) -> None:
    module = own(
        "def f(images, prompts, answer, weight=1, bonus=0): return [weight * a + bonus for a in answer]\n"
    )
    reward = load_reward(f"{module}:f", {"weight": 10}, "cpu")
    columns = columns_of(reward)
    assert (columns.required, columns.optional) == (("answer",), ("bonus",))
    # A prompt file that happens to have a column of the option's name must not override the option.
    assert score_one("f", reward, answer=[1, 2], weight=[100, 100]) == [10.0, 20.0]


def test_own_class_gets_options_and_device(own: Any) -> None:
    module = own(
        "class Level:\n"
        "    def __init__(self, device, level=0.0): self.level, self.device = level, device\n"
        "    def __call__(self, images, prompts):\n"
        "        assert str(self.device) == 'cpu'\n"
        "        return (images.mean(dim=(1, 2, 3)) - self.level).abs()\n"
    )
    reward = load_reward(f"{module}:Level", {"level": 0.25}, torch.device("cpu"))
    assert score_one("level", reward) == [0.25, 0.25]


@pytest.mark.parametrize(
    ("source", "attribute", "options", "expected"),
    [
        ("def score(images, prompts): return [0]", "scroe", {}, "did you mean 'score'"),
        ("score = 3", "score", {}, "cannot be called"),
        ("def score(images): return [0]", "score", {}, "'prompts' is missing"),
        ("def score(images, /, prompts): return [0]", "score", {}, "positional-only"),
        ("def score(images, prompts, weight=1): return [0]", "score", {"wieght": 2}, "did you mean 'weight'"),
        ("class score:\n    def __init__(self): 1 / 0", "score", {}, "ZeroDivisionError"),
        ("import nowhere_to_be_found", "score", {}, "No module named 'nowhere_to_be_found'"),
        ("def score(:", "score", {}, "SyntaxError"),
    ],
)
def test_own_reward_is_checked_at_load(
    own: Any, source: str, attribute: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        load_reward(f"{own(source)}:{attribute}", options, "cpu")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("shape", {}, "did you mean 'shapes'"),
        ("no_such_module_here:score", {}, "No module named"),
        ("dir/file.py:score", {}, "dotted name"),
        ("shapes", {"path": "x"}, "unknown option 'path'; it has no options"),
        ("clip", {}, "needs the option 'path'"),
        ("clip", {"paht": "x"}, "did you mean 'path'"),
        ("clip", {"path": "/nowhere"}, "/nowhere/config.json: cannot be read"),
    ],
)
def test_unusable_names_and_options(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_reward(name, options, "cpu")


def test_a_missing_column_is_refused_with_the_columns_of_the_file() -> None:
    rewards = {"shapes": load_reward("shapes", {}, "cpu")}
    assert required_columns(rewards["shapes"]) == ("objects", "relation")
    check_columns(rewards, ["task", "objects", "relation"], "heldout.jsonl")
    with pytest.raises(InputError, match=r"heldout\.jsonl: .*'relation'.*prompt, objects, task"):
        check_columns(rewards, ["task", "objects"], "heldout.jsonl")


def test_shapes_scores_a_true_render_above_a_wrong_one() -> None:
    red = {"colour": "red", "shape": "circle", "count": 1}
    images = torch.full((2, 3, 32, 32), 0.08)
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    disc = ((x - 15.5) ** 2 + (y - 15.5) ** 2) < 64
    for image, channel in ((0, 0), (1, 2)):
        images[image, channel, disc] = 0.9
    columns: dict[str, list[Any]] = {"objects": [[red], [red]], "relation": [None, None]}
    rewards = {name: load_reward(name, {}, "cpu") for name in ("shapes", "shapes_exact")}
    graded, exact = score_images(rewards, images, ["a red circle"] * 2, columns, batch_size=2)
    assert graded[0] > graded[1] + 0.2
    assert exact.tolist() == [1.0, 0.0]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clip(tmp_path_factory.mktemp("clip"))


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "resample": 2},
        {"size": {"height": 20, "width": 28}, "crop_size": {"height": 33, "width": 17}},
        {"do_resize": False, "crop_size": {"height": 24, "width": 24}},
        {"size": {"shortest_edge": 21}, "do_center_crop": False},
        {"size": {"shortest_edge": 24}, "do_center_crop": False, "do_normalize": False},
        {"size": {"shortest_edge": 9}, "crop_size": {"height": 9, "width": 9}, "image_mean": [0.5, 0.4, 0.3]},
    ],
)
@pytest.mark.parametrize("shape", [(32, 32), (24, 24), (37, 19), (18, 45)])
def test_preprocessing_equals_transformers(
    tmp_path: Path, config: dict[str, Any], shape: tuple[int, int]
) -> None:
    write_preprocessor(tmp_path, config)
    images = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(3))
    expected = processor(config)(images=as_pil(images), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(read_preprocessing(tmp_path)(images), expected, atol=2e-6, rtol=0)


def test_preprocessing_reads_the_old_form_with_bare_numbers(tmp_path: Path) -> None:
    old = {"size": 24, "crop_size": 24, "do_resize": True, "do_center_crop": True, "do_normalize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    images = torch.rand(1, 3, 40, 30, generator=torch.Generator().manual_seed(4))
    expected = processor({"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}})(
        images=as_pil(images), return_tensors="pt"
    )["pixel_values"]
    torch.testing.assert_close(read_preprocessing(tmp_path)(images), expected, atol=2e-6, rtol=0)


def test_preprocessing_is_found_inside_processor_config(tmp_path: Path, clip_folder: Path) -> None:
    inner = json.loads((clip_folder / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert read_preprocessing(tmp_path) == read_preprocessing(clip_folder)


def test_clip_score_is_the_models_own_cosine(clip_folder: Path) -> None:
    """The logits of CLIPModel.forward, divided by their scale, on transformers' own inputs."""
    images = torch.rand(4, 3, 32, 40, generator=torch.Generator().manual_seed(1))
    model = CLIPModel.from_pretrained(clip_folder).eval()
    tokens = CLIPTokenizer.from_pretrained(clip_folder)(
        PROMPTS, padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt"
    )
    pixels = processor({"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}})(
        images=as_pil(images), return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**tokens, **pixels).logits_per_image
    expected = logits.diagonal() / model.logit_scale.exp().item()
    reward = load_clip_score(str(clip_folder), torch.device("cpu"))
    scores = reward(images, PROMPTS)
    assert scores.dtype == torch.float32
    assert scores.std() > 1e-3
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


def test_clip_score_of_a_batch_is_that_of_its_images(clip_folder: Path) -> None:
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    rewards = {"clip": load_reward("clip", {"path": str(clip_folder)}, "cpu")}
    together = score_images(rewards, images, PROMPTS, {}, batch_size=4)
    alone = score_images(rewards, images, PROMPTS, {}, batch_size=1)
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_clip_score_is_float32_under_autocast_and_from_half_precision_files(
    clip_folder: Path, tmp_path: Path
) -> None:
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    reward = load_clip_score(str(clip_folder), torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = reward(images, PROMPTS)
    torch.testing.assert_close(autocast, reward(images, PROMPTS), atol=0, rtol=0)

    for file in clip_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    CLIPModel.from_pretrained(clip_folder).half().save_pretrained(tmp_path)
    half = load_clip_score(str(tmp_path), torch.device("cpu"))
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}


def test_clip_score_takes_features_as_object_or_as_tensor(clip_folder: Path) -> None:
    """transformers 5 returns an object whose pooler_output holds the features, 4 the features."""

    class Other:
        def __init__(self, model: Any, convert: Any) -> None:
            self.model, self.convert = model, convert

        def get_image_features(self, **inputs: Tensor) -> Any:
            return self.convert(self.model.get_image_features(**inputs))

        def get_text_features(self, **inputs: Tensor) -> Any:
            return self.convert(self.model.get_text_features(**inputs))

    class Holder:
        def __init__(self, features: Tensor) -> None:
            self.pooler_output = features

    def features(output: Any) -> Tensor:
        return output if isinstance(output, Tensor) else output.pooler_output

    images = torch.rand(4, 3, 24, 24, generator=torch.Generator().manual_seed(5))
    reward = load_clip_score(str(clip_folder), torch.device("cpu"))
    forms = [lambda output: features(output), lambda output: Holder(features(output))]
    scores = [
        ClipScore(
            Other(reward.model, form), reward.tokenizer, reward.preprocessing, CONTEXT, torch.device("cpu")
        )(images, PROMPTS)
        for form in forms
    ]
    torch.testing.assert_close(scores[0], reward(images, PROMPTS), atol=0, rtol=0)
    torch.testing.assert_close(scores[1], reward(images, PROMPTS), atol=0, rtol=0)


def test_clip_counts_texts_beyond_its_context(clip_folder: Path) -> None:
    reward = load_clip_score(str(clip_folder), torch.device("cpu"))
    # One token a letter here, and a start and an end token.
    assert reward.truncated(["abcdefghij", "abcdefghijk", "ab"]) == 1


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match=r"model_type is 'bert', expected 'clip'"):
        load_reward("clip", {"path": str(tmp_path)}, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(InputError, match="not a complete CLIP model"):
        load_reward("clip", {"path": str(tmp_path)}, "cpu")
