"""Does it learn? One recipe, several seeds, two at a time; resumable: give the command again.

    python benchmarks/learning.py recipes/shapes_g2rpo_long.yaml --seeds 5

Every seed is an ordinary run of `flowcredit train`, in a process and on threads of its own. Prints, and
writes to OUT/results.md and OUT/results.json, the held-out scores before and after of every seed, with the
mean change and its 95 % interval over seeds (Student's t).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from many_runs import Run, changes, means, run_all

from flowcredit.recipe_io import load_recipe


def results(runs: list[Run]) -> dict[str, Any]:
    last = [run.log()[-1] for run in runs]
    return {
        "iterations": runs[0].iterations,
        "velocity_evaluations": [line["velocity_evaluations"] for line in last],
        "training_minutes": [line["seconds"] / 60 for line in last],
        "rows": changes([means(run, 0) for run in runs], [means(run, run.iterations) for run in runs]),
    }


def markdown(found: dict[str, Any]) -> str:
    seeds = range(len(found["training_minutes"]))
    lines = [
        "| held-out score | before | "
        + " | ".join(f"seed {seed}" for seed in seeds)
        + " | mean change (95 %) |",
        "|---|---|" + "---|" * len(seeds) + "---|",
    ]
    for name, row in found["rows"].items():
        cells = [f"{value:.3f}" for value in row["after"]]
        change = f"{row['mean_change']:+.3f} ± {row['interval_95']:.3f}"
        lines.append(f"| {name} | {row['before'][0]:.3f} | " + " | ".join(cells) + f" | {change} |")
    minutes = ", ".join(f"{value:.1f}" for value in found["training_minutes"])
    lines.append(
        f"\n{found['iterations']} iterations, {found['velocity_evaluations'][0]:,.0f} velocity evaluations a"
        f" seed; training minutes: {minutes}."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="runs/learning/RECIPE by default")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.out = args.out or Path("runs/learning") / args.recipe.stem
    iterations = load_recipe(args.recipe).train.iterations
    runs = [
        Run(args.out / f"seed-{seed}", args.recipe, (f"seed={seed}",), iterations)
        for seed in range(args.seeds)
    ]
    run_all(runs, args.parallel, args.threads)
    found = results(runs)
    (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "results.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
