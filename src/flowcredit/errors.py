"""The one exception that stands for a mistake in what the user gave, not in this code."""

import json
from typing import Self


class InputError(ValueError):
    """Bad input: a recipe, a prompt file, a checkpoint or a command line that cannot be used.

    The message is one line: what was found, where, what is expected and what to do. The command line
    prints it and exits with ``exit_code``; a stack trace is kept for faults of our own.
    """

    exit_code = 2

    @classmethod
    def of_code(cls, message: str, exit_code: int) -> Self:
        """An error that ends the program with another exit code."""
        error = cls(message)
        error.exit_code = exit_code
        return error


class SharedError(InputError):
    """Bad input that one of several processes found, and tells for all: the others keep quiet."""


def one_line(text: object) -> str:
    """A text without its line feeds."""
    return " ".join(line.strip() for line in str(text).splitlines() if line.strip())


def misfit(error: Exception) -> str:
    """What Python's error over the content of a file says of that content, in a reader's words."""
    match error:
        case OSError():
            return f"cannot be read: {error.strerror}"
        case json.JSONDecodeError():
            return f"not JSON: {error.msg} in line {error.lineno}"
        case KeyError():
            return f"it has no {error.args[0]!r}"
        case ValueError():
            return one_line(error)
    return "its parts are not what they should be"
