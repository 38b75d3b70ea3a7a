"""Three updates of every method end where they ended when the results were kept."""

import json
from itertools import combinations

import pytest

from flowcredit.methods import METHODS
from golden_methods import CASES, FILE, Found, run

GOLDEN: dict[str, Found] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_three_updates_end_where_they_did(case: str) -> None:
    found = run(case)
    assert found.keys() == GOLDEN[case].keys()
    for name, values in found.items():
        assert values == pytest.approx(GOLDEN[case][name], rel=1e-4, abs=1e-7), name


def test_every_method_is_kept_and_nothing_else() -> None:
    assert GOLDEN.keys() == CASES.keys()
    assert {case["algorithm"]["name"] for case in CASES.values()} == METHODS.keys()


def test_what_is_kept_tells_every_case_from_every_other() -> None:
    for one, other in combinations(GOLDEN.values(), 2):
        apart = [abs(a - b) for a, b in zip(one["parameters"], other["parameters"], strict=True)]
        assert max(apart) > 3e-4
