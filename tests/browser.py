"""A page in a real browser: what it printed, what it asked for, and what axe-core finds in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without these the browser asks its maker's hosts for news at every start.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browser_program() -> str:
    """The browser of this machine. Without one tests skip, or fail under FLOWCREDIT_BROWSER=required."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        advice = f"no browser is installed (one of {', '.join(NAMES)})"
        if os.environ.get("FLOWCREDIT_BROWSER") == "required":
            pytest.fail(advice)
        pytest.skip(advice)
    return found


@dataclass
class Seen:
    """A page, and all that went wrong or went out while it was looked at."""

    page: Page
    complaints: list[str] = field(default_factory=list)  # of the console, and of scripts
    requests: list[str] = field(default_factory=list)  # beside the page itself and what lies in it

    def watch(self) -> None:
        """Collect from now on."""
        self.page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in _LOUD else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def leaves(self, own: str) -> list[str]:
        """The requests that went neither to addresses beginning with `own` nor into the page itself."""
        inside = (own, "data:", "blob:", "about:")
        return [url for url in self.requests if not url.startswith(inside)]

    def barriers(self) -> list[str]:
        """What axe-core finds against WCAG 2.2 A and AA, one line each."""
        rules = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
        found = Axe().run(self.page, options={"runOnly": rules})
        return [
            f"{broken['id']}: {broken['help']} at {node['target']}"
            for broken in found.response["violations"]
            for node in broken["nodes"]
        ]

    def broken_images(self) -> list[str]:
        """The images that did not load, by their texts."""
        return self.page.evaluate(
            "() => [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.alt || i.src)"
        )


_LOUD = ("error", "warning")


@contextmanager
def opened(address: str, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Seen]:
    """The page at an address (file:// or a local server's), in a fresh browser of its own."""
    program = browser_program()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        seen = Seen(page)
        seen.watch()
        page.goto(address)
        yield seen
        browser.close()
