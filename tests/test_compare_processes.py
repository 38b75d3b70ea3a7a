"""Processes side by side: each to its end, failures told, all of them ended together."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from flowcredit.compare import processes
from flowcredit.compare.arms import Arm
from flowcredit.compare.processes import Child, Failure, Process, Task, run_tasks
from flowcredit.compare.runs import Run, wait_until_free
from flowcredit.errors import InputError
from flowcredit.recipe_io import load_recipe
from flowcredit.run_folder import RunFolder


class Said:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.running = 0
        self.most = 0

    def started(self, task: Task, words: Sequence[str]) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.lines.append(f"started {task.name}")

    def finished(self, task: Task) -> None:
        self.running -= 1
        self.lines.append(f"finished {task.name}")

    def failed(self, failure: Failure) -> None:
        self.running -= 1
        self.lines.append(f"failed {failure.name}")

    def tick(self) -> None:
        pass


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TICK_S", 0.01)


def start(words: Sequence[str], console_file: Path) -> Process:
    return Child([sys.executable, "-c", *words], console_file, 3)


def task(folder: Path, name: str, code: str, peaks: list[int] | None = None) -> Task:
    """Finished when its code has written the file of its name."""
    return Task(
        name=name,
        console_file=folder / f"{name}.log",
        command=lambda: None if (folder / name).exists() else [code, str(folder / name)],
        work=1.0,
        done=lambda: 0.0,
        peak=lambda size: None if peaks is None else peaks.append(size),
    )


WRITE = "import os, sys, time; time.sleep(0.05); open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])"


def test_tasks_come_to_their_end_some_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    peaks: list[int] = []
    tasks = [task(tmp_path, name, WRITE, peaks) for name in ("a", "there", "b", "c", "d")]
    said = Said()
    assert run_tasks(tasks, 2, start, said) == []
    assert said.most == 2
    assert [line for line in said.lines if "there" in line] == []
    assert [(tmp_path / name).read_text() for name in ("a", "b", "c", "d", "there")] == ["3"] * 4 + ["before"]
    # A Python process takes more than 2 MiB and less than 2 GiB.
    assert len(peaks) == 4
    assert all(2**21 < peak < 2**31 for peak in peaks)
    said = Said()
    assert run_tasks(tasks, 2, start, said) == []
    assert said.lines == []


def test_a_failure_is_told_with_its_last_lines_and_the_others_go_on(tmp_path: Path) -> None:
    fails = "import sys; print('\\n'.join(map(str, range(9)))); sys.exit('flowcredit: no such thing')"
    killed = "import os; os.kill(os.getpid(), 9)"
    nothing = "pass"
    tasks = [
        task(tmp_path, name, code)
        for name, code in (("fails", fails), ("killed", killed), ("nothing", nothing), ("well", WRITE))
    ]
    failures = {each.name: each for each in run_tasks(tasks, 1, start, Said())}
    assert failures.keys() == {"fails", "killed", "nothing"}
    assert failures["fails"].why == "exit code 1, no such thing"
    assert failures["killed"].why == "was ended by SIGKILL"
    assert set(failures["fails"].last_lines) == {"5", "6", "7", "8", "flowcredit: no such thing"}
    assert "what it was to write is not there" in failures["nothing"].why
    assert failures["nothing"].last_lines == ()
    assert (tmp_path / "well").exists()


def test_a_task_of_two_commands_is_finished_after_the_second(tmp_path: Path) -> None:
    def command() -> list[str] | None:
        left = [name for name in ("one", "two") if not (tmp_path / name).exists()]
        return [WRITE, str(tmp_path / left[0])] if left else None

    said = Said()
    both = Task("both", tmp_path / "log", command, 1.0, lambda: 0.0)
    assert run_tasks([both], 1, start, said) == []
    assert said.lines == ["started both", "started both", "finished both"]


def test_a_run_at_which_a_lost_process_still_works_is_waited_for(tmp_path: Path) -> None:
    arm, recipe = Arm("one", Path("a.yaml")), load_recipe("recipes/shapes_g2rpo.yaml")
    runs = [Run(arm, seed, tmp_path / f"seed-{seed}", recipe) for seed in range(2)]
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / "recipe.yaml").touch()
    said: list[str] = []
    wait_until_free(runs, 0, said.append)
    assert not (tmp_path / "seed-0").exists()
    with RunFolder(tmp_path / "seed-1").owned():
        with pytest.raises(InputError, match="another process is at work"):
            wait_until_free(runs, 0.0, said.append)
        waiting = threading.Thread(target=wait_until_free, args=(runs, 60.0, said.append))
        waiting.start()
        time.sleep(0.5)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()
    assert said == [f"waiting for a process that is still at work in {tmp_path / 'seed-1'}"]


SAVES = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1] + '.saved').touch()
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
pathlib.Path(sys.argv[1] + '.ready').touch()
time.sleep(60)
"""
DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1] + '.ready').touch()
time.sleep(60)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_child_and_lets_it_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    started: list[Process] = []

    def kept(words: Sequence[str], console_file: Path) -> Process:
        started.append(start(words, console_file))
        return started[-1]

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("*.ready"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), kind)

    before = signal.getsignal(kind)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_tasks([task(tmp_path, name, SAVES) for name in ("a", "b", "waits")], 2, kept, Said())
    assert [process.poll() for process in started] == [130, 130]
    assert {file.name for file in tmp_path.glob("*.saved")} == {"a.saved", "b.saved"}
    assert signal.getsignal(kind) is before


def test_a_child_that_does_not_listen_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 0.1)
    monkeypatch.setattr(processes, "PATIENCE_ENDING_S", 0.1)
    deaf = start([DEAF, str(tmp_path / "deaf")], tmp_path / "log")
    while not (tmp_path / "deaf.ready").exists():
        time.sleep(0.01)

    class Broken(Said):
        def tick(self) -> None:
            raise RuntimeError("a fault of our own")

    waits = task(tmp_path, "deaf", DEAF)
    with pytest.raises(RuntimeError):
        run_tasks([waits], 1, lambda words, file: deaf, Broken())
    assert deaf.poll() == -signal.SIGKILL
