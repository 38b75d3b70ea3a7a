"""What the record of an iteration holds."""

import pytest
import torch

from flowcredit.leaf_scoring import ScoreCounts
from flowcredit.training_log import iteration_record


def test_a_leaf_with_one_image_has_no_spread_and_warns_of_nothing() -> None:
    """By hand: 1 and 3 have the mean 2 and the deviation sqrt(2); warnings are errors here."""
    single, pair = torch.tensor([[[5.0]]]), torch.tensor([[[1.0, 3.0]]])
    counts, advantages = ScoreCounts(3, 3), {0: torch.tensor([[1.0, -1.0]])}
    spread = torch.tensor([0.25])
    both = iteration_record(("a",), {0: single, 1: pair}, counts, advantages, {}, spread)
    assert both["reward/a"] == pytest.approx(3.0)
    assert both["reward_spread/a"] == pytest.approx(2**0.5)
    assert both["image_spread"] == 0.25
    alone = iteration_record(("a",), {0: single}, counts, advantages, {}, spread)
    assert alone["reward_spread/a"] is None
    assert alone["reward/a"] == 5.0
