"""Does the guard see a collapse, and does it keep quiet where there is none?

    python reliability/collapse.py provoke [--iterations 24] [--prompts 16] [--seed 0]
    python reliability/collapse.py look FOLDER...

`provoke` trains the bundled model at learning rates that ruin it, and at those that do not, with
`guard.action=stop`, and tells at which iteration the guard spoke. `look` lets the guard of its defaults read
runs that are there already, every one below the folders, and tells what it would have said of them. On two
cores a run of `provoke` takes a minute or two. Exit code 1 where a ruined run was not stopped, or a
healthy one was.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flowcredit.comparison import Evaluation, summarise
from flowcredit.guard import Collapse, Guard
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder
from flowcredit.running import GuardSettings
from flowcredit.standing import evaluations_of
from flowcredit.trainer import train

RECIPES = Path(__file__).parent.parent / "recipes"
GRAVEST = 0.1
"""Loss of the graded score, of 1, beyond which a run that nobody stopped counts as ruined."""


@dataclass(frozen=True)
class Trial:
    """A run of the bundled world, and whether it is meant to be ruined."""

    recipe: str
    learning_rate: float
    ruinous: bool


TRIALS = (
    Trial("shapes_g2rpo", 3e-3, True),
    Trial("shapes_g2rpo", 1e-2, True),
    Trial("shapes_flow_grpo", 3e-3, True),
    Trial("shapes_dense_grpo", 3e-3, True),
    Trial("shapes_mix_grpo", 3e-3, True),
    Trial("shapes_g2rpo", 3e-4, False),
    Trial("shapes_flow_grpo", 3e-4, False),
    Trial("shapes_dense_grpo", 3e-4, False),
    Trial("shapes_mix_grpo", 3e-4, False),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    provoking = commands.add_parser("provoke")
    provoking.add_argument("--iterations", type=int, default=24)
    provoking.add_argument("--prompts", type=int, default=16)
    provoking.add_argument("--seed", type=int, default=0)
    looking = commands.add_parser("look")
    looking.add_argument("folders", nargs="+", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.what == "look":
        _look(chosen.folders)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        right = [_provoke(trial, Path(folder), chosen) for trial in TRIALS]
    print(f"as expected: {sum(right)} of {len(right)}", flush=True)
    return int(not all(right))


def _provoke(trial: Trial, folder: Path, chosen: argparse.Namespace) -> bool:
    name = f"{trial.recipe}-{trial.learning_rate:g}"
    overrides = [
        f"name={name}",
        f"seed={chosen.seed}",
        f"train.iterations={chosen.iterations}",
        f"train.prompts_per_iteration={chosen.prompts}",
        f"train.learning_rate={trial.learning_rate}",
        "evaluation={every: 4, prompts: 96, group_by: task, batch_size: 96, images: 0}",
        "guard.action=stop",
    ]
    said = "nothing"
    try:
        train(load_recipe(RECIPES / f"{trial.recipe}.yaml", overrides), folder / name, Console(quiet=True))
    except Collapse as collapse:
        said = str(collapse)
    run = RunFolder(folder / name)
    first, last = _ends(evaluations_of(run))
    records = list(run.log_records())
    rewards = ", ".join(f"{record['reward/shapes']:.2f}" for record in records[:: max(1, len(records) // 8)])
    print(
        f"{name}: graded {first:.3f} to {last:.3f}, in rollouts {rewards}; after iteration "
        f"{records[-1]['iteration']} the guard said: {said}",
        flush=True,
    )
    stopped, ruined = said != "nothing", last < first - GRAVEST
    return stopped if trial.ruinous else not stopped and not ruined


def _look(folders: Sequence[Path]) -> None:
    runs = [RunFolder(log.parent) for folder in folders for log in sorted(folder.rglob("log.jsonl"))]
    read = told = 0
    for run in runs:
        evaluations = evaluations_of(run)
        if len(evaluations) < 2:
            continue
        read += 1
        weights = {each.name: each.weight for each in load_recipe(run.recipe, []).rewards}
        said = list(_words(run, evaluations, weights))
        told += bool(said)
        if said:
            print(f"{run.path}: {'; '.join(said)}")
    print(f"runs read: {read}; the guard would have spoken in {told}")


def _words(
    run: RunFolder, evaluations: Mapping[int, Evaluation], weights: Mapping[str, float]
) -> Iterator[str]:
    guard = Guard(GuardSettings(), weights)
    records = {record["iteration"]: record for record in run.log_records()}
    for iteration in sorted({*records, *evaluations}):
        found = [guard.look(records[iteration])] if iteration in records else []
        found += [guard.judge(evaluations[iteration])] if iteration in evaluations else []
        yield from (f"iteration {iteration}: {why}" for why in found if why)


def _ends(evaluations: Mapping[int, Evaluation]) -> tuple[float, float]:
    means = [summarise(each.scores["shapes"]).mean for each in evaluations.values()]
    return means[0], means[-1]


if __name__ == "__main__":
    sys.exit(main())
