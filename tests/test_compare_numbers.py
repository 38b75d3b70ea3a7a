"""Means with their intervals over seeds, and how they are written."""

import math

import pytest

from flowcredit.compare.results import Estimate, estimate, paired
from flowcredit.compare.tables import decimals, show


def test_intervals_by_hand() -> None:
    # A deviation of 1 over the root of 4, times 3.18245 at three degrees of freedom.
    root = math.sqrt(1.5)
    found = estimate([5 - root, 5, math.nan, 5, 5 + root])
    assert (found.mean, found.count) == (5, 4)
    assert found.half == pytest.approx(3.18245 * 1 / 2, rel=1e-5)
    assert estimate([2.0]).mean == 2.0
    assert math.isnan(estimate([2.0]).half)
    assert estimate([math.nan]).count == 0
    assert paired({0: 1.0, 1: 2.0, 2: 9.0}, {1: 2.5, 0: 1.5}).mean == 0.5
    assert paired({0: 1.0}, {1: 1.0}).count == 0


@pytest.mark.parametrize(
    ("each", "text"),
    [
        (Estimate(0.79912, 0.01301, 5), "0.799 ± 0.013"),
        (Estimate(21.7249, 0.1049, 5), "21.72 ± 0.10"),
        (Estimate(1043.4, 12.2, 5), "1043 ± 12"),
        (Estimate(0.64, math.nan, 1), "0.640 (1 of 5 seeds)"),
        (Estimate(21.7249, math.nan, 5), "21.72"),
        (Estimate(math.nan, math.nan, 0), "no score"),
        (Estimate(0.5, 0.0, 2), "0.500 ± 0.000 (2 of 5 seeds)"),
    ],
)
def test_numbers_have_the_digits_that_their_intervals_bear(each: Estimate, text: str) -> None:
    assert show(each, decimals([each]), of=5) == text
