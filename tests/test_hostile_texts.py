"""Prompts, columns, names and paths that try to be more than text, wherever they are written out."""

import ast
import html
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowcredit import report
from flowcredit.cli import main
from flowcredit.compare.arms import Arm, with_slugs
from flowcredit.compare.tables import Cell, Table, markdown
from flowcredit.comparison import Evaluation, evaluation_table, steps_table
from flowcredit.config import Recipe
from flowcredit.console import Monitor, say
from flowcredit.errors import InputError
from flowcredit.evaluate import _slug
from flowcredit.evaluation_files import save_evaluation
from flowcredit.model_card import model_card
from flowcredit.prompts import load_prompts
from flowcredit.report import build_report, figures
from flowcredit.report.run_data import read_run
from flowcredit.run_folder import RunFolder, write_text
from flowcredit.visible import code_block, code_span, visible
from flowcredit.visible import markdown as markdown_text
from test_report import begin, record

HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</title></style></pre><script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}{# x #}",
    "\x1b[2J\x1b]0;title\x07\x9b31m",
    "[bold red]x[/] [link=http://evil]y[/link] :boom: [/nothing]",
    'one\ntwo\r\n{"iteration": 99}\u2028three\u2029four\x85five\x0bsix\x0cseven',
    "| a | b |\n---\n# heading\n```\n<b>x</b>\n[x](javascript:alert(1)) ![i](http://evil/i.png)",
    "`` ` ``` ````",
    "$\\frac{1}$ $(touch x) `touch x` ; touch x",
    "=cmd|' /C calc'!A0",
    "../../../etc/passwd",
    "\u202egnp.exe",
    "--\n---\nlicense: mit\n---",
)
EVERY = pytest.mark.parametrize("text", HOSTILE)


def is_quiet(text: str) -> bool:
    """Nothing in it but characters to be seen, spaces and line feeds."""
    return all(c.isprintable() or c in "\n" for c in text)


@given(st.text(st.characters(), max_size=60))
def test_a_visible_text_is_one_printable_line_and_plain_texts_stay(text: str) -> None:
    shown = visible(text)
    assert len(shown.splitlines()) <= 1
    assert all(c.isprintable() or c.isspace() for c in shown)
    shown.encode()
    if text.isprintable():
        assert shown == text


@EVERY
@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_console_shows_and_does_not_obey(text: str, on_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=on_terminal, width=2000, color_system=None)
    say(console, text)
    assert out.getvalue() == visible(text) + "\n"
    out.truncate(0)
    out.seek(0)
    with Monitor(Console(file=out, width=2000), 1, 0, 1) as monitor:
        monitor.finish_iteration(text)
    assert out.getvalue() == f"iteration 1/1  {visible(text)}".rstrip() + "\n"


@EVERY
def test_tables_show_and_do_not_obey(text: str) -> None:
    before = Evaluation(0, ("a", "b"), {f"http/{text}": (0.25, 0.5)}, "column", (text, "z"))
    for table in (evaluation_table(before, replace(before, iteration=2)), steps_table({4: before})):
        out = io.StringIO()
        Console(file=out, width=2000).print(table)
        assert is_quiet(out.getvalue())
        assert visible(text).strip() in out.getvalue()
        assert f"http/{visible(text)}".strip() in out.getvalue()


@EVERY
def test_an_error_stays_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    # Of a path two slashes are one.
    text = text.replace("//", "/")
    monkeypatch.setattr(sys, "argv", ["flowcredit", "plan", "--", text + ".yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith("\n")
    assert said[:-1].isprintable()
    assert visible(text) in said


@EVERY
def test_what_plan_prints_of_a_recipe(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = {
        "name": "x",
        "model": {"path": text},
        "prompts": {"train": text, "heldout": text},
        "rewards": [{"name": f"http/{text}"}],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    for words in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["flowcredit", "plan", str(tmp_path / "recipe.yaml"), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said, refused = capsys.readouterr()
        # What lies at the end of such a path on a real machine is no prompt file, and may be refused as one.
        assert ended.value.code == (2 if refused else 0)
        assert is_quiet(said + refused)
        if words and not refused:
            json.loads(said)


NAMES = ("../evil", "a/b", "a\nb", ".x", "", "x" * 101, "a b", "a\x00", "-x", "~", "x\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_runs_name_is_no_path(name: str) -> None:
    prompts = {"train": "p", "heldout": "p"}
    content = {"name": name, "model": {"path": "m"}, "prompts": prompts, "rewards": ["clip"]}
    with pytest.raises(ValueError, match="name"):
        Recipe.model_validate(content)


@given(st.text(max_size=80))
def test_a_file_named_by_a_prompt_stays_in_its_folder(text: str) -> None:
    for prompt in (text, *HOSTILE):
        assert re.fullmatch(r"[0-9A-Za-z]([0-9A-Za-z-]{0,38}[0-9A-Za-z])?", _slug(prompt))


@given(st.lists(st.text(min_size=1, max_size=80), min_size=1, max_size=6, unique=True))
def test_an_arms_folder_stays_in_its_folder(names: list[str]) -> None:
    slugs = [arm.slug for arm in with_slugs([Arm(name, Path("r")) for name in [*names, *HOSTILE]])]
    assert len(set(slugs)) == len(slugs)
    for slug in slugs:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", slug)


@EVERY
def test_a_log_stays_one_record_a_line(text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for iteration in (1, 2, 3):
        folder.append_log({"iteration": iteration, f"reward/{text}": 0.5, "note": text})
    lines = folder.log.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert all(line.isprintable() for line in lines)
    folder.cut_log(2)
    assert folder.logged_iterations() == {1, 2}


TAGS = """html head meta title style body header main section footer h1 h2 p ul li dl dt dd table thead tbody
tr th td span i div figure figcaption img details summary pre a br strong em code h3 output script svg line
path polygon circle text"""
OWN_SCRIPT = (Path(report.__file__).parent / "page.js").read_text(encoding="utf-8")


class Looked(HTMLParser):
    """Every tag and attribute, and all text, as a browser would take them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes = "", set[str](), list[tuple[str, str]]()
        self.scripts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.cdata_elem == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)


def is_harmless(page: Looked) -> None:
    assert page.tags <= set(TAGS.split())
    for kind, content in page.scripts:
        if kind == "application/json":
            assert all(len(point) == 2 for point in json.loads(content))
        else:
            assert content.strip() == OWN_SCRIPT.strip()
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value.startswith("data:image/") or re.fullmatch(r"#\w*", value)


@EVERY
def test_a_report_escapes(text: str, tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    reward = f"http/{text}"
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe |= {"name": text, "rewards": [{"name": reward}], "model": {"path": text}, "noise": {"kind": text}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    told = {f"missing/{reward}": 2, f"reward/{reward}": 0.5}
    (run / "log.jsonl").write_text(record(1, **told) + record(2, **told))
    write_text(run / "environment.json", json.dumps({text: text}))
    images = torch.rand(2, 3, 8, 8)
    for iteration, scores in ((0, (0.1, 0.2)), (4, (0.3, 0.5))):
        evaluation = Evaluation(
            iteration, (text, "b"), {reward: scores}, text, (text, "x"), seconds=1.0, images=images
        )
        save_evaluation(evaluation, run)
    page = Looked(build_report(run).read_text(encoding="utf-8"))
    is_harmless(page)
    assert len(page.scripts) > 5
    assert " ".join(text.split()) in " ".join(page.text.split())
    assert any(name == "alt" and value.startswith(text.split("\r")[0]) for name, value in page.attributes)


def test_curves_take_names_as_they_are(tmp_path: Path) -> None:
    """XML has no place for controls, and JSON within a page none for the end of its element."""
    run = begin(tmp_path / "run")
    reward = "http/$\\frac{1}$ </text><script>alert(1)</script>\x1b[2J\x00 & _^"
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "rewards": [{"name": reward}]}))
    (run / "log.jsonl").write_text("".join(record(i, **{f"reward/{reward}": 0.5}) for i in (1, 2)))
    for iteration in (0, 4):
        save_evaluation(Evaluation(iteration, ("a", "b"), {reward: (0.1, 0.2)}, seconds=1.0), run)
    data = read_run(run)
    drawn = [*figures.learning_curves(data), *figures.training_curves(data)]
    assert len(drawn) > 5
    for chart in drawn:
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(chart.svg).iter()}
        assert tags <= {"svg", "line", "path", "polygon", "circle", "text"}
        assert not set("<>&") & set(chart.points)
        assert all("\x1b" not in words for _, words in json.loads(chart.points))


def rendered(text: str) -> str:
    """What is left of a line of Markdown when its escapes are read: an independent, small reader."""
    assert not re.search(r"(?<!\\)(\\\\)*[`*|\[\]]", text), "mark-up that is not escaped"
    assert "<" not in text
    return html.unescape(re.sub(r"\\([\\`*|\[\]])", r"\1", text))


@given(st.text(max_size=60))
def test_markdown_of_a_text_reads_as_the_text(text: str) -> None:
    for each in (text, *HOSTILE):
        line = markdown_text(each)
        assert len(line.splitlines()) <= 1
        assert rendered(line).split() == visible(" ".join(each.split())).split()


@given(st.text("`ab \n", max_size=30))
def test_code_cannot_be_closed_from_inside(text: str) -> None:
    span = code_span(text)
    ticks = re.match(r"`+", span).group()  # type: ignore[union-attr]
    assert re.findall(rf"(?<!`){ticks}(?!`)", span[len(ticks) : -len(ticks)]) == []
    fence, *inside, last = code_block("yaml", text).split("\n")
    assert fence.removesuffix("yaml") == last
    assert not any(line.strip().startswith(last) for line in inside)


@EVERY
def test_a_model_card_escapes(text: str) -> None:
    reward = f"http/{text}"
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"path": text, "lora": text, "height": 32, "width": 32},
            "prompts": {"train": text, "heldout": text},
            "rewards": [{"name": reward, "weight": 0.5}],
            "weights": {"method": "lora"},
        }
    )
    before = Evaluation(0, ("a", "b"), {reward: (0.25, 0.5)}, "c", (text, "z"))
    card = model_card(recipe, "FluxPipeline", before, replace(before, iteration=7))
    _, head, rest = card.split("\n---\n" if card.startswith("\n") else "---\n", 2)
    front = yaml.safe_load(head)
    assert front.keys() == {"library_name", "pipeline_tag", "base_model", "tags"}
    assert front["base_model"] == text
    # The code is Python in which the path is a text, and nothing else.
    code = re.findall(r"^(`{3,})python\n(.*?)\n\1$", rest, flags=re.S | re.M)[0][1]
    calls: list[tuple[str, Any]] = []
    pipeline = SimpleNamespace(
        load_lora_weights=lambda path: calls.append(("lora", path)),
        fuse_lora=lambda: None,
        unload_lora_weights=lambda: None,
    )

    def load(path: str, dtype: Any) -> Any:
        calls.append(("model", path))
        return pipeline

    without_imports = "\n".join(line for line in code.split("\n") if "import" not in line[:30])
    exec(without_imports, {"torch": torch, "FluxPipeline": SimpleNamespace(from_pretrained=load)})
    assert calls == [("model", text), ("lora", text), ("lora", "THIS_FOLDER")]
    # Outside of code: no HTML, no link, no image, no row of a table with more cells.
    prose = re.sub(r"^(`{3,})\w+\n.*?\n\1$", "", rest, flags=re.S | re.M)
    prose = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"\\`", "", prose))
    assert "<" not in prose
    assert not re.search(r"(?<!\\)\]\(", prose)
    rows = [line for line in prose.split("\n") if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert len(rows) == 2 + 3
    assert [line for line in prose.split("\n") if line.startswith("#")] == [
        "# tiny",
        "## Results on 2 held-out prompts",
        "## Recipe",
    ]


@EVERY
def test_a_comparisons_markdown_escapes(text: str) -> None:
    table = Table(text, text, ((text, text), ("b", "")), ((text, (Cell(text, True), Cell(text))),))
    lines = markdown(table).rstrip("\n").split("\n")
    assert len(lines) == 7
    assert lines[0].startswith("## ")
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines[4:]} == {4}
    assert "<" not in "".join(lines)


@EVERY
def test_prompts_keep_their_text_and_are_no_paths(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": text, text: text}) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    found = load_prompts(file)
    assert found.prompts == (text.strip(), "b")
    assert found.columns == {text: (text, None)}


@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[{"prompt": "a \\ud800"}]', "half of a surrogate pair"),
        ('[{"prompt": "a", "x": "\\udfff"}]', "half of a surrogate pair"),
        ('[{"prompt": "a", "x": %s}]' % ("9" * 5000), "a number of too many digits"),
        ('[{"prompt": "a", "x": %s}]' % ("[" * 100_000), "nested too deeply"),
    ],
)
def test_json_that_no_file_could_hold_is_refused(
    ending: str, content: str, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / f"prompts.{ending}"
    file.write_text(content if ending == "json" else content[1:].removesuffix("]"))
    with pytest.raises(InputError, match=rf"prompts\.{ending}.*: .*{expected}"):
        load_prompts(file)


def test_every_line_for_the_console_goes_through_say() -> None:
    """Elsewhere only tables and marks of our own are printed, never a text."""
    texts = []
    for file in sorted((Path(__file__).parent.parent / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).lower().endswith("console.print"):
                continue
            if file.name != "console.py" and isinstance(node.args[0], ast.JoinedStr | ast.Constant):
                texts.append(f"{file.name}:{node.lineno}")
    assert not texts
