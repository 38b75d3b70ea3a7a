"""The reward ``http``: what it sends, what it takes for a score, and every way in which a service fails."""

import base64
import contextlib
import io
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fake_service import HANG_UP, Answer, Asked, Fake, closed_port, fake_service
from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.rewards.endpoint import Endpoint, ServiceError
from flowcredit.scoring import RewardError, check_columns, columns_of, score_images

HEALTH = {"protocol": "flowcredit-reward/1", "name": "red", "version": "7"}
PROMPTS = [f"prompt {i}" for i in range(5)]


def images_of(*levels: int, size: tuple[int, int] = (6, 4)) -> Tensor:
    """Images that are red in k / 255, [B, 3, H, W]."""
    images = torch.zeros(len(levels), 3, *size)
    images[:, 0] = torch.tensor(levels)[:, None, None] / 255
    return images


IMAGES = images_of(10, 20, 30, 40, 50)


def red_levels(asked: Asked) -> list[int]:
    """The red of each image that was sent, read by Pillow alone."""
    pngs = [Image.open(io.BytesIO(base64.b64decode(png))) for png in asked.body["images"]]
    return [int(np.asarray(png)[0, 0, 0]) for png in pngs]


def red_service(asked: Asked) -> Any:
    return HEALTH if asked.method == "GET" else {"scores": red_levels(asked)}


def answering(post: Callable[[Asked], Any], **health: Any) -> Callable[[Asked], Any]:
    """A healthy service that answers requests for scores by ``post``."""
    return lambda asked: {**HEALTH, **health} if asked.method == "GET" else post(asked)


def load(fake: Fake, **options: Any) -> Any:
    return load_reward("http", {"url": fake.url, "backoff": 0.001, **options}, "cpu")


def score(
    reward: Any, images: Tensor = IMAGES, *, columns: Any = None, on_error: Any = "stop"
) -> list[float]:
    rewards, prompts = {"http": reward}, PROMPTS[: len(images)]
    scores = score_images(rewards, images, prompts, columns or {}, batch_size=16, on_error=on_error)
    return [float(each) for each in scores[0]]


@pytest.fixture
def service() -> Iterator[Fake]:
    with fake_service(red_service) as fake:
        yield fake


def test_pixels_prompts_and_columns_arrive_as_they_are(service: Fake) -> None:
    pixels = torch.randint(256, (2, 5, 7, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = pixels.permute(0, 3, 1, 2) / 255
    reward = load(service, columns=["answer", "objects"])
    objects = [[{"colour": "red"}], []]
    score(reward, images, columns={"answer": ["é", None], "objects": objects, "unused": [1, 2]})
    [body] = service.posts()
    assert body.keys() == {"protocol", "prompts", "columns", "images"}
    assert body["protocol"] == "flowcredit-reward/1"
    assert body["prompts"] == ["prompt 0", "prompt 1"]
    assert body["columns"] == {"answer": ["é", None], "objects": objects}
    for text, expected in zip(body["images"], pixels, strict=True):
        image = Image.open(io.BytesIO(base64.b64decode(text)))
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (7, 5))
        assert np.array_equal(np.asarray(image), expected.numpy())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_batches_of_any_size_give_the_same_scores_in_order(service: Fake, size: int) -> None:
    assert score(load(service, batch_size=size)) == [10, 20, 30, 40, 50]
    sizes = [len(body["prompts"]) for body in service.posts()]
    assert sizes == [min(size, 5 - start) for start in range(0, 5, size)]
    assert [prompt for body in service.posts() for prompt in body["prompts"]] == PROMPTS


def test_the_service_says_which_columns_it_needs() -> None:
    columns = {"required": ["answer"], "optional": ["hint"]}
    with fake_service(answering(lambda asked: {"scores": [1.0]}, columns=columns)) as fake:
        reward = load(fake, columns=["task"])
        assert columns_of(reward).required == ("task", "answer")
        with pytest.raises(InputError, match=r"'http' needs the column 'answer'.*prompt, task"):
            check_columns({"http": reward}, ["task"], "p.jsonl")
        score(reward, images_of(1), columns={"answer": [3], "task": ["t"], "hint": ["h"], "other": [0]})
        assert fake.posts()[0]["columns"] == {"answer": [3], "task": ["t"], "hint": ["h"]}
    with fake_service(answering(lambda asked: {"scores": [1.0]}, columns={"every": True})) as fake:
        score(load(fake), images_of(1), columns={"a": [1], "b": [2]})
        assert fake.posts()[0]["columns"] == {"a": [1], "b": [2]}


def test_null_is_no_score_and_no_failure() -> None:
    with fake_service(answering(lambda asked: {"scores": [1.5, None, 2]})) as fake:
        first, second, third = score(load(fake), images_of(1, 2, 3))
    assert (first, third) == (1.5, 2.0)
    assert math.isnan(second)


RUBBISH: dict[str, tuple[Answer | Any, str]] = {
    "html": (Answer(b"<html>\n<h1>It works!</h1>"), r"no JSON: <html> <h1>It works!</h1>"),
    "nothing": (Answer(b""), "no JSON: nothing"),
    "binary": (Answer(b"\x80\x04\x95\x0b"), "no JSON"),
    "escapes": (Answer(b"\x1b[31mred"), r"no JSON: \[31mred"),
    "deep": (Answer(b"[" * 100_000), "no JSON"),
    "no scores": ({"score": [1]}, "expected an object with a list 'scores'"),
    "a number": (3, "answered 3; expected an object with a list 'scores'"),
    "too few": ({"scores": [1, 2]}, "answered 2 scores for 5 images"),
    "too many": ({"scores": [1] * 6}, "answered 6 scores for 5 images"),
    "text": ({"scores": [1, 2, "3", 4, 5]}, r"scores\.2 is '3'"),
    "truth": ({"scores": [1, 2, 3, True, 5]}, r"scores\.3 is True"),
    "nan": (Answer(b'{"scores": [1, 2, NaN, 4, 5]}'), "no JSON"),
    "infinity": (Answer(b'{"scores": [1, 2, 3, 4, -Infinity]}'), "no JSON"),
    "overflow": (Answer(b'{"scores": [1, 1e999, 3, 4, 5]}'), r"scores\.1 is inf"),
    "beyond float32": ({"scores": [1, 1e39, 3, 4, 5]}, r"scores\.1 is 1e\+39"),
    "a long whole number": ({"scores": [10**400, 2, 3, 4, 5]}, r"scores\.0 is 1000"),
    "nested": ({"scores": [[1], 2, 3, 4, 5]}, r"scores\.0 is \[1\]"),
    "huge": (Answer(b" " * (3 << 20)), "more than 1,048,576 bytes"),
    "login": (
        Answer(b"", 302, {"Location": "https://login.example/?next=/"}),
        "answered 302, a redirect to https://login.example",
    ),
    "redirect of a post": (Answer(b"", 307, {"Location": "http://127.0.0.1:1/"}), "answered 307"),
    "forbidden": (Answer(b'{"error": "who are you"}', 403), "answered 403: who are you; it wants a token"),
    "not there": (Answer(b"<html>404</html>", 404), "answered 404: <html>404</html>"),
}


@pytest.mark.parametrize(("answer", "expected"), RUBBISH.values(), ids=RUBBISH)
def test_rubbish_is_one_line_that_names_the_url_and_is_not_asked_again(answer: Any, expected: str) -> None:
    with fake_service(answering(lambda asked: answer)) as fake:
        with pytest.raises(RewardError, match=expected) as failure:
            score(load(fake))
        assert fake.url in str(failure.value)
        assert "'prompt 0' (and 4 more in its batch)" in str(failure.value)
        assert str(failure.value).isprintable()
        assert len(fake.posts()) == 1
        assert all(math.isnan(each) for each in score(load(fake), on_error="skip"))


TRANSIENT = {
    "503": Answer(b"loading", 503),
    "500": Answer(b'{"detail": "out of memory"}', 500),
    "429": Answer(b'{"error": {"message": "slow down"}}', 429, {"Retry-After": "0"}),
    "hung up": HANG_UP,
    "broken off": Answer(b'{"scores": [', 200, {"Content-Length": "40"}),
    "no http": Answer(b"x", 200, {"Transfer-Encoding": "chunked"}),
}


@pytest.mark.parametrize("answer", TRANSIENT.values(), ids=TRANSIENT)
def test_a_service_that_fails_twice_then_works_gives_its_scores(answer: Answer) -> None:
    calls = iter([answer, answer])
    with fake_service(answering(lambda asked: next(calls, None) or red_service(asked))) as fake:
        assert score(load(fake, retries=2)) == [10, 20, 30, 40, 50]
        assert len(fake.posts()) == 3


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("503", "answered 503: loading"), ("500", "answered 500: out of memory"), ("429", "slow down")],
)
def test_retries_end_and_a_service_that_is_down_is_then_asked_once_a_batch(kind: str, expected: str) -> None:
    down = threading.Event()
    down.set()
    with fake_service(answering(lambda a: TRANSIENT[kind] if down.is_set() else red_service(a))) as fake:
        reward = load(fake, retries=2)
        with pytest.raises(RewardError, match=rf"{expected} \(tried 3 times\)"):
            score(reward)
        assert len(fake.posts()) == 3
        assert all(math.isnan(each) for each in score(reward, on_error="skip"))
        assert len(fake.posts()) == 4
        down.clear()
        assert score(reward) == [10, 20, 30, 40, 50]
        down.set()
        score(reward, on_error="skip")
        assert len(fake.posts()) == 5 + 3


def test_pauses_double_up_to_a_bound_and_follow_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("flowcredit.rewards.endpoint.time.sleep", pauses.append)
    with fake_service(answering(lambda asked: Answer(b"", 503))) as fake:
        score(load(fake, retries=7, backoff=0.5), on_error="skip")
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30]
    pauses.clear()
    with fake_service(answering(lambda asked: Answer(b"", 429, {"Retry-After": "9"}))) as fake:
        score(load(fake, retries=2, backoff=0.5), on_error="skip")
    assert pauses == [9, 9]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_slow_service_is_given_up_and_not_asked_again(release: threading.Event) -> None:
    def wait(asked: Asked) -> Any:
        release.wait()
        return red_service(asked)

    with fake_service(answering(wait)) as fake:
        reward = load(fake, timeout=0.1)
        with pytest.raises(RewardError, match=r"127\.0\.0\.1:\d+: no answer within 0\.1 seconds"):
            score(reward)
        assert len(fake.posts()) == 1
        release.set()
        assert score(load(fake, timeout=60)) == [10, 20, 30, 40, 50]


def test_an_answer_that_trickles_is_given_up_though_no_pause_in_it_is_long(release: threading.Event) -> None:
    """A time limit of the socket alone begins anew with every byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while not release.wait(0.01):
                    connection.sendall(b" ")

        threading.Thread(target=trickle).start()
        port = listener.getsockname()[1]
        endpoint = Endpoint(f"http://127.0.0.1:{port}", {}, timeout_s=0.2, retries=3, backoff_s=0.0)
        with pytest.raises(ServiceError, match=r"no answer within 0\.2 seconds"):
            endpoint.post("", {})


def test_only_the_image_that_a_service_refuses_is_lost() -> None:
    def post(asked: Asked) -> Any:
        if 30 in red_levels(asked):
            return Answer(b'{"error": "cannot read the third"}', 422)
        return red_service(asked)

    with fake_service(answering(post)) as fake:
        scores = score(load(fake, batch_size=4), on_error="skip")
        assert [scores[i] for i in (0, 1, 3, 4)] == [10, 20, 40, 50]
        assert math.isnan(scores[2])
        # The batch of four, each of them alone, and the last one.
        assert [len(body["images"]) for body in fake.posts()] == [4, 1, 1, 1, 1, 1]
        with pytest.raises(RewardError, match=r"'prompt 2': .*answered 422: cannot read the third"):
            score(load(fake))


def test_a_failed_batch_leaves_the_scores_of_the_others() -> None:
    calls = iter([None, Answer(b"<html>", 200)])
    with fake_service(answering(lambda asked: next(calls, None) or red_service(asked))) as fake:
        scores = score(load(fake, batch_size=2), on_error="skip")
    assert [scores[i] for i in (0, 1, 4)] == [10, 20, 50]
    assert math.isnan(scores[2])
    assert math.isnan(scores[3])


def test_columns_that_json_cannot_hold_are_refused(service: Fake) -> None:
    reward = load(service, columns=["made"])
    for value in (b"bytes", math.nan):
        with pytest.raises(RewardError, match="JSON"):
            score(reward, images_of(1), columns={"made": [value]})
    assert service.posts() == []


START_UP = {
    "html": (Answer(b"<html>"), "/health: answered with what is no JSON: <html>"),
    "404": (Answer(b"no", 404), "/health: answered 404: no"),
    "503": (Answer(b"no", 503), "/health: answered 503: no; expected a reward service"),
    "other json": ({"status": "ok"}, "/health answered JSON without 'protocol'"),
    "a list": ([], "/health answered JSON without 'protocol'"),
    "another protocol": ({**HEALTH, "protocol": "other/2"}, "speaks 'other/2'; this version speaks"),
    "no name": ({"protocol": HEALTH["protocol"]}, "needs the option 'name', in the answer of .*/health"),
    "a strange column": (
        {**HEALTH, "columns": {"required": ["not a word"]}},
        "asks for the column 'not a word'",
    ),
    "a taken column": ({**HEALTH, "columns": {"required": ["prompts"]}}, "asks for the column 'prompts'"),
}


@pytest.mark.parametrize(("answer", "expected"), START_UP.values(), ids=START_UP)
def test_what_is_no_reward_service_is_refused_at_the_start(answer: Any, expected: str) -> None:
    with fake_service(lambda asked: answer) as fake, pytest.raises(InputError, match=expected) as failure:
        load(fake)
    assert fake.url in str(failure.value)


def test_a_service_that_is_down_is_refused_at_the_start() -> None:
    url = closed_port()
    with pytest.raises(InputError, match=rf"{url}/health: the connection failed: Connection refused"):
        load_reward("http/heavy", {"url": url}, "cpu")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "needs the option 'url'"),
        ({"url": 3}, "option 'url' is 3"),
        ({"url": "127.0.0.1:80"}, "expected an address such as http://"),
        ({"url": "file:///etc/passwd"}, "expected an address such as http://"),
        ({"url": "http://h/?key=1"}, r"'http://h/'; .*without '\?' and '#'"),
        ({"url": "http://h:99999"}, "expected an address such as http://"),
        ({"url": "http://[::1"}, "expected an address such as http://"),
        ({"url": "http://h/ü b"}, "expected an address such as http://"),
        ({"url": "http://h", "timeuot": 3}, "did you mean 'timeout'"),
        ({"url": "http://h", "timeout": 0}, "option 'timeout' is 0"),
        ({"url": "http://h", "retries": -1}, "option 'retries' is -1"),
        ({"url": "http://h", "columns": "answer"}, "option 'columns' is \"answer\""),
        ({"url": "http://h", "token_env": "NOT_SET_HERE"}, "'NOT_SET_HERE', which is not set"),
        ({"url": "http://h", "headers_env": {"X Y": "HOME"}}, "'X Y', which is no name of a header"),
    ],
)
def test_options_are_checked_before_anything_is_asked(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_reward("http", options, "cpu")


def test_secrets_come_from_the_environment_alone(service: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame\n")
    monkeypatch.setenv("MY_KEY", "k-1")
    reward = load(service, token_env="MY_TOKEN", headers_env={"X-Api-Key": "MY_KEY"})
    score(reward)
    assert [each.headers["Authorization"] for each in service.asked] == ["Bearer sesame"] * 2
    assert [each.headers["X-Api-Key"] for each in service.asked] == ["k-1"] * 2
    assert "sesame" not in repr(reward)
    for options in (
        {"token_env": "sk-secret"},
        {"headers_env": {"A": "sk-secret"}},
        {"headers_env": "sk-secret"},
        {"token_env": ["sk-secret"]},
        {"url": "http://u:sk-secret@h"},
    ):
        with pytest.raises(InputError, match="_env") as failure:
            load(service, **options)
        assert "sk-secret" not in str(failure.value)
    monkeypatch.setenv("MY_TOKEN", "two\nlines")
    with pytest.raises(InputError, match="no header can"):
        load(service, token_env="MY_TOKEN")


def test_a_redirect_does_not_carry_the_token_away(monkeypatch: pytest.MonkeyPatch, service: Fake) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame")
    with fake_service(answering(lambda a: Answer(b"", 308, {"Location": f"{service.url}/"}))) as fake:
        score(load(fake, token_env="MY_TOKEN"), on_error="skip")
    assert service.asked == []


def test_a_loopback_service_is_asked_past_the_proxy(service: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", closed_port())
    assert json.dumps(score(load(service))) == "[10.0, 20.0, 30.0, 40.0, 50.0]"
