"""A server on loopback that answers what a test tells it to, and keeps what it was asked."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """``content`` goes out as it is; a Content-Length in ``headers`` may lie about it."""

    content: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


HANG_UP = Answer(b"", status=0)
"""The connection is closed without a word."""

Respond = Callable[[Asked], Any]
"""What to answer: an `Answer`, or what becomes JSON."""


@dataclass
class Fake:
    url: str
    asked: list[Asked] = field(default_factory=list)

    def posts(self) -> list[Any]:
        return [each.body for each in self.asked if each.method == "POST"]


@contextmanager
def fake_service(respond: Respond, tls: ssl.SSLContext | None = None) -> Iterator[Fake]:
    """Serves until the block ends, over https with ``tls``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            asked = Asked(self.command, self.path, dict(self.headers), body)
            fake.asked.append(asked)
            answer = respond(asked)
            if not isinstance(answer, Answer):
                answer = Answer(json.dumps(answer).encode())
            if answer is HANG_UP:
                return
            try:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.content)
            except OSError:
                pass  # The client has gone, as one with a time limit does.

        def handle(self) -> None:
            with suppress(ssl.SSLError, ConnectionError):  # A client that does not trust us hangs up.
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        # The handshake in the request's own thread: one that fails there stops no other.
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    fake = Fake(f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def closed_port() -> str:
    """An address at which nobody listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_port}"
