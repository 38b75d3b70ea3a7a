"""What the record of an iteration holds."""

import pytest
import torch

from flowcredit.leaf_scoring import ScoreCounts
from flowcredit.training_log import Record, iteration_line, iteration_record


def test_a_leaf_with_one_image_has_no_spread_and_warns_of_nothing() -> None:
    """By hand: 1 and 3 have the mean 2 and the deviation sqrt(2); warnings are errors here."""
    single, pair = torch.tensor([[[5.0]]]), torch.tensor([[[1.0, 3.0]]])
    counts, advantages = ScoreCounts(3, 3), {0: torch.tensor([[1.0, -1.0]])}
    spread = torch.tensor([0.25])
    both = iteration_record(("a",), {0: single, 1: pair}, counts, advantages, {}, spread, {0: 5})
    assert both["reward/a"] == pytest.approx(3.0)
    assert both["reward_spread/a"] == pytest.approx(2**0.5)
    assert both["image_spread"] == 0.25
    assert (both["advantage/5"], both["dead_groups/5"]) == (1, 0)
    alone = iteration_record(("a",), {0: single}, counts, advantages, {}, spread, {0: 5})
    assert alone["reward_spread/a"] is None
    assert alone["reward/a"] == 5.0


def test_the_mean_of_large_scores_is_told() -> None:
    """By hand: the sum of four is beyond float32, as is each squared deviation."""
    large = torch.tensor([[[1e38, 1e38, 1e38, 2e38]]])
    advantages = {0: torch.tensor([[-1.0, -1.0, -1.0, 1.0]])}
    record = iteration_record(("a",), {0: large}, ScoreCounts(4, 4), advantages, {}, torch.zeros(1), {})
    assert record["reward/a"] == pytest.approx(1.25e38)
    assert record["reward_spread/a"] == pytest.approx(0.5e38)
    assert iteration_line(("a",), record) == "a 1.25e+38  no update"


def test_credit_is_told_by_step() -> None:
    """By hand: at step 2 sizes of 14 in all in 8 places, and one dead group of four; at step 4 zeros."""
    advantages = {
        3: torch.tensor([[1.0, -1.0], [0.0, 0.0]]),
        5: torch.tensor([[3.0, -3.0], [3.0, -3.0]]),
        6: torch.zeros(2, 2),
    }
    steps = {3: 2, 5: 2, 6: 4, 7: 1}
    scores = {0: torch.rand(1, 2, 2)}
    record = iteration_record(("a",), scores, ScoreCounts(4, 4), advantages, {}, torch.zeros(2), steps)
    told = {name: value for name, value in record.items() if "/" in name and name.split("/")[1].isdigit()}
    assert told == {"advantage/2": 14 / 8, "dead_groups/2": 0.25, "advantage/4": 0.0, "dead_groups/4": 1.0}
    whole_images = iteration_record(("a",), scores, ScoreCounts(4, 4), advantages, {}, torch.zeros(2), {})
    assert not any(name.startswith("advantage/") for name in whole_images)


def test_the_line_of_an_iteration_tells_what_is_there() -> None:
    record: Record = {
        "reward/a": 0.5,
        "grad_norm": 0.25,
        "clip_fraction_low": 0.1,
        "clip_fraction_high": 0.02,
    }
    assert iteration_line(("a",), record) == "a 0.5000  gradient 0.250  clipped 12%"
    record |= {"clip_fraction_low": 0.0, "clip_fraction_high": 0.0, "dead_groups": 0.25}
    assert iteration_line(("a",), record) == "a 0.5000  gradient 0.250  no signal 25%"
    assert iteration_line(("a",), {"reward/a": None}) == "a no score  no update"
