"""Images as parts of a page.

Axes: N images, H and W their height and width.
"""

import io

from PIL import Image
from torch import Tensor

from flowcredit.image_grid import to_pixels
from flowcredit.report.parts import data_uri

SMALL = 64
"""Sides up to this many pixels are shown whole, enlarged without blur; larger ones, in thumbs, as JPEG."""


def whole(image: Tensor) -> str:
    """A [3, H, W] image in [0, 1] as a data URI of a PNG: every pixel as ``flowcredit sample`` writes it."""
    return _uri(Image.fromarray(to_pixels(image[None])[0]), "png")


def thumb(image: Tensor, side: int = 96) -> str:
    """The same, scaled down so that its longer side is at most ``side`` pixels."""
    picture = Image.fromarray(to_pixels(image[None])[0])
    if max(picture.size) <= SMALL:
        return _uri(picture, "png")
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return _uri(picture, "jpeg")


def _uri(picture: Image.Image, kind: str) -> str:
    out = io.BytesIO()
    picture.save(out, kind, quality=90)
    return data_uri(f"image/{kind}", out.getvalue())
