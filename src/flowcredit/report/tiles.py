"""The images of an evaluation's grid, one by one, as parts of a page."""

import io

from PIL import Image

from flowcredit.image_grid import Layout, tile_box
from flowcredit.report.parts import data_uri
from flowcredit.report.run_data import Snapshot

LARGEST = 256
"""Pixels of the longer side of an image on the page; larger ones are scaled down for it."""


def tiles(snapshot: Snapshot) -> list[str]:
    """The images of a grid as data URIs; none where they were not kept or cannot be read."""
    layout = snapshot.layout
    if layout is None or snapshot.picture is None:
        return []
    try:
        with Image.open(snapshot.picture) as picture:
            grid = picture.convert("RGB")
    except OSError:
        return []
    return [_uri(grid.crop(tile_box(layout, index)), layout) for index in range(layout.count)]


def _uri(tile: Image.Image, layout: Layout) -> str:
    if layout.enlarged > 1:
        # Back to the model's own pixels; the page enlarges them again without blur.
        size = (tile.width // layout.enlarged, tile.height // layout.enlarged)
        tile = tile.resize(size, Image.Resampling.NEAREST)
    tile.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    kind = "png" if layout.enlarged > 1 else "jpeg"
    tile.save(out, kind, quality=90)
    return data_uri(f"image/{kind}", out.getvalue())
