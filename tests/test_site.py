"""The site of the docs in a browser, its links and anchors, and the names and costs that pages tell.

What is told page by page: ``test_docs``.
"""

import functools
import http.server
import importlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag

import pytest
import yaml

from browser import opened
from commands_page import commands_page
from flowcredit.algorithms import build
from flowcredit.methods import METHODS
from flowcredit.recipe_io import list_settings, load_recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^(```|    ).*?(?:\n```$|$)", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: a link or an anchor that leads nowhere fails."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a built page loads, links to and can be linked at; and text that Markdown left as it was."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.left: list[str] = []
        self._in_text = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.update(value for name, value in attrs if name in ("id", "name") and value)
        self._in_text = tag == "p" or (self._in_text and tag not in ("ul", "ol", "table", "div", "code"))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        elif tag == "link":
            self.loads.append(str(given["href"]))
        elif given.get("src"):
            self.loads.append(str(given["src"]))

    def handle_endtag(self, tag: str) -> None:
        self._in_text = self._in_text and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._in_text and re.search(r"^\s*(- |\* |\||```|#+ )", data, re.MULTILINE):
            self.left.append(data)


def test_pages_load_nothing_from_elsewhere_and_every_link_and_anchor_is_there(site: Path) -> None:
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 20
    for file, page in pages.items():
        for url in page.loads:
            assert not re.match(r"(?:\w+:)?//", url), f"{file} loads {url}"
        for url in (*page.links, *page.loads):
            address, fragment = urldefrag(url)
            if re.match(r"[a-z]+:", address) or address.startswith("/"):
                continue
            target = (file.parent / unquote(address)).resolve() if address else file
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{file} points to {url}"
            if fragment and target in pages and fragment != "__comments":
                assert unquote(fragment) in pages[target].ids, f"{file} points to {url}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8"))


def test_lists_and_tables_are_rendered(site: Path) -> None:
    left = {file.parent.name: page.left for file in site.rglob("*.html") if (page := Page(file)).left}
    assert not left


def test_the_page_of_commands_is_that_of_this_version() -> None:
    current = commands_page()
    assert (DOCS / "commands.md").read_text("utf-8") == current, (
        "write it anew: python tools/commands_page.py > docs/commands.md"
    )
    for name in ("train", "evaluate", "plan", "check", "compare", "launch", "serve-reward", "export"):
        assert f"\n## flowcredit {name}\n" in current
    assert "\n| `--resume RUN` | Go on with" in current
    assert "[cyan]" not in current


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_in_a_browser_no_page_complains_or_asks_another_host(served: str) -> None:
    with opened(served, width=390) as seen:
        for name in ("choose", "mathematics", "settings"):
            seen.page.goto(served if name == "index" else f"{served}{name}/")
            seen.page.wait_for_load_state("networkidle")
            assert seen.broken_images() == []
            # Only tables and blocks may be wider than a phone, and these scroll by themselves.
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390, name
        for name in ("index", "porting"):
            seen.page.set_viewport_size({"width": 1280, "height": 900})
            seen.page.goto(served if name == "index" else f"{served}{name}/")
            assert seen.barriers() == [], name
        assert seen.complaints == []
        assert seen.leaves(served) == []


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def test_links_work_where_the_repository_is_read() -> None:
    headings = {
        file: {slug(found) for found in re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)}
        for file in TEXTS
    }
    for file in TEXTS:
        for url in LINK.findall(CODE.sub("", file.read_text("utf-8"))):
            address, fragment = urldefrag(url)
            if re.match(r"https?:", address):
                continue
            target = (file.parent / address).resolve() if address else file
            assert target.exists(), f"{file.name} links to {url}"
            if fragment:
                assert fragment in headings[target], f"{file.name} links to {url}"


SECTIONS = {each.setting.partition(".")[0] for each in list_settings() if "." in each.setting}
SETTINGS = {each.setting for each in list_settings()} | SECTIONS
MODULES = {path.stem for path in (ROOT / "src/flowcredit").iterdir()} | {"flowcredit"}
FILE = re.compile(r"\.(?:md|py|yaml|yml|json|jsonl|html|txt|toml|csv|parquet|safetensors|pth|pt|cff)$")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def is_code(name: str) -> bool:
    """Whether ``module.function`` is there, in flowcredit or written out from it."""
    parts = name.removeprefix("flowcredit.").split(".")
    found: object = importlib.import_module("flowcredit")
    for part in parts:
        if isinstance(found, ModuleType) and part not in vars(found):
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        elif isinstance(found, ModuleType | type) and part in vars(found):
            found = vars(found)[part]
        else:
            return False
    return True


def named(text: str) -> Iterator[str]:
    """Dotted names in backticks whose first part is a module or a section of settings; files are none."""
    for quoted in re.findall(r"`([^`\n]+)`", CODE.sub("", text)):
        name = quoted.partition("=")[0].partition("(")[0].strip()
        if DOTTED.fullmatch(name) and not FILE.search(name) and name.split(".")[0] in MODULES | SECTIONS:
            yield name


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.stem)
def test_names_in_the_docs_exist(file: Path) -> None:
    wrong = [name for name in named(file.read_text("utf-8")) if name not in SETTINGS and not is_code(name)]
    assert not [name for name in wrong if not any(each.startswith(f"{name}.") for each in SETTINGS)]


def test_a_name_that_is_not_there_is_found() -> None:
    assert list(named("`transition.flow_sdee`, `train.updat=x`, `log.jsonl`, `torch.cuda`, `a b.c`")) == [
        "transition.flow_sdee",
        "train.updat",
    ]
    assert is_code("transition.Gaussian.log_prob")
    assert is_code("flowcredit.models.pipelines.guided_prediction")
    assert not is_code("transition.flow_sdee")
    assert not is_code("transition.Gaussian.log_probb")
    assert "train.update" in SETTINGS


def rows(file: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, its head left out; backticks too."""
    text = (DOCS / file).read_text("utf-8").split(f"## {heading}\n", 1)[1]
    table = re.search(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)
    assert table is not None
    lines = table[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def test_every_method_is_in_the_index_and_its_code_is_named() -> None:
    index = rows("papers.md", "Methods")
    assert {row[0] for row in index} == set(METHODS)
    for row in index:
        assert f"algorithms.{row[0]}" in row[3]
        assert all(is_code(name.strip()) for name in row[3].split(","))
    assert {row[0] for row in rows("choose.md", "What each needs, and when to take it")} == set(METHODS)


def test_the_costs_in_the_docs_are_those_that_plan_tells() -> None:
    table = rows("choose.md", "What an iteration costs")
    assert {row[0] for row in table} == set(METHODS)
    for method, name, *told in table:
        recipe = load_recipe(ROOT / f"recipes/{name}.yaml")
        algorithm, prompts = build(recipe.algorithm, recipe.seed), recipe.train.prompts_per_iteration
        trees = [algorithm.plan_at(iteration) for iteration in range(min(300, recipe.train.iterations))]
        costs = (
            [1 for tree in trees],
            [tree.velocity_evaluations for tree in trees],
            [algorithm.trained_states(tree) for tree in trees],
            [tree.decodes for tree in trees],
            [len(recipe.rewards) * tree.scores for tree in trees],
        )
        found = [sorted({min(each) * prompts, max(each) * prompts}) for each in costs]
        expected = [" to ".join(f"{cost:,}" for cost in each) for each in found]
        assert (method, told) == (recipe.algorithm.name, expected)


def test_the_citation_file_reads_and_names_both_papers() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {each["url"][-10:] for each in found["references"]} == {"2510.01982", "2601.20218"}
    assert all(len(each["authors"]) >= 7 for each in found["references"])
    assert found["license"] == "Apache-2.0"
    assert found["version"] in (ROOT / "CHANGELOG.md").read_text("utf-8")
