"""The report: complete in itself, right in its numbers and pictures, and made of whatever a run has."""

import base64
import io
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowcredit.comparison import Evaluation
from flowcredit.errors import InputError
from flowcredit.evaluation_files import save_evaluation
from flowcredit.image_grid import to_pixels
from flowcredit.report import build_report, figures
from flowcredit.report.parts import with_figures
from flowcredit.report.run_data import read_run

PROMPTS = ("a red circle", "a <b>blue</b> square", "two rings", "a star")
RECIPE = """\
name: my-run
seed: 3
model: {path: some/model, height: 16, width: 16}
prompts: {train: a.txt, heldout: b.jsonl}
algorithm: {name: g2rpo, num_steps: 8, group_size: 6}
rewards: [{name: graded}]
watch: [{name: exact}]
train: {iterations: 4, learning_rate: 1.0e-04, max_grad_norm: 1.0}
"""


@dataclass
class Page(HTMLParser):
    """What a reader's browser would find in the page."""

    source: str
    addresses: list[str] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    _stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.addresses += [given[name] for name in ("src", "href") if name in given]
        if tag == "img":
            self.pictures.append((given["alt"], given["src"]))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("img", "meta", "link", "br"):
            self._stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if text and "style" not in self._stack:
            self.texts.append(text)
            if "td" in self._stack or "th" in self._stack:
                self.rows[-1][-1] += text

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row and row[0].startswith(name))


def record(iteration: int, **others: Any) -> str:
    values = {
        "iteration": iteration,
        "reward/graded": 0.4 + 0.01 * iteration,
        "missing/graded": 0,
        "on_policy_deviation": 1e-7,
        "ratio_max_deviation": 1e-4,
        "clip_fraction_low": 0.0,
        "clip_fraction_high": 0.1,
        "grad_norm": 0.5,
        "dead_groups": 0.0,
        "learning_rate": 1e-4,
        "velocity_evaluations": 1000 * iteration,
        "seconds": 2.5 * iteration,
    }
    return json.dumps({**values, **others}) + "\n"


def evaluation(
    iteration: int, graded: Sequence[float], exact: Sequence[float], images: Tensor | None
) -> Evaluation:
    scores = {"graded": tuple(graded), "exact": tuple(exact)}
    groups = ("one", "one", "count", "count")
    return Evaluation(iteration, PROMPTS, scores, "task", groups, seconds=30.0, images=images)


def pictures(seed: int, size: int = 16) -> Tensor:
    return torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(seed))


def begin(folder: Path) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def evaluate_twice(run: Path, size: int = 16) -> None:
    save_evaluation(evaluation(0, (0.2, 0.5, 0.4, 0.6), (0, 1, 0, 0), pictures(0, size)), run)
    save_evaluation(evaluation(4, (0.4, 0.6, 0.7, 0.6), (1, 1, 0, 1), pictures(4, size)), run)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of four iterations."""
    folder = begin(tmp_path / "run")
    (folder / "log.jsonl").write_text("".join(record(i) for i in (1, 2, 3, 4)))
    evaluate_twice(folder)
    return folder


def page_of(run: Path) -> Page:
    path = build_report(run)
    assert path == run / "report.html"
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of other parts: the curves are what takes the time."""
    for curves in ("learning_curves", "training_curves"):
        monkeypatch.setattr(figures, curves, lambda data: [])


def content(uri: str, kind: str) -> bytes:
    head, _, body = uri.partition(",")
    assert head == f"data:{kind};base64"
    return base64.b64decode(body)


def panels(page: Page, alt: str) -> list[str]:
    """The ids of the axes in a drawing of matplotlib's."""
    uri = next(uri for text, uri in page.pictures if text.startswith(alt))
    drawing = ElementTree.fromstring(content(uri, "image/svg+xml"))
    names = [element.get("id", "") for element in drawing.iter()]
    return [name for name in names if name.startswith("axes_")]


def tile(page: Page, alt: str, kind: str = "image/png") -> Any:
    uri = next(uri for text, uri in page.pictures if text == alt)
    with Image.open(io.BytesIO(content(uri, kind))) as image:
        return np.asarray(image)


def test_page_needs_nothing_from_outside(run: Path) -> None:
    page = page_of(run)
    assert len(page.addresses) == 3 + 3 + 2 * 3
    assert all(address.startswith("data:") for address in page.addresses)
    assert not page._stack
    for outside in ("@import", "url(", "<link", "http:", "https:", "fetch", "import("):
        assert outside not in page.source


@pytest.mark.usefixtures("no_curves")
def test_table_holds_means_and_paired_changes(run: Path) -> None:
    page = page_of(run)
    assert page.row("graded")[:4] == ["gradedtrained", "0.425", "0.575", "▲+0.150 ± 0.065"]
    assert page.row("exact")[:4] == ["exactnot trained", "0.250", "0.750", "+0.500 ± 0.289"]
    # Below the exact match its tasks; the marks stand at the means.
    names = [row[0] for row in page.rows if row]
    assert names[:5] == ["reward", "gradedtrained", "exactnot trained", "one", "count"]
    assert page.row("count")[1:4] == ["0.000", "0.500", "+0.500 ± 0.500"]
    for place in ("42.5%", "57.5%", "25.0%", "75.0%"):
        assert f"left:{place}" in page.source


@pytest.mark.usefixtures("no_curves")
def test_images_stand_side_by_side_with_their_prompts(run: Path) -> None:
    page = page_of(run)
    for index, prompt in enumerate(PROMPTS[:3]):
        np.testing.assert_array_equal(tile(page, f"{prompt}, before"), to_pixels(pictures(0))[index])
        after = tile(page, f"{prompt}, after 4 iterations")
        np.testing.assert_array_equal(after, to_pixels(pictures(4))[index])
        assert prompt in page.texts
    assert "0.20" in page.texts
    assert "0.40" in page.texts


@pytest.mark.usefixtures("no_curves")
def test_large_images_are_scaled_down_for_the_page(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    evaluate_twice(run, size=300)
    assert tile(page_of(run), "a red circle, before", "image/jpeg").shape == (256, 256, 3)


def test_curves_have_a_panel_for_each_thing_logged(run: Path) -> None:
    data = read_run(run)
    assert [chart.title for chart in figures.learning_curves(data)] == [
        *["graded (trained)"] * 2,
        *["exact (not trained)"] * 2,
    ]
    assert [chart.title for chart in figures.training_curves(data)] == [
        "Rollout reward: graded",
        "|ratio − 1|",
        "Share of ratios clipped",
        "Gradient norm before clipping",
        "Share of groups without a signal",
        "Learning rate",
    ]
    assert page_of(run).source.count('<figure class="chart">') == 4 + 6
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    fewer = [{key: line[key] for key in ("iteration", "reward/graded", "grad_norm")} for line in lines]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in fewer))
    assert len(figures.training_curves(read_run(run))) == 2


@pytest.mark.usefixtures("no_curves")
def test_times_and_counts_come_from_the_log(run: Path) -> None:
    texts = page_of(run).texts
    following = dict(reversed(list(itertools.pairwise(texts))))
    assert following["my-run"] == "4 of 4 iterations in 10 s"
    assert following["Median iteration"] == "2.5 s"
    assert following["Velocity evaluations in rollouts"] == "4,000"
    assert following["Held-out evaluations"] == "60 s for 2"
    assert following["Model"] == "some/model; 16×16 pixels"


def test_a_torn_last_line_is_no_fault(run: Path) -> None:
    """The page is the same to the byte, which also takes that it does not tell when it was made."""
    whole = page_of(run).source
    with (run / "log.jsonl").open("a") as log:
        log.write(record(5)[:40])
    assert page_of(run).source == whole


@pytest.mark.usefixtures("no_curves")
def test_a_broken_line_within_the_log_is_told(run: Path) -> None:
    (run / "log.jsonl").write_text(record(1) + "{oops\n" + record(3) + record(4, **{"reward/graded": "high"}))
    page = page_of(run)
    assert "log.jsonl: line 2 cannot be read and is left out" in page.texts
    data = read_run(run)
    assert data.column("iteration") == [1, 3, 4]
    assert math.isnan(data.column("reward/graded")[-1])


def test_a_resumed_runs_later_lines_replace_the_earlier(run: Path) -> None:
    (run / "log.jsonl").write_text("".join(record(i) for i in (1, 2, 3)) + record(2, grad_norm=9.0))
    data = read_run(run)
    assert data.column("iteration") == [1, 2]
    assert data.column("grad_norm") == [0.5, 9.0]
    assert (data.evaluations_until(0), data.evaluations_until(2)) == (0, 2000)
    assert math.isnan(data.evaluations_until(3))


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    page = page_of(begin(tmp_path / "run"))
    assert any("no evaluation yet" in text for text in page.texts)
    assert any(text.startswith("unfinished: 0 of 4 iterations; while it runs") for text in page.texts)
    assert not page.pictures
    assert [row for row in page.rows if row[0] == "reward"] == []


def test_a_run_with_one_evaluation(run: Path) -> None:
    (run / "evaluations" / "000004.json").unlink()
    (run / "log.jsonl").write_text(record(1, **{"missing/graded": 7}))
    page = page_of(run)
    assert page.row("graded")[:2] == ["gradedtrained", "0.425 ± 0.085"]
    assert [alt for alt, _ in page.pictures] == [f"{prompt}, before" for prompt in PROMPTS[:3]]
    assert "graded: 7 rollout images had no score." in page.texts
    assert any(text.startswith("unfinished: 1 of 4 iterations in 2 s;") for text in page.texts)


@pytest.mark.usefixtures("no_curves")
def test_what_cannot_be_read_is_told_and_left_out(run: Path) -> None:
    (run / "evaluations" / "000002.json").write_text("{")
    (run / "images" / "000004.png").write_bytes(b"no picture")
    (run / "images" / "000000.png").unlink()
    page = page_of(run)
    assert any("000002.json: not an evaluation" in text for text in page.texts)
    assert page.row("graded")[2] == "0.575"
    assert all("before" not in alt for alt, _ in page.pictures)


@pytest.mark.usefixtures("no_curves")
def test_evaluations_of_other_prompts_are_not_compared(run: Path) -> None:
    other = Evaluation(9, ("another prompt",), {"graded": (0.9,)})
    save_evaluation(other, run)
    page = page_of(run)
    assert page.row("graded")[:3] == ["gradedtrained", "0.425", "0.575"]


def test_a_missing_package_is_named_with_the_command(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    build_report(run)
    with pytest.raises(InputError, match=r"matplotlib.*pip install 'flowcredit\[report\]'"):
        with_figures()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"jinja2.*pip install 'flowcredit\[report\]'"):
        build_report(run)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"is no run: recipe\.yaml \(cannot be read: No such file or directory\); expected"),
        ("", r"recipe\.yaml: not the recipe of a run \(its parts are not what they should be\); expected"),
        (
            "- 3\n",
            r"recipe\.yaml: not the recipe of a run \(its parts are not what they should be\); expected",
        ),
        ("name: x\n", r"recipe\.yaml: not the recipe of a run \(it has no 'rewards'\); expected"),
        ("name: x\na: [1\n", r"recipe\.yaml:3: not valid YAML: while parsing a flow sequence expected"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=told) as error:
        build_report(tmp_path)
    assert "\n" not in str(error.value)
