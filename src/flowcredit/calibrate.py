"""``flowcredit calibrate``: runs Algorithm 1, survives a kill, writes the levels and where they come from."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flowcredit.assembly import Setup, assemble
from flowcredit.calibration import (
    Balance,
    Round,
    State,
    balances,
    begin,
    finished,
    gain_settings,
    judge,
    measure_gains,
    round_size,
    settled_levels,
)
from flowcredit.config import Recipe
from flowcredit.console import Monitor, say
from flowcredit.destinations import check_file
from flowcredit.errors import InputError
from flowcredit.evaluate import weights_of
from flowcredit.run_folder import write_text

WITHIN = 0.1
"""A calibrated step's share of gains lies this close to a half, or the file says why not."""


def calibrate_command(
    recipe: Recipe, out: Path, run_dir: Path | None = None, console: Console | None = None
) -> None:
    """Calibrate the noise of a recipe's method and write the levels to ``out`` as JSON.

    With ``run_dir`` it is for the weights that this run has come to. The rounds so far lie in ``OUT.rounds``:
    given again after a stop, the command goes on from there. Raises InputError for a method without gains, a
    reward without signal, an ``out`` that exists, or rounds left behind by other settings.
    """
    gain_settings(recipe)
    if out.exists():
        raise InputError(f"{out} exists already; a noise table is not written over")
    check_file(out, "--out")
    console = console or Console()
    setup = assemble(recipe)
    with weights_of(setup.model, run_dir):
        content = _calibrate(setup, out.with_name(out.name + ".rounds"), console)
    write_text(out, json.dumps(content, indent=1) + "\n")
    out.with_name(out.name + ".rounds").unlink()
    console.print(_table(content["steps"]))
    say(console, f"noise table: {out}")


def _calibrate(setup: Setup, rounds: Path, console: Console) -> dict[str, Any]:
    """All rounds, those in the file ``rounds`` included, and the check; what the table's file holds."""
    settings, trace = setup.recipe.calibration, trace_of(setup)
    state = read_state(rounds, trace) if rounds.exists() else begin(start_levels(setup), settings)
    if state.rounds:
        say(console, f"going on after {len(state.rounds)} rounds: {rounds}")
    _, evaluations = round_size(setup.recipe)
    with Monitor(console, settings.rounds, len(state.rounds), 1) as monitor:
        while not finished(state, settings):
            monitor.stage("finding gains", evaluations)
            gains = measure_gains(setup, state.levels, len(state.rounds), monitor.advance)
            state = judge(state, balances(gains), settings)
            write_text(rounds, json.dumps({"trace": trace, "state": asdict(state)}))
            monitor.finish_iteration(_shares(state.rounds[-1].balances))
        levels = settled_levels(state)
        monitor.stage("checking the result", evaluations)
        after = balances(measure_gains(setup, levels, settings.rounds, monitor.advance))
    return result(setup, trace, state, levels, after)


def start_levels(setup: Setup) -> list[float]:
    """The recipe's own noise as a level for each stochastic step: the deviation of a step, per root of dt."""
    x = torch.zeros(1, 1)
    levels = []
    for k in range(len(setup.grid) - 2):
        std = float(setup.kernel(x, x, k, k + 1).std)
        levels.append(std / float(setup.grid[k] - setup.grid[k + 1]) ** 0.5)
    return levels


def trace_of(setup: Setup) -> dict[str, Any]:
    """Everything on which the levels depend: settings, the grid, hashes of the prompts and the weights.

    The weights' hash is of names, shapes and sums, so that it costs one pass even for a large model.
    """
    recipe = setup.recipe
    prompts = json.dumps([setup.train_prompts.prompts, dict(setup.train_prompts.columns)], default=str)
    digest = hashlib.sha256()
    for name, value in setup.model.network.named_parameters():
        digest.update(f"{name} {tuple(value.shape)} {float(value.detach().double().sum()):.9g}\n".encode())
    whole = {"seed", "model", "algorithm", "grid", "noise", "rewards", "calibration", "weights"}
    chosen = recipe.model_dump(mode="json", include=whole)
    chosen["train"] = {"mixed_precision": recipe.train.mixed_precision}
    return {
        "settings": chosen,
        "prompts": {"file": recipe.prompts.train, "sha256": hashlib.sha256(prompts.encode()).hexdigest()},
        "weights_sha256": digest.hexdigest(),
        "grid": setup.grid.tolist(),
    }


def read_state(path: Path, trace: dict[str, Any]) -> State:
    """The rounds that an interrupted calibration left. Raises InputError if they are not of ``trace``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, state = content["trace"], content["state"]
        rounds = tuple(
            Round(
                tuple(each["levels"]), tuple(Balance(**b) for b in each["balances"]), tuple(each["balanced"])
            )
            for each in state["rounds"]
        )
        if found == trace:
            return State(tuple(state["levels"]), tuple(state["strides"]), rounds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: cannot be read as the rounds of a calibration ({error}); remove it to begin anew"
        ) from None
    changed = ", ".join(sorted(_differences(found, trace))) or "something"
    raise InputError(
        f"{path}: holds the rounds of another calibration ({changed} differ); remove it, or choose"
        " another --out"
    )


def _differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            name
            for key in sorted({*a, *b})
            for name in _differences(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if a == b else [prefix]


def result(
    setup: Setup, trace: dict[str, Any], state: State, levels: Sequence[float], after: Sequence[Balance]
) -> dict[str, Any]:
    """What the file holds: ``levels``, ``grid``, a line on each step, the rounds, and the trace."""
    first = state.rounds[0]
    steps = []
    for k, level in enumerate(levels):
        steps.append(
            {
                "step": k,
                "sigma": float(setup.grid[k]),
                "level_before": first.levels[k],
                "level": level,
                "gained_before": first.balances[k].gained,
                "gained": after[k].gained,
                "lost": after[k].lost,
                "mean_gain": after[k].mean,
                "gain_deviation": after[k].spread,
                "note": _note(setup, state, k, level, after[k]),
            }
        )
    rounds = [asdict(each) for each in state.rounds]
    return {"levels": list(levels), "grid": trace["grid"], "steps": steps, "rounds": rounds, "trace": trace}


def _note(setup: Setup, state: State, k: int, level: float, after: Balance) -> str:
    settings = setup.recipe.calibration
    if abs(after.gained - 0.5) <= WITHIN:
        return "balanced"
    if after.gained + after.lost < 1 - 2 * WITHIN:
        return f"{1 - after.gained - after.lost:.0%} of its trajectories neither gain nor lose"
    if level <= settings.floor:
        return (
            "hurts even at the lowest level"
            if after.gained < after.lost
            else "helps even at the lowest level"
        )
    if not any(each.balanced[k] for each in state.rounds):
        return f"not balanced within {len(state.rounds)} rounds"
    return "not settled: more trajectories or rounds would tell"


def _shares(found: Sequence[Balance]) -> str:
    return "gained: " + " ".join(f"{balance.gained:.2f}" for balance in found)


def _table(steps: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="share of trajectories that gain by each step")
    for name in ("step", "sigma", "level before", "gain", "level after", "gain", "note"):
        table.add_column(name, justify="left" if name == "note" else "right")
    for step in steps:
        table.add_row(
            str(step["step"]),
            f"{step['sigma']:.3f}",
            f"{step['level_before']:.3f}",
            f"{step['gained_before']:.2f}",
            f"{step['level']:.3f}",
            f"{step['gained']:.2f}",
            step["note"],
        )
    return table
