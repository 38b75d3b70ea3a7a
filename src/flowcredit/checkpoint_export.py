"""Weights of any kept checkpoint as files for plain diffusers."""

from pathlib import Path

from rich.console import Console

from flowcredit.assembly import build_model
from flowcredit.checkpoint import Checkpoint, kept_iterations, latest_checkpoint, load_checkpoint
from flowcredit.cli_inputs import check_run
from flowcredit.console import say
from flowcredit.errors import InputError
from flowcredit.export import export_weights
from flowcredit.progress import reward_weights
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder
from flowcredit.standing import best_iterations
from flowcredit.weights import weights_replaced


def export_command(run_dir: Path, out: Path, iteration: int | None, best: bool) -> None:
    """Export a checkpoint of a run to ``out``; the newest whole one, that of ``iteration``, or the ``best``.

    Raises InputError where there is none such, saying which there are, and as `export_weights`.
    """
    folder = check_run(run_dir)
    recipe = load_recipe(folder.recipe, ["parallel.sharding=replicated"])
    if iteration is not None and best:
        raise InputError("export was given both --iteration and --best; expected one of them")
    chosen = _chosen(folder, iteration, _best(folder, reward_weights(recipe)) if best else None)
    model = build_model(recipe)
    with weights_replaced(model.network, chosen.groups.get("ema", chosen.groups["weights"])):
        export_weights(model, out)
    say(Console(), f"iteration {chosen.iteration}: {out}")


def _best(folder: RunFolder, weights: dict[str, float]) -> int:
    kept = kept_iterations(folder.checkpoints)
    ranked = best_iterations(folder, weights, count=1_000_000)
    found = next((each for each in ranked if each in kept), None)
    if found is None:
        raise InputError(
            f"{folder.path}: no kept checkpoint has an evaluation to be ranked by (kept: {_listed(kept)});"
            " run with checkpoint.keep_best=1"
        )
    return found


def _chosen(folder: RunFolder, iteration: int | None, best: int | None) -> Checkpoint:
    wanted = iteration if best is None else best
    if wanted is None:
        newest, damaged = latest_checkpoint(folder.checkpoints)
        if newest is None:
            raise InputError(f"{folder.path}: no whole checkpoint{''.join(f'; {line}' for line in damaged)}")
        return newest
    kept = kept_iterations(folder.checkpoints)
    if wanted not in kept:
        raise InputError(
            f"{folder.path}: no checkpoint of iteration {wanted}; expected one of {_listed(kept)}"
        )
    return load_checkpoint(folder.checkpoints / f"{wanted:06d}")


def _listed(iterations: list[int]) -> str:
    return ", ".join(map(str, iterations)) or "none"
