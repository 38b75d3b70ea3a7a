"""What a person sees of a comparison: a bar on a terminal, lines with the time left anywhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from flowcredit.compare.processes import Failure, Task
from flowcredit.console import duration, say
from flowcredit.visible import visible

LINE_EVERY_S = 600.0
"""Where no bar can be drawn, seconds after which a line tells how far all is."""


class Screen:
    """Progress of the tasks, those that are finished included."""

    def __init__(self, console: Console, tasks: Sequence[Task]) -> None:
        self.console = console
        self._tasks = tasks
        self._finished = {task.name for task in tasks if task.command() is None}
        self._running: list[str] = []
        self._failed = 0
        self._began = self._looked = time.monotonic()
        self._total = sum(task.work for task in tasks)
        self._first = self._done()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._row = self._bar.add_task(
            "runs", total=max(self._total, 1.0), completed=int(self._first), left=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, task: Task, words: Sequence[str]) -> None:
        if task.name not in self._running:
            self._running.append(task.name)
        self._say(f"{words[0]} {task.name}")

    def finished(self, task: Task) -> None:
        self._running.remove(task.name)
        self._finished.add(task.name)
        self._say(f"finished {task.name}")

    def failed(self, failure: Failure) -> None:
        self._running.remove(failure.name)
        self._failed += 1
        self._say(f"FAILED {failure.name}: {failure.why}; see {failure.console_file}; it said last:")
        for line in failure.last_lines or ("(nothing)",):
            self._print(f"    {line}")

    def tick(self) -> None:
        """Called often; looks now and then."""
        now = time.monotonic()
        if now - self._looked < (1.0 if self.console.is_terminal else LINE_EVERY_S):
            return
        self._looked = now
        if self.console.is_terminal:
            names = escape(visible("; ".join(self._running)))
            left = self._left()
            self._bar.update(self._row, completed=self._done(), description=names, left=left)
        else:
            self._say("running " + "; ".join(self._running))

    def _say(self, what: str) -> None:
        counts = f"{len(self._finished)}/{len(self._tasks)} done"
        if self._failed:
            counts += f", {self._failed} failed"
        left = self._left()
        self._print(f"{time.strftime('%H:%M')}  {counts}{', ' + left if left else ''}: {what}")

    def _print(self, line: str) -> None:
        say(self.console, line)

    def _left(self) -> str:
        """The time that what is left takes at the pace since the beginning; empty before there is one."""
        done = self._done()
        moved, elapsed = done - self._first, time.monotonic() - self._began
        if moved <= 0 or done >= self._total:
            return ""
        return f"about {duration((self._total - done) * elapsed / moved)} left"

    def _done(self) -> float:
        return sum(min(task.done(), task.work) for task in self._tasks)
