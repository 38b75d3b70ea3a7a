"""What a run reads beside its recipe, as digests: a path says nothing of what lies there on the next day."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from flowcredit.assembly import Setup
from flowcredit.config import Recipe
from flowcredit.credit import Preferences
from flowcredit.errors import InputError
from flowcredit.evaluation_files import load_evaluation
from flowcredit.image_pairs import pair_files
from flowcredit.known_rewards import REGISTERED
from flowcredit.lora_file import find_lora
from flowcredit.noise_table import read_noise_table
from flowcredit.pipeline_folder import components, weight_files
from flowcredit.prompts import PromptSet
from flowcredit.run_folder import RunFolder
from flowcredit.shapes import bundled_path

WHOLE = 1 << 20
"""Bytes up to which a file is read whole."""
BLOCKS, BLOCK = 16, 1 << 16
"""Of a larger one: its length and so many blocks of so many bytes, from the first to the last."""
DESCRIPTIONS = frozenset({".json", ".txt", ".model", ".jinja"})
"""Endings of what tells how a model or a tokenizer is built; its weights are looked up by name."""


def input_digests(setup: Setup) -> dict[str, str]:
    """A digest of everything from a file that decides a run's course, by the setting that names it.

    Prompts by what is read of them, pairs of images, levels of noise, each part of the model, a LoRA, and
    the models of rewards that have them. Large files are sampled: other weights are seen, a flipped bit is
    not. Rewards of one's own and remote ones are not looked into.
    """
    recipe = setup.recipe
    found = {
        "prompts.train": _prompts(setup.train_prompts),
        "prompts.heldout": _prompts(setup.heldout_prompts),
    }
    objective = setup.algorithm.objective
    if isinstance(objective, Preferences) and objective.columns is not None:
        found["prompts.train, its images"] = _files(pair_files(setup.train_prompts, objective.columns))
    if recipe.noise.table is not None:
        table = read_noise_table(recipe.noise.table)
        found["noise.table"] = _text([table.levels, table.grid])
    folder = bundled_path(recipe.model.path)
    for part in components(folder):
        found[f"model.path, its {part}"] = _folder(folder / part)
    lora = None if recipe.model.lora is None else find_lora(Path(recipe.model.lora))
    if lora is not None:
        found["model.lora"] = _files([lora])
    return found | _rewards(recipe)


def refuse_other_inputs(folder: RunFolder, setup: Setup) -> None:
    """InputError where what a run was begun with is no longer what its recipe's paths lead to."""
    begun, now = folder.begun_with(), input_digests(setup)
    other = [name for name, digest in begun.items() if now.get(name) != digest]
    first = folder.evaluation(0)
    if "prompts.heldout" not in other and first.exists():
        # Runs of versions before there were digests.
        other += ["prompts.heldout"] * (load_evaluation(first)[0].prompts != setup.heldout_prompts.prompts)
    if other:
        told = "; ".join(_placed(each, setup) for each in other)
        raise InputError(
            f"{folder.path}: changed since the run began: {told}. A resumed run would be another one: put"
            " back what was there, or start one under another name"
        )


def _placed(name: str, setup: Setup) -> str:
    """A setting with the path that it holds."""
    setting = name.partition(",")[0]
    value: object = setup.recipe
    for key in setting.split("."):
        value = getattr(value, key, None)
    return f"{name} ({value})" if isinstance(value, str) else name


def _rewards(recipe: Recipe) -> dict[str, str]:
    """Of rewards that read models, each option that is the path of one."""
    found = {}
    for reward in (*recipe.rewards, *recipe.watch):
        known = REGISTERED.get(reward.name.partition("/")[0])
        for option in known.options if known is not None else ():
            value = reward.options.get(option)
            if isinstance(value, str) and value:
                path = bundled_path(value)
                found[f"{option} of the reward {reward.name}"] = (
                    _folder(path) if path.is_dir() else _files([path])
                )
    return found


def _prompts(prompts: PromptSet) -> str:
    return _text([prompts.prompts, sorted(prompts.columns.items())])


def _text(content: object) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def _folder(folder: Path) -> str:
    """Of a part of a model: its weights as they are loaded, and what describes it."""
    weights = weight_files(folder) or sorted(folder.glob("*.bin"))
    told = [
        each
        for each in sorted(folder.iterdir())
        if each.suffix in DESCRIPTIONS and ".index." not in each.name and each.is_file()
    ]
    return _files([*weights, *told])


def _files(files: Iterable[Path]) -> str:
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
