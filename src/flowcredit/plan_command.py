"""What `flowcredit plan` prints: the tree, its cost, parameters, memory by part and phase. Loads nothing."""

import json
from dataclasses import asdict
from typing import Any

from flowcredit import algorithms, scaling
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.memory.estimate import Estimate, Part, estimate
from flowcredit.plan_picture import describe
from flowcredit.readiness import look_over, notes

GIB = 2**30
LOOKED_AT = 1000
"""Iterations whose trees are compared."""


def plan_command(
    recipe: Recipe,
    as_json: bool,
    asked: int | None = None,
    gpus: int | None = None,
    assumed: scaling.Assumptions | None = None,
) -> str:
    """The text, or one JSON object; with ``gpus`` also what so many would give.

    Raises InputError for what would be refused once it is loaded.
    """
    missing = look_over(recipe)
    processes = _processes(recipe, gpus if asked is None else asked)
    method = algorithms.build(recipe.algorithm, recipe.seed)
    tree = method.plan
    found = estimate(recipe, processes)
    assumed = assumed or scaling.Assumptions()
    counted = None if gpus is None else scaling.counts(recipe, found)
    if as_json:
        known = _as_object(recipe, method, found) | {
            "processes": processes,
            "not_there": missing,
            "notes": notes(recipe),
        }
        if counted is not None and gpus is not None:
            rows = scaling.table(counted, gpus, assumed)
            known["derived"] = {
                "assumed": asdict(assumed),
                "not_known": list(counted.uncounted),
                "gpus": [asdict(row) for row in rows],
            }
        return json.dumps(known, indent=2)
    lines = [describe(tree)]
    if tree.trajectory_evaluations is not None:
        lines.append(f"velocity evaluations for one trajectory: {tree.trajectory_evaluations}")
    if found is not None and found.rows > 1:
        lines.append(
            f"each velocity evaluation is {found.rows} rows of the network (classifier-free guidance)"
        )
    lines += _changes(recipe, method)
    lines += ["", *_cost_table(recipe, method), ""]
    lines += [*_memory_lines(recipe, found, processes), *(("", *notes(recipe)) if notes(recipe) else ())]
    if gpus is not None:
        lines += ["", *_scaling_lines(counted, gpus, assumed)]
    if missing:
        lines += ["", "not there yet; check and train refuse the recipe without:"]
        lines += [f"  {line}" for line in missing]
    return "\n".join(lines)


def _scaling_lines(counted: scaling.Counts | None, gpus: int, assumed: scaling.Assumptions) -> list[str]:
    if counted is None:
        return [f"what {gpus} GPUs would give is not known: this network is not known here"]
    return scaling.lines(counted, gpus, assumed)


def _processes(recipe: Recipe, asked: int | None) -> int:
    """As many as were asked for, else as few as the recipe can have. InputError for fewer."""
    least = 2 if recipe.parallel.sharding == "sharded" else 1
    if asked is not None and asked < least:
        raise InputError(
            f"--processes {asked}, but parallel.sharding is 'sharded'; expected at least {least}, or"
            " replicated"
        )
    return least if asked is None else asked


def _changes(recipe: Recipe, method: algorithms.Algorithm) -> list[str]:
    """A line where the tree, and its cost, differs from one iteration to another."""
    first = min(recipe.train.iterations, LOOKED_AT)
    evaluations = {method.plan_at(iteration).velocity_evaluations for iteration in range(first)}
    if len(evaluations) == 1:
        return []
    return [
        f"the tree is that of the first iteration; over the first {first:,} a prompt costs"
        f" {min(evaluations):,} to {max(evaluations):,} velocity evaluations"
    ]


def _costs(recipe: Recipe, method: algorithms.Algorithm) -> dict[str, int]:
    rewards, tree = len(recipe.rewards), method.plan
    return {
        "velocity evaluations": tree.velocity_evaluations,
        "  if nothing were shared": tree.naive_velocity_evaluations,
        "decodes": tree.decodes,
        f"scores ({rewards} x {tree.scores})": rewards * tree.scores,
        "states trained on": method.trained_states(tree),
    } | _of_the_reference(recipe, method)


def _of_the_reference(recipe: Recipe, method: algorithms.Algorithm) -> dict[str, int]:
    if not method.needs_reference and recipe.train.kl_weight == 0:
        return {}
    return {"  and by the reference": method.trained_states(method.plan)}


def _cost_table(recipe: Recipe, method: algorithms.Algorithm) -> list[str]:
    prompts = recipe.train.prompts_per_iteration
    head = f"{'cost':<24} {'a prompt':>12} {'an iteration':>14}   ({prompts} prompts an iteration)"
    rows = [f"{name:<24} {cost:>12,} {cost * prompts:>14,}" for name, cost in _costs(recipe, method).items()]
    return [head, *rows]


def _memory_lines(recipe: Recipe, found: Estimate | None, processes: int) -> list[str]:
    if found is None:
        return [f"parameters and memory need the model's folder: {recipe.model.path} holds no known pipeline"]
    lines = []
    if found.published is not None:
        lines.append(
            f"{recipe.model.path} is not there: reckoned from the published config of {found.published}"
        )
    known = [count for count in found.parameters.values() if count is not None]
    method = "all weights" if recipe.weights.method == "full" else f"LoRA of rank {recipe.weights.rank}"
    trained = "not known" if found.trained is None else f"{found.trained:,}"
    lines.append(f"parameters: {sum(known):,}   trained: {trained} ({method})")
    lines += [
        f"  {name:<22} {'not known' if count is None else f'{count:,}':>16}"
        for name, count in found.parameters.items()
    ]
    lines += ["", f"{'memory':<38} {'GiB':>9}{_of_each(recipe, processes)}"]
    lines += [_row(part) for part in found.parts]
    lines += ["", f"{'phase':<38} {'GiB':>9}   (parts that stay, and its own)"]
    lines += [f"{name:<38} {_gib(size)}" for name, size in found.phases.items()]
    if found.peak is None:
        lines.append("no peak: activations are not known for this network")
    else:
        lines.append(
            f"{'peak':<38} {_gib(found.peak)}   of tensors; the device's own and fragments come on top"
        )
    if found.unknown:
        lines.append(f"not in any phase, because not known: {', '.join(found.unknown)}")
    return lines


def _of_each(recipe: Recipe, processes: int) -> str:
    if processes == 1:
        return ""
    sharded = ", the network's parts divided among them" if recipe.parallel.sharding == "sharded" else ""
    return f"   (on each of {processes} processes{sharded}; --processes for other numbers)"


def _row(part: Part) -> str:
    size = "not known" if part.size is None else _gib(part.size)
    return f"{part.name:<38} {size:>9}" + (f"   {part.note}" if part.note else "")


def _gib(size: int) -> str:
    return f"{size / GIB:>9.2f}" if size >= GIB // 100 else f"{size / GIB:>9.4f}"


def _as_object(recipe: Recipe, method: algorithms.Algorithm, found: Estimate | None) -> dict[str, Any]:
    tree = method.plan
    model: dict[str, Any] | None = None
    if found is not None:
        model = {
            "parameters": found.parameters,
            "trained_parameters": found.trained,
            "rows_per_velocity_evaluation": found.rows,
            "published_config": found.published,
            "memory_bytes": [asdict(part) for part in found.parts],
            "phase_bytes": found.phases,
            "peak_bytes": found.peak,
            "not_known": found.unknown,
        }
    return {
        "tree": {
            "num_steps": tree.num_steps,
            "root_width": tree.root_width,
            "segments": [asdict(segment) for segment in tree.segments],
        },
        "prompts_per_iteration": recipe.train.prompts_per_iteration,
        "a_prompt": {
            "velocity_evaluations": tree.velocity_evaluations,
            "naive_velocity_evaluations": tree.naive_velocity_evaluations,
            "trajectory_evaluations": tree.trajectory_evaluations,
            "decodes": tree.decodes,
            "reward_calls": len(recipe.rewards) * tree.scores,
            "trained_states": method.trained_states(tree),
        },
        "model": model,
    }
