"""What the commands make of their arguments, and how they refuse them."""

import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowcredit.completion import complete_setting
from flowcredit.errors import InputError
from flowcredit.processes import resume_command
from flowcredit.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowcredit.config import Recipe
    from flowcredit.prompts import PromptSet
    from flowcredit.run_folder import RunFolder
    from flowcredit.scaling import Assumptions

INTERRUPTED = 130

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SETTING=VALUE",
        help="Settings to change, such as train.learning_rate=1e-5; flowcredit settings lists all.",
        show_default=False,
        autocompletion=complete_setting,
    ),
]


Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=100_000,
        help="Processes; memory is then that of each. 1, or 2 where weights are sharded, or as --gpus.",
        show_default=False,
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=100_000, help="Derive what N GPUs would give.", show_default=False),
]
FASTEST = 1e9
"""Of assumed speeds, in TFLOP/s and GB/s: what is beyond is a slip."""
_speed = partial(typer.Option, metavar="X", min=0.001, max=FASTEST, show_default=False)
PeakTflops = Annotated[float | None, _speed(help="Assumed of a GPU, in bf16; 989.")]
Utilisation = Annotated[
    float | None,
    typer.Option(metavar="X", min=0.001, max=1, help="Assumed share of the peak; 0.4.", show_default=False),
]
LinkGbs = Annotated[float | None, _speed(help="Assumed GB/s between GPUs of a machine; 450.")]
NetworkGbs = Annotated[float | None, _speed(help="Assumed GB/s a GPU between machines; 50.")]
GpusPerMachine = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="GPUs of one machine; 8.", show_default=False)
]


def assumptions(gpus: int | None, given: "Mapping[str, float | None]") -> "Assumptions":
    """The assumed speeds, by default where none is given. InputError for one without ``gpus``."""
    from flowcredit.scaling import Assumptions

    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen and gpus is None:
        raise InputError(f"--{next(iter(chosen)).replace('_', '-')} is for --gpus, which is not given")
    for name, value in chosen.items():
        if math.isnan(value):
            raise InputError(f"--{name.replace('_', '-')} is nan; expected a number")
    default = Assumptions()
    return Assumptions(
        peak_tflops=chosen.get("peak_tflops", default.peak_tflops),
        utilisation=chosen.get("utilisation", default.utilisation),
        link_gbs=chosen.get("link_gbs", default.link_gbs),
        network_gbs=chosen.get("network_gbs", default.network_gbs),
        gpus_per_machine=int(chosen.get("gpus_per_machine", default.gpus_per_machine)),
    )


def only_overrides(first: str | None, others: list[str] | None) -> list[str]:
    """With --resume there is no recipe to name: the first argument is an override like the others."""
    if first is not None and "=" not in first:
        raise InputError(
            f"--resume reads the run's own recipe; leave out '{first}' (overrides read setting=value)"
        )
    return [*([first] if first is not None else []), *(others or [])]


def say_how_to_resume(run_dir: Path, stop: KeyboardInterrupt) -> None:
    """Ends the command by the code of the signal that stopped it, Ctrl-C's where it tells none."""
    began = run_dir.is_dir()
    advice = f"go on with: {resume_command(run_dir)}" if began else "the run had not begun"
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"\nInterrupted; no finished iteration is lost; {visible(advice)}", err=True)
    raise typer.Exit(128 + stop.args[0] if stop.args else INTERRUPTED)


def open_source(source: str, overrides: list[str] | None) -> "tuple[Recipe, Path | None]":
    """The recipe that ``source`` is, or that the run in the folder ``source`` holds (with that folder).

    Says where that run's model is no longer the one it began with.
    """
    from flowcredit.config import Recipe
    from flowcredit.digests import note_other_model
    from flowcredit.recipe_io import load_recipe, load_settings

    path = Path(source)
    if not path.exists():
        return load_settings(Recipe, path, overrides or [], "the folder of a run, or a recipe"), None
    if not path.is_dir():
        return load_recipe(path, overrides or []), None
    recipe = load_recipe(check_run(path).recipe, overrides or [])
    try:
        note = note_other_model(path, recipe)
    except (InputError, OSError):
        note = None  # Whoever loads the model says what is wrong with it.
    if note is not None:
        typer.echo(visible(note), err=True)
    return recipe, path


def check_run(path: Path) -> "RunFolder":
    from flowcredit.run_folder import RunFolder

    folder = RunFolder(path)
    if not folder.recipe.is_file():
        found = f"it holds no {folder.recipe.name}" if path.is_dir() else "there is no such folder"
        found = "it is a file" if path.is_file() else found
        raise InputError(f"{path} is no run: {found}; expected the folder that flowcredit train wrote")
    return folder


def refuse_existing_run(run_dir: Path) -> None:
    resume = f"go on with it by {resume_command(run_dir)}, or " if run_dir.is_dir() else ""
    refuse_existing(run_dir, f"a run is not written over; {resume}give this one another name by name=...")


def refuse_existing(path: Path, advice: str) -> None:
    if path.exists():
        raise InputError(f"{path} exists already; {advice}")


def chosen_prompts(texts: list[str] | None, file: str | None, column: str) -> "PromptSet":
    from flowcredit.prompts import PromptSet, load_prompts

    if file is not None and not texts:
        chosen = load_prompts(file, column)
        typer.echo(visible(chosen.describe()))
        return chosen
    if file is not None and texts:
        raise InputError("sample was given both --prompt and --prompts; expected one of them")
    if not texts or not all(text.strip() for text in texts):
        raise InputError('sample needs prompts: --prompt "a red circle", once or more, or --prompts FILE')
    return PromptSet(tuple(text.strip() for text in texts))
