"""``flowcredit diagnose``: measures a model, draws what was found, and puts it on a page."""

from pathlib import Path

from rich.console import Console

from flowcredit.assembly import assemble
from flowcredit.config import Recipe
from flowcredit.console import counted, say
from flowcredit.destinations import check_folder
from flowcredit.diagnostics import (
    Diagnosis,
    check_rewarded,
    cost,
    diagnose,
    gains,
    rank_correlations,
    variance_shares,
)
from flowcredit.evaluate import weights_of
from flowcredit.recipe_io import dump_recipe
from flowcredit.report.diagnosis_files import write_diagnosis
from flowcredit.report.parts import with_figures


def diagnose_command(recipe: Recipe, run_dir: Path | None, out: Path, prompts: int) -> None:
    """Diagnose a recipe's model, or with ``run_dir`` what that run made of it, into the folder ``out``.

    Raises InputError for whatever in the recipe cannot work, or if the packages for figures are missing.
    """
    with_figures()
    check_folder(out, "--out")
    check_rewarded(recipe)
    console = Console()
    evaluations, images = cost(recipe, prompts)
    say(
        console,
        f"diagnosing {recipe.name} on {prompts} prompts: {evaluations:,} velocity evaluations, {images:,}"
        " images decoded and scored; fewer --prompts, algorithm.num_steps or algorithm.group_size cost less",
    )
    setup = assemble(recipe)
    with (
        weights_of(setup.model, run_dir),
        counted(console, "velocity evaluations", evaluations) as advance,
    ):
        found = diagnose(setup, prompts, advance)
    out.mkdir(parents=True, exist_ok=True)
    write_diagnosis(found, out, recipe.name, dump_recipe(recipe))
    for line in _lines(found):
        say(console, line)
    say(console, f"figures and page: {out / 'diagnosis.html'}")


def _lines(diagnosis: Diagnosis) -> list[str]:
    found = gains(diagnosis).flatten(1)
    shares, ranks = variance_shares(diagnosis), rank_correlations(diagnosis)
    lines = ["step  sigma  noise  gain     gaining  of the variance  rank correlation after it"]
    for k, row in enumerate(found):
        gaining = float((row > 0).double().mean())
        lines.append(
            f"{k:>4}  {diagnosis.sigmas[k]:.3f}  {diagnosis.noise[k]:.3f}  {float(row.mean()):+.4f}  "
            f"{gaining:>7.0%}  {shares[k]:>15.0%}  {ranks[k]:>25.2f}"
        )
    return lines
