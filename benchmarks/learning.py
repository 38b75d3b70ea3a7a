"""Does it learn? One recipe, several seeds, two at a time; resumable: give the command again.

    python benchmarks/learning.py recipes/shapes_g2rpo_long.yaml --seeds 5 --out runs/learning

Every seed is an ordinary run of `flowcredit train`, in a process and on threads of its own. Prints, and
writes to OUT/results.md and OUT/results.json, the held-out scores before and after of every seed, with the
mean change and its 95 % interval over seeds (Student's t).
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from flowcredit.recipe_io import load_recipe


def command(recipe: Path, run: Path, seed: int) -> list[str]:
    train = [sys.executable, "-m", "flowcredit", "train"]
    if (run / "recipe.yaml").exists():
        return [*train, "--resume", str(run)]
    return [*train, str(recipe), f"seed={seed}", f"name={run.name}", f"output={run.parent}"]


def finished(run: Path, iterations: int) -> bool:
    return (run / "evaluations" / f"{iterations:06d}.json").exists() and (run / "final").exists()


def run_all(recipe: Path, out: Path, seeds: list[int], parallel: int, threads: int, iterations: int) -> None:
    waiting = [seed for seed in seeds if not finished(out / f"seed-{seed}", iterations)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < parallel:
            seed = waiting.pop(0)
            run = out / f"seed-{seed}"
            log = (out / f"seed-{seed}.log").open("ab")
            running[seed] = subprocess.Popen(
                command(recipe, run, seed), stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        time.sleep(1)
        for seed, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[seed]
            if process.returncode != 0:
                raise SystemExit(f"seed {seed} failed: see {out / f'seed-{seed}.log'}")
            print(f"seed {seed} finished after {(time.monotonic() - began) / 60:.1f} min", flush=True)


def means(run: Path, iteration: int) -> dict[str, float]:
    """Every reward's mean, and every group's as "reward, group"."""
    content = json.loads((run / "evaluations" / f"{iteration:06d}.json").read_text())
    result = {}
    for name, reward in content["rewards"].items():
        result[name] = reward["mean"]
        for group, summary in reward.get("groups", {}).items():
            result[f"{name}, {group}"] = summary["mean"]
    return result


def interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    if len(values) < 2:
        return math.nan
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(student.ppf(0.975, len(values) - 1)) * spread


def results(out: Path, seeds: list[int], iterations: int) -> dict[str, Any]:
    runs = {seed: out / f"seed-{seed}" for seed in seeds}
    before = {seed: means(run, 0) for seed, run in runs.items()}
    after = {seed: means(run, iterations) for seed, run in runs.items()}
    logs = {seed: json.loads((run / "log.jsonl").read_text().splitlines()[-1]) for seed, run in runs.items()}
    rows = {}
    for name in before[seeds[0]]:
        changes = [after[seed][name] - before[seed][name] for seed in seeds]
        rows[name] = {
            "before": [before[seed][name] for seed in seeds],
            "after": [after[seed][name] for seed in seeds],
            "mean_change": statistics.mean(changes),
            "interval_95": interval(changes),
            "lowest_change": min(changes),
        }
    return {
        "seeds": seeds,
        "iterations": iterations,
        "velocity_evaluations": [logs[seed]["velocity_evaluations"] for seed in seeds],
        "training_minutes": [logs[seed]["seconds"] / 60 for seed in seeds],
        "rows": rows,
    }


def markdown(found: dict[str, Any]) -> str:
    seeds = found["seeds"]
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
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds, iterations = list(range(args.seeds)), load_recipe(args.recipe).train.iterations
    run_all(args.recipe, args.out, seeds, args.parallel, args.threads, iterations)
    found = results(args.out, seeds, iterations)
    (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "results.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
