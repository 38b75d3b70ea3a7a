"""OCR: is the text that was asked for written in the image? In [0, 1], 1 where it can be read.

The reward of Flow-GRPO (arXiv 2505.05470) and DenseGRPO (arXiv 2601.20218). What is asked for stands in the
prompt between its first double quotes, or in the prompt file's column ``text``. Both texts lose their spaces
and capitals; the score is 1 if the target is found in what was read, else one minus the edit distance, capped
at the target's length, over that length. The reader is RapidOCR with the PP-OCR weights inside its package,
where Flow-GRPO has PaddleOCR; both drop lines of a confidence under 0.5.

Axes: B images, H and W image height and width.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.image_grid import to_pixels
from flowcredit.rewards.files import need_module


@dataclass(frozen=True)
class OcrReward:
    """The reward; it computes on the CPU, from 8-bit pixels."""

    read: Callable[[Image.Image], str]
    """All lines of an image, one after the other."""
    distance: Callable[[str, str], int]
    """Levenshtein's."""

    def __call__(self, images: Tensor, prompts: Sequence[str], text: Sequence[Any] | None = None) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1], B prompts and B texts to [B] float32.

        Args:
            text: what each image shall say; None for all or for one: what its prompt quotes.

        Raises:
            InputError: a prompt without quotes, or with nothing between them.
        """
        asked = [None] * len(prompts) if text is None else text
        targets = [target_text(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
        found = [_plain(self.read(Image.fromarray(image))) for image in to_pixels(images)]
        return torch.tensor(
            [self._agreement(target, line) for target, line in zip(targets, found, strict=True)]
        )

    def refusal(self, prompt: str, columns: Mapping[str, Any]) -> str | None:
        """For `interfaces.ChecksPrompts`: that a row asks for no text, None if it does."""
        return _fault(prompt, columns.get("text"))

    def _agreement(self, target: str, found: str) -> float:
        wrong = 0 if target in found else min(self.distance(found, target), len(target))
        return 1.0 - wrong / len(target)


def target_text(prompt: str, text: object = None) -> str:
    """The text asked for, without spaces and capitals; InputError if there is none."""
    fault = _fault(prompt, text)
    if fault is not None:
        raise InputError(f"reward 'ocr': {fault}")
    return _asked_for(prompt, text)


def _fault(prompt: str, text: object) -> str | None:
    if text is not None and not isinstance(text, str):
        return f"the column 'text' holds {text!r}; expected the words to be written"
    if not _asked_for(prompt, text):
        return (
            f"nothing to be written in the prompt {prompt!r}; expected words in double quotes in it, or in"
            " the column 'text'"
        )
    return None


def _asked_for(prompt: str, text: object) -> str:
    quoted = _QUOTED.search(prompt)
    return _plain(str(text) if text is not None else (quoted[1] or quoted[2] or "") if quoted else "")


def load_ocr(device: torch.device) -> OcrReward:
    """Load the reader; InputError if RapidOCR, onnxruntime or rapidfuzz is not installed."""
    distance = need_module("rapidfuzz.distance", "ocr", "ocr").Levenshtein.distance
    need_module("onnxruntime", "ocr", "ocr")
    # Below "error" it logs every image in which it finds no text.
    engine = need_module("rapidocr", "ocr", "ocr").RapidOCR(params={"Global.log_level": "error"})

    def read(image: Image.Image) -> str:
        return "".join(engine(image).txts or ())

    return OcrReward(read, distance)


_QUOTED = re.compile('"([^"]*)"|“([^”]*)”')


def _plain(text: str) -> str:
    return "".join(text.split()).lower()
