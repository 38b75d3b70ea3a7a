"""The OCR reward: its arithmetic on given readings, and the real reader on rendered words."""

import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward, required_columns
from flowcredit.rewards.ocr import OcrReward, target_text
from flowcredit.scoring import RewardError, columns_of, score_images


def edits(a: str, b: str) -> int:
    """Levenshtein's distance from its definition."""

    @cache
    def left(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return len(a) - i + len(b) - j
        same = left(i + 1, j + 1) + (a[i] != b[j])
        return min(same, 1 + left(i + 1, j), 1 + left(i, j + 1))

    return left(0, 0)


def score(prompt: str, found: str, text: str | None = None) -> float:
    reward: Any = OcrReward(read=lambda image: found, distance=edits)
    return float(reward(torch.zeros(1, 3, 8, 8), [prompt], [text])[0])


@pytest.mark.parametrize(
    ("prompt", "found", "expected"),
    [
        ('A sign that says "Hello World"', "HELLO world", 1.0),
        ('A sign that says "Hello World"', "say: hello world!", 1.0),  # more around it costs nothing
        ('A sign that says "Hello World"', "helo world", 0.9),
        ('A sign that says "Hello World"', "", 0.0),
        ('A sign that says "Hi"', "quite another one", 0.0),  # never below 0
        ('"One" over "Two"', "one", 1.0),  # the first quotes count
        ("A poster, “Grand Opening”", "grand  0pening", 1 - 1 / 12),
    ],
)
def test_the_score_is_flow_grpos(prompt: str, found: str, expected: float) -> None:
    assert score(prompt, found) == pytest.approx(expected, abs=1e-7)


def test_the_column_goes_before_the_quotes_and_may_be_left_open() -> None:
    assert score('says "left"', "right", text="RIGHT") == 1.0
    assert score('says "left"', "left", text=None) == 1.0
    reward: Any = OcrReward(read=lambda image: "left", distance=edits)
    assert columns_of(reward).optional == ("text",)
    assert required_columns(reward) == ()
    prompts, columns = ['says "left"', 'says "left"'], {"text": ["right", None]}
    scores = score_images({"ocr": reward}, torch.zeros(2, 3, 8, 8), prompts, columns, batch_size=2)
    assert scores[0].tolist() == pytest.approx([0.2, 1.0])  # one letter of "right" is in "left" at its place


@pytest.mark.parametrize("prompt", ["a red cat", 'an empty "" sign', 'a blank "  " sign', 'one " only'])
def test_a_prompt_that_asks_for_no_text_is_refused(prompt: str) -> None:
    with pytest.raises(InputError, match="nothing to be written in the prompt"):
        target_text(prompt)
    reward: Any = OcrReward(read=lambda image: "", distance=edits)
    with pytest.raises(RewardError, match=r"reward 'ocr' failed on the prompt .*nothing to be written"):
        score_images({"ocr": reward}, torch.zeros(1, 3, 8, 8), [prompt], {}, batch_size=1)


def test_a_column_that_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="the column 'text' holds 3; expected the words"):
        target_text('says "x"', 3)


def test_the_published_distance_is_ours() -> None:
    distance = pytest.importorskip("rapidfuzz.distance").Levenshtein.distance
    for a, b in [("kitten", "sitting"), ("", "abc"), ("flaw", "lawn"), ("same", "same")]:
        assert distance(a, b) == edits(a, b)


@pytest.mark.parametrize("module", ["rapidocr", "onnxruntime", "rapidfuzz.distance"])
def test_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in ("rapidfuzz.distance", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, FakeModule(name))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"'ocr' needs .*'{module}'.*pip install 'flowcredit\[ocr\]'"):
        load_reward("ocr", {}, "cpu")


class FakeModule:
    """Stands for an installed package."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    class Levenshtein:
        distance = staticmethod(edits)


def written(words: str, colour: str, ground: str) -> Tensor:
    image = Image.new("RGB", (256, 96), ground)
    ImageDraw.Draw(image).text((16, 24), words, fill=colour, font=ImageFont.load_default(36))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255


def test_rendered_words_are_read() -> None:
    """The real reader on real weights: the right words score 1, others and a blank wall what is due."""
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    reward: Any = load_reward("ocr", {}, "cpu")
    images = torch.stack(
        [
            written("Open Daily", "black", "white"),
            written("FRESH FISH", "yellow", "navy"),
            torch.full((3, 96, 256), 0.5),
        ]
    )
    prompts = ['a door with "Open Daily"', 'a stall with "Fresh Fish"', 'a wall with "Open Daily"']
    assert reward(images, prompts).tolist() == [1.0, 1.0, 0.0]
    assert reward(images[:1], ['a door with "Open Early"']).item() == pytest.approx(1 - 2 / 9, abs=1e-6)
