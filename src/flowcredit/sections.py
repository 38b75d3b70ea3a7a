"""What settings are made of: checked types with their bounds, and the section that holds them."""

from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

# Strict: 1.5 is no count, true no number, and "1" neither.
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Field(min_length=1)]
Pixels = Annotated[Whole, Field(ge=8, le=4096)]
Steps = Annotated[Whole, Field(ge=1, le=1000)]
Count = Annotated[Whole, Field(ge=1, le=1_000_000)]
CountOrNone = Annotated[Whole, Field(ge=0, le=1_000_000)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63)]
Positive = Annotated[Number, Field(gt=0, le=1e6)]
NonNegative = Annotated[Number, Field(ge=0, le=1e6)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
PositiveFraction = Annotated[Number, Field(gt=0, lt=1)]


def refuse(setting: str, found: str, expected: str) -> NoReturn:
    """A cross-check's refusal; ``setting``, dotted from the checked section on, is where it points."""
    raise PydanticCustomError(
        "cross_check",
        "{found}; expected {expected}",
        {"setting": setting, "found": found, "expected": expected},
    )


def refuse_repeats(setting: str, values: tuple[object, ...]) -> None:
    for value in values:
        if values.count(value) > 1:
            refuse(setting, f"{value!r} stands there more than once", "each once")


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


NAME_ALONE = BeforeValidator(_named)
"""Lets ``algorithm: g2rpo`` stand for ``algorithm: {name: g2rpo}``."""


class Section(BaseModel):
    """A group of settings: cannot be changed once read, and knows no setting but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
