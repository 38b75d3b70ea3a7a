"""A recipe looked over before anything is loaded: what is not there yet, what cannot work. Without torch."""

from pathlib import Path

from flowcredit import algorithms
from flowcredit.config import NoiseSettings, Recipe
from flowcredit.credit import Preferences
from flowcredit.errors import InputError
from flowcredit.known_rewards import FILES, REGISTERED, check_name, take_options
from flowcredit.memory.estimate import find_pipeline
from flowcredit.memory.families import FAMILIES
from flowcredit.memory.fitness import check_fit
from flowcredit.noise_table import read_noise_table
from flowcredit.own_code import check_form
from flowcredit.pipeline_folder import read_index
from flowcredit.prompt_files import HUB
from flowcredit.prompts import check_group_by, load_prompts
from flowcredit.shapes import bundled_path

LARGE = 2**23
"""Bytes: longer prompt files are not read by a quick look."""


def look_over(recipe: Recipe, quick: bool = True) -> tuple[str, ...]:
    """What of a recipe's files is not there yet, a line each.

    Raises InputError for what is there and would be refused once it is loaded. A ``quick`` look leaves out
    large prompt files and those that need a library; data sets of the hub are never looked for.
    """
    return (*_model(recipe), *_prompts(recipe, quick), *_noise(recipe), *_rewards(recipe))


def notes(recipe: Recipe) -> tuple[str, ...]:
    """What a recipe sets and its method does not read, a line each."""
    if recipe.algorithm.reads_noise:
        return ()
    fields = NoiseSettings.model_fields
    return tuple(
        f"noise.{name} is {value}, which algorithm {recipe.algorithm.name} does not read: it draws no noise"
        " while it samples"
        for name, value in recipe.noise.model_dump().items()
        if value != fields[name].default
    )


def _model(recipe: Recipe) -> list[str]:
    folder = bundled_path(recipe.model.path)
    missing = []
    if recipe.model.lora is not None and not Path(recipe.model.lora).exists():
        missing.append(f"model.lora {recipe.model.lora}: nothing there")
    if not (folder / "model_index.json").is_file():
        there = "no model_index.json in it" if folder.is_dir() else "no such folder"
        missing.append(f"model.path {recipe.model.path}: {there}")
    elif recipe.model.adapter is None:
        kind = str(read_index(folder).get("_class_name"))
        if kind not in FAMILIES:
            raise InputError(
                f"{folder / 'model_index.json'}: pipeline class {kind!r} has no adapter; expected one of"
                f" {', '.join(sorted(FAMILIES))}, or an adapter of your own in model.adapter"
            )
    if recipe.model.adapter is not None:
        # Code is not run here, and what its model can do only it knows.
        check_form("model.adapter", recipe.model.adapter, "'my_adapter:MyFlow'")
        return missing
    pipeline = find_pipeline(recipe)
    return missing if pipeline is None else [*missing, *check_fit(recipe, pipeline, folder)]


def _prompts(recipe: Recipe, quick: bool) -> list[str]:
    missing = []
    for setting, source in (("train", recipe.prompts.train), ("heldout", recipe.prompts.heldout)):
        if source.startswith(HUB):
            continue
        path = bundled_path(source)
        if not path.exists():
            missing.append(f"prompts.{setting} {source}: no such file")
            continue
        if quick and (path.is_dir() or path.suffix == ".parquet" or path.stat().st_size > LARGE):
            continue
        found = load_prompts(source, recipe.prompts.column)
        if setting == "heldout":
            check_group_by(found, recipe.evaluation.group_by)
            continue
        objective = algorithms.build(recipe.algorithm, recipe.seed).objective
        columns = objective.columns if isinstance(objective, Preferences) else None
        for column in columns or ():
            if column not in found.columns:
                has = ", ".join(["prompt", *sorted(found.columns)])
                raise InputError(f"{source}: no column {column!r} of images, but the columns here are: {has}")
    return missing


def _noise(recipe: Recipe) -> list[str]:
    if recipe.noise.table is None:
        return []
    if not Path(recipe.noise.table).exists():
        return [f"noise.table {recipe.noise.table}: no such file"]
    table, steps = read_noise_table(recipe.noise.table), recipe.algorithm.num_steps
    if len(table.levels) not in (steps, steps - 1):
        raise InputError(
            f"{table.source}: a noise table has {len(table.levels)} levels: expected one for each of"
            f" {steps} steps"
        )
    if table.grid is not None and len(table.grid) != steps + 1:
        raise InputError(
            f"{table.source}: was calibrated for {len(table.grid) - 1} steps, but this recipe samples"
            f" {steps}; calibrate again, or sample as it was calibrated"
        )
    return []


def _rewards(recipe: Recipe) -> list[str]:
    missing = []
    for reward in (*recipe.rewards, *recipe.watch):
        check_name(reward.name)
        kind = reward.name.partition("/")[0]
        entry = REGISTERED.get(kind)
        if entry is None or entry.settings is not None:
            continue
        take_options(kind, reward.options, entry.options)
        for option in FILES:
            value = reward.options.get(option)
            if isinstance(value, str) and not bundled_path(value).exists():
                missing.append(f"reward {reward.name}, {option} {value}: nothing there")
    return missing
