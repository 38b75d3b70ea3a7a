"""What a reward service and its client say to one another: JSON, images as PNG in base64.

Axes: B images, H and W their height and width.
"""

import base64
import binascii
import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowcredit.image_grid import to_pixels
from flowcredit.rewards.endpoint import ServiceError, brief, finite_number

PROTOCOL = "flowcredit-reward/1"
MAX_IMAGE_PIXELS = 1 << 26
"""Pixels of one image, 8192 x 8192."""
MAX_PIXELS = 1 << 27
"""Pixels of all images of one request, 1.5 GiB as float32: a PNG of few bytes may unfold to more."""


def encode_images(images: Tensor) -> list[str]:
    """[B, 3, H, W] in [0, 1] to B PNGs of 8-bit RGB in base64: values are rounded to k / 255."""
    return [_png(Image.fromarray(pixels)) for pixels in to_pixels(images)]


def _png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def decode_images(texts: Sequence[str]) -> Tensor:
    """B PNGs in base64 to [B, 3, H, W] float32 in [0, 1], k / 255.

    Raises:
        ValueError: an image that is no PNG of 8-bit RGB or of another size than the first; too many pixels.
    """
    arrays: list[np.ndarray] = []
    size: tuple[int, int] | None = None
    for index, text in enumerate(texts):
        image = _open(text, index)
        size = size or image.size
        if image.size != size:
            raise ValueError(
                f"images.{index} has {image.width} x {image.height} pixels, images.0 {size[0]} x {size[1]}; "
                "expected one size for all"
            )
        if size[0] * size[1] * len(texts) > MAX_PIXELS:
            raise ValueError(
                f"{len(texts)} images of {size[0]} x {size[1]} exceed {MAX_PIXELS:,} pixels; send fewer"
            )
        try:
            arrays.append(np.asarray(image))
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"images.{index}: its PNG is damaged ({error})") from None
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous().to(torch.float32) / 255


def _open(text: str, index: int) -> Image.Image:
    try:
        content = base64.b64decode(text, validate=True)
        _check_head(content, index)
        image = Image.open(io.BytesIO(content), formats=["PNG"])
    except (binascii.Error, OSError, SyntaxError, struct.error) as error:
        raise ValueError(f"images.{index} is no PNG in base64 ({brief(str(error))})") from None
    if image.mode != "RGB":
        raise ValueError(f"images.{index} has the mode {image.mode}; expected 8-bit RGB")
    return image


def _check_head(content: bytes, index: int) -> None:
    """Before any of a PNG is unfolded: its size and kind of pixels, and whether it is one image.

    From its chunks (ISO/IEC 15948), each a length, a name, so many bytes and a checksum.
    """
    width, height, depth = struct.unpack_from(">IIB", content, 16)
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[12:16] != b"IHDR":
        raise OSError("another format")
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(
            f"images.{index} has {width} x {height} pixels; expected at most {MAX_IMAGE_PIXELS:,}"
        )
    if depth > 8:
        raise ValueError(f"images.{index} has {depth} bits a colour; expected 8-bit RGB")
    place = 8
    while place + 8 <= len(content) and (name := content[place + 4 : place + 8]) != b"IDAT":
        if name == b"acTL":
            raise ValueError(f"images.{index} is an animation; expected one image")
        place += 12 + int.from_bytes(content[place : place + 4], "big")


def read_scores(answer: Any, count: int, url: str) -> list[float | None]:
    """The scores in a service's answer, None for an image without one.

    Raises:
        ServiceError: the answer is not ``{"scores": [...]}`` with ``count`` finite numbers or nulls.
    """
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise ServiceError(f"{url}: answered {shown(answer)}; expected an object with a list 'scores'")
    if len(scores) != count:
        raise ServiceError(f"{url}: answered {len(scores)} scores for {count} images; expected {count}")
    numbers = [finite_number(score) for score in scores]
    for index, score in enumerate(scores):
        if score is not None and numbers[index] is None:
            raise ServiceError(
                f"{url}: scores.{index} is {shown(score)}; expected a finite number, or null for no score"
            )
    return numbers


def shown(value: Any) -> str:
    """What a service answered, cut to fit a message."""
    try:
        return brief(repr(value)[:400], 80)
    except RecursionError:
        return "lists within lists"
