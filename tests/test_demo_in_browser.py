"""`flowcredit demo` as a user has it: a process, a page in a browser, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from browser import Seen, browser_program, opened
from demo_run import make_run

pytest.importorskip("gradio", reason="the extra demo is not installed")

PROMPT = "a triangle and a ring"
WATCHED = """\
import sys
OUT = {out!r}
def look(event, given):
    if event == "socket.getaddrinfo":
        host = given[0]
    elif event == "socket.connect" and isinstance(given[1], tuple):
        host = given[1][0]
    else:
        return
    if host not in (None, "", "127.0.0.1", "localhost", "::1", b"127.0.0.1"):
        with open(OUT, "a") as file:
            file.write(str(host) + "\\n")
sys.addaudithook(look)
"""
"""Loaded by Python as it starts: notes each name and address beyond this machine that is asked for."""


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    asked: Path
    """The hosts beyond this machine that the server asked for, a line each."""
    errors: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    browser_program()
    folder = tmp_path_factory.mktemp("demo")
    run_dir = make_run(folder, "g2rpo", "algorithm.group_size=3", "algorithm.train_steps=[0, 2]")
    asked, errors = folder / "asked.txt", folder / "errors.txt"
    (folder / "sitecustomize.py").write_text(WATCHED.format(out=str(asked)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    words = [sys.executable, "-m", "flowcredit", "demo", str(run_dir), "--port", "0"]
    with errors.open("w") as said:
        process = subprocess.Popen(
            words, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=said, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, (line, errors.read_text())
        yield Server(process, found.group(), asked, errors)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def seen(server: Server) -> Iterator[Seen]:
    with opened(server.url) as page:
        page.page.set_default_timeout(60_000)
        yield page


def fill(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).locator("visible=true").fill(text)


def test_base_and_aligned_are_compared(seen: Seen) -> None:
    page = seen.page
    fill(page, "Prompt", PROMPT)
    page.get_by_role("button", name="Draw").click()
    pictures = page.locator(".compare img")
    expect(pictures).to_have_count(2, timeout=60_000)
    assert [each.split(":")[1] for each in names(page)] == [" base, seed 0", " iteration 2, seed 0"]
    rows = page.locator(".compare tbody tr").all_inner_texts()
    assert [re.split(r"\s+", row)[:2] for row in rows] == [["shapes", "trained"], ["shapes_exact", "watched"]]
    assert all(re.search(r"\d\.\d{3}", row) for row in rows)
    sources = [pictures.nth(i).get_attribute("src") for i in (0, 1)]
    assert sources[0] != sources[1]
    assert not seen.broken_images()
    assert_accessible(seen)


def names(page: Page) -> list[str]:
    return [each.get_attribute("alt") or "" for each in page.locator(".compare img").all()]


def test_the_slider_goes_through_checkpoints_by_keyboard(seen: Seen) -> None:
    page = seen.page
    newest = page.locator(".compare img").nth(1).get_attribute("src")
    slider = page.locator('#compare-slider input[type="range"]')
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".prose.which").locator("visible=true")).to_contain_text("iteration 1 of 2")
    expect(page.locator(".compare figcaption").nth(1)).to_have_text("iteration 1", timeout=60_000)
    assert page.locator(".compare img").nth(1).get_attribute("src") != newest
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".prose.which").locator("visible=true")).to_contain_text("the base model")
    expect(page.locator(".compare figcaption").nth(1)).to_have_text("base again", timeout=60_000)
    first, second = (page.locator(".compare img").nth(i).get_attribute("src") for i in (0, 1))
    assert first == second


def test_bad_input_is_one_line_on_the_page(seen: Seen) -> None:
    page = seen.page
    for label, bad, good, said in (
        ("Seed", "seven", "0", "the seed is 'seven'; expected a whole number"),
        ("Prompt", "  ", PROMPT, "type a prompt first"),
    ):
        fill(page, label, bad)
        page.get_by_role("button", name="Draw").click()
        alert = page.get_by_role("alert").locator("visible=true")
        expect(alert).to_contain_text(said, timeout=60_000)
        assert "\n" not in alert.inner_text().strip()
        assert "Traceback" not in page.content()
        fill(page, label, good)


def test_a_hostile_prompt_is_drawn_as_text(seen: Seen) -> None:
    page = seen.page
    hostile = "<img src=x onerror=\"document.title='taken'\"> ${1+1} {{value}}"
    fill(page, "Prompt", hostile)
    page.get_by_role("button", name="Draw").click()
    expect(page.locator(".compare .title")).to_contain_text(hostile, timeout=60_000)
    expect(page.locator(".compare .notes")).to_contain_text("No score by shapes")
    assert page.title() != "taken"


def test_the_tree_is_played(seen: Seen) -> None:
    page = seen.page
    page.get_by_role("tab", name="Rollout tree").click()
    fill(page, "Prompt", PROMPT)
    page.get_by_role("button", name="Roll out").click()
    at, shown = page.locator(".player .at"), page.locator(".player .stage").locator("visible=true")
    expect(at).to_have_text("1 of 4", timeout=60_000)
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".player .said")).to_contain_text("3 branches from one state")
    expect(shown).to_have_count(1)
    expect(shown.locator("tbody tr")).to_have_count(3)
    # Two strides for each of three branches: a picture each, in the tree and in the table.
    expect(shown.locator("svg.tree g.node:not(.foretold)")).to_have_count(6)
    expect(shown.locator("svg.thumb")).to_have_count(6)
    told = [float(each.replace("−", "-")) for each in shown.locator("tbody td:last-child").all_inner_texts()]
    assert abs(sum(told)) < 0.04
    assert max(told) > 0
    assert_accessible(seen)
    page.locator('.player input[type="range"]').focus()
    page.keyboard.press("ArrowRight")
    expect(at).to_have_text("3 of 4")
    page.get_by_role("button", name="Play").press("Enter")
    expect(at).to_have_text("4 of 4")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    expect(shown.locator("caption")).to_have_text("Advantages of all steps")


def test_narrow_and_dark(seen: Seen, server: Server) -> None:
    browser = seen.page.context.browser
    assert browser is not None
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.goto(server.url)
    fill(page, "Prompt", PROMPT)
    page.get_by_role("button", name="Draw").click()
    expect(page.locator(".compare img")).to_have_count(2, timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert_accessible(Seen(page))
    page.close()


def assert_accessible(seen: Seen) -> None:
    # Until gradio has faded in what came last its colours are still on their way.
    seen.page.wait_for_timeout(600)
    assert seen.barriers() == []


def test_nothing_was_asked_elsewhere_and_nobody_complained(seen: Seen, server: Server) -> None:
    assert seen.complaints == []
    assert seen.leaves(server.url) == []
    assert not server.asked.exists(), server.asked.read_text()


def test_pages_of_other_names_are_refused(server: Server) -> None:
    request = urllib.request.Request(server.url, headers={"Host": "elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    refused.value.close()
    assert refused.value.code == 400


def test_ctrl_c_ends_it(server: Server) -> None:
    """The last: there is no server after it."""
    server.process.send_signal(signal.SIGINT)
    out, _ = server.process.communicate(timeout=120)
    assert server.process.returncode == 0
    assert out == "stopped\n"
    assert "Traceback" not in server.errors.read_text()
