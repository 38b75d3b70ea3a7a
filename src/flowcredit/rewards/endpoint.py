"""JSON over HTTP to a service that may be down, slow or talk rubbish; each failure is one line.

Nothing that comes back is trusted: it is JSON of a bounded size, whole before the deadline, or a
`ServiceError`. Redirects are not followed, to no host and no other scheme of the same one: they would carry
the token elsewhere and often lead to a page for a person to log in. Nothing is unpacked: a compressed answer
is no JSON.
"""

import io
import ipaddress
import json
import math
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NoReturn, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 1 << 20
"""A service's answer is numbers and a few words: what is longer is not read to its end."""
LONGEST_PAUSE_S = 30.0

_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)})
_REFUSED = frozenset({400, 413, 422})


class ServiceError(Exception):
    """A service gave no usable answer; the message names the URL and what came back."""


class RequestRefused(ServiceError):
    """A service refused this request (400, 413, 422): it may well answer another, or a smaller one."""


class _Transient(Exception):
    """What may pass by itself; ``after`` is the pause in seconds that the service asks for."""

    def __init__(self, what: str, after: float = 0.0) -> None:
        super().__init__(what)
        self.after = after


@dataclass
class Endpoint:
    """A service under one address.

    A service that used up its retries is asked once for each further request, until it answers again: a
    run that skips failures must not wait out every pause for every batch.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float
    retries: int
    backoff_s: float
    patient: bool = True

    def get(self, path: str) -> Any:
        """The JSON under ``url + path``, asked for once. Raises ServiceError."""
        return self._ask(path, None, 1)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON body, with retries. Raises ServiceError, ValueError for the body."""
        content = json.dumps(body, allow_nan=False).encode()
        return self._ask(path, content, 1 + self.retries if self.patient else 1)

    def _ask(self, path: str, content: bytes | None, tries: int) -> Any:
        url = self.url + path
        headers = {**self.headers, "Accept": "application/json", "User-Agent": "flowcredit"}
        if content is not None:
            headers["Content-Type"] = "application/json"
        for attempt in range(tries):
            try:
                raw = _exchange(urllib.request.Request(url, content, headers), self.timeout_s)
                self.patient = True
                return _parse(raw)
            except _Transient as failure:
                if attempt == tries - 1:
                    self.patient = False
                    raise ServiceError(f"{url}: {failure}{_times(tries)}") from None
                pause = max(self.backoff_s * 2**attempt, failure.after)
                time.sleep(min(pause, LONGEST_PAUSE_S))
            except ServiceError as failure:
                raise type(failure)(f"{url}: {failure}") from None
        raise AssertionError("a request is tried at least once")


def brief(text: str, limit: int = 120) -> str:
    """Foreign text for one line of a message: no line breaks or control characters, cut where it is long."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    line = " ".join(line.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def finite_number(value: Any) -> float | None:
    """A number of JSON that float32 can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Compared as it stands: a whole number of JSON may be too long for a float.
    return float(value) if -3.4e38 < value < 3.4e38 else None


def _times(tries: int) -> str:
    return f" (tried {tries} times)" if tries > 1 else ""


def _exchange(request: urllib.request.Request, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    try:
        with _opener(request.host, deadline).open(request, timeout=timeout_s) as response:
            return _read(response, MAX_ANSWER_BYTES)
    except HTTPError as error:
        with error:
            _raise_status(error)
    except TimeoutError:
        raise ServiceError(f"no answer within {timeout_s:g} seconds") from None
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise ServiceError(f"no connection within {timeout_s:g} seconds") from None
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise ServiceError(
                f"its certificate is not trusted: {error.reason.verify_message}; name a file with that of its"
                " authority in the environment variable SSL_CERT_FILE"
            ) from None
        raise _Transient(_reason(error.reason)) from None
    except (OSError, HTTPException) as error:
        raise _Transient(_reason(error)) from None


class Timed(io.RawIOBase):
    """What a socket receives until ``deadline`` (of `time.monotonic`), with no pause longer than ``stall_s``.

    Raises TimeoutError: the socket's own time limit would begin anew with every byte.
    """

    def __init__(self, connection: socket.socket, deadline: float, stall_s: float = math.inf) -> None:
        self._connection, self._deadline, self._stall_s = connection, deadline, stall_s
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(min(left, self._stall_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


@dataclass(frozen=True)
class _Receiver:
    """Stands in for a socket where ``http.client`` asks for no more than a file to read an answer from."""

    connection: socket.socket
    deadline: float

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(Timed(self.connection, self.deadline))


def _until(kind: type[HTTPConnection], deadline: float) -> Callable[..., HTTPConnection]:
    """Connections whose answers, status line and headers included, are whole before the deadline."""

    def response(connection: socket.socket, debuglevel: int = 0, method: str | None = None) -> HTTPResponse:
        return HTTPResponse(cast(socket.socket, _Receiver(connection, deadline)), debuglevel, method)

    def make(host: str, **settings: Any) -> HTTPConnection:
        made = kind(host, **settings)
        made.response_class = cast(Any, response)
        return made

    return make


class _Http(urllib.request.AbstractHTTPHandler):
    """Both schemes, by a deadline."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(cast(Any, _until(HTTPConnection, self._deadline)), request)

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(cast(Any, _until(HTTPSConnection, self._deadline)), request)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_


def _opener(host: str, deadline: float) -> urllib.request.OpenerDirector:
    """Opens http and https alone, through the environment's proxy unless the host is this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler({} if is_loopback(name) else None),
        _Http(deadline),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: object) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"the connection failed: {brief(error.strerror)}"
    return f"the connection failed: {type(error).__name__}: {brief(str(error))}"


def _read(response: HTTPResponse, limit: int) -> bytes:
    """The body, piece by piece, so that no more than ``limit`` bytes are ever held."""
    parts: list[bytes] = []
    size, expected = 0, response.length
    while (expected is None or size < expected) and (part := response.read1(1 << 16)):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise ServiceError(f"an answer of more than {limit:,} bytes; expected JSON with a few numbers")
    if expected is not None and size < expected:
        raise _Transient(f"the answer broke off after {size} of {expected} bytes")
    return b"".join(parts)


def _raise_status(error: HTTPError) -> NoReturn:
    status = f"answered {error.code}"
    if 300 <= error.code < 400:
        target = brief(error.headers.get("Location", "nowhere"))
        raise ServiceError(
            f"{status}, a redirect to {target}, which is not followed; give the final address of the service"
        )
    try:
        said = _said(_read(cast(HTTPResponse, error.fp), 1 << 16))
    except (OSError, HTTPException, ServiceError, _Transient):
        said = "nothing readable"
    if error.code in _TRANSIENT:
        raise _Transient(f"{status}: {said}", _retry_after(error.headers.get("Retry-After")))
    if error.code in _REFUSED:
        raise RequestRefused(f"{status}: {said}")
    advice = "; it wants a token: see token_env" if error.code in (401, 403) else ""
    raise ServiceError(f"{status}: {said}{advice}")


def _retry_after(value: str | None) -> float:
    return float(value) if value is not None and value.isascii() and value.isdigit() else 0.0


def _said(raw: bytes) -> str:
    """The message inside an error's body, in one of the forms in use, or its beginning."""
    try:
        body = _parse(raw)
    except ServiceError:
        return brief(raw.decode("utf-8", "replace")) or "nothing"
    for key in ("error", "detail", "message"):
        found = body.get(key) if isinstance(body, dict) else None
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str):
            return brief(found, 400)
    return brief(raw[:400].decode("utf-8", "replace"))


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        start = brief(raw[:400].decode("utf-8", "replace"), 80)
        raise ServiceError(f"answered with what is no JSON: {start or 'nothing'}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
