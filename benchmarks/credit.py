"""Does credit for each step help? Four ways to reward a step, at an equal number of velocity evaluations.

    flowcredit calibrate recipes/shapes_dense_grpo.yaml --out psi.json
    python benchmarks/credit.py --table psi.json --seeds 3 --out runs/credit

Trains Flow-GRPO (the image's advantage to every step), the dense baseline (a step is rewarded by the state
it ends in), and DenseGRPO (by its gain) with one noise level for all steps and with the calibrated ones. The
trajectories of a group share their initial noise in all four. A velocity evaluation is one forward pass of
the transformer for one sample, in the rollout or in training; each run ends at the last iteration within the
budget. All else is the recipe's. Resumable: give the command again. Writes OUT/results.md, results.json and
curves.png.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from many_runs import Run, changes, interval, means, run_all
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flowcredit.algorithms import build
from flowcredit.recipe_io import load_recipe
from flowcredit.report.style import COLOURS, STYLE, WIDTH

RECIPES = Path(__file__).parents[1] / "recipes"
SPARSE, DENSE = RECIPES / "shapes_flow_grpo.yaml", RECIPES / "shapes_dense_grpo.yaml"
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Arm:
    """A method with its seeds' runs."""

    name: str
    per_iteration: int
    runs: tuple[Run, ...]

    @property
    def iterations(self) -> int:
        return self.runs[0].iterations

    def evaluated(self) -> list[int]:
        return [int(file.stem) for file in sorted((self.runs[0].folder / "evaluations").glob("*.json"))]


def arms(out: Path, table: Path, seeds: int, budget: float, prompts: int, points: int) -> list[Arm]:
    kinds = {
        "Flow-GRPO": (SPARSE, ("algorithm.initial_noise=shared",)),
        "dense baseline": (DENSE, ("algorithm.step_reward=state",)),
        "DenseGRPO, uniform": (DENSE, ()),
        "DenseGRPO, calibrated": (DENSE, (f"noise={{table: {table.resolve()}}}",)),
    }
    found = []
    for name, (recipe, special) in kinds.items():
        settings = load_recipe(recipe, special)
        plan = build(settings.algorithm).plan
        cost = settings.train.prompts_per_iteration * (plan.velocity_evaluations + plan.trained_states)
        iterations = max(1, int(budget // cost))
        length = (
            f"train.iterations={iterations}",
            f"evaluation.every={max(1, -(-iterations // points))}",
            f"evaluation.prompts={prompts}",
        )
        folder = out / name.lower().replace(", ", "-").replace(" ", "-")
        runs = tuple(
            Run(folder / f"seed-{seed}", recipe, (*special, *length, f"seed={seed}"), iterations)
            for seed in range(seeds)
        )
        found.append(Arm(name, cost, runs))
    return found


def results(found: list[Arm], budget: float) -> dict[str, Any]:
    rows = {}
    for arm in found:
        spent = [run.log()[-1] for run in arm.runs]
        before = [means(run, 0) for run in arm.runs]
        rows[arm.name] = {
            "iterations": arm.iterations,
            "velocity_evaluations": arm.iterations * arm.per_iteration,
            "minutes": [line["seconds"] / 60 for line in spent],
            "scores": changes(before, [means(run, arm.iterations) for run in arm.runs]),
        }
    return {"budget": budget, "seeds": len(found[0].runs), "methods": rows}


def markdown(found: dict[str, Any], scores: list[str]) -> str:
    lines = [
        "| method | iterations | minutes | " + " | ".join(scores) + " |",
        "|---|---|---|" + "---|" * len(scores),
    ]
    first = next(iter(found["methods"].values()))["scores"]
    start = [f"{np.mean(first[score]['before']):.3f}" for score in scores]
    lines.append("| before | 0 | 0 | " + " | ".join(start) + " |")
    for name, row in found["methods"].items():
        cells = []
        for score in scores:
            after = row["scores"][score]["after"]
            cells.append(f"{np.mean(after):.3f} ± {interval(after):.3f}")
        minutes = f"{np.mean(row['minutes']):.1f}"
        lines.append(f"| {name} | {row['iterations']} | {minutes} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def curves(found: list[Arm], scores: list[str], file: Path) -> None:
    """Held-out scores against velocity evaluations and against training seconds: mean and 95 % interval."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.7 + 2.1 * len(scores)), layout="constrained")
        axes = figure.subplots(len(scores), 2, sharex="col", sharey="row", squeeze=False)
        colours = dict(zip([arm.name for arm in found], COLOURS, strict=False))
        for row, score in enumerate(scores):
            axes[row, 0].set_title(score)
            for arm, dashes in zip(found, DASHES, strict=False):
                _curve(axes[row], arm, score, colours[arm.name], dashes)
        axes[-1, 0].set_xlabel("velocity evaluations, rollout and training")
        axes[-1, 0].xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[-1, 1].set_xlabel("seconds of training, one thread a run")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
        figure.savefig(file, dpi=100)


def _curve(axes: Any, arm: Arm, score: str, colour: str, dashes: Any) -> None:
    at = arm.evaluated()
    values = np.array([[means(run, i)[score] for run in arm.runs] for i in at])
    half = np.array([interval(list(row)) for row in values])
    logs = [{line["iteration"]: line["seconds"] for line in run.log()} for run in arm.runs]
    seconds = [float(np.mean([log[i] if i else 0.0 for log in logs])) for i in at]
    spent = [float(i * arm.per_iteration) for i in at]
    axis: Axes
    for axis, x in zip(axes, (spent, seconds), strict=True):
        mean = values.mean(axis=1)
        axis.fill_between(x, mean - half, mean + half, color=colour, alpha=0.12, linewidth=0)
        axis.plot(
            x, mean, color=colour, linestyle=dashes, marker="o", markersize=3, linewidth=1.7, label=arm.name
        )
        axis.yaxis.set_major_locator(MaxNLocator(5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, required=True, help="calibrated levels for shapes_dense_grpo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=2e5, help="velocity evaluations a run")
    parser.add_argument("--prompts", type=int, default=384, help="held-out prompts")
    parser.add_argument("--points", type=int, default=5, help="evaluations during a run")
    parser.add_argument("--out", type=Path, default=Path("runs/credit"))
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    found = arms(args.out, args.table, args.seeds, args.budget, args.prompts, args.points)
    run_all([run for arm in found for run in arm.runs], args.parallel, args.threads)
    scores = ["shapes", "shapes_exact", "clip"]
    summary = results(found, args.budget)
    (args.out / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
    (args.out / "results.md").write_text(markdown(summary, scores))
    curves(found, scores, args.out / "curves.png")
    print(markdown(summary, scores))


if __name__ == "__main__":
    main()
