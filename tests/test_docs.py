"""The documentation: it builds without a warning, asks nobody for anything, and names what there is."""

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.main import get_command

from flowcredit.cli import app
from flowcredit.recipe_io import list_settings, settings_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link, an anchor or a page that is left out fails the build."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


class Asked(HTMLParser):
    """What a browser would fetch for a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.addresses.append(given.get("href") or "")


def test_pages_ask_no_other_host(site: Path) -> None:
    pages = list(site.rglob("index.html"))
    assert len(pages) == len(PAGES)
    for page in pages:
        for address in Asked(page.read_text(encoding="utf-8")).addresses:
            assert not address.startswith(("http:", "https:", "//")), (page, address)


def test_the_page_of_settings_is_that_of_this_version() -> None:
    current = settings_page()
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == current, (
        "write it anew: flowcredit settings --markdown > docs/settings.md"
    )
    for each in list_settings():
        assert f"| `{each.setting}` |" in current


@pytest.mark.parametrize("page", ["mathematics.md", "papers.md", "methods.md"])
def test_functions_that_are_named_are_there(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:[a-z_]+\.)[A-Za-z_.]*[A-Za-z_])\b", text))
    modules = {path.stem for path in (ROOT / "src" / "flowcredit").glob("*.py")}
    found = 0
    for name in sorted(named):
        module, _, attribute = name.partition(".")
        if module not in modules or attribute in ("py", "md", "yaml"):
            continue
        if module in ("noise", "guard") and any(each.setting == name for each in list_settings()):
            continue
        target = importlib.import_module(f"flowcredit.{module}")
        for part in attribute.split("."):
            assert part in vars(target), name
            target = vars(target)[part]
        found += 1
    assert found >= (15 if page != "methods.md" else 2)


def test_commands_and_options_that_are_shown_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    shown = 0
    for text in TEXTS:
        for line in re.findall(r"^flowcredit ([^\n]*)", text.read_text(encoding="utf-8"), re.MULTILINE):
            words = line.split("#")[0].split()
            command = "train" if words[0] == "launch" else words[0]
            assert command in commands, (text.name, line)
            options = {option for each in commands[words[0]].params for option in each.opts}
            if words[0] == "launch":
                continue
            for word in words[1:]:
                if word.startswith("--"):
                    assert word.partition("=")[0] in options, (text.name, line)
            shown += 1
    assert shown > 30


def test_files_that_are_named_exist() -> None:
    for text in TEXTS:
        named = re.findall(
            r"`((?:tests|benchmarks|reliability|examples|recipes|comparisons)/[\w./]+)`", text.read_text()
        )
        for name in named:
            assert (ROOT / name).exists(), (text.name, name)
