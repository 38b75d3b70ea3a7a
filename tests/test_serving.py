"""``flowcredit serve-reward``: the client's scores are the local reward's, and nothing else gets in."""

import base64
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.rewards.wire import decode_images, encode_images
from flowcredit.scoring import RewardError, columns_of, score_images
from flowcredit.serving import RewardServer, Service, serve_command

ROOT = Path(__file__).parent.parent


@contextmanager
def served(reward: Any, **settings: Any) -> Iterator[str]:
    service = Service("mine", reward, **{"max_bytes": 1 << 20, **settings})
    with RewardServer(("127.0.0.1", 0), service) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def eighths(count: int) -> Tensor:
    """Random images whose values are k / 255."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, 3, 9, 7), generator=generator, dtype=torch.uint8) / 255


def scores(reward: Any, images: Tensor, batch_size: int, on_error: Any = "stop", **columns: Any) -> Tensor:
    prompts = [f"p{i}" for i in range(len(images))]
    found = score_images({"r": reward}, images, prompts, columns, batch_size=batch_size, on_error=on_error)
    return found[0]


def weighted(images: Tensor, prompts: Sequence[str], answer: Sequence[float], bonus: Any = None) -> Tensor:
    """Depends on every pixel and its place, on the prompt, and on both columns."""
    place = torch.linspace(-1, 1, images[0].numel()).view_as(images[0])
    words = torch.tensor([float(prompt[1:]) for prompt in prompts])
    extra = torch.zeros(len(prompts)) if bonus is None else torch.tensor(bonus)
    return (images * place).sum((1, 2, 3)) + 10 * words + torch.tensor(answer) + extra


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("bonus", [{}, {"bonus": [0.5] * 8}])
def test_a_served_reward_gives_the_local_scores(batch_size: int, bonus: dict[str, Any]) -> None:
    images, answer = eighths(8), [i / 4 for i in range(8)]
    local = scores(weighted, images, 8, answer=answer, **bonus)
    with served(weighted) as url:
        remote = load_reward("http", {"url": url, "batch_size": batch_size}, "cpu")
        assert columns_of(remote) == columns_of(weighted)  # type: ignore[arg-type]
        assert torch.equal(scores(remote, images, 8, answer=answer, **bonus), local)


def test_rounding_to_bytes_is_all_that_is_lost() -> None:
    images = torch.rand(4, 3, 6, 5, generator=torch.Generator().manual_seed(2))
    back = decode_images(encode_images(images))
    assert back.dtype == torch.float32
    assert (back - images).abs().max() <= 0.5 / 255 + 1e-6
    assert torch.equal(decode_images(encode_images(back)), back)


def test_none_nan_and_failures_keep_their_meaning() -> None:
    def reward(images: Tensor, prompts: Sequence[str]) -> list[float | None]:
        if "p1" in prompts:
            raise RuntimeError("cannot see p1")
        return [None if prompt == "p2" else float("nan") if prompt == "p3" else 1.0 for prompt in prompts]

    with served(reward) as url:
        remote = load_reward("http", {"url": url}, "cpu")
        assert scores(remote, eighths(5), 8, "skip").isnan().tolist() == [False, True, True, True, False]
        with pytest.raises(
            RewardError, match=r"answered 422: reward 'mine' failed .*RuntimeError: cannot see p1"
        ):
            scores(remote, eighths(5), 8)


def test_one_batch_is_scored_at_a_time() -> None:
    inside = threading.Semaphore(1)

    def reward(images: Tensor, prompts: Sequence[str]) -> list[float]:
        assert inside.acquire(blocking=False)
        torch.randn(200, 200).matmul(torch.randn(200, 200))
        inside.release()
        return [1.0] * len(prompts)

    with served(reward) as url:
        threads = [threading.Thread(target=lambda: found.append(ask(url, body()))) for _ in range(8)]
        found: list[tuple[int, Any]] = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [(200, {"scores": [1.0, 1.0]})] * 8


def png(size: tuple[int, int] = (4, 4), mode: str = "RGB", kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, format=kind)
    return base64.b64encode(buffer.getvalue()).decode()


def forged(width: int, height: int, depth: int = 8) -> str:
    """The head of a PNG, and not one of the pixels that it promises."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    parts = (b"\x89PNG\r\n\x1a\n", struct.pack(">I", 13), head, struct.pack(">I", zlib.crc32(head)))
    data = b"IDAT" + zlib.compress(b"")
    more = (struct.pack(">I", len(data) - 4), data, struct.pack(">I", zlib.crc32(data)))
    return base64.b64encode(b"".join(parts + more)).decode()


def body(**changes: Any) -> dict[str, Any]:
    request = {
        "protocol": "flowcredit-reward/1",
        "prompts": ["p0", "p1"],
        "columns": {},
        "images": [png(), png()],
    }
    return {**request, **changes}


def ask(url: str, content: Any, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON answer; ``content`` is sent as it is where it is bytes."""
    data = content if isinstance(content, bytes | None) else json.dumps(content).encode()
    sent = {
        "Content-Type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    request = urllib.request.Request(url, data, sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def mean(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.mean((1, 2, 3))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(mean) as where:
        yield where


BAD: dict[str, tuple[Any, int, str]] = {
    "no json": (b"{", 400, "the body is not JSON"),
    "nan": (b'{"a": NaN}', 400, "NaN is no number of JSON"),
    "deep": (b"[" * 100_000, 400, "the body is not JSON"),
    "a list": ([], 400, "the body: "),
    "pickle": (b"\x80\x04K\x01.", 400, "the body is not JSON"),
    "another protocol": (
        body(protocol="flowcredit-reward/2"),
        400,
        "protocol: Input should be 'flowcredit-reward/1'",
    ),
    "no images": ({"protocol": "flowcredit-reward/1", "prompts": []}, 400, "images: Field required"),
    "a prompt too few": (body(prompts=["p0"]), 400, "1 prompts for 2 images"),
    "prompts that are no text": (body(prompts=[1, 2]), 400, "prompts.0: "),
    "a column too short": (body(columns={"answer": [1]}), 400, "1 answer for 2 images"),
    "no base64": (body(images=["?", "?"]), 400, "images.0 is no PNG in base64"),
    "no png": (body(images=[png(), "AAAA"]), 400, "images.1 is no PNG in base64"),
    "jpeg": (body(images=[png(kind="JPEG")] * 2), 400, "images.0 is no PNG"),
    "grey": (body(images=[png(mode="L")] * 2), 400, "images.0 has the mode L; expected 8-bit RGB"),
    "cut off": (body(images=[png((64, 64))[:-40]] * 2), 400, "images.0"),
    "two sizes": (body(images=[png(), png((4, 5))]), 400, "images.1 has 4 x 5 pixels, images.0 4 x 4"),
    "a bomb": (body(images=[forged(60_000, 60_000)] * 2), 400, "images.0 has 60000 x 60000 pixels"),
    "a large batch": (
        body(images=[forged(8000, 8000)] * 3, prompts=["p"] * 3),
        400,
        "exceed 134,217,728 pixels",
    ),
    "deep colours": (body(images=[forged(4, 4, depth=16)] * 2), 400, "images.0 has 16 bits a colour"),
    "a column called images": (body(columns={"images": [1, 2]}), 400, "columns.images: "),
    "a column called prompts": (body(columns={"prompts": [1, 2]}), 400, "columns.prompts: "),
    "too long": (b" " * (2 << 20), 413, "at most 1,048,576"),
}


@pytest.mark.parametrize(("content", "status", "expected"), BAD.values(), ids=BAD)
def test_what_is_no_request_is_refused_in_json(url: str, content: Any, status: int, expected: str) -> None:
    found, answer = ask(url, content)
    assert (found, answer.keys()) == (status, {"error"})
    assert expected in answer["error"]
    assert ask(url, body()) == (200, {"scores": [0.0, 0.0]})


def test_paths_methods_and_types(url: str) -> None:
    assert ask(f"{url}/health", None)[1]["protocol"] == "flowcredit-reward/1"
    assert ask(f"{url}/nowhere", None)[0] == 404
    assert ask(f"{url}/nowhere", body())[0] == 404
    status, answer = ask(url, b"", method="PUT")
    assert (status, answer.keys()) == (501, {"error"})
    # What a page in a browser can post without being asked for its origin.
    assert ask(url, body(), Content_Type="text/plain")[0] == 415
    assert ask(url, b"")[0] == 411
    assert ask(url, body(images=[], prompts=[])) == (200, {"scores": []})


def test_a_missing_column_is_named() -> None:
    with served(weighted) as url:
        assert ask(url, body()) == (400, {"error": "the reward 'mine' needs the columns answer"})


def test_a_client_that_hangs_up_harms_nobody(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    host, port = url.removeprefix("http://").split(":")
    for start in (
        b"",
        b"GET",
        b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(start)
    assert ask(url, body())[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_token_keeps_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT", "sesame")
    monkeypatch.setenv("WRONG", "sesam")
    with served(mean, token="sesame") as url:
        assert ask(url, body())[0] == 401
        assert ask(url, b" " * (2 << 20), Authorization="Basic sesame")[0] == 401
        with pytest.raises(InputError, match=r"answered 401: .*see token_env"):
            load_reward("http", {"url": url, "token_env": "WRONG"}, "cpu")
        remote = load_reward("http", {"url": url, "token_env": "RIGHT"}, "cpu")
        assert torch.equal(scores(remote, eighths(2), 2), scores(mean, eighths(2), 2))


def start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    """Also where a test has failed: a process that is left running fails the tests after it."""
    process.kill()
    with process:
        pass


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return line.strip()


def test_the_command_serves_until_ctrl_c() -> None:
    process = start(
        "-m", "flowcredit", "serve-reward", "simple_rewards:redness", "--port", "0", "--device", "cpu"
    )
    try:
        line = first_line(process)
        url = line.split(" at ")[1].split()[0]
        assert line == f"reward 'simple_rewards:redness' at {url} (Ctrl-C ends it)"
        remote = load_reward("http", {"url": url}, "cpu")
        local = load_reward("simple_rewards:redness", {}, "cpu")
        assert torch.equal(scores(remote, eighths(3), 2), scores(local, eighths(3), 2))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        end(process)
    assert (process.returncode, out, err) == (0, "stopped\n", "")


INTERRUPTED = """
import os, signal, socketserver, time
from flowcredit.serving import serve_command
let_in = socketserver.ThreadingMixIn.process_request
def interrupted(self, request, address):
    let_in(self, request, address)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)
socketserver.ThreadingMixIn.process_request = interrupted
serve_command("simple_rewards:redness", [], "127.0.0.1", 0, "cpu", None, 1)
"""


def test_ctrl_c_is_heard_while_a_client_is_let_in() -> None:
    process = start("-c", INTERRUPTED)
    try:
        url = first_line(process).split(" at ")[1].split()[0]
        load_reward("http", {"url": url}, "cpu")
        out, err = process.communicate(timeout=120)
    finally:
        end(process)
    assert (process.returncode, out, err) == (0, "stopped\n", "")


@pytest.mark.parametrize(
    ("name", "options", "change", "expected"),
    [
        ("shapse", [], {}, "did you mean 'shapes'"),
        ("clip", ["path"], {}, "expected key=value"),
        ("clip", ["path=/nowhere"], {}, "/nowhere/config.json: cannot be read"),
        ("clip", ["path=[1"], {}, "--option 'path=[1'"),
        ("shapes", [], {"device": "nonsense"}, "--device is 'nonsense'"),
        ("shapes", [], {"token_env": "NOT_SET_HERE"}, "'NOT_SET_HERE' is not set"),
        ("simple_rewards:redness", [], {"host": "203.0.113.1"}, "cannot listen on 203.0.113.1:0"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    name: str, options: list[str], change: dict[str, Any], expected: str
) -> None:
    given: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "device": "cpu",
        "token_env": None,
        "max_megabytes": 1,
    }
    with pytest.raises(InputError) as failure:
        serve_command(name, options, **{**given, **change})
    assert expected in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_port_in_use_is_named(url: str) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
        serve_command("simple_rewards:redness", [], "127.0.0.1", port, "cpu", None, 1)


def test_the_documented_service_works_as_it_stands() -> None:
    example = ROOT / "examples" / "reward_service.py"
    docs = (ROOT / "docs" / "remote_rewards.md").read_text(encoding="utf-8")
    assert example.read_text(encoding="utf-8") in docs
    process = start(str(example), "0")
    try:
        remote = load_reward("http", {"url": first_line(process)}, "cpu")
        expected = scores(mean, eighths(3), 3)
        torch.testing.assert_close(scores(remote, eighths(3), 3), expected, atol=1e-6, rtol=0)
    finally:
        end(process)
