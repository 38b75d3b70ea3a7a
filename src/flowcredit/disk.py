"""What is written on a user's disk, which may be full."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowcredit.errors import InputError


@contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """What goes wrong with the disk while entered is an InputError that names ``path``.

    ``also``: what a library raises in place of OSError.
    """
    caught: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except caught as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(
            f"{path}: cannot be written ({why}); make room on its disk, or let it be written"
        ) from error
