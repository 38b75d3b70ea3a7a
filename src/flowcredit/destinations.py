"""Whether something can be written where a user wants it, asked before the work that is to be written."""

import os
from pathlib import Path

from flowcredit.errors import InputError


def check_folder(path: Path, named: str) -> None:
    """InputError unless ``path`` is a folder that may be written, or can be made; ``named`` is the option."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{named} {path}: is a file; expected a folder, or a name that is free")
    _check_above(path, named)


def check_file(path: Path, named: str) -> None:
    """InputError unless ``path`` is a file that may be written, or can be made; ``named`` is the option."""
    if path.is_dir():
        raise InputError(f"{named} {path}: is a folder; expected the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{named} {path}: may not be written; choose another, or change its permissions")
    _check_above(path.parent, named)


def _check_above(folder: Path, named: str) -> None:
    """Of the folders on the way, the last that is there has to take what is new."""
    there = next(above for above in (folder, *folder.absolute().parents) if os.path.lexists(above))
    if not there.is_dir():
        raise InputError(f"{named} {folder}: {there} is no folder; choose another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{named} {folder}: nothing may be written in {there}; choose another place")
