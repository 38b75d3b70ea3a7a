"""Diffusers and transformers without bars, and without remarks that a user can do nothing about."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the libraries' progress bars and remarks on parts that this project does not use."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [(library.is_progress_bar_enabled(), library.get_verbosity()) for library in libraries]
    for library in libraries:
        library.disable_progress_bar()
        library.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        for library, (bar, verbosity) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            if bar:
                library.enable_progress_bar()
