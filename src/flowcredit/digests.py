"""Digests of what a recipe's paths lead to: a path says nothing of what lies there on the next day. No torch.

Large files are sampled: other weights are seen, a flipped bit is not.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from flowcredit.config import Recipe
from flowcredit.known_rewards import REGISTERED
from flowcredit.lora_file import find_lora
from flowcredit.pipeline_folder import components, weight_files
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder
from flowcredit.shapes import bundled_path

WHOLE = 1 << 20
"""Bytes up to which a file is read whole."""
BLOCKS, BLOCK = 16, 1 << 16
"""Of a larger one: its length and so many blocks of so many bytes, from the first to the last."""
DESCRIPTIONS = frozenset({".json", ".txt", ".model", ".jinja"})
"""Endings of what tells how a model or a tokenizer is built; its weights are looked up by name."""


def model_digests(recipe: Recipe) -> dict[str, str]:
    """Of each part of the model and of the LoRA beneath. InputError where there is no such folder."""
    folder = bundled_path(recipe.model.path)
    found = {f"model.path, its {part}": folder_digest(folder / part) for part in components(folder)}
    lora = None if recipe.model.lora is None else find_lora(Path(recipe.model.lora))
    return found if lora is None else {**found, "model.lora": files_digest([lora])}


def reward_digests(recipe: Recipe) -> dict[str, str]:
    """Of rewards that read models, of each option that is the path of one."""
    found = {}
    for reward in (*recipe.rewards, *recipe.watch):
        known = REGISTERED.get(reward.name.partition("/")[0])
        for option in known.options if known is not None else ():
            value = reward.options.get(option)
            if isinstance(value, str) and value:
                path = bundled_path(value)
                digest = folder_digest(path) if path.is_dir() else files_digest([path])
                found[f"{option} of the reward {reward.name}"] = digest
    return found


def text_digest(content: object) -> str:
    """Of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """Of a part of a model: its weights as they are loaded, and what describes it."""
    weights = weight_files(folder) or sorted(folder.glob("*.bin"))
    told = [
        each
        for each in sorted(folder.iterdir())
        if each.suffix in DESCRIPTIONS and ".index." not in each.name and each.is_file()
    ]
    return files_digest([*weights, *told])


def files_digest(files: Iterable[Path]) -> str:
    """Of files with their names, in their order."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= WHOLE:
                digest.update(stream.read())
                continue
            for place in range(BLOCKS):
                stream.seek(place * (size - BLOCK) // (BLOCKS - 1))
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def note_other_model(run_dir: Path, recipe: Recipe) -> str | None:
    """A line where a run is looked at on another model than it was begun with, though at the same path."""
    folder = RunFolder(run_dir)
    began = load_recipe(folder.recipe)
    if (began.model.path, began.model.lora) != (recipe.model.path, recipe.model.lora):
        return None
    begun = folder.begun_with()
    other = [name for name, digest in model_digests(recipe).items() if begun.get(name, digest) != digest]
    if not other:
        return None
    told = "; ".join(placed(each, recipe) for each in other)
    return f"{run_dir}: changed since the run began: {told}. What is computed here is not that run's"


def placed(name: str, recipe: Recipe) -> str:
    """A setting with the path that it holds."""
    setting = name.partition(",")[0]
    value: object = recipe
    for key in setting.split("."):
        value = getattr(value, key, None)
    return f"{name} ({value})" if isinstance(value, str) else name
