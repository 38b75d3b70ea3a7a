"""The settings of every method: what a recipe's ``algorithm`` may hold."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from flowcredit.methods.common import MethodSettings
from flowcredit.methods.dense import DenseGRPOSettings, StepwiseFlowGRPOSettings, TurningPointGRPOSettings
from flowcredit.methods.granular import G2RPOSettings, TempFlowGRPOSettings
from flowcredit.methods.preference import DPOSettings
from flowcredit.methods.trajectory import (
    CoCASettings,
    DanceGRPOSettings,
    FlowGRPOFastSettings,
    FlowGRPOSettings,
    MixGRPOSettings,
)
from flowcredit.methods.tree import BranchGRPOSettings
from flowcredit.methods.without_noise import NeighborGRPOSettings

__all__ = [
    "METHODS",
    "AlgorithmSettings",
    "BranchGRPOSettings",
    "CoCASettings",
    "DPOSettings",
    "DanceGRPOSettings",
    "DenseGRPOSettings",
    "FlowGRPOFastSettings",
    "FlowGRPOSettings",
    "G2RPOSettings",
    "MethodSettings",
    "MixGRPOSettings",
    "NeighborGRPOSettings",
    "StepwiseFlowGRPOSettings",
    "TempFlowGRPOSettings",
    "TurningPointGRPOSettings",
    "with_method_defaults",
]

METHODS: Mapping[str, type[MethodSettings]] = {
    str(each.model_fields["name"].default): each
    for each in (
        G2RPOSettings,
        DenseGRPOSettings,
        FlowGRPOSettings,
        FlowGRPOFastSettings,
        DanceGRPOSettings,
        MixGRPOSettings,
        TempFlowGRPOSettings,
        BranchGRPOSettings,
        StepwiseFlowGRPOSettings,
        TurningPointGRPOSettings,
        CoCASettings,
        NeighborGRPOSettings,
        DPOSettings,
    )
}
"""By name, in the order in which they are offered."""


def with_method_defaults(recipe: object) -> object:
    """A recipe as read, with what its method expects of other sections where the recipe does not say.

    Where the noise's kind or table is given, the method's level is not taken: it belongs to the method's
    kind.
    """
    if not isinstance(recipe, dict):
        return recipe
    named = recipe.get("algorithm", {})
    name = named.get("name", "g2rpo") if isinstance(named, dict) else named
    method = METHODS.get(name) if isinstance(name, str) else None
    for section, defaults in ({} if method is None else method.others).items():
        given = recipe.get(section, {})
        if not isinstance(given, dict) or (section == "noise" and given.keys() & {"kind", "table"}):
            continue
        recipe = {**recipe, section: {**defaults, **given}}
    return recipe


def _g2rpo_if_unnamed(value: object) -> object:
    return {"name": "g2rpo", **value} if isinstance(value, dict) and "name" not in value else value


AlgorithmSettings = Annotated[
    Annotated[
        G2RPOSettings
        | DenseGRPOSettings
        | FlowGRPOSettings
        | FlowGRPOFastSettings
        | DanceGRPOSettings
        | MixGRPOSettings
        | TempFlowGRPOSettings
        | BranchGRPOSettings
        | StepwiseFlowGRPOSettings
        | TurningPointGRPOSettings
        | CoCASettings
        | NeighborGRPOSettings
        | DPOSettings,
        Field(discriminator="name"),
    ],
    BeforeValidator(_g2rpo_if_unnamed),
]
