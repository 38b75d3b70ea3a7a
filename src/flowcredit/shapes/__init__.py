"""The bundled world: coloured shapes on dark ground, with a flow model, a checker and a CLIP of its own."""

from pathlib import Path

from flowcredit.errors import InputError
from flowcredit.nearest import nearest

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

    Raises InputError for a bundled name that does not exist, with one that is near and does.
    """
    if not name.startswith("bundled:"):
        return Path(name)
    if name not in BUNDLED:
        near = nearest(name.removeprefix("bundled:"), [known.removeprefix("bundled:") for known in BUNDLED])
        meant = f"did you mean 'bundled:{near}'? There" if near else "there"
        raise InputError(f"nothing is bundled as {name!r}; {meant} are {', '.join(BUNDLED)}")
    return ASSETS / BUNDLED[name]
