"""The commands. What is slow to import is imported by the command that needs it."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowcredit import processes
from flowcredit.cli_inputs import (
    INTERRUPTED,
    Gpus,
    GpusPerMachine,
    LinkGbs,
    NetworkGbs,
    Overrides,
    PeakTflops,
    Processes,
    Utilisation,
    assumptions,
    check_run,
    chosen_prompts,
    only_overrides,
    open_source,
    refuse_existing,
    refuse_existing_run,
    say_how_to_resume,
)
from flowcredit.completion import complete_recipe
from flowcredit.errors import InputError, SharedError
from flowcredit.mistakes import USAGE_ERROR, tell_for_all, tell_usage
from flowcredit.published import PUBLISHED, published_table
from flowcredit.tool_commands import check, compare, demo, export, launch, replay, serve_reward
from flowcredit.visible import visible, visible_lines

BAD_INPUT = 2

app = typer.Typer(
    name="flowcredit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeOrRun = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|RUN",
        help="A recipe file, or the folder of a run.",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]


def main() -> None:
    """The program: bad input is one line on stderr and exit code 2; of several processes one tells it."""
    processes.register()
    try:
        sys.exit(app(standalone_mode=False, prog_name="flowcredit") or 0)
    except USAGE_ERROR as error:
        tell_usage(error)
        sys.exit(BAD_INPUT)
    except InputError as error:
        if isinstance(error, SharedError) or processes.size() == 1:
            print(f"flowcredit: {visible(str(error))}", file=sys.stderr)
        else:
            tell_for_all(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        # Of the user's disk: a full one, a folder that may not be written, a file where a folder should be.
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = visible(str(error.filename or "writing"))
        print(f"flowcredit: {where}: {error.strerror}", file=sys.stderr)
        sys.exit(BAD_INPUT)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"flowcredit {version('flowcredit')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, help="Show the version and exit.", is_eager=True),
    ] = False,
) -> None:
    """Align text-to-image flow models with fine-grained GRPO.

    [bold]First steps[/bold]: look at what a recipe costs, run it, read its report.

    [cyan]flowcredit plan recipes/shapes_g2rpo.yaml[/cyan]

    [cyan]flowcredit train recipes/shapes_g2rpo.yaml[/cyan]

    [cyan]flowcredit report runs/shapes-g2rpo[/cyan]
    """


@app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe file (YAML).",
            show_default=False,
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on with the run in this folder, with the recipe it holds.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Align a model as a recipe says, and write the run's folder.

    The folder, runs/NAME, holds the whole recipe, a log (JSONL), checkpoints, images and the report.

    Ctrl-C, SIGTERM and a killed process lose no finished iteration.

    [cyan]flowcredit train recipes/shapes_g2rpo.yaml[/cyan]

    [cyan]flowcredit train recipes/shapes_g2rpo.yaml name=two 'algorithm.strides=[1, 2]' seed=2[/cyan]

    [cyan]flowcredit train --resume runs/shapes-g2rpo[/cyan]

    [cyan]flowcredit train --resume runs/shapes-g2rpo evaluation.every=5[/cyan]
    """
    if resume is not None:
        _resume(resume, only_overrides(recipe, overrides))
        return
    if recipe is None:
        raise InputError(
            "train needs a recipe file, or --resume with the folder of a run; see flowcredit train --help"
        )
    from flowcredit.recipe_io import load_recipe

    settings = load_recipe(recipe, overrides or [])
    run_dir = Path(settings.output) / settings.name
    # Of several processes only the first asks: it may have made the folder before the others look.
    if os.environ.get("RANK", "0") == "0":
        refuse_existing_run(run_dir)
    try:
        from flowcredit import trainer

        trainer.train(settings, run_dir)
    except KeyboardInterrupt as stop:
        say_how_to_resume(run_dir, stop)
    except InputError as error:
        if not (run_dir / "recipe.yaml").is_file():
            raise
        then = f"{error}; then: {processes.resume_command(run_dir)}"
        kind = SharedError if isinstance(error, SharedError) else InputError
        raise kind.of_code(then, error.exit_code) from error


@app.command()
def evaluate(
    source: RecipeOrRun,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write every score to this JSON file.", show_default=False),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1000,
            help="Sampling steps; give several for a column each.",
            show_default=False,
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="PAPER", help=f"Also print a paper's table: {', '.join(PUBLISHED)}.", show_default=False
        ),
    ] = None,
) -> None:
    """Score the images of held-out prompts: the model of a recipe, or what a run made of it.

    [cyan]flowcredit evaluate recipes/shapes_g2rpo.yaml[/cyan]

    [cyan]flowcredit evaluate runs/shapes-g2rpo evaluation.prompts=400 --out scores.json[/cyan]

    [cyan]flowcredit evaluate runs/flux --steps 10 --steps 20 --beside g2rpo_steps[/cyan]
    """
    settings, run_dir = open_source(source, overrides)
    if out is not None:
        refuse_existing(out, "scores are not written over; choose another --out")
    if beside is not None and beside not in PUBLISHED:
        raise InputError(f"--beside {beside}: no such table; expected one of {', '.join(PUBLISHED)}")
    from flowcredit.evaluate import evaluate_command

    evaluate_command(settings, run_dir, out, steps or ())
    if beside is not None:
        Console().print(published_table(beside))


@app.command()
def sample(
    source: RecipeOrRun,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A prompt; may be given several times.", show_default=False),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A prompt file (.txt, .jsonl, or a bundled one) instead.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the images; made, and not written over.")
    ] = Path("samples"),
    count: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Images for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the initial noises.")] = 0,
) -> None:
    """Draw images for prompts of your own: from the model of a recipe, or from what a run made of it.

    [cyan]flowcredit sample recipes/shapes_g2rpo.yaml --prompt "a red circle" --out before[/cyan]

    [cyan]flowcredit sample runs/shapes-g2rpo --prompt "a red circle" --count 4 --out after[/cyan]
    """
    settings, run_dir = open_source(source, overrides)
    chosen = chosen_prompts(prompt, prompts, settings.prompts.column)
    refuse_existing(out, "images are not written over; choose another --out")
    from flowcredit.evaluate import sample_command

    sample_command(settings, run_dir, chosen, out, count, seed)


@app.command()
def plan(
    source: RecipeOrRun,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    processes: Processes = None,
    gpus: Gpus = None,
    peak_tflops: PeakTflops = None,
    utilisation: Utilisation = None,
    link_gbs: LinkGbs = None,
    network_gbs: NetworkGbs = None,
    gpus_per_machine: GpusPerMachine = None,
) -> None:
    """Show a recipe's rollout tree, what an iteration costs, what is trained, how much memory it will take.

    Nothing is loaded or run: parameters and memory come from the model's configs and the headers of its
    files, or from its published config where it is not there yet. What cannot work is refused, what is
    not there yet is listed. --gpus adds what several GPUs would give, derived from counts and assumed speeds.

    [cyan]flowcredit plan recipes/shapes_g2rpo.yaml[/cyan]

    [cyan]flowcredit plan recipes/shapes_g2rpo.yaml 'algorithm.strides=[1]' algorithm.group_size=8[/cyan]
    """
    settings, _ = open_source(source, overrides)
    from flowcredit.plan_command import plan_command

    given = {
        "peak_tflops": peak_tflops,
        "utilisation": utilisation,
        "link_gbs": link_gbs,
        "network_gbs": network_gbs,
        "gpus_per_machine": gpus_per_machine,
    }
    assumed = assumptions(gpus, given)
    typer.echo(visible_lines(plan_command(settings, as_json, processes, gpus, assumed)))


@app.command()
def calibrate(
    source: RecipeOrRun,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The noise table to write (JSON); not written over.")
    ] = Path("psi.json"),
) -> None:
    """Find for each step the noise at which exploration helps as often as it hurts (DenseGRPO).

    Ctrl-C and a killed process lose no finished round: give the command again.

    [cyan]flowcredit calibrate recipes/shapes_dense_grpo.yaml --out psi.json[/cyan]

    [cyan]flowcredit train recipes/shapes_dense_grpo.yaml 'noise={table: psi.json}'[/cyan]
    """
    settings, run_dir = open_source(source, overrides)
    from flowcredit.calibrate import calibrate_command

    try:
        calibrate_command(settings, out, run_dir)
    except KeyboardInterrupt:
        typer.echo("\nInterrupted; no finished round is lost; give the command again to go on", err=True)
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def diagnose(
    source: RecipeOrRun,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for figures and page: RUN/diagnosis for a run, else ./diagnosis; written anew.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Training prompts to look at.")
    ] = 16,
) -> None:
    """Draw where a reward is made: gains and rewards by step, what each step's noise explains, strides.

    What lies in RUN/diagnosis also appears in the run's report.

    [cyan]flowcredit diagnose recipes/shapes_g2rpo.yaml noise.eta=0.3[/cyan]

    [cyan]flowcredit diagnose runs/shapes-g2rpo --prompts 48[/cyan]
    """
    settings, run_dir = open_source(source, overrides)
    folder = out or ((run_dir or Path()) / "diagnosis")
    from flowcredit.report.diagnose import diagnose_command

    diagnose_command(settings, run_dir, folder, prompts)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
) -> None:
    """Write the report of a run anew, one HTML page, and say where it is.

    [cyan]flowcredit report runs/shapes-g2rpo[/cyan]
    """
    check_run(run)
    from flowcredit.report import build_report

    typer.echo(visible(str(build_report(run))))


@app.command()
def settings(
    word: Annotated[
        str | None,
        typer.Argument(help="Only those with this in their name, such as train or clip.", show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a page in Markdown.")] = False,
) -> None:
    """List every setting of a recipe, or those with a word in their name: its default, and what it is.

    [cyan]flowcredit settings algorithm.strides[/cyan]
    """
    from flowcredit.recipe_io import settings_named, settings_page

    if markdown:
        typer.echo(settings_page(), nl=False)
        return
    for each in settings_named(word):
        default = "(required)" if each.default is None else each.default
        typer.echo(f"{each.setting} = {default}\n    {each.description}")


app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(launch)
app.command()(check)
app.command()(compare)
app.command()(demo)
app.command()(export)
app.command()(replay)
app.command("serve-reward")(serve_reward)


def _resume(run_dir: Path, overrides: list[str]) -> None:
    check_run(run_dir)
    try:
        from flowcredit import trainer

        trainer.resume(run_dir, overrides)
    except KeyboardInterrupt as stop:
        say_how_to_resume(run_dir, stop)
