"""Libraries without the bars and remarks that a user of this project can do nothing about."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries(*names: str) -> Iterator[None]:
    """Diffusers and transformers, or those of the two that are named, say errors alone and draw no bars."""
    libraries = [
        importlib.import_module(f"{name}.utils.logging") for name in names or ("diffusers", "transformers")
    ]
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
