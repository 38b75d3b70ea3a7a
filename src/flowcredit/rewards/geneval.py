"""GenEval as a reward: any transformers object detector for counts and places, a CLIP for colours.

Ghosh et al., arXiv 2310.11513. The released evaluation detects with Mask2Former and cuts a coloured object
out by its mask; the detectors here give boxes, so a colour is judged on the box, background included.

Axes: B images, H and W image height and width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.image_grid import to_pixels
from flowcredit.quiet import quiet_libraries
from flowcredit.rewards.clip import ClipScore, load_clip_score
from flowcredit.rewards.files import loading_fault, loading_reason
from flowcredit.rewards.geneval_rules import Found, Objects, Wanted, degree, is_right, read_wanted

CONFIDENCE, COUNTING_CONFIDENCE = 0.3, 0.9
"""Least confidence of an object, and for the tag "counting", as GenEval has them."""
MOST_OBJECTS = 16
"""Objects of a class that are looked at, the most confident ones, as in GenEval."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
DETECTOR_NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""GenEval's names of classes that COCO's detectors call otherwise."""


@dataclass(frozen=True)
class GenEvalReward:
    """1 or 0 (``graded`` False), or by degrees."""

    detector: Any
    processor: Any
    labels: Mapping[int, str]
    clip: ClipScore
    graded: bool
    device: torch.device

    def __call__(
        self,
        images: Tensor,
        prompts: Sequence[str],
        tag: Sequence[str],
        include: Sequence[Sequence[Mapping[str, Any]]],
        exclude: Sequence[Sequence[Mapping[str, Any]] | None] | None = None,
    ) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and the columns of GenEval's metadata to [B] float32."""
        unwanted = [None] * len(images) if exclude is None else exclude
        scores = []
        for image, kind, wanted, without in zip(images, tag, include, unwanted, strict=True):
            confidence = COUNTING_CONFIDENCE if kind == "counting" else CONFIDENCE
            scores.append(self._score(image, confidence, wanted, without or ()))
        return torch.tensor(scores, dtype=torch.float32)

    def _score(
        self,
        image: Tensor,
        confidence: float,
        include: Sequence[Mapping[str, Any]],
        exclude: Sequence[Mapping[str, Any]],
    ) -> float:
        wanted, unwanted = self._wanted(include, exclude)
        objects = self._objects(image, confidence)

        def colors_of(name: str, found: Sequence[Found]) -> Sequence[str]:
            return [self._color(image, name, each) for each in found]

        if self.graded:
            return degree(wanted, objects, colors_of)
        return float(is_right(wanted, unwanted, objects, colors_of))

    def _wanted(
        self, include: Sequence[Mapping[str, Any]], exclude: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[Wanted, ...], tuple[Wanted, ...]]:
        """A row of GenEval's metadata; ValueError where it is not of its format or not of this detector."""
        wanted, unwanted = read_wanted(include, "include"), read_wanted(exclude, "exclude")
        if not wanted:
            raise ValueError("include is empty: expected at least one object")
        known = set(self.labels.values())
        for entry in (*wanted, *unwanted):
            if DETECTOR_NAMES.get(entry.name, entry.name) not in known:
                raise ValueError(f"the detector knows no {entry.name!r}; it knows {', '.join(sorted(known))}")
        return wanted, unwanted

    def refusal(self, prompt: str, columns: Mapping[str, Any]) -> str | None:
        """For `interfaces.ChecksPrompts`: what is wrong with a row's metadata, None if nothing is."""
        include = columns.get("include")
        if not isinstance(include, Sequence) or isinstance(include, str):
            return f"include is {include!r}; expected a list of objects, as in GenEval's metadata"
        try:
            self._wanted(include, columns.get("exclude") or ())
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def modules(self) -> tuple[nn.Module, ...]:
        """The networks, for `interfaces.HoldsModules`."""
        return (self.detector, *self.clip.modules())

    def _objects(self, image: Tensor, confidence: float) -> Objects:
        """By GenEval's names, the most confident first."""
        pixels = to_pixels(image[None])[0]
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            inputs = self.processor(images=pixels, input_data_format="channels_last", return_tensors="pt")
            out = self.detector(pixel_values=inputs["pixel_values"].to(self.device))
        (found,) = self.processor.post_process_object_detection(
            out, threshold=confidence, target_sizes=[pixels.shape[:2]]
        )
        named = {name: ours for ours, name in DETECTOR_NAMES.items()}
        objects: dict[str, list[Found]] = {}
        for index in found["scores"].argsort(descending=True, stable=True).tolist():
            name = self.labels[int(found["labels"][index])]
            mine = objects.setdefault(named.get(name, name), [])
            if len(mine) < MOST_OBJECTS:
                left, top, right, bottom = found["boxes"][index].tolist()
                mine.append(Found((left, top, right, bottom), float(found["scores"][index])))
        return objects

    def _color(self, image: Tensor, name: str, found: Found) -> str:
        """The colour whose texts a CLIP finds nearest to the object's box: three texts for each, averaged."""
        height, width = image.shape[1:]
        left, top = (max(0, int(np.floor(edge))) for edge in found.box[:2])
        right, bottom = (int(np.ceil(edge)) for edge in found.box[2:])
        left, top = min(left, width - 1), min(top, height - 1)
        crop = image[:, top : max(top + 1, bottom), left : max(left + 1, right)]
        texts = [
            text
            for color in COLORS
            for text in (
                f"a photo of a {color} {name}",
                f"a photo of a {color}-colored {name}",
                f"a photo of a {color} object",
            )
        ]
        means = self.clip.embed_texts(texts).unflatten(0, (len(COLORS), 3)).mean(1)
        likeness = nn.functional.normalize(means, dim=-1) @ self.clip.embed_images(crop[None])[0]
        return COLORS[int(likeness.argmax())]


def load_geneval(detector: str, clip: str, device: torch.device, graded: bool = False) -> GenEvalReward:
    """A detector and a CLIP from their folders in transformers' layout.

    Raises:
        InputError: a folder that is no complete object detector or CLIP model.
    """
    from transformers import AutoModelForObjectDetection

    # From where it lies: at their top some versions of transformers let it pass only with torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    folder = Path(detector)
    if not (folder / "config.json").is_file():
        raise InputError(_no_detector(folder, "there is no config.json in it"))
    try:
        with quiet_libraries("transformers"):
            model, report = AutoModelForObjectDetection.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, trust_remote_code=False
            )
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, backend="pil", trust_remote_code=False
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, UnpicklingError) as error:
        raise InputError(_no_detector(folder, loading_reason(error))) from error
    fault = loading_fault(report)
    if fault is not None:
        raise InputError(_no_detector(folder, fault))
    labels = {int(number): name for number, name in model.config.id2label.items()}
    ready = model.float().to(device).eval().requires_grad_(False)
    return GenEvalReward(ready, processor, labels, load_clip_score(clip, device), graded, device)


def _no_detector(folder: Path, reason: str) -> str:
    return (
        f"{folder}: not a complete object detector ({reason}); expected the files that a transformers model"
        " for object detection and its image processor write with save_pretrained"
    )
