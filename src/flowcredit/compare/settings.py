"""The settings of a comparison file: arms, what they have in common, and the budget of each."""

from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from flowcredit.sections import Count, CountOrNone, Section, Seed, Steps, Text, refuse, refuse_repeats

Changes = dict[str, JsonValue]


Grid = dict[str, Annotated[tuple[JsonValue, ...], Field(min_length=1)]]
"""Lists of values by setting."""


class ArmSettings(Section):
    """One column of the comparison: a recipe and what is changed in it."""

    name: Annotated[Text, Field(max_length=100)]
    """What the arm is called on the page. Required."""
    recipe: Text | None = None
    """Recipe file, relative to the current folder, or the folder of a run; that of all arms by default."""
    set: Changes = Field(default_factory=dict)
    """Settings of the recipe to change, by their dotted names; nothing by default."""
    grid: Grid = Field(default_factory=dict)
    """Lists of values as in the comparison's `grid`, in place of its lists for the same settings; none."""


class ComparisonSettings(Section):
    """A comparison: several arms, each trained at the same budget with the same seeds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] | None = None
    """Name of the comparison and of its folder; that of the file by default."""
    title: Text | None = None
    """Heading of the page; the name by default."""
    recipe: Text | None = None
    """Recipe file, relative to the current folder, of the arms that name none."""
    budget: Text | None = None
    """What each run may cost: `nfe=4e5` (velocity evaluations), `seconds=600` (of training) or `calls=2e4`
    (reward calls); --budget wins over it."""
    seeds: Count | Annotated[tuple[Seed, ...], Field(min_length=1)] = 3
    """How many seeds, 0, 1, 2, ..., or a list of them; 3."""
    steps: tuple[Steps, ...] = ()
    """Numbers of sampling steps at which the trained weights are evaluated besides the recipe's own."""
    points: Count = 5
    """Evaluations during a run, besides the one before it; 5."""
    images: CountOrNone = 8
    """Prompts whose images stand on the page; 8."""
    beside: tuple[Text, ...] = ()
    """Papers' tables to print below, by their names in `flowcredit evaluate --beside`; none by default."""
    set: Changes = Field(default_factory=dict)
    """Settings to change in every arm, by their dotted names; an arm's own win over them."""
    grid: Grid = Field(default_factory=dict)
    """Settings with a list of values each: every arm is run with every combination of them; none."""
    arms: Annotated[tuple[ArmSettings, ...], Field(min_length=1)]
    """The arms, the first of which the others are compared with. Required."""

    @model_validator(mode="after")
    def _whole(self) -> "ComparisonSettings":
        names = [arm.name for arm in self.arms]
        for place, arm in enumerate(self.arms):
            if arm.name in names[:place]:
                refuse(f"arms.{place}.name", f"'{arm.name}' is the name of another arm", "each name once")
            if arm.recipe is None and self.recipe is None:
                refuse(f"arms.{place}", f"arm '{arm.name}' has no recipe", "recipe there, or above all arms")
        if isinstance(self.seeds, tuple):
            refuse_repeats("seeds", self.seeds)
        refuse_repeats("steps", self.steps)
        return self
