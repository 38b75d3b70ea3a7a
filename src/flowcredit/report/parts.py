"""What pages share: the optional packages, and pictures that are part of the page."""

import base64
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError


def short(name: str) -> str:
    """A reward of one's own by its attribute: the module's name is in the recipe."""
    return name.rpartition(":")[2]


def with_figures() -> Any:
    """`extras`, for pages with figures of matplotlib. InputError where that is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise _missing(error) from error
    return extras()


def extras() -> Any:
    """The templates. InputError where a package that pages need, and training does not, is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise _missing(error) from error
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )


def _missing(error: ImportError) -> InputError:
    return InputError(
        f"the report needs {error.name}, which is not installed; install it with: "
        "pip install 'flowcredit[report]'"
    )


def inline_svg(svg: str | None) -> str | None:
    """As an image of its own: the identifiers inside two drawings must not meet in one document."""
    return None if svg is None else data_uri("image/svg+xml", svg.encode())


def data_uri(kind: str, content: bytes) -> str:
    """Bytes as an address that holds them."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
