"""Scoring: every image meets its own prompt and columns, and no failure passes for a score."""

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowcredit.interfaces import Conditioning, Reward
from flowcredit.leaf_scoring import ScoreCounts, score_leaves
from flowcredit.plan import Plan, Segment
from flowcredit.scoring import PartialFailure, RewardError, score_images


@dataclass
class Decoder:
    """A model that only decodes: the latent's one number becomes the image's brightness."""

    network: nn.Module = field(default_factory=nn.Identity)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    image_tokens: int = 1
    decoded: list[int] = field(default_factory=list)

    def decode(self, x0: Tensor) -> Tensor:
        assert x0.dtype == torch.float32
        self.decoded.append(len(x0))
        return x0[:, None, None, None].expand(-1, 3, 2, 2)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        raise NotImplementedError

    def initial_noise(self, count: int, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        raise NotImplementedError

    def time_grid(self, num_steps: int) -> Tensor:
        raise NotImplementedError


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.mean(dim=(1, 2, 3))


BRIGHTNESS: dict[str, Any] = {"brightness": brightness}


def against_answer(images: Tensor, prompts: Sequence[str], answer: Sequence[float]) -> list[float]:
    """A score that is right only if image, prompt and column belong together."""
    offsets = [float(prompt) + number for prompt, number in zip(prompts, answer, strict=True)]
    return [
        value - offset for value, offset in zip(brightness(images, prompts).tolist(), offsets, strict=True)
    ]


def images_of(*values: float) -> Tensor:
    return torch.tensor(values)[:, None, None, None].expand(-1, 3, 2, 2)


def run(reward: Any, count: int = 5, **options: Any) -> list[float]:
    images = images_of(*(i / 10 for i in range(count)))
    prompts = [f"prompt {i}" for i in range(count)]
    settings = {"batch_size": 3, **options}
    return [float(score) for score in score_images({"mine": reward}, images, prompts, {}, **settings)[0]]


def nan_equal(found: Sequence[float], expected: Sequence[float | None]) -> bool:
    return [None if math.isnan(value) else pytest.approx(value) for value in found] == list(expected)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_leaves_are_scored_with_their_own_prompt_and_columns(batch_size: int) -> None:
    prompts, answers = ["1", "2", "3"], [10.0, 20.0, 30.0]
    leaves = {
        4: torch.arange(6.0).reshape(3, 2) / 100,
        7: torch.arange(12.0).reshape(3, 4) / 100 + 0.5,
    }
    rewards: dict[str, Any] = {"answer": against_answer, "brightness": brightness}
    told: list[int] = []
    scores, counts = score_leaves(
        Decoder(), leaves, prompts, {"answer": answers}, rewards, batch_size=batch_size, progress=told.append
    )
    assert (sum(told), max(told)) == (18, min(batch_size, 18))
    offset = torch.tensor([11.0, 22.0, 33.0])[:, None]
    assert scores.keys() == leaves.keys()
    for segment, leaf in leaves.items():
        torch.testing.assert_close(scores[segment], torch.stack([leaf - offset, leaf]))
    assert counts == ScoreCounts(18, 36, {"answer": 0, "brightness": 0}, {"answer": 0, "brightness": 0})


def test_a_leaf_of_two_segments_is_decoded_and_scored_once() -> None:
    """Strides of the last step end in the same state; the plan and the executor agree on it."""
    segments = (
        Segment(None, (0, 1), fan_out=3, stochastic=True),
        Segment(0, (1, 2), scored=True),
        Segment(0, (1, 2), scored=True),
    )
    plan = Plan(num_steps=2, segments=segments)
    assert plan.segment_end[1] == plan.segment_end[2]
    leaf = torch.rand(2, 3)
    model = Decoder()
    # Handed over as views, as by an executor that cuts segments from one storage of the node.
    scores, counts = score_leaves(model, {1: leaf[:], 2: leaf}, ["a", "b"], {}, BRIGHTNESS, batch_size=4)
    assert counts.decodes == 2 * plan.decodes == sum(model.decoded)
    torch.testing.assert_close(scores[1][0], leaf)
    torch.testing.assert_close(scores[2][0], leaf)


def test_half_precision_leaves_are_decoded_in_float32() -> None:
    leaf = torch.tensor([[0.25, 0.5]], dtype=torch.bfloat16)
    scores, _ = score_leaves(Decoder(), {0: leaf}, ["a"], {}, BRIGHTNESS, batch_size=2)
    assert scores[0].tolist() == [[[0.25, 0.5]]]


def test_a_diverged_model_is_not_scored() -> None:
    leaf = torch.tensor([[0.25, math.nan]])
    with pytest.raises(ValueError, match="1 of 2 decoded images contain NaN"):
        score_leaves(Decoder(), {0: leaf}, ["a"], {}, BRIGHTNESS, batch_size=2)


def test_columns_must_follow_the_prompts() -> None:
    with pytest.raises(ValueError, match="got 1 answer for leaves of 2 prompts"):
        score_leaves(Decoder(), {0: torch.rand(2, 1)}, ["a", "b"], {"answer": [1]}, {}, batch_size=2)
    with pytest.raises(ValueError, match="got 1 prompts for 2 images"):
        score_images({}, images_of(0, 1), ["a"], {}, batch_size=2)


def raising(*bad: int, alone: bool = True) -> Callable[..., list[float]]:
    def reward(images: Tensor, prompts: Sequence[str]) -> list[float]:
        if any(f"prompt {i}" in prompts for i in bad) and (alone or len(prompts) > 1):
            raise KeyError("no such colour")
        return brightness(images, prompts).tolist()

    return reward


def test_a_reward_that_raises_stops_and_names_the_prompt() -> None:
    with pytest.raises(
        RewardError, match=r"'mine' failed on the prompt 'prompt 4'.*KeyError.*test_scoring\.py"
    ):
        run(raising(4))


def test_a_reward_that_raises_loses_only_the_images_at_fault() -> None:
    assert nan_equal(run(raising(1, 4), on_error="skip"), [0.0, None, 0.2, 0.3, None])


def test_a_reward_that_fails_on_batches_alone() -> None:
    """Out of memory, say: skipping keeps every score, stopping does not blame an innocent prompt."""
    assert nan_equal(run(raising(1, alone=False), on_error="skip"), [0.0, 0.1, 0.2, 0.3, 0.4])
    with pytest.raises(RewardError, match="fails on 3 images at once"):
        run(raising(1, alone=False))


def test_failures_and_missing_scores_are_counted() -> None:
    def reward(images: Tensor, prompts: Sequence[str]) -> list[float | None]:
        if "bad" in prompts:
            raise RuntimeError
        return [None if prompt == "none" else 1.0 for prompt in prompts]

    rewards: dict[str, Any] = {"mine": reward, "brightness": brightness}
    leaf = torch.rand(3, 2)
    scores, counts = score_leaves(
        Decoder(), {0: leaf}, ["bad", "none", "good"], {}, rewards, batch_size=4, on_error="skip"
    )
    assert counts.missing == {"mine": 4, "brightness": 0}
    assert counts.failed == {"mine": 2, "brightness": 0}
    assert scores[0][0].isnan().tolist() == [[True, True], [True, True], [False, False]]
    assert scores[0][0, 2].tolist() == [1.0, 1.0]


def test_a_reward_that_knows_which_images_it_failed_on_keeps_the_others() -> None:
    calls: list[int] = []

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        calls.append(len(prompts))
        raise PartialFailure(torch.tensor([1.0, math.nan, 3.0, math.inf]), {2: "it is down", 1: "no"})

    assert nan_equal(run(reward, count=4, batch_size=4, on_error="skip"), [1.0, None, None, None])
    with pytest.raises(RewardError, match=r"'prompt 1' \(and 1 more in its batch\): no; mend"):
        run(reward, count=4, batch_size=4)
    assert calls == [4, 4]
    rewards: dict[str, Any] = {"mine": reward}
    _, counts = score_leaves(
        Decoder(), {0: torch.rand(2, 2)}, ["a", "b"], {}, rewards, batch_size=4, on_error="skip"
    )
    assert (counts.missing, counts.failed) == ({"mine": 3}, {"mine": 3})
    with pytest.raises(RewardError, match="returned 4 scores for 3 images"):
        run(reward, count=3, on_error="skip")


def test_nan_and_none_are_no_score_and_no_failure() -> None:
    def reward(images: Tensor, prompts: Sequence[str]) -> list[float | None]:
        return [None, math.nan, 1.0][: len(prompts)]

    assert nan_equal(run(reward, count=3), [None, None, 1.0])


@pytest.mark.parametrize("value", [math.inf, -math.inf, 2e30, -1e38])
def test_an_infinite_score_is_a_failure(value: float) -> None:
    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.tensor([value if prompt == "prompt 1" else 2.0 for prompt in prompts])

    assert nan_equal(run(reward, on_error="skip"), [2.0, None, 2.0, 2.0, 2.0])
    with pytest.raises(RewardError, match=rf"'prompt 1': it returned {re.escape(f'{value:g}')}"):
        run(reward)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1.0, 2.0], "returned 2 scores for 3 images; expected 3"),
        (torch.zeros(4), "returned 4 scores for 3 images"),
        (torch.zeros(3, 1), r"shape \[3, 1\], expected \[3\]"),
        (1.0, "returned a value of type float, no list of numbers"),
        ([10**400, 0, 0], "returned a value of type list, no list of numbers"),
        (torch.zeros(3, dtype=torch.complex64), "returned complex numbers"),
        (None, "returned a value of type NoneType"),
        (["high", "low", "low"], "no list of numbers"),
    ],
)
def test_a_result_that_is_not_one_number_an_image_is_refused(
    on_error: str, result: Any, expected: str
) -> None:
    """A fault of the reward's code, not of an image: skipping does not hide it."""
    with pytest.raises(RewardError, match=expected):
        run(lambda images, prompts: result, count=3, on_error=on_error)


@pytest.fixture
def hanging() -> Any:
    """A reward that waits for ever on one prompt; set free when the test ends."""
    release = threading.Event()

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        if "prompt 1" in prompts:
            release.wait()
        return brightness(images, prompts)

    yield reward
    release.set()


def test_a_reward_that_hangs_is_given_up(hanging: Reward) -> None:
    with pytest.raises(
        RewardError, match=r"'mine' failed on the prompt 'prompt 0' \(and 2 more.*within 0\.05 s"
    ):
        run(hanging, timeout_s=0.05)
    assert nan_equal(run(hanging, timeout_s=0.05, on_error="skip"), [None, None, None, 0.3, 0.4])


def test_an_exception_crosses_the_thread_of_the_time_limit() -> None:
    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise TimeoutError("the server said so")

    with pytest.raises(RewardError, match="TimeoutError: the server said so"):
        run(reward, timeout_s=60)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_rewards_run_without_gradient(timeout_s: float | None) -> None:
    weight = torch.ones(1, requires_grad=True)

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        assert not (brightness(images, prompts) * weight).requires_grad
        return brightness(images, prompts)

    assert nan_equal(run(reward, timeout_s=timeout_s), [0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_reward_that_works_in_place_does_not_change_the_next_ones_images() -> None:
    def spoiling(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.mul_(255).mean(dim=(1, 2, 3))

    rewards: dict[str, Any] = {"spoiling": spoiling, "brightness": brightness}
    images = images_of(0.2, 0.4).contiguous()
    scores = score_images(rewards, images, ["a", "b"], {}, batch_size=2)
    torch.testing.assert_close(scores, torch.tensor([[51.0, 102.0], [0.2, 0.4]]))
