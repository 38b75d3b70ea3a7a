"""Pairs of images that a prompt file names: found and looked at before a run, read when they are trained on.

Axes: P prompts, H and W image height and width in pixels; of a pair, the chosen image comes first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.prompt_files import HUB, json_type
from flowcredit.prompts import PromptSet
from flowcredit.shapes import bundled_path

Columns = tuple[str, str]
"""Names of the columns with the chosen and with the rejected image."""


class PairError(InputError):
    """An image of a pair that is missing, damaged or too small."""


def check_pairs(prompts: PromptSet, columns: Columns, height: int, width: int) -> None:
    """PairError unless every row names two images that are there, are two and, either way up, large enough.

    By their headers alone; what is damaged further on is found when it is read.
    """
    first: Path | None = None
    for place, path, column in _named(prompts, columns):
        said = f'{place}: "{column}" {path}'
        if column == columns[1] and first is not None and first.exists() and path.exists():
            _check_two(first, path, said, columns[0])
        first = path if column == columns[0] else None
        with _opened(path, said) as image:
            lying = (image.width - image.height) * (width - height) < 0
            _check_depth(image.mode, said)
            _check_size(image.size[::-1] if lying else image.size, said, height, width)


def read_pairs(prompts: PromptSet, columns: Columns, height: int, width: int) -> Tensor:
    """[P, 2, 3, H, W] float32 in [0, 1].

    Images are turned upright as their camera says; larger ones are scaled down (bilinear) and cut around
    their centre, as in diffusers' training scripts. PairError for an image that cannot be read, or is
    smaller: it would be blurred.
    """
    read = []
    for place, path, column in _named(prompts, columns):
        said = f'{place}: "{column}" {path}'
        with _opened(path, said) as image:
            _check_depth(image.mode, said)
            ImageOps.exif_transpose(image, in_place=True)
            _check_size(image.size, said, height, width)
            fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BILINEAR)
            read.append(torch.from_numpy(np.asarray(fitted).copy()))
    pixels = torch.stack(read).permute(0, 3, 1, 2).to(torch.float32) / 255
    return pixels.unflatten(0, (-1, 2)).contiguous()


def pair_files(prompts: PromptSet, columns: Columns) -> list[Path]:
    """The images of all pairs, row by row. PairError as in ``check_pairs`` where a row names none."""
    return [path for _, path, _ in _named(prompts, columns)]


def _named(prompts: PromptSet, columns: Columns) -> Iterator[tuple[str, Path, str]]:
    """Place, path and column of every image, row by row."""
    for column, setting in zip(columns, ("chosen_column", "rejected_column"), strict=True):
        if column not in prompts.columns:
            has = ", ".join(["prompt", *sorted(prompts.columns)])
            raise PairError(
                f"{prompts.source}: no column {column!r}, but the columns here are: {has}; name the one with"
                f" these images by algorithm.{setting}"
            )
    folder = _folder(prompts.source)
    for row in range(len(prompts)):
        place = prompts.places[row] if prompts.places else prompts.source
        for column in columns:
            value = prompts.columns[column][row]
            if not isinstance(value, str) or not value.strip():
                got = "an empty text" if isinstance(value, str) else json_type(value)
                raise PairError(f'{place}: "{column}" must be the path of an image, got {got}')
            path = Path(value.strip())
            if folder is None and not path.is_absolute():
                raise PairError(
                    f'{place}: "{column}" {path}: relative to a data set of the hub, which has no folder;'
                    " expected an absolute path"
                )
            yield place, path if folder is None else folder / path, column


def _folder(source: str) -> Path | None:
    """What paths in a prompt file are relative to."""
    if source.startswith(HUB):
        return None
    path = bundled_path(source)
    return path if path.is_dir() else path.parent


@contextmanager
def _opened(path: Path, said: str) -> Iterator[Image.Image]:
    """The image, of which only the header is read as yet; what Pillow raises becomes a PairError."""
    try:
        with Image.open(path) as image:
            yield image
    except FileNotFoundError:
        raise PairError(f"{said}: no such file; paths are relative to the prompt file") from None
    except UnidentifiedImageError:
        raise PairError(f"{said}: not an image that Pillow knows; expected such as PNG or JPEG") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow raises SyntaxError for damaged PNG. What was already told is told as it is.
        if isinstance(error, PairError):
            raise
        raise PairError(f"{said}: not readable as an image ({str(error).strip()})") from None


def _check_two(chosen: Path, rejected: Path, said: str, column: str) -> None:
    if chosen.samefile(rejected):
        raise PairError(
            f'{said}: is the file of "{column}" too, and a pair of one image teaches nothing; expected two'
        )


def _check_depth(mode: str, said: str) -> None:
    if mode.startswith(("I", "F")):
        raise PairError(
            f"{said}: more than 8 bits a channel (Pillow's mode {mode}), which would become white; expected"
            " 8 bits a channel"
        )


def _check_size(size: tuple[int, int], said: str, height: int, width: int) -> None:
    if size[0] < width or size[1] < height:
        raise PairError(
            f"{said}: {size[0]} x {size[1]} pixels, smaller than the recipe's {width} x {height}:"
            " enlarged it would teach blur; expected at least that size, or a smaller model.width and"
            " model.height"
        )
