"""The pages as a browser shows them: whole, silent, asking nobody, usable by keys, readable for all."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from browser import Seen, opened
from flowcredit.compare.tables import Cell, Table, published
from flowcredit.published import PUBLISHED
from flowcredit.report import build_report
from flowcredit.report.diagnosis_files import write_diagnosis
from flowcredit.report.parts import with_figures
from test_diagnostics import made
from test_report import begin, evaluate_twice, record

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an alarm, credit by step, long names, and a reward that has no number in one iteration."""
    folder = begin(tmp_path_factory.mktemp("pages") / "run")
    lines = [
        record(i, **{"advantage/0": 0.5 * i, "advantage/1": 0.1, "dead_groups/0": 0.0, "dead_groups/1": 0.25})
        for i in (1, 2, 3, 4)
    ]
    (folder / "log.jsonl").write_text("".join(lines))
    (folder / "environment.json").write_text(json.dumps({"Versions": "torch 2.13.0", "Device": "CPU"}))
    (folder / "guard.jsonl").write_text(
        json.dumps({"iteration": 3, "why": "held-out a fell", "done": "warned"})
    )
    evaluate_twice(folder)
    build_report(folder)
    return folder


@pytest.fixture(scope="module")
def seen(run: Path) -> Iterator[Seen]:
    with opened((run / "report.html").as_uri()) as seen:
        yield seen


def is_sound(seen: Seen) -> None:
    assert seen.complaints == []
    assert seen.leaves("file:") == []
    assert seen.broken_images() == []


NARROWEST_NAME = """
    Math.min(1000, ...[...document.querySelectorAll(".wide td:first-child")].map(each => each.offsetWidth))
"""
"""Pixels of the first column, in which a table with many columns has its names."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_report_is_whole_and_open_to_all(seen: Seen, size: dict[str, int], scheme: str) -> None:
    seen.page.set_viewport_size({"width": size["width"], "height": size["height"]})
    seen.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    seen.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    is_sound(seen)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert seen.barriers() == []
    assert seen.page.evaluate(NARROWEST_NAME) >= 100
    paper = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_curve_tells_its_values_by_pointer_and_by_keys(seen: Seen, run: Path) -> None:
    seen.page.set_viewport_size({"width": 1280, "height": 900})
    chart = seen.page.locator(".chart", has_text="Gradient norm")
    told = chart.locator("output")
    assert told.inner_text() == ""
    curve = chart.locator("svg")
    curve.focus()
    logged = [json.loads(line)["grad_norm"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert told.inner_text() == f"iteration 4: {logged[3]:.4g}"
    for _ in range(2):
        curve.press("ArrowLeft")
    assert told.inner_text() == f"iteration 2: {logged[1]:.4g}"
    assert curve.get_attribute("aria-valuetext") == f"iteration 2: {logged[1]:.4g}"
    curve.press("Home")
    curve.press("ArrowLeft")
    assert told.inner_text().startswith("iteration 1:")
    curve.press("End")
    assert told.inner_text().startswith("iteration 4:")
    box = curve.bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + 60 / 440 * box["width"], box["y"] + 30)
    assert told.inner_text().startswith("iteration 1:")
    learning = seen.page.locator(".chart", has_text="graded (trained)").first
    learning.locator("svg").focus()
    assert learning.locator("output").inner_text() == "iteration 4: 0.575 ± 0.063"


def test_every_part_of_the_report_is_there(seen: Seen) -> None:
    heads = seen.page.locator("h2").all_inner_texts()
    assert heads == [
        "Held-out prompts, before and after",
        "Images, before and after",
        "Prompts that changed most",
        "Learning curves",
        "Training",
        "Credit by step",
        "Time and cost",
        "Recipe",
        "To repeat it",
    ]
    assert "Collapse at iteration 3: held-out a fell; warned." in seen.page.locator(".alarms").inner_text()
    assert "torch 2.13.0" in seen.page.locator("section", has_text="To repeat it").last.inner_text()


def test_without_scripts_the_curves_are_pictures(run: Path) -> None:
    source = (run / "report.html").read_text(encoding="utf-8")
    assert source.count('role="img" aria-label="Gradient norm before clipping: iteration 4: 0.5"') == 1


def comparison_page() -> str:
    """The page of a comparison with as many columns as a paper's table."""
    table = published(PUBLISHED["g2rpo"])
    cells = (Cell("comparisons/levels/shapes.yaml"), *[Cell("dense_grpo")] * 11)
    names = tuple((f"algorithm.some_setting_{place}", "") for place in range(12))
    settings = Table("Settings that differ", "Many.", names, (("DenseGRPO with calibrated noise", cells),))
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    sample = SimpleNamespace(prompt="a red circle", pictures=[(picture, "0.5")] * 3, small=True)
    template = with_figures().get_template("comparison_page.html.j2")
    return str(
        template.render(
            title="Arms",
            status="3 arms",
            notes=["one run is missing"],
            scores=[table],
            published=[table],
            curves=picture,
            costs=table,
            settings=settings,
            heads=["before", "one", "other"],
            samples=[sample],
            arms=[("one", "recipes/a.yaml", "train.iterations=4")],
        )
    )


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(out, "PNG")
    return out.getvalue()


def test_a_diagnosis_and_a_comparison_are_sound(tmp_path: Path, seen: Seen) -> None:
    states = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0))
    branches = torch.rand(2, 2, 2, 3, generator=torch.Generator().manual_seed(1))
    write_diagnosis(made(states, branches), tmp_path, "a run", "name: a run")
    (tmp_path / "comparison.html").write_text(comparison_page(), encoding="utf-8")
    for name in ("diagnosis.html", "comparison.html"):
        seen.page.goto((tmp_path / name).as_uri())
        seen.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        for width in (390, 1280):
            seen.page.set_viewport_size({"width": width, "height": 900})
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            assert seen.barriers() == []
            assert seen.page.evaluate(NARROWEST_NAME) >= 100
        is_sound(seen)
