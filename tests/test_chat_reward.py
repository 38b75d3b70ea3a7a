"""The reward ``chat``: what the judge is asked, which number of its answer counts, and how it fails."""

import base64
import io
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fake_service import HANG_UP, Answer, Asked, Fake, closed_port, fake_service
from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.scoring import RewardError, check_columns, columns_of, score_images

MODELS = {"object": "list", "data": [{"id": "UnifiedReward", "object": "model"}]}


def said(text: str | None) -> dict[str, Any]:
    """A chat completion, as vLLM answers it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 3}}


def judging(post: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
    return lambda asked: MODELS if asked.method == "GET" else post(asked)


def level(asked: Asked) -> int:
    """The grey of the image in the question, read by Pillow alone."""
    url = asked.body["messages"][0]["content"][0]["image_url"]["url"]
    kind, _, text = url.partition(",")
    assert kind == "data:image/png;base64"
    return int(np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("L"))[0, 0])


def question(asked: Asked) -> str:
    text = asked.body["messages"][0]["content"][1]
    assert text["type"] == "text"
    return str(text["text"])


def greys(*levels: int) -> Tensor:
    return (torch.tensor(levels)[:, None, None, None] / 255).expand(-1, 3, 4, 4)


def load(fake: Fake, **options: Any) -> Any:
    given = {"url": f"{fake.url}/v1/", "model": "UnifiedReward", "backoff": 0.001, **options}
    return load_reward("chat", given, "cpu")


def score(
    reward: Any,
    images: Tensor,
    prompts: Sequence[str] | None = None,
    *,
    on_error: Any = "stop",
    **columns: Any,
) -> list[Any]:
    prompts = prompts or [f"prompt {i}" for i in range(len(images))]
    scores = score_images({"chat": reward}, images, prompts, columns, batch_size=64, on_error=on_error)[0]
    return [None if math.isnan(each) else pytest.approx(float(each)) for each in scores]


def test_the_judge_sees_each_image_with_its_own_question() -> None:
    with fake_service(judging(lambda asked: said(f"Fine.\nFinal Score: {level(asked) / 10}"))) as fake:
        images = greys(10, 15, 30, 50)
        assert score(load(fake), images, ["a", "b", "a {c}", 'd "x"']) == [0, 0.125, 0.5, 1]
        posts = [asked for asked in fake.asked if asked.method == "POST"]
    assert {asked.path for asked in posts} == {"/v1/chat/completions"}
    for asked in posts:
        assert (asked.body["model"], asked.body["temperature"]) == ("UnifiedReward", 0)
        assert "from 1 (neither) to 5 (both" in question(asked)
        assert "{" not in question(asked).replace("a {c}", "")
    shown = {level(asked): question(asked) for asked in posts}
    for grey, prompt in zip((10, 15, 30, 50), ('"a"', '"b"', '"a {c}"', '"d "x""'), strict=True):
        assert f"for this description: {prompt}\n" in shown[grey]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Final Score: 4", 4),
        ("final score : **4.5**", 4.5),
        ("**Final Score:** 3,5", 3.5),
        ("Final Score: 2\nNo, I misread it.\nFinal Score: 3/5", 3),
        ("<think>Final Score: 1?</think>\nFinal Score:\n 5.", 5),
        ("Final Score: 7", None),
        ("Final Score: 0", None),
        ("Final Score (1-5): excellent", None),
        ("I would give it a 4.", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_number_after_final_score_counts(text: str | None, expected: float | None) -> None:
    with fake_service(judging(lambda asked: said(text))) as fake:
        assert score(load(fake, raw=True), greys(1)) == [expected]


def test_no_score_is_no_failure_even_under_stop() -> None:
    with fake_service(judging(lambda asked: said("5" if level(asked) == 2 else "no"))) as fake:
        assert score(load(fake, pattern=r"(\d+)"), greys(1, 2, 3)) == [None, 1, None]


def test_scale_pattern_and_columns_of_ones_own() -> None:
    with fake_service(judging(lambda asked: said('{"score": -40}'))) as fake:
        template = 'Does it read {text}? Answer {"score": ...}. Asked for: {prompt}'
        options = {"template": template, "scale": [-100, 100], "pattern": r'"score":\s*(-?\d+)'}
        reward = load(fake, **options)
        assert columns_of(reward).required == ("text",)
        with pytest.raises(InputError, match="needs the column 'text'"):
            check_columns({"chat": reward}, [], "p.txt")
        assert score(reward, greys(1), ["a {text}"], text=["{prompt}"]) == [0.3]
        [asked] = [asked for asked in fake.asked if asked.method == "POST"]
    assert question(asked) == 'Does it read {prompt}? Answer {"score": ...}. Asked for: a {text}'


def test_a_group_that_holds_no_number_is_no_score() -> None:
    with fake_service(judging(lambda asked: said("Verdict: good"))) as fake:
        assert score(load(fake, pattern=r"Verdict: (\w+)"), greys(1)) == [None]
        assert score(load(fake, pattern=r"Verdict: (bad)?"), greys(1)) == [None]


@pytest.fixture
def gate() -> Iterator[threading.Barrier]:
    barrier = threading.Barrier(3)
    yield barrier
    barrier.abort()


def test_requests_run_side_by_side_and_scores_keep_their_order(gate: threading.Barrier) -> None:
    def post(asked: Asked) -> Any:
        gate.wait(timeout=30)  # Passes only while three requests are under way.
        return said(f"Final Score: {level(asked)}")

    with fake_service(judging(post)) as fake:
        images = greys(1, 2, 3, 4, 5, 1)
        assert score(load(fake, concurrency=3, raw=True), images) == [1, 2, 3, 4, 5, 1]


def test_only_the_image_whose_request_fails_is_lost() -> None:
    answers = {
        2: Answer(b'{"error": {"message": "image refused"}}', 400),
        3: Answer(b"<html>"),
        4: {"choices": []},
    }

    def post(asked: Asked) -> Any:
        return answers.get(level(asked), said("Final Score: 5"))

    with fake_service(judging(post)) as fake:
        assert score(load(fake), greys(1, 2, 3, 4, 5), on_error="skip") == [1, None, None, None, 1]
        assert len(fake.posts()) == 5
        with pytest.raises(RewardError, match=r"'prompt 1' \(and 2 more.*answered 400: image refused"):
            score(load(fake), greys(1, 2, 3, 4, 5))
        with pytest.raises(RewardError, match="expected a chat completion"):
            score(load(fake), greys(4))


def test_an_endpoint_that_hangs_up_is_asked_again() -> None:
    calls = iter([HANG_UP, Answer(b"", 503)])
    with fake_service(judging(lambda asked: next(calls, None) or said("Final Score: 3"))) as fake:
        assert score(load(fake, retries=2), greys(1)) == [0.5]
        assert len(fake.posts()) == 3


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    with fake_service(judging(lambda asked: said("Final Score: 3"))) as fake:
        score(load(fake, token_env="JUDGE_KEY"), greys(1))
        assert [asked.headers["Authorization"] for asked in fake.asked] == ["Bearer sk-1"] * 2


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (
            {"data": [{"id": "other"}, {"id": "more"}]},
            "/v1/models has no model 'UnifiedReward'; it has 'other', 'more'",
        ),
        ({"data": []}, "it has none"),
        ([], "JSON that is no list of models"),
        (Answer(b"no", 404), "/v1/models: answered 404: no; expected an OpenAI-compatible endpoint"),
        (Answer(b"", 401), "answered 401: nothing; it wants a token: see token_env"),
    ],
)
def test_an_endpoint_without_the_model_is_refused_at_the_start(models: Any, expected: str) -> None:
    with fake_service(lambda asked: models) as fake, pytest.raises(InputError, match=re.escape(expected)):
        load(fake)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": None}, "option 'model'"),
        ({"scale": [5, 1]}, r"'scale' is \[5, 1\]"),
        ({"scale": [1]}, "'scale"),
        ({"pattern": "(a"}, "no regular expression"),
        ({"pattern": "score"}, "has 0 groups; expected one"),
        ({"concurrency": 0}, "'concurrency' is 0"),
        ({"template": "{images}"}, "asks for the column 'images'"),
        ({"promtp": "x"}, "unknown option 'promtp'"),
        ({}, "models: the connection failed"),
    ],
)
def test_options_are_checked(options: dict[str, Any], expected: str) -> None:
    given = {"url": closed_port(), "model": "m", **options}
    with pytest.raises(InputError, match=expected):
        load_reward("chat", given, "cpu")
