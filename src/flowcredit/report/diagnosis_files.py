"""A diagnosis in a folder: its numbers, figures and page; and its place in the report of a run."""

import json
from pathlib import Path

from flowcredit.diagnostics import Diagnosis
from flowcredit.errors import InputError
from flowcredit.report.parts import inline_svg, with_figures
from flowcredit.run_folder import write_text

DOTS_PER_INCH = 110
"""Makes the figures 968 pixels wide."""


def write_diagnosis(diagnosis: Diagnosis, out: Path, name: str, recipe_text: str) -> None:
    """Write ``diagnosis.json``, a PNG for each figure and ``diagnosis.html``, complete in itself.

    Raises InputError if the packages for figures are not installed.
    """
    environment = with_figures()
    from flowcredit.report.diagnosis_figures import figures

    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "diagnosis.json", json.dumps(diagnosis.to_json()) + "\n")
    for file, (_, figure) in figures(diagnosis).items():
        figure.savefig(out / f"{file}.png", dpi=DOTS_PER_INCH)
    page = environment.get_template("diagnosis_page.html.j2").render(
        name=name, diagnosis=pictures(diagnosis), diagnosis_of=described(diagnosis), recipe_text=recipe_text
    )
    write_text(out / "diagnosis.html", page)


def diagnosis_of_run(run_dir: Path) -> Diagnosis | None:
    """The diagnosis that lies in a run's folder, if one does. Raises InputError if it cannot be read."""
    path = run_dir / "diagnosis" / "diagnosis.json"
    if not path.is_file():
        return None
    try:
        return Diagnosis(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path}: cannot be read as a diagnosis ({error}); remove it, or write it anew with: flowcredit"
            f" diagnose {run_dir}"
        ) from None


def described(diagnosis: Diagnosis) -> str:
    """What was measured, in a sentence."""
    prompts, group = len(diagnosis.states[0]), len(diagnosis.states[0][0])
    return (
        f"{prompts} training prompts, {group} trajectories each, {len(diagnosis.sigmas) - 1} steps,"
        f" noise {diagnosis.noise_kind}, reward {diagnosis.reward}."
    )


def pictures(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Caption and inline SVG of each figure."""
    from flowcredit.report.diagnosis_figures import figures
    from flowcredit.report.style import to_svg

    return [(text, str(inline_svg(to_svg(figure)))) for text, figure in figures(diagnosis).values()]
