"""The reward server under malformed requests of every kind: each is refused, the next proper one is scored.

The long form is ``python reliability/fuzz_server.py``; here hypothesis chooses, and shrinks what it finds.
"""

import base64
import contextlib
import hmac
import json
import pickle
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from fuzz_server import Counts, Fault, check_alive, judge, one, send
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed import CANARY, KINDS, PICKLED, Attack, http, png, request
from PIL import Image

import flowcredit.serving
from flowcredit.serving import RewardServer, Service
from simple_rewards import brightness
from test_serving import ask, body, mean, served

Address = tuple[str, int]
FUZZ = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
    max_examples=100,
)


def black(images: Any, prompts: Any, answer: Any = None) -> list[float]:
    return brightness(images, prompts)


def address_of(url: str) -> Address:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with served(black) as url:
        yield address_of(url)


@FUZZ
@given(st.randoms(use_true_random=False))
def test_malformed_requests_are_refused_and_the_next_proper_one_is_scored(
    address: Address, random: Random
) -> None:
    counts = Counts()
    one(address, random, counts)
    assert counts.refused + counts.closed + counts.answered == 1
    assert counts.proper == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_refused_in_json_or_hung_up_on(
    address: Address, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = Counts()
    for seed in range(8):
        judge(send(address, Attack(kind, (KINDS[kind](Random(seed)),))), counts)
        check_alive(address)
    assert counts.refused > 0
    assert "Traceback" not in capfd.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(["protocol", "prompts", "columns", "images", "more"])


@FUZZ
@given(st.dictionaries(FIELDS, JSON, min_size=1))
def test_other_values_in_a_proper_request_are_refused_by_name(
    address: Address, changes: dict[str, Any]
) -> None:
    sent = json.dumps({**request(), **changes}).encode()
    counts = Counts()
    judge(send(address, Attack("json", (http(sent),))), counts)
    check_alive(address)
    assert counts.refused + counts.answered == 1


def test_nothing_that_is_sent_runs(address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary sings where such a pickle is loaded: asserted first, so that the test can fail."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(PICKLED)
    assert (tmp_path / CANARY).exists()
    (tmp_path / CANARY).unlink()
    for content in (PICKLED, http(PICKLED), http(PICKLED, Content_Type="application/python-pickle")):
        judge(send(address, Attack("pickle", (content,))), Counts())
    for seed in range(40):
        for kind in ("schema", "images"):
            judge(send(address, Attack(kind, (KINDS[kind](Random(seed)),))), Counts())
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("length", ["-1", "+5", "0x10", "9" * 5000, "", "5, 5", "5\r\nContent-Length: 6"])
def test_a_length_that_is_no_number_is_refused_in_one_line(address: Address, length: str) -> None:
    head = f"POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\nhello"
    answer = send(address, Attack("length", (head.encode(),)))
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 411")), answer
    message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert "Content-Length" in message
    assert len(message) <= 1000


def test_one_request_is_read_of_a_connection(address: Address) -> None:
    """What follows a body is not taken for a second request: it may be smuggled past a proxy."""
    good = http(json.dumps(request()).encode())
    answer = send(address, Attack("pipelined", (good + b"GET /health HTTP/1.1\r\n\r\n",)))
    assert answer.count(b"HTTP/1.1 ") == 1
    chunked = good.replace(b"Host: h", b"Transfer-Encoding: chunked")
    assert send(address, Attack("both", (chunked,))).startswith(b"HTTP/1.1 411")


def trickle(address: Address, content: bytes, pause_s: float) -> float:
    """Seconds after which the server gives up a client that sends a byte at a time."""
    began = time.monotonic()
    with socket.create_connection(address, timeout=20) as connection:
        connection.settimeout(pause_s)
        for place in range(len(content)):
            try:
                connection.sendall(content[place : place + 1])
                if connection.recv(1) == b"":
                    return time.monotonic() - began
            except TimeoutError:
                continue
            except OSError:
                return time.monotonic() - began
    raise AssertionError("the server read to the end")


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\n", http(b"x" * 3)[:-3]])
def test_a_client_that_trickles_is_given_up_and_holds_up_nobody(
    start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flowcredit.serving, "_SENT_S", 1.0)
    with served(mean) as url:
        address = address_of(url)
        head, _, _ = http(b"x" * 3000).partition(b"xxx")
        slow = {b"": b"G" * 3000, http(b"x" * 3)[:-3]: head + b"x" * 3000}.get(start, start + b"X" * 3000)
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(trickle(address, slow, 0.005)))
        thread.start()
        while thread.is_alive():
            assert ask(url, body())[0] == 200
        thread.join()
    assert found[0] < 15


def alive(address: Address) -> bool:
    with contextlib.suppress(Fault):
        check_alive(address)
        return True
    return False


def test_clients_beyond_the_limit_are_told_so_and_the_others_are_served() -> None:
    service = Service("mine", cast(Any, black), max_bytes=1 << 20, max_connections=2)
    with RewardServer(("127.0.0.1", 0), service) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            where = (server.server_name, server.server_port)
            idle = [socket.create_connection(where) for _ in range(2)]
            with socket.create_connection(where, timeout=30) as third:
                assert third.recv(100).startswith(b"HTTP/1.1 503 ")
            for each in idle:
                each.close()
            # Their threads see it a moment later: until then it is told 503, or hung up on as it sends.
            while not alive(where):
                time.sleep(0.01)
        finally:
            server.shutdown()
            thread.join()


def test_a_bomb_is_refused_by_its_head_before_a_pixel_is_unfolded(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*words: Any, **more: Any) -> Any:
        raise AssertionError("opened")

    monkeypatch.setattr(Image, "open", never)
    for size in ((60_000, 60_000), (2**31 - 1, 1), (2**32 - 1, 2**32 - 1)):
        image = base64.b64encode(png(promised=size)).decode()
        sent = http(json.dumps({**request(), "images": [image] * 2}).encode())
        answer = send(address, Attack("bomb", (sent,)))
        assert answer.startswith(b"HTTP/1.1 400")
        assert f"{size[0]} x {size[1]} pixels; expected at most".encode() in answer


def test_an_animation_and_a_packed_profile_are_refused(address: Address) -> None:
    def answer_to(*chunks: tuple[bytes, bytes]) -> bytes:
        image = base64.b64encode(png(chunks=chunks)).decode()
        sent = json.dumps({**request(), "images": [image] * 2}).encode()
        return send(address, Attack("chunks", (http(sent),)))

    assert answer_to().startswith(b"HTTP/1.1 200")
    frames = answer_to((b"tEXt", b"k\0v"), (b"acTL", struct.pack(">II", 5000, 0)))
    assert b"images.0 is an animation; expected one image" in frames
    # Sixty times 4 MiB of zeros, each in 4 KiB.
    bomb = (b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 22), 9))
    assert b"HTTP/1.1 400" in answer_to(*[bomb] * 60)


def test_a_fault_of_the_reward_is_500_or_422_and_shows_no_control_characters(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fails(images: Any, prompts: Any) -> Any:
        raise RuntimeError(f"\x1b[2J{prompts[0]}\nflowcredit: all is well")

    with served(fails) as url:
        status, answer = ask(url, body(prompts=["\x1b]0;mine\x07\r\n", "p"]))
    assert status == 422
    said = capfd.readouterr().err
    assert said.startswith("flowcredit: reward 'mine' failed")
    assert said.count("\n") == 1
    assert not any(ord(c) < 32 for c in said[:-1] + answer["error"])


def test_a_token_is_compared_in_constant_time_whatever_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    shown = ["", "Bearer ", "Bearer sesam", "Bearer sesame ", "bearer sesame", "Bearer \xff", "Bearer sesame"]
    with served(mean, token="sesame") as url:
        found = [
            send(address_of(url), Attack("token", (http(json.dumps(body()).encode(), Authorization=each),)))[
                9:12
            ]
            for each in shown
        ]
    assert found == [b"401"] * 6 + [b"200"]
    assert len(compared) == len(shown)


def test_the_fuzzer_tells_a_server_that_misbehaves() -> None:
    """Of the judge itself: what it must not let pass."""
    bad = (
        b"hello",
        b"HTTP/1.1 500 x\r\n\r\n{}",
        b"HTTP/1.1 400 x\r\n\r\n<html>",
        b"HTTP/1.1 400 x\r\n\r\n{}",
    )
    for answer in bad:
        with pytest.raises(Fault):
            judge(answer, Counts())
    with served(lambda images, prompts, answer=None: [1.0] * len(prompts)) as url, pytest.raises(Fault):
        check_alive(address_of(url))
