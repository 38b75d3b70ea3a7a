"""A method's tree, made small enough to be drawn. No tensors."""

from pydantic import ValidationError

from flowcredit import algorithms
from flowcredit.algorithms import Algorithm
from flowcredit.methods import (
    AlgorithmSettings,
    BranchGRPOSettings,
    NeighborGRPOSettings,
    TempFlowGRPOSettings,
)
from flowcredit.plan import Plan

MOST_IMAGES = 96
"""Finished images of a tree that is drawn as it is."""


def shrunk(
    settings: AlgorithmSettings, seed: int, iteration: int, most: int = MOST_IMAGES
) -> tuple[Algorithm, Plan, str | None]:
    """The method and its tree of an iteration, with the smaller groups that leave at most ``most`` images if
    that can be had; and in words what was made smaller, None if nothing."""
    small = settings
    while _plan(small, seed, iteration).decodes > most:
        smaller = _smaller(small)
        if smaller is None:
            break
        small = smaller
    algorithm = algorithms.build(small, seed)
    plan = algorithm.plan_at(iteration)
    if small == settings:
        return algorithm, plan, None
    whole = _plan(settings, seed, iteration).decodes
    return (
        algorithm,
        plan,
        f"Shrunk to be drawn: {_changes(settings, small)}, so that there are {plan.decodes} images, not"
        f" {whole}. Advantages are those of the smaller groups.",
    )


def _plan(settings: AlgorithmSettings, seed: int, iteration: int) -> Plan:
    return algorithms.build(settings, seed).plan_at(iteration)


def _smaller(settings: AlgorithmSettings) -> AlgorithmSettings | None:
    """The same with about half as many samples; None where it goes no further."""
    changes: dict[str, object] = {"group_size": max(2, settings.group_size // 2)}
    if isinstance(settings, BranchGRPOSettings):
        splits = settings.split_steps[:-1]
        changes = {"split_steps": splits, "group_size": settings.fan_out ** len(splits), "kept_leaves": None}
    elif isinstance(settings, TempFlowGRPOSettings) and settings.seeds > 1:
        changes = {"seeds": settings.seeds // 2}
    elif isinstance(settings, NeighborGRPOSettings):
        changes["anchors"] = min(settings.anchors, max(2, settings.group_size // 2))
    try:
        small = type(settings).model_validate({**settings.model_dump(), **changes})
    except ValidationError:
        return None
    return None if small == settings else small


def _changes(before: AlgorithmSettings, after: AlgorithmSettings) -> str:
    old, new = before.model_dump(), after.model_dump()
    changed = [name for name in old if old[name] != new[name] and name != "kept_leaves"]
    return ", ".join(f"{name} {_plain(new[name])} in place of {_plain(old[name])}" for name in changed)


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
