"""Calls that run beside the main thread, one after another, such as rewards while the next rollout runs."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread
from typing import Any

import torch

WAITING = 4
"""Calls that wait at most, besides the one that runs: their arguments, batches of images, are in memory."""


Submit = Callable[[Callable[[], Any]], Future[Any]]
"""Runs a call now or later; what it returns or raises is in the future."""


def at_once(call: Callable[[], Any]) -> Future[Any]:
    """Run a call here and now; what it raises is raised here."""
    done: Future[Any] = Future()
    done.set_result(call())
    return done


def settle(call: Callable[[], Any], outcome: Future[Any]) -> None:
    """Run a call and leave what it returns or raises in ``outcome``."""
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)


def ready(outcome: Future[Any], wait_s: float = 0.1) -> bool:
    """Whether a call is done, after waiting so many seconds for it at most."""
    return bool(wait([outcome], timeout=wait_s).done)


def thread_like_this(work: Callable[[], None], name: str) -> Thread:
    """A daemon thread, not yet started, with this one's current device and number of threads for a kernel.

    Both belong to a thread, and without them a call could answer otherwise there than here. A daemon does not
    keep the program alive: a call that never returns cannot be ended, only left behind.
    """
    kernels = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        torch.set_num_threads(kernels)
        if device is not None:
            torch.cuda.set_device(device)
        work()

    return Thread(target=run, name=name, daemon=True)


@contextmanager
def beside(check: Callable[[], None]) -> Iterator[Submit]:
    """Runs calls in the order in which they are submitted, in one thread of their own, while entered.

    Submitting waits while there are `WAITING` calls ahead, and calls ``check`` meanwhile. After a call that
    raised none is begun: their futures raise the same. Leaving does not wait: what was not begun never is.
    """
    calls: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(WAITING)
    left = Event()
    failed: list[BaseException] = []

    def work() -> None:
        while (item := calls.get()) is not None and not left.is_set():
            call, outcome = item
            if failed:
                outcome.set_exception(failed[0])
                continue
            settle(call, outcome)
            error = outcome.exception()
            if error is not None:
                failed.append(error)

    def submit(call: Callable[[], Any]) -> Future[Any]:
        if failed:
            raise failed[0]
        outcome: Future[Any] = Future()
        while True:
            try:
                calls.put((call, outcome), timeout=0.1)
                return outcome
            except queue.Full:
                check()

    thread_like_this(work, "beside").start()
    try:
        yield submit
    finally:
        left.set()
        while True:
            try:
                calls.get_nowait()
            except queue.Empty:
                break
        calls.put(None)


def submitting(overlap: bool, check: Callable[[], None]) -> AbstractContextManager[Submit]:
    """`beside` where calls are to overlap with what follows them, else `at_once`."""
    return beside(check) if overlap else nullcontext(at_once)
