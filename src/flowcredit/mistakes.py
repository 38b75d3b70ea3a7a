"""How the program tells that it was used wrongly: in one line on stderr."""

import sys
from typing import Any

import typer

from flowcredit import processes
from flowcredit.visible import visible

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""What a wrong command, option or argument raises; typer exports the class below it alone."""


def tell_usage(error: Any) -> None:
    """Tell a usage error of typer, and which help to look at."""
    # `flowcredit` alone has printed the help already.
    if type(error).__name__ != "NoArgsIsHelpError":
        command = error.ctx.command_path if error.ctx else _command()
        line = " ".join(error.format_message().split()).rstrip(".")
        print(f"{visible(f'{command}: {line}')}; see {command} --help", file=sys.stderr)


def _command() -> str:
    """The command that was called, for an option at the end without its value: typer does not tell it."""
    called = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return f"flowcredit {called}".rstrip()


def tell_for_all(line: str) -> None:
    """Tell what is wrong in every process alike by one of them, before they have joined."""
    from flowcredit.heartbeat import speaks_before_joining

    if speaks_before_joining(line):
        who = processes.named(processes.number("RANK", 0), processes.size())
        print(f"flowcredit: {who}: {visible(line)}", file=sys.stderr)
