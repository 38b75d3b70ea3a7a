"""The exceptions that stand for a mistake in what the user gave, not in this code."""


class InputError(ValueError):
    """Bad input: a recipe, a prompt file, a checkpoint or a command line that cannot be used.

    The message is one line: what was found, where, what is expected and what to do. The command line
    prints it and exits with code 2; a stack trace is kept for faults of our own.
    """


class SharedError(InputError):
    """Bad input that one of several processes found, and tells for all: the others keep quiet."""
