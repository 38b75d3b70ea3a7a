"""docs/commands.md, from what commands say of themselves: python tools/commands_page.py > docs/commands.md"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer.main

from flowcredit.cli import app

HEAD = """# Every command

Made by `python tools/commands_page.py` from what `flowcredit COMMAND --help` says.

Bad input is one line and exit code 2. Exit code 1: something that was checked does not hold, or a run failed.
3: the guard stopped a run. 130: Ctrl-C; 143: SIGTERM.

`flowcredit --version` prints the version; `flowcredit --install-completion` lets your shell complete
commands, options, recipes, settings and rewards."""
MARKUP = re.compile(r"\[/?(?:bold|cyan)\]")
EXAMPLE = re.compile(r"\[cyan\](.*?)\[/cyan\]", re.DOTALL)
TYPE = re.compile(r" <[^>]*>$")
"""What typer adds to the name of an argument."""


def commands_page() -> str:
    """A heading for each command; below it what it does, examples, and a table of arguments and options."""
    program: Any = typer.main.get_command(app)
    context = program.make_context("flowcredit", [], resilient_parsing=True)
    known = ((name, program.get_command(context, name)) for name in program.list_commands(context))
    sections = ["\n\n".join(_command(name, command)) for name, command in known]
    return "\n\n".join([HEAD, *sections]) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## flowcredit {name}"
    text = inspect.cleandoc(command.help or "")
    examples = [" ".join(found.replace("\\[", "[").split()) for found in EXAMPLE.findall(text)]
    said = MARKUP.sub("", EXAMPLE.sub("", text)).strip()
    yield re.sub(r"\n{3,}", "\n\n", said)
    if examples:
        yield "\n".join(["```", *examples, "```"])
    with command.make_context(name, [], resilient_parsing=True) as context:
        rows = [row for each in command.get_params(context) if (row := _parameter(each, context))]
    if rows:
        yield "\n".join(["| argument or option | what it is |", "|---|---|", *rows])


def _parameter(parameter: Any, context: Any) -> str | None:
    found = parameter.get_help_record(context)
    if found is None or parameter.name == "help":
        return None
    name, meaning = TYPE.sub("", found[0]), " ".join(MARKUP.sub("", found[1]).split())
    bar = "\\|"
    return f"| `{name.replace('|', bar)}` | {meaning.replace('|', bar).replace('<', '&lt;')} |"


if __name__ == "__main__":
    print(commands_page(), end="")
