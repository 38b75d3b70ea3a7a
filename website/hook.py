"""What mkdocs does beside its own: reference pages are filled, links that leave docs/ become plain words."""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reference import commands, settings

FILLED: Mapping[str, Callable[[], str]] = {
    "<!-- every setting -->": settings,
    "<!-- every command -->": commands,
}
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
"""A link to a file of the repository that is no page: it works where the repository is read, not here."""

log = logging.getLogger("mkdocs.hooks.flowcredit")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page, with its text."""
    for mark, content in FILLED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, content())
    folder = Path(page.file.abs_src_path).parent

    def plain(found: re.Match[str]) -> str:
        if not (folder / found[2]).exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, found[2])
        return found[1]

    return OUTSIDE.sub(plain, markdown)
