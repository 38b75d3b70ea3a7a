"""A reward behind HTTP: the reference server of the protocol in ``docs/remote_rewards.md``.

Only JSON and PNG are read; nothing that a client sends is run. One image batch is scored at a time.

Axes: B images of one request, H and W their height and width.
"""

import hmac
import io
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from threading import BoundedSemaphore, Lock
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from flowcredit.assembly import device_of
from flowcredit.errors import InputError
from flowcredit.interfaces import Reward
from flowcredit.rewards.endpoint import Timed, brief, is_loopback
from flowcredit.rewards.loading import load_reward
from flowcredit.rewards.wire import PROTOCOL, decode_images
from flowcredit.scoring import Columns, RewardError, columns_of, score_images
from flowcredit.yaml_lines import parse_yaml

_STALLED_S = 60
"""Seconds without a byte after which a client is given up."""
_SENT_S = 600
"""Seconds in which a whole request must be here, however steadily it trickles."""
_LINGER_S = 2
"""Seconds for which a client that was answered may go on sending."""
_AT_WORK = 2
"""Requests that are unfolded in memory at once: one is scored while the next is read."""
_ANSWER_CHARACTERS = 1000
"""Longest message of a refusal: it may quote what was sent."""
_DRAINED_BYTES = 1 << 30
"""What is read of a refused body and thrown away: a client hears no answer before it has sent its own."""


@dataclass(frozen=True)
class Service:
    """What is served, and to whom."""

    name: str
    reward: Reward
    max_bytes: int
    """Longest request body."""
    token: str | None = field(default=None, repr=False)
    """What a client must show as ``Authorization: Bearer ...``; None lets everyone in."""
    max_connections: int = 64
    """Clients at once; a further one is told 503, after which it tries again."""
    lock: Lock = field(default_factory=Lock, repr=False)
    """Held while the reward computes: rewards are not written for several threads."""
    at_work: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(_AT_WORK), repr=False)
    """Bounds the memory that images take, whatever the number of clients."""

    @property
    def columns(self) -> Columns:
        """The columns that the reward takes."""
        return columns_of(self.reward)


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    protocol: Literal["flowcredit-reward/1"]
    prompts: list[str]
    columns: dict[str, list[Any]] = {}
    images: list[str]


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """Answers GET /health and POST /; a thread a connection."""

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        self.service = service
        self._places = BoundedSemaphore(service.max_connections)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking the name service who this host is, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the client, or a word that there is none."""
        if not self._places.acquire(blocking=False):
            with suppress(OSError):
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had; one that began gives its place back itself
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is its own affair; all else is a fault of ours and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.server_name}:{self.server_port}"


_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    b'{"error": "too many clients at once"}'
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _STALLED_S
    server: RewardServer
    unread = 0

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(Timed(self.connection, time.monotonic() + _SENT_S, _STALLED_S))

    def do_GET(self) -> None:
        self._answer_with(self._health)

    def do_POST(self) -> None:
        self._answer_with(self._scores)

    def _answer_with(self, make: Any) -> None:
        try:
            self.unread = self._length()
            self._check_token()
            status, body = 200, make()
        except _Refusal as refusal:
            status, body = refusal.status, {"error": brief(str(refusal), _ANSWER_CHARACTERS)}
            self._drain()
        except OSError:
            raise
        except Exception as error:
            traceback.print_exc()
            status, body = 500, {"error": f"a fault of the server: {type(error).__name__}"}
        self._send(status, body)

    def _length(self) -> int:
        """Bytes of the body. Two answers to where it ends would be two requests to a proxy."""
        found = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers:
            raise _Refusal(411, "Transfer-Encoding is not read; expected a body and its Content-Length")
        if not found:
            return 0
        length = found[0].strip()
        if len(found) > 1 or len(length) > 18 or not (length.isascii() and length.isdigit()):
            raise _Refusal(400, f"Content-Length is {', '.join(found)!r}; expected one number of bytes")
        return int(length)

    def _health(self) -> dict[str, Any]:
        if self.path != "/health":
            raise _Refusal(404, f"nothing at {self.path!r}; GET /health, or POST / to have images scored")
        service, columns = self.server.service, self.server.service.columns
        return {
            "protocol": PROTOCOL,
            "name": service.name,
            "version": version("flowcredit"),
            "columns": {
                "required": columns.required,
                "optional": columns.optional,
                "every": columns.every,
            },
        }

    def _scores(self) -> dict[str, Any]:
        if self.path != "/":
            raise _Refusal(404, f"nothing at {self.path!r}; POST / to have images scored, or GET /health")
        content = self._body()
        with self.server.service.at_work:
            return {"scores": score_request(self.server.service, _parse(content))}

    def _check_token(self) -> None:
        token = self.server.service.token
        if token is None:
            return
        shown = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(shown, f"Bearer {token}".encode()):
            raise _Refusal(401, "the header 'Authorization: Bearer ...' is missing or holds another token")

    def _body(self) -> bytes:
        # A page in somebody's browser may post anywhere, but not with this type unless the server consents.
        if self.headers.get_content_type() != "application/json":
            raise _Refusal(415, "expected the header 'Content-Type: application/json'")
        if not self.unread:
            raise _Refusal(411, "expected a body and its Content-Length")
        if self.unread > self.server.service.max_bytes:
            limit = self.server.service.max_bytes
            raise _Refusal(413, f"a body of {self.unread:,} bytes; at most {limit:,}: send fewer images")
        content = self.rfile.read(self.unread)
        if len(content) < self.unread:
            raise ConnectionAbortedError
        self.unread = 0
        return content

    def _drain(self) -> None:
        left = min(self.unread, _DRAINED_BYTES)
        while left > 0 and (part := self.rfile.read1(min(left, 1 << 16))):
            left -= len(part)

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body, allow_nan=False).encode()
        self.close_connection = True
        self.connection.settimeout(_STALLED_S)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self._linger()

    def _linger(self) -> None:
        """Let the answer arrive: to close on bytes that were not read is to take it back."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            rest = Timed(self.connection, time.monotonic() + _LINGER_S)
            while rest.read(1 << 16):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Also what the standard library refuses, an unknown method for one, is answered in JSON."""
        self._send(code, {"error": message or self.responses.get(code, ("refused", ""))[0]})

    def version_string(self) -> str:
        return "flowcredit"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a training run asks thousands of times."""


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _Refusal(400, f"the body is not JSON: {error}") from None


def score_request(service: Service, body: Any) -> list[float | None]:
    """The scores of a request's B images, None for no score.

    Raises:
        _Refusal: 400 for a request that is not as the protocol says, 422 where the reward fails on it.
    """
    try:
        request = _Request.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise _Refusal(400, f"{where}: {first['msg']}") from None
    for name in ("images", "prompts"):
        if name in request.columns:
            raise _Refusal(
                400, f"columns.{name}: a column cannot be called so; {name} stand beside the columns"
            )
    count = len(request.images)
    for name, values in {"prompts": request.prompts, **request.columns}.items():
        if len(values) != count:
            raise _Refusal(400, f"{len(values)} {name} for {count} images; expected one for each")
    missing = [name for name in service.columns.required if name not in request.columns]
    if missing:
        raise _Refusal(400, f"the reward {service.name!r} needs the columns {', '.join(missing)}")
    if not count:
        return []
    try:
        images = decode_images(request.images)
    except ValueError as error:
        raise _Refusal(400, str(error)) from None
    return _scored(service, images, request.prompts, request.columns)


def _scored(
    service: Service, images: torch.Tensor, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> list[float | None]:
    rewards = {service.name: service.reward}
    try:
        with service.lock:
            scores = score_images(rewards, images, prompts, columns, batch_size=len(images))[0]
    except RewardError as error:
        print(f"flowcredit: {brief(str(error), _ANSWER_CHARACTERS)}", file=sys.stderr, flush=True)
        raise _Refusal(422, str(error)) from None
    return [None if score != score else score for score in scores.tolist()]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def serve_command(
    name: str,
    options: Sequence[str],
    host: str,
    port: int,
    device: str,
    token_env: str | None,
    max_megabytes: int,
) -> None:
    """Load a reward, serve it until Ctrl-C, and say in one line where.

    Raises:
        InputError: as `load_reward`, and for an option, a token or an address that cannot be used.
    """
    token = None if token_env is None else os.environ.get(token_env, "").strip()
    if token == "":
        raise InputError(f"--token-env: the environment variable {token_env!r} is not set")
    try:
        where = device_of(device)
    except InputError as error:
        raise InputError(str(error).replace("model.device", "--device", 1)) from None
    reward = load_reward(name, _read_options(options), where)
    service = Service(name, reward, max_megabytes << 20, token)
    try:
        server = RewardServer((host, port), service)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from None
    with server:
        exposed = not is_loopback(host) and token is None
        _listen_to_interrupts()
        warning = "; whoever reaches this port can use it, see --token-env" if exposed else ""
        try:
            print(f"reward {name!r} at {server.url} (Ctrl-C ends it){warning}", flush=True)
            _serve_until_interrupt(server)
        except KeyboardInterrupt:
            print("stopped", flush=True)


def _serve_until_interrupt(server: RewardServer) -> None:
    """Clients are let in by another thread: an interrupt that arose among its locks could be lost there."""
    ended = threading.Event()

    def serve() -> None:
        try:
            server.serve_forever()
        finally:
            ended.set()

    threading.Thread(target=serve, daemon=True).start()
    try:
        ended.wait()
    finally:
        server.shutdown()


def _listen_to_interrupts() -> None:
    """A shell starts what it puts in the background deaf to Ctrl-C and kill -INT."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_options(words: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        label = f"--option '{word}'"
        key, equals, text = word.partition("=")
        if not key.strip() or not equals:
            raise InputError(f"{label}: expected key=value, such as path=/models/clip")
        options[key.strip()] = parse_yaml(text, label, numbered=False).value
    return options
