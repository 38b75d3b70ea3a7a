"""What a person sees while a run goes on: a bar with the time left on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from flowcredit.visible import visible

LINE_EVERY_S = 60.0
"""Where no bar can be drawn, seconds after which a line tells how far a piece of work is."""
COMPILED = ("evaluating", "rolling out", "updating")
"""Stages whose first call of a compiled network compiles it: its graphs differ by batch and gradient."""


def duration(seconds: float) -> str:
    """Seconds as "45 s", "12 min" or "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def say(console: Console, text: str) -> None:
    """One line on the console: what looks like mark-up or would steer a terminal is shown, not obeyed."""
    console.print(visible(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def counted(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress of one piece of work of ``total`` units, told as they are done: a bar with the time left on a
    terminal, elsewhere a line now and then."""
    began = told = time.monotonic()
    done = 0
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(what, total=total, left="")

    def advance(units: int) -> None:
        nonlocal done, told
        done += units
        now = time.monotonic()
        pace = (now - began) / done if done else 0.0
        left = f"about {duration(pace * (total - done))} left" if done < total else ""
        bar.update(task, completed=done, left=left)
        if not console.is_terminal and now - told >= LINE_EVERY_S and left:
            told = now
            say(console, f"{what}: {done:,} of {total:,}, {left}")

    with bar:
        yield advance


class Monitor:
    """Progress of a run of ``total`` iterations, ``done`` of which are finished.

    ``stage`` names what goes on within an iteration and how many units it has; ``advance`` counts them.
    ``compiles``: stages that run the network take minutes the first time.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        done: int,
        line_every: int,
        compiles: bool = False,
        told: Callable[[str, int], None] = lambda stage, iteration: None,
    ) -> None:
        self.told = told
        self._uncompiled = set(COMPILED) if compiles else set()
        self.console, self.total, self.done, self.line_every = console, total, done, line_every
        self._began, self._first = time.monotonic(), done
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._run = self._progress.add_task("iterations", total=total, completed=done, left="")
        self._stage: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int) -> None:
        """A new stage of the current iteration begins; ``told`` hears of it, and of the iteration."""
        self.told(name, self.done + 1)
        if self._stage is not None:
            self._progress.remove_task(self._stage)
        if name in self._uncompiled:
            self._uncompiled.remove(name)
            name = f"compiling the network, {name}"
            if not self.console.is_terminal:
                self.say(f"{name}: the first time takes minutes")
        self._stage = self._progress.add_task(f"  {name}", total=total, left="")

    def advance(self, units: int) -> None:
        """Units of the stage are done."""
        if self._stage is not None:
            self._progress.advance(self._stage, units)

    def finish_iteration(self, summary: str) -> None:
        """An iteration is finished: moves the bar and prints its line when one is due."""
        self.done += 1
        pace = (time.monotonic() - self._began) / (self.done - self._first)
        left = f"{duration(pace * (self.total - self.done))} left" if self.done < self.total else ""
        self._progress.update(self._run, completed=self.done, left=left)
        if self.done % self.line_every == 0 or self.done == self.total:
            text = f"iteration {self.done}/{self.total}  {summary}  {left}".rstrip()
            say(self.console, text)

    def go_back(self, done: int) -> None:
        """So many iterations are finished, after more were."""
        self._began, self._first, self.done = time.monotonic(), done, done
        self._progress.update(self._run, completed=done, left="")

    def say(self, text: str) -> None:
        """A line of its own."""
        say(self.console, text)
