"""A user's own code, named in a recipe as ``module:attribute``: found on the import path and in the current
folder."""

import importlib
import os
import sys
from typing import Any

from flowcredit.errors import InputError
from flowcredit.nearest import nearest


def check_form(what: str, name: str, example: str) -> str:
    """The module's name. InputError unless ``name`` is ``module:attribute``; nothing is imported.

    ``what`` is that which is named, such as "reward"; ``example`` ends the message.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise InputError(
            f"{what} {name!r}: expected 'module:attribute' with the module's dotted name, such as {example}"
        )
    return module


def module_of(what: str, name: str, example: str) -> str:
    """``check_form``; from here on the module can be found in the current folder too."""
    module = check_form(what, name, example)
    # A console script does not see the folder it is run from, where a user's own module usually lies.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return module


def not_imported(what: str, name: str, error: Exception) -> InputError:
    """What to say of a module that cannot be imported."""
    return InputError(
        f"{what} {name!r}: importing {name.partition(':')[0]!r} raised {type(error).__name__}: {error};"
        " expected a module on the import path or in the current folder"
    )


def import_own(what: str, name: str, example: str) -> Any:
    """The attribute itself. InputError for a module or an attribute that is not there."""
    module_name, attribute = module_of(what, name, example), name.partition(":")[2]
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise not_imported(what, name, error) from error
    members = vars(module)
    if attribute not in members:
        close = nearest(attribute, [member for member in members if not member.startswith("_")])
        meant = f" (did you mean {close!r}?)" if close else ""
        raise InputError(
            f"{what} {name!r}: module {module_name!r} ({module.__file__}) has no {attribute!r}{meant}"
        )
    return members[attribute]
