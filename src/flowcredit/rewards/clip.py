"""CLIP score: the cosine of image and text embedding of any transformers ``CLIPModel``, in float32.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", arXiv 2103.00020;
as a reward in G²RPO (arXiv 2510.01982) and DanceGRPO (arXiv 2505.07818).

Axes: B images, T distinct texts, H and W image height and width, E embedding dimensions.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.image_grid import to_pixels
from flowcredit.shapes import bundled_path


@dataclass(frozen=True)
class Preprocessing:
    """What a ``preprocessor_config.json`` asks for, done as Pillow does it, on 8-bit pixels."""

    shortest_edge: int | None
    """Scale the shorter side to this many pixels, keeping the aspect; None: see ``size``."""
    size: tuple[int, int] | None
    """Or scale to this height and width; both None: do not scale."""
    resample: int
    """Pillow's number of the filter; 3 is bicubic."""
    crop: tuple[int, int] | None
    """Height and width cut from the centre, zeros around an image that is smaller."""
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, 3, H', W'] float32, normalised, on the CPU."""
        cut = np.stack([self._crop(self._resize(image)) for image in to_pixels(images)])
        scaled = torch.from_numpy(cut).permute(0, 3, 1, 2).to(torch.float64) * self.scale
        channel = (1, -1, 1, 1)
        mean, std = torch.tensor(self.mean).view(channel), torch.tensor(self.std).view(channel)
        return ((scaled - mean) / std).to(torch.float32)

    def _resize(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        height, width = image.shape[:2]
        target = self.size
        if self.shortest_edge is not None:
            longer = int(self.shortest_edge * max(height, width) / min(height, width))
            target = (longer, self.shortest_edge) if width <= height else (self.shortest_edge, longer)
        if target is None or target == (height, width):
            return image
        resample = Image.Resampling(self.resample)
        return np.asarray(Image.fromarray(image).resize((target[1], target[0]), resample))

    def _crop(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self.crop is None:
            return image
        missing = [max(0, wanted - has) for wanted, has in zip(self.crop, image.shape[:2], strict=True)]
        before = [(m + 1) // 2 for m in missing]
        pad = [(b, m - b) for b, m in zip(before, missing, strict=True)]
        padded = np.pad(image, [*pad, (0, 0)])
        # The centre is that of the image, not of the padded one: they differ where the padding is odd.
        top, left = (
            (has - wanted) // 2 + b for has, wanted, b in zip(image.shape[:2], self.crop, before, strict=True)
        )
        return padded[top : top + self.crop[0], left : left + self.crop[1]]


@dataclass(frozen=True)
class ClipScore:
    """The reward: cosine in [-1, 1], without the logit scale."""

    model: Any
    tokenizer: Any
    preprocessing: Preprocessing
    context: int
    """Tokens that the text encoder takes; longer texts are cut there, end token kept."""
    device: torch.device

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32; each distinct text is encoded once."""
        texts = list(dict.fromkeys(prompts))
        rows = torch.tensor([texts.index(prompt) for prompt in prompts], device=self.device)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            image = self._embed_images(images)
            text = self._embed_texts(texts)[rows]
        return (image * text).sum(dim=-1)

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many of the prompts are longer than the context, so that their end is not scored."""
        lengths = (len(ids) for ids in self.tokenizer(list(prompts))["input_ids"])
        return sum(length > self.context for length in lengths)

    def _embed_images(self, images: Tensor) -> Tensor:
        pixels = self.preprocessing(images).to(self.device)
        return _unit(self.model.get_image_features(pixel_values=pixels))

    def _embed_texts(self, texts: list[str]) -> Tensor:
        # Always padded to the context: a text's embedding must not depend on its neighbours in a batch.
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=self.context, return_tensors="pt"
        ).to(self.device)
        return _unit(
            self.model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
        )


def load_clip_score(path: str, device: torch.device) -> ClipScore:
    """Load the CLIP score from a folder written by ``CLIPModel`` and ``CLIPProcessor.save_pretrained``.

    Args:
        path: the folder, or a bundled name such as ``bundled:shapes-clip``.

    Raises:
        InputError: no such folder, or one that holds no complete CLIP model.
    """
    folder = bundled_path(path)
    config = _read_json(folder, "config.json")
    if config.get("model_type") != "clip":
        raise InputError(
            f"{folder / 'config.json'}: model_type is {config.get('model_type')!r}, expected 'clip': the "
            "reward 'clip' takes a folder of a transformers CLIPModel"
        )
    from transformers import AutoTokenizer, CLIPModel

    try:
        model = CLIPModel.from_pretrained(folder, local_files_only=True).float().to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder}: not a complete CLIP model ({str(error).splitlines()[0]}); expected the files that "
            "CLIPModel and CLIPProcessor write with save_pretrained"
        ) from error
    model.requires_grad_(False)
    context = model.config.text_config.max_position_embeddings
    return ClipScore(model, tokenizer, read_preprocessing(folder), context, device)


def read_preprocessing(folder: Path) -> Preprocessing:
    """Read ``preprocessor_config.json``, or the image processor inside a ``processor_config.json``.

    Raises:
        InputError: neither file is there, or a size is in a form that CLIP's processor does not write.
    """
    if (folder / "preprocessor_config.json").is_file():
        config = _read_json(folder, "preprocessor_config.json")
    else:
        config = _read_json(folder, "processor_config.json").get("image_processor", {})
    size = config.get("size", 224) if config.get("do_resize", True) else {}
    size = {"shortest_edge": size} if isinstance(size, int) else size
    crop = config.get("crop_size", 224) if config.get("do_center_crop", True) else None
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    normalise = config.get("do_normalize", True)
    try:
        return Preprocessing(
            shortest_edge=size.get("shortest_edge"),
            size=(size["height"], size["width"]) if "height" in size else None,
            resample=config.get("resample", int(Image.Resampling.BICUBIC)),
            crop=None if crop is None else (crop["height"], crop["width"]),
            scale=config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0,
            mean=tuple(config.get("image_mean", _MEAN)) if normalise else (0.0,),
            std=tuple(config.get("image_std", _STD)) if normalise else (1.0,),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder}: its image processor has size {size!r} and crop_size {crop!r}; expected a number, "
            "shortest_edge, or height and width"
        ) from error


_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def _unit(features: Any) -> Tensor:
    """[B, E] of length one; transformers 4 returns the features, 5 an object that holds them."""
    embedding: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return nn.functional.normalize(embedding.float(), dim=-1)


def _read_json(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{folder / name}: cannot be read ({error.strerror}); expected the folder of a transformers "
            "CLIPModel with its tokenizer and image processor"
        ) from error
    except ValueError as error:
        raise InputError(f"{folder / name}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{folder / name}: holds a {type(content).__name__}, expected an object")
    return content
