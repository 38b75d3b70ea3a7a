"""The one exception that stands for a mistake in what the user gave, not in this code."""


class InputError(ValueError):
    """Bad input: a recipe, a prompt file, a checkpoint or a command line that cannot be used.

    The message is one line: what was found, where, what is expected and what to do. The command line
    prints it and exits with code 2; a stack trace is kept for faults of our own. What others said and is
    quoted in it, such as a reward's error, is put on that line too.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: object) -> str:
    """A text without its line feeds."""
    return " ".join(line.strip() for line in str(text).splitlines() if line.strip())
