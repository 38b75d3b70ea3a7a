"""The reference pages in Markdown, from the same sources as `flowcredit settings` and `flowcredit --help`."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer.main

from flowcredit.cli import app
from flowcredit.recipe_io import SettingInfo, list_settings

MARKUP = re.compile(r"\[/?(?:bold|cyan)\]")
TYPE = re.compile(r" <[^>]*>$")
"""What typer adds to the name of an argument."""
PIPE = r"\|"
EXAMPLE = re.compile(r"\[cyan\](.*?)\[/cyan\]", re.DOTALL)


def settings() -> str:
    """A heading for each section, below it its settings in a table; in the order of `flowcredit settings`."""
    sections: dict[str, list[SettingInfo]] = {}
    for each in list_settings():
        sections.setdefault(each.setting.partition(".")[0] if "." in each.setting else "", []).append(each)
    return "\n\n".join(f"## {name or 'The run'}\n\n{_table(rows)}" for name, rows in sections.items())


def _table(rows: list[SettingInfo]) -> str:
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    for each in rows:
        default = "required" if each.default is None else f"`{each.default}`"
        lines.append(f"| `{each.setting}` | {_cell(default)} | {_cell(each.description)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A text in a table; names in angle brackets are no tags."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """A heading for each command, with what its --help says."""
    program = typer.main.get_command(app)
    context = program.make_context("flowcredit", [], resilient_parsing=True)
    known = {name: program.get_command(context, name) for name in program.list_commands(context)}  # type: ignore[attr-defined]
    return "\n\n".join("\n\n".join(_command(name, command)) for name, command in known.items())


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## flowcredit {name}"
    text = inspect.cleandoc(command.help or "")
    examples = [" ".join(found.replace("\\[", "[").split()) for found in EXAMPLE.findall(text)]
    yield MARKUP.sub("", EXAMPLE.sub("", text)).strip()
    if examples:
        yield "\n".join(["```", *examples, "```"])
    with command.make_context(name, [], resilient_parsing=True) as context:
        rows = [row for each in command.get_params(context) if (row := _parameter(each, context))]
    yield "\n".join(["| argument or option | what it is |", "|---|---|", *rows])


def _parameter(parameter: Any, context: Any) -> str | None:
    found = parameter.get_help_record(context)
    if found is None or parameter.name == "help":
        return None
    name, meaning = TYPE.sub("", found[0]), found[1]
    return f"| `{name.replace('|', PIPE)}` | {_cell(MARKUP.sub('', meaning))} |"
