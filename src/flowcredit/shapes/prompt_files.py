"""Write the bundled prompt files: ``python -m flowcredit.shapes.prompt_files``.

Every task fills the same number of rows, so that a head of the file of any length is balanced. A task with
fewer contents than rows repeats them; each row is its own group, with its own noise.
"""

import json
from pathlib import Path

import numpy as np

from flowcredit.shapes import ASSETS
from flowcredit.shapes.scenes import Scene, all_scenes, is_held_out

ROWS = {"train": 160, "heldout": 64}
"""Rows for each task."""


def rows(split: str) -> list[Scene]:
    """The scenes of "train" or "heldout", tasks taking turns."""
    rng = np.random.default_rng(2026)
    by_task = []
    for scenes in all_scenes().values():
        chosen = [scene for scene in scenes if is_held_out(scene) == (split == "heldout")]
        order = [chosen[i] for i in rng.permutation(len(chosen))]
        by_task.append([order[i % len(order)] for i in range(ROWS[split])])
    return [scenes[i] for i in range(ROWS[split]) for scenes in by_task]


def write(folder: Path) -> None:
    """``train.jsonl`` and ``heldout.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ROWS:
        lines = [json.dumps(scene.record()) for scene in rows(split)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(ASSETS)
