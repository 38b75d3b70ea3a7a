"""The bundled world: coloured shapes on dark ground, with a flow model, a checker and a CLIP of its own."""

import difflib
from pathlib import Path

from flowcredit.errors import InputError

ASSETS = Path(__file__).parent / "assets"
BUNDLED = {
    "bundled:shapes": "pipeline",
    "bundled:shapes-clip": "clip",
    "bundled:shapes/train": "train.jsonl",
    "bundled:shapes/heldout": "heldout.jsonl",
}
"""What comes with the package, by the name that recipes use."""


def bundled_path(name: str) -> Path:
    """The file or folder that a ``bundled:...`` name stands for; any other name is taken as a path.

    Raises InputError for a bundled name that does not exist, with the nearest that does.
    """
    if not name.startswith("bundled:"):
        return Path(name)
    if name not in BUNDLED:
        near = difflib.get_close_matches(name, BUNDLED, n=1, cutoff=0.0)[0]
        raise InputError(
            f"nothing is bundled as {name!r}; did you mean {near!r}? There are {', '.join(BUNDLED)}"
        )
    return ASSETS / BUNDLED[name]
