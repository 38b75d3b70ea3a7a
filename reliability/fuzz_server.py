"""Malformed requests to a real ``flowcredit serve-reward``, after each of them a proper one.

    python reliability/fuzz_server.py --requests 5000

Ends with exit code 1, and says which request (by its seed) did it, if the server hangs, dies, answers a
proper request wrongly, shows a stack trace, or runs anything that it was sent.
"""

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from malformed import CANARY, Attack, attack, http, request

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 20.0
"""A request that is at its end and has no answer in this time hangs."""
REWARD = '''"""A reward for the fuzzer."""


def brightness(images, prompts, answer=None):
    return images.mean((1, 2, 3)).tolist()
'''


class Fault(Exception):
    """What a server must not do."""


@dataclass
class Counts:
    """Requests by what became of them."""

    refused: int = 0
    """Answered with a status from 400 on, in JSON."""
    closed: int = 0
    """The connection was closed without an answer, by either side."""
    answered: int = 0
    """200: what was changed did not matter."""
    proper: int = 0
    """Proper requests in between, all scored."""
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)


def send(address: tuple[str, int], what: Attack) -> bytes:
    """All that the server answers; empty where it only hangs up. Raises Fault if it does neither."""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        with suppress(ConnectionError):
            for piece in what.pieces:
                connection.sendall(piece)
                time.sleep(what.pause_s)
            if what.ending == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if what.ending in ("close", "reset"):
                return b""
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        parts = []
        try:
            while part := connection.recv(1 << 16):
                parts.append(part)
        except ConnectionError:
            pass
        except TimeoutError:
            raise Fault(f"no end of its answer within {PATIENCE_S:g} seconds") from None
        return b"".join(parts)


def judge(answer: bytes, counts: Counts) -> None:
    """Count an answer. Raises Fault for one that is none of the protocol."""
    if answer.startswith(b"HTTP/1.1 100"):
        answer = answer.partition(b"\r\n\r\n")[2]
    if not answer:
        counts.closed += 1
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        # To a request line of HTTP/0.9 the standard library answers without a head.
        body, status = answer, 400 if answer.startswith(b'{"error"') else 200
    else:
        status = int(head.split()[1])
    try:
        content = json.loads(body)
    except ValueError:
        raise Fault(f"answered {status} with {answer[:300]!r}") from None
    counts.statuses[status] += 1
    if status == 200:
        counts.answered += 1
    elif status >= 500 and status != 501 and status != 505:
        raise Fault(f"answered {status}: {content}")
    elif set(content) == {"error"}:
        counts.refused += 1
    else:
        raise Fault(f"answered {status} with {body[:80]!r}")


def check_alive(address: tuple[str, int]) -> None:
    """A proper request and its right answer. Raises Fault."""
    proper = Attack("proper", (http(json.dumps(request(3)).encode()),))
    try:
        answer = send(address, proper)
    except OSError as error:
        raise Fault(f"no longer answers: {error}") from None
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or json.loads(body) != {"scores": [0.0] * 3}:
        raise Fault(f"answered a proper request with {answer[:200]!r}")


def one(address: tuple[str, int], random: Random, counts: Counts) -> None:
    """A malformed request, and a proper one after it. Raises Fault."""
    what = attack(random)
    counts.kinds[what.kind] += 1
    judge(send(address, what), counts)
    check_alive(address)
    counts.proper += 1


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    """The command itself, in a process and a folder of its own."""
    (folder / "fuzzed_reward.py").write_text(REWARD, encoding="utf-8")
    words = ["serve-reward", "fuzzed_reward:brightness", "--port", "0", "--device", "cpu"]
    words += ["--max-request-mb", "4"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "flowcredit", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            host, _, port = line.split("http://")[1].split()[0].rpartition(":")
            yield process, (host, int(port))
        finally:
            process.send_signal(signal.SIGINT)
            with process:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()


def memory_of(process: subprocess.Popen[bytes]) -> str:
    """The most memory that the process ever held, where the system tells it."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                return f"{int(line.split()[1]) / 2**10:,.0f} MiB"
    return "not told"


def run(requests: int, seed: int) -> tuple[Counts, str, list[str]]:
    """Counts, the server's peak memory, and what it did wrong."""
    counts, faults, peak, began = Counts(), [], "not told", time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder) as (process, address):
            for number in range(requests):
                try:
                    one(address, Random(f"{seed}/{number}"), counts)
                except Fault as fault:
                    faults.append(f"request {number} of seed {seed}: {fault}")
                    if process.poll() is not None:
                        break
                if (number + 1) % 1000 == 0:
                    passed = time.monotonic() - began
                    print(f"{number + 1} in {passed:.0f} s, faults: {len(faults)}", flush=True)
            if process.poll() is not None:
                faults.append(f"the server ended with code {process.returncode}")
            peak = memory_of(process)
        said = (folder / "said").read_text(encoding="utf-8", errors="replace")
        if "Traceback" in said:
            faults.append(f"a stack trace: {said[said.index('Traceback') :][:2000]}")
        if any(not (c.isprintable() or c == "\n") for c in said):
            faults.append("control characters on its terminal")
        if list(folder.rglob(CANARY)):
            faults.append("it ran what it was sent")
    return counts, peak, faults


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Malformed requests to flowcredit serve-reward.")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    began = time.monotonic()
    counts, peak, faults = run(given.requests, given.seed)
    print(f"malformed requests: {sum(counts.kinds.values())} in {time.monotonic() - began:.0f} s")
    print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(counts.kinds.items())))
    print(f"refused {counts.refused}, closed {counts.closed}, answered all the same {counts.answered}")
    print("  status " + ", ".join(f"{status}: {count}" for status, count in sorted(counts.statuses.items())))
    print(f"proper requests after them, all scored: {counts.proper}")
    print(f"the server's peak memory: {peak}")
    for fault in faults[:20]:
        print(f"FAULT {fault}")
    print(
        f"server alive: {'no' if any('ended' in fault for fault in faults) else 'yes'}; faults: {len(faults)}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
