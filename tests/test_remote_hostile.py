"""A service that means harm: its answers are bounded in time and size, and JSON, or told in one line."""

import contextlib
import gzip
import json
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fake_service import Answer, Asked, fake_service
from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.rewards.endpoint import MAX_ANSWER_BYTES, Endpoint, ServiceError
from flowcredit.rewards.wire import read_scores
from flowcredit.scoring import RewardError, score_images

HEALTH = {"protocol": "flowcredit-reward/1", "name": "red", "version": "7"}
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
Talk = Callable[[socket.socket, threading.Event], None]


@contextmanager
def talking(talk: Talk) -> Iterator[Endpoint]:
    """A service of one connection that says what ``talk`` sends; it is asked for 0.6 seconds."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                talk(connection, over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", {}, 0.6, 0, 0.0)
        finally:
            over.set()
            thread.join()


def dripping(start: bytes, piece: bytes) -> Talk:
    """Never a long pause, and never an end."""

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        while not over.wait(0.02):
            connection.sendall(piece)

    return talk


DRIPS = {
    "the status line": (b"", b"H"),
    "a header": (OK + b"X: ", b"y"),
    "a body": (OK + b"Content-Length: 100000\r\n\r\n", b" "),
    "a body without a length": (OK + b"\r\n", b" "),
    "the size of a chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    "the end of chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"X: y\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the words of an error": (b"HTTP/1.1 400 Bad\r\nContent-Length: 100000\r\n\r\n", b" "),
}


@pytest.mark.parametrize(("start", "piece"), DRIPS.values(), ids=DRIPS)
def test_whatever_trickles_is_given_up_at_the_deadline(start: bytes, piece: bytes) -> None:
    began = time.monotonic()
    with talking(dripping(start, piece)) as endpoint, pytest.raises(ServiceError) as failure:
        endpoint.get("")
    # The drip would go on for ever; the margin is for a machine that is busy.
    assert time.monotonic() - began < 30
    assert "no answer within 0.6 seconds" in str(failure.value) or "400: nothing readable" in str(
        failure.value
    )


def once(content: bytes) -> Talk:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(content)

    return talk


def flood(start: bytes, piece: bytes) -> Talk:
    """As much as the other side takes."""

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        while not over.is_set():
            connection.sendall(piece)

    return talk


MIB = b"x" * (1 << 20)
FLOODS = {
    "with a length": (OK + b"Content-Length: 1000000000000\r\n\r\n", MIB),
    "without a length": (OK + b"\r\n", MIB),
    "in chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + MIB + b"\r\n"),
    "in one chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffff\r\n", MIB),
    "a status line": (b"HTTP/1.1 200 ", MIB),
    "a header": (OK + b"X: ", MIB),
    "headers": (OK, b"X: y\r\n" * 1000),
    "an error": (b"HTTP/1.1 400 Bad\r\n\r\n", MIB),
}


@pytest.mark.parametrize(("start", "piece"), FLOODS.values(), ids=FLOODS)
def test_a_flood_is_cut_off_before_it_fills_memory(start: bytes, piece: bytes) -> None:
    tracemalloc.start()
    try:
        with talking(flood(start, piece)) as endpoint, pytest.raises(ServiceError) as failure:
            endpoint.get("")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * MAX_ANSWER_BYTES
    assert len(str(failure.value)) < 300


def test_the_limit_is_on_the_byte() -> None:
    def answer(size: int) -> bytes:
        return OK + b"\r\n" + b'"' + b"x" * (size - 2) + b'"'

    with talking(once(answer(MAX_ANSWER_BYTES))) as endpoint:
        assert len(endpoint.get("")) == MAX_ANSWER_BYTES - 2
    with (
        talking(once(answer(MAX_ANSWER_BYTES + 1))) as endpoint,
        pytest.raises(ServiceError, match="more than"),
    ):
        endpoint.get("")


PACKED = gzip.compress(b'{"scores": [1, 1]}')


@pytest.mark.parametrize(
    # Named, since a name made of the bytes would hold the second in which they were packed.
    "content",
    [PACKED, gzip.compress(bytes(1 << 26)), zlib.compress(bytes(1 << 26))],
    ids=["scores", "gzip bomb", "zlib bomb"],
)
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_packed_answer_is_not_unpacked(content: bytes, encoding: str) -> None:
    with fake_service(lambda asked: Answer(content, 200, {"Content-Encoding": encoding})) as fake:
        endpoint = Endpoint(fake.url, {}, 30, 0, 0.0)
        with pytest.raises(ServiceError, match="answered with what is no JSON"):
            endpoint.get("/health")
        assert fake.asked[0].headers["Accept-Encoding"] == "identity"


def scored(answer: Any) -> list[float]:
    def respond(asked: Asked) -> Any:
        return HEALTH if asked.method == "GET" else answer

    with fake_service(respond) as fake:
        reward = load_reward("http", {"url": fake.url, "retries": 0, "timeout": 30}, "cpu")
        found = score_images({"r": reward}, torch.zeros(2, 3, 4, 4), ["a", "b"], {}, batch_size=2)
    return found[0].tolist()


@pytest.mark.parametrize("kind", ["application/json", "text/html", "image/png", "", "x\x1b[2J"])
def test_the_content_decides_and_not_what_its_type_says(kind: str) -> None:
    """A service in a line of Python names no type; what is no JSON is refused under any."""
    assert scored(Answer(b'{"scores": [1, 0.5]}', 200, {"Content-Type": kind})) == [1, 0.5]
    with pytest.raises(RewardError, match="what is no JSON: <html>"):
        scored(Answer(b"<html>", 200, {"Content-Type": kind}))


HUGE = "9" * 4000
BODIES = {
    "nan": b'{"scores": [NaN, 1]}',
    "infinity": b'{"scores": [-Infinity, 1]}',
    "overflow": b'{"scores": [1e999, 1]}',
    "beyond float32": b'{"scores": [1e39, 1]}',
    "a huge whole number": b'{"scores": [%s, 1]}' % HUGE.encode(),
    "a huger one": b'{"scores": [%s, 1]}' % (HUGE * 10).encode(),
    "truth": b'{"scores": [true, 1]}',
    "text": b'{"scores": ["1", 1]}',
    "an object": b'{"scores": {"0": 1, "1": 1}}',
    "too many": b'{"scores": [1, 1, 1]}',
    "nothing": b"",
    "no utf-8": b'{"scores": [1, "\xff"]}',
    "utf-16": '{"scores": [1, 1]}'.encode("utf-16"),
    "a mark": b'\xef\xbb\xbf{"scores": [1, 1]}',
    "two": b'{"scores": [1, 1]}{"scores": [1, 1]}',
    "a pickle": b"\x80\x04K\x01.",
    "a terminal's codes": b'{"scores": ["\\u001b[2J\\u0007\\n", 1]}',
    "half a character": b'{"scores": ["\\ud800", 1]}',
}


@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
def test_what_is_no_answer_is_one_short_line(content: bytes) -> None:
    with pytest.raises(RewardError) as failure:
        scored(Answer(content))
    message = str(failure.value)
    assert message.isprintable()
    assert len(message) < 500


def test_depth_is_no_way_in() -> None:
    """Where the parser gives up is not where the writer of the message does: all depths around are tried."""
    for depth in [*range(1, 1200, 7), 5_000, 100_000, 400_000]:
        for start, end in (("[", "]"), ('{"a":', "}")):
            text = start * depth + "1" + end * depth
            for status in (200, 400):
                with talking(once(b"HTTP/1.1 %d x\r\n\r\n" % status + text.encode())) as endpoint:
                    with pytest.raises(ServiceError) as failure:
                        read_scores(endpoint.get(""), 1, "there")
                    assert len(str(failure.value)) < 300


TARGETS = (
    "{url}/other",
    "https://{host}/health",
    "http://elsewhere.invalid/",
    "file:///etc/passwd",
    "//x",
    "\x1b[2J",
)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", TARGETS)
def test_no_redirect_is_followed_not_even_to_https_of_the_same_host(status: int, target: str) -> None:
    def respond(asked: Asked) -> Any:
        host = asked.headers["Host"]
        return Answer(b"", status, {"Location": target.format(url=f"http://{host}", host=host)})

    with fake_service(respond) as fake:
        with pytest.raises(InputError, match=f"answered {status}, a redirect to .*not followed") as failure:
            load_reward("http", {"url": fake.url}, "cpu")
        assert str(failure.value).isprintable()
        assert [asked.path for asked in fake.asked] == ["/health"]


LONG = "n" * 500_000


@pytest.mark.parametrize(
    "health",
    [
        {**HEALTH, "protocol": LONG},
        {**HEALTH, "protocol": [[LONG]]},
        {**HEALTH, "columns": {"required": [LONG + "-"]}},
        {**HEALTH, "columns": {"required": ["\x1b[2J\n"]}},
        {**HEALTH, "columns": {"required": "x"}},
        {**HEALTH, "columns": LONG},
        {**HEALTH, "name": 10**4000},
        Answer(LONG.encode(), 200),
        Answer(json.dumps({"error": LONG}).encode(), 404),
        Answer(b"x", 404, {"X": "y", "Retry-After": "9" * 5000}),
    ],
)
def test_what_a_service_says_of_itself_is_cut_short(health: Any) -> None:
    with fake_service(lambda asked: health) as fake, pytest.raises(InputError) as failure:
        load_reward("http", {"url": fake.url, "retries": 0}, "cpu")
    assert len(str(failure.value)) < 700


@pytest.mark.parametrize(
    "models",
    [
        {"data": [{"id": LONG}] * 2},
        {"data": [{"id": [[[LONG]]]}, {"id": 3}]},
        {"data": [{"id": "\x1b[2J"}]},
        {"data": {"id": "x"}},
        {"data": None},
        [LONG],
    ],
)
def test_what_a_judge_says_of_itself_is_cut_short(models: Any) -> None:
    with fake_service(lambda asked: models) as fake, pytest.raises(InputError) as failure:
        load_reward("chat", {"url": fake.url, "model": "m", "retries": 0}, "cpu")
    assert len(str(failure.value)) < 700
    assert str(failure.value).isprintable()


def test_a_judges_answer_of_any_shape_is_a_score_or_none() -> None:
    odd: list[Any] = [3, True, {}, [], {"choices": 3}, {"choices": []}, {"choices": [{"message": 3}]}, LONG]
    odd += [{"choices": [{"message": {"content": c}}]} for c in (3, [LONG], {"a": 1})]
    calls = iter(odd)

    def respond(asked: Asked) -> Any:
        return {"data": [{"id": "m"}]} if asked.method == "GET" else next(calls)

    with fake_service(respond) as fake:
        judge = load_reward("chat", {"url": fake.url, "model": "m", "retries": 0, "concurrency": 1}, "cpu")
        for _ in odd:
            with pytest.raises(RewardError) as failure:
                score_images({"r": judge}, torch.zeros(1, 3, 4, 4), ["p"], {}, batch_size=1)
            assert len(str(failure.value)) < 700
