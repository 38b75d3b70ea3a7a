"""A server on loopback that answers what a test tells it to, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
def fake_service(respond: Respond) -> Iterator[Fake]:
    """Serves until the block ends."""

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

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake = Fake(f"http://127.0.0.1:{server.server_port}")
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
