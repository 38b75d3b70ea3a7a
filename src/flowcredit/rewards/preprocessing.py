"""An image as a CLIP-family encoder takes it: resized, cut from the centre, normalised, as Pillow does it.

Axes: B images, H and W image height and width.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.image_grid import to_pixels
from flowcredit.rewards.files import read_json

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of the RGB channels, in [0, 1]; the same for every reward of the CLIP family (OpenAI's values)."""


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
    rounded_centre: bool = False
    """Where the image exceeds the crop by an odd number: torchvision rounds half to even, others down."""

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
        sides = zip(image.shape[:2], self.crop, before, strict=True)
        top, left = (self._half(has - wanted) + b for has, wanted, b in sides)
        return padded[top : top + self.crop[0], left : left + self.crop[1]]

    def _half(self, excess: int) -> int:
        return round(excess / 2) if self.rounded_centre else excess // 2


def read_preprocessing(folder: Path) -> Preprocessing:
    """Read ``preprocessor_config.json``, or the image processor inside a ``processor_config.json``.

    Raises:
        InputError: neither file is there, or a size is in a form that CLIP's processor does not write.
    """
    if (folder / "preprocessor_config.json").is_file():
        config = read_json(folder, "preprocessor_config.json")
    else:
        config = read_json(folder, "processor_config.json").get("image_processor", {})
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
            mean=tuple(config.get("image_mean", CLIP_MEAN)) if normalise else (0.0,),
            std=tuple(config.get("image_std", CLIP_STD)) if normalise else (1.0,),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder}: its image processor has size {size!r} and crop_size {crop!r}; expected a number, "
            "shortest_edge, or height and width"
        ) from error
