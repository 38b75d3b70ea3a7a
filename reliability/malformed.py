"""Requests to a reward server that are wrong in every way we know, as bytes and as manners of sending them.

Each kind is a function of a source of random numbers, so that a seed, or hypothesis, says which one comes.
"""

import base64
import json
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

CANARY = "canary-of-the-fuzzer"
"""The file, in the server's folder, that every payload which is code would make."""
_MAKE = f"touch {CANARY}"


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (_MAKE,)


CODE = (
    f"__import__('os').system('{_MAKE}')",
    f"$({_MAKE})",
    f"`{_MAKE}`",
    f"'; {_MAKE}; '",
    f"!!python/object/apply:os.system ['{_MAKE}']",
    f"{{{{ cycler.__init__.__globals__.os.system('{_MAKE}') }}}}",
    "\x1b]0;title\x07\x1b[2J",
    "../../../../etc/passwd",
)
PICKLED = pickle.dumps(_Runs())


@dataclass(frozen=True)
class Attack:
    """Pieces of bytes to send with a pause of ``pause_s`` between them.

    ``ending``: "wait" for an answer, "half" close our side and wait, "close" at once, "reset" the connection.
    """

    kind: str
    pieces: tuple[bytes, ...]
    ending: str = "half"
    pause_s: float = 0.0


def png(width: int = 4, height: int = 4, **changes: Any) -> bytes:
    """A black RGB image; ``changes``: depth, colour, promised (width, height), chunks before the pixels."""
    promised = changes.get("promised", (width, height))
    head = struct.pack(">IIBBBBB", *promised, changes.get("depth", 8), changes.get("colour", 2), 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + bytes(3 * width) for _ in range(height)))
    chunks = [(b"IHDR", head), *changes.get("chunks", ()), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def request(images: int = 2) -> dict[str, Any]:
    """A proper one; every image scores 0 with a reward that measures brightness."""
    return {
        "protocol": "flowcredit-reward/1",
        "prompts": [f"p{place}" for place in range(images)],
        "columns": {"answer": list(range(images))},
        "images": [base64.b64encode(png()).decode()] * images,
    }


def http(body: bytes, **headers: str) -> bytes:
    """A proper request with a body; ``headers`` in place of its own, underscores for hyphens."""
    chosen = {
        "Host": "h",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in chosen.items())
    return b"POST / HTTP/1.1\r\n" + lines.encode("latin-1", "replace") + b"\r\n" + body


def _noise(random: Random, most: int) -> bytes:
    return random.randbytes(random.randint(0, most))


def _bytes(random: Random) -> bytes:
    return random.choice([_noise(random, 3000), PICKLED, b"\x16\x03\x01" + _noise(random, 200), b"\r\n" * 50])


def _request_line(random: Random) -> bytes:
    method = random.choice(
        [b"GET", b"POST", b"PUT", b"get", b"", b"TRACE", b"G\0T", b"CONNECT", b"A" * 70_000]
    )
    paths = [
        b"/",
        b"/health",
        b"//",
        b"/../../etc/passwd",
        b"http://elsewhere/",
        b"/\xff\x00",
        b"/" + b"a" * 66_000,
    ]
    paths += [code.encode() for code in CODE]
    version = random.choice(
        [b"HTTP/1.1", b"HTTP/0.9", b"HTTP/9.9", b"HTTP/1.1.1", b"HTTP/x", b"", b"\x1b[31m"]
    )
    space = random.choice([b" ", b"  ", b"\t", b"", b"\0"])
    end = random.choice([b"\r\n\r\n", b"\n\n", b"\r\r", b"", b"\r\n"])
    return space.join((method, random.choice(paths), version)) + end


def _headers(random: Random) -> bytes:
    body = json.dumps(request()).encode()
    wrong = random.choice(
        [
            b"no colon at all\r\n",
            b": no name\r\n",
            b"X: " + b"y" * random.choice([100, 66_000]) + b"\r\n",
            b"".join(b"X-%d: y\r\n" % number for number in range(random.choice([50, 150]))),
            b"X: a\r\n folded\r\n\tagain\r\n",
            b"X: \x00\xff\x1b[2J\r\n",
            b"Content-Type: " + random.choice(CODE).encode() + b"\r\n",
            b"Authorization: Bearer " + _noise(random, 40) + b"\r\n",
            b"Expect: 100-continue\r\n",
            b"Content-Encoding: gzip\r\n",
            b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
            _noise(random, 300),
        ]
    )
    return http(body).replace(b"\r\n", b"\r\n" + wrong, 1)


def _length_lies(random: Random) -> bytes:
    body = json.dumps(request()).encode()
    lie = random.choice(
        [
            str(len(body) + random.randint(1, 500)),
            str(random.randint(0, len(body) - 1)),
            "-1",
            "+5",
            "0x10",
            "1e3",
            "9" * random.choice([15, 25, 5000]),
            "٣",
            "",
            "NaN",
            f"{len(body)}, {len(body)}",
            f"{len(body)}\r\nContent-Length: 3",
        ]
    )
    head = b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: "
    return head + lie.encode() + b"\r\n\r\n" + body


def _chunked(random: Random) -> bytes:
    body = json.dumps(request()).encode()
    size = random.choice([b"%x" % len(body), b"-1", b"ffffffffffffffffffff", b"zz", b"", b"5;" + b"e" * 500])
    head = b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    both = random.choice([b"", b"Content-Length: %d\r\n" % len(body)])
    return head + both + b"\r\n" + size + b"\r\n" + body + random.choice([b"\r\n0\r\n\r\n", b"", b"\r\n"])


def _mutated(random: Random) -> bytes:
    whole = bytearray(http(json.dumps(request()).encode()))
    for _ in range(random.randint(1, 12)):
        place = random.randrange(len(whole))
        match random.randrange(4):
            case 0:
                whole[place] = random.randrange(256)
            case 1:
                del whole[place : place + random.randint(1, 30)]
            case 2:
                whole[place:place] = _noise(random, 20)
            case _:
                whole[place:place] = whole[: random.randint(1, 60)]
        whole = whole or bytearray(b"x")
    return bytes(whole)


def _pipelined(random: Random) -> bytes:
    good = http(json.dumps(request()).encode())
    parts = [good, b"GET /health HTTP/1.1\r\n\r\n", _noise(random, 100), _request_line(random)]
    return b"".join(random.choice(parts) for _ in range(random.randint(2, 6)))


WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0.5,
    10**400,
    "",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    {"__class__": "x"},
    {"$ref": "#"},
    "p" * 10_000,
    *CODE,
    base64.b64encode(PICKLED).decode(),
)


def _schema(random: Random) -> bytes:
    body = request(random.randint(0, 3))
    for _ in range(random.randint(1, 3)):
        holder: Any = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = random.choice(keys)
            if isinstance(holder[key], dict | list) and random.random() < 0.6:
                holder = holder[key]
                continue
            match random.randrange(4):
                case 0:
                    del holder[key]
                case 1 if isinstance(holder, dict):
                    holder[random.choice([*CODE, "images", "prompts", "self", "reward"])] = deepcopy(
                        holder[key]
                    )
                case _:
                    holder[key] = deepcopy(random.choice(WRONG))
            break
    return http(json.dumps(body).encode())


def _json(random: Random) -> bytes:
    depth = random.choice([10, 500, 990, 1000, 1010, 5000, 100_000])
    inner = json.dumps(request())[1:-1]
    text = random.choice(
        [
            "[" * depth,
            "[" * depth + "]" * depth,
            '{"a":' * depth + "1" + "}" * depth,
            '{"columns": {"x": ' + "[" * depth + "]" * depth + "}, " + inner + "}",
            "{" + inner + ', "extra": ' + random.choice(["NaN", "-Infinity", "1e999", "9" * 5000]) + "}",
            "{" + inner + ', "prompts": 3}',
            '{"protocol": "flowcredit-reward/1", ' * 3,
            "\ufeff{" + inner + "}",
            "nul",
            "",
        ]
    )
    encoding = random.choice(["utf-8", "utf-8", "utf-16", "utf-32"])
    return http(text.encode(encoding, "surrogatepass"))


def _images(random: Random) -> bytes:
    whole = png(16, 16)
    bomb = zlib.compress(bytes(1 << 22), 9)
    frames = b"\0\0\0\0" + struct.pack(">IIIIHHBB", 4, 4, 0, 0, 1, 1, 0, 0)
    content = random.choice(
        [
            whole[: random.randrange(len(whole))],
            png(
                promised=(
                    random.choice([0, 1, 5, 60_000, 2**31 - 1, 2**32 - 1]),
                    random.choice([1, 8000, 2**31]),
                )
            ),
            png(promised=(8192, 8192)),
            png(depth=random.choice([0, 1, 4, 16, 255]), colour=random.choice([0, 2, 3, 4, 6, 9])),
            png(chunks=[(b"zTXt", b"k\0\0" + bomb)]),
            png(chunks=[(b"iCCP", b"k\0\0" + bomb)]),
            png(
                chunks=[(b"acTL", struct.pack(">II", 2**31 - 1, 0)), (b"fcTL", frames)]
                * random.randint(1, 50)
            ),
            png(chunks=[(b"tRNS", _noise(random, 9)), (b"eXIf", _noise(random, 50))]),
            whole[:40] + _noise(random, 200),
            b"GIF89a" + _noise(random, 50),
            PICKLED,
        ]
    )
    text = base64.b64encode(content).decode()
    if random.random() < 0.1:
        text = random.choice([text[:-1], text + "é", "=" * 50, f"data:image/png;base64,{text}"])
    return http(json.dumps({**request(), "images": [text] * 2}).encode())


KINDS: Mapping[str, Callable[[Random], bytes]] = {
    "bytes": _bytes,
    "request line": _request_line,
    "headers": _headers,
    "length that lies": _length_lies,
    "chunked": _chunked,
    "mutated": _mutated,
    "pipelined": _pipelined,
    "schema": _schema,
    "json": _json,
    "images": _images,
}


def attack(random: Random) -> Attack:
    """Any of them, sent whole or in pieces, to its end or not."""
    kind = random.choice(list(KINDS))
    content = KINDS[kind](random)
    if random.random() < 0.15:
        content = content[: random.randint(0, len(content))]
    cuts = sorted(random.randint(0, len(content)) for _ in range(random.choice([0, 0, 0, 1, 5])))
    pieces = tuple(content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True))
    ending = random.choice(["half"] * 8 + ["close", "reset"])
    return Attack(kind, pieces, ending, 0.002 if cuts and random.random() < 0.5 else 0.0)
