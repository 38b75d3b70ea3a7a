"""One of several processes raises, hangs or dies, or Ctrl-C comes: what is said, by whom, what is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from flowcredit import heartbeat, launch, processes, trainer
from flowcredit.checkpoint import load_checkpoint
from flowcredit.errors import InputError, SharedError
from flowcredit.heartbeat import Board, Failure, Heartbeat, LostContact
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("survival")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\n")
    recipe = {
        "name": "tiny",
        "output": str(root / "runs"),
        "model": {
            "path": str(root / "pipeline"),
            "height": 16,
            "width": 16,
            "max_sequence_length": 8,
            "dtype": "float32",
        },
        "prompts": {"train": str(root / "prompts.txt"), "heldout": str(root / "prompts.txt")},
        "algorithm": {"name": "flow_grpo", "num_steps": 3, "group_size": 3},
        "train": {"iterations": 3, "prompts_per_iteration": 2, "mixed_precision": "no"},
        "evaluation": {"every": 0, "prompts": 2, "images": 0},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, **variables}
    command = [sys.executable, *words]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code, and what flowcredit says of errors."""
    _, said = process.communicate(timeout=120)
    assert "Traceback" not in said, said
    return process.returncode, [line for line in said.splitlines() if line.startswith(("flow", "Inter"))]


def launched(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    words = ("-m", "flowcredit", "launch", "--nproc", "2", "train", str(folder / "recipe.yaml"))
    return start(*words, *overrides)


def test_ctrl_c_finishes_the_iteration_and_saves(folder: Path) -> None:
    run = folder / "runs" / "interrupted"
    process = launched(
        folder,
        "name=interrupted",
        "rewards=['faulty_rewards:slow']",
        "train.iterations=500",
        "checkpoint.every=400",
    )
    while not (run / "log.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, lines = ended(process)
    assert (code, lines) == (
        130,
        [
            "Interrupted; no finished iteration is lost; go on with:"
            f" flowcredit launch --nproc 2 train --resume {run}"
        ],
    )
    logged = [json.loads(line)["iteration"] for line in (run / "log.jsonl").read_text().splitlines()]
    (saved,) = (run / "checkpoints").iterdir()
    assert load_checkpoint(saved).iteration == logged[-1] == len(logged)


def test_a_process_that_is_killed_is_named_and_the_run_goes_on_from_its_checkpoint(folder: Path) -> None:
    run = folder / "runs" / "killed"
    code, lines = ended(launched(folder, "name=killed", "rewards=['faulty_rewards:killing']"))
    assert code == 1
    (line,) = lines
    assert line.startswith(
        "flowcredit: process 1 of 2 was ended by SIGKILL (last seen scoring in iteration 2"
    )
    command = f"flowcredit launch --nproc 2 train --resume {run}"
    assert line.endswith(f"go on from the last checkpoint with: {command}")
    assert load_checkpoint(run / "checkpoints" / "000001").iteration == 1
    trainer.resume(run, [], Console(quiet=True))
    assert (run / "final" / "model_index.json").is_file()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def apart(folder: Path, how: str, rank: int) -> list[tuple[int, list[str]]]:
    """Two processes that nothing watches over, as on two machines."""
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    here["MASTER_PORT"] = str(free_port())
    words = (str(HERE / "meeting_worker.py"), str(folder), how, str(rank))
    return [ended(each) for each in [start(*words, RANK=str(r), **here) for r in (0, 1)]]


def test_a_process_that_hangs_is_named_by_the_others(folder: Path) -> None:
    (code, lines), (other, silent) = apart(folder, "hang", 1)
    assert (code, other, silent) == (1, 1, [])
    (line,) = lines
    place = "scoring in iteration 2, at meeting_worker.py:28 (misbehave)"
    assert f"process 1 of 2 has not come to the others within 4 s (parallel.timeout_s): it is {place}" in line


def test_under_torchrun_the_error_of_one_process_is_told_once(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process = start(*torchrun, str(HERE / "meeting_worker.py"), str(folder), "raise")
    _, said = process.communicate(timeout=120)
    # torchrun's own trace follows, and quotes it as the root cause.
    assert said.count("flowcredit: process 1 of 2: the scorer is out of paper") == 1
    assert said.count("flowcredit:") == 1
    assert "traceback : the scorer is out of paper" in said.partition("Root Cause")[2]


class Pair:
    """The boards of two processes on one store, without threads."""

    def __init__(self) -> None:
        store = HashStore()
        self.one, self.two = (Heartbeat(Board(store, {}), rank, 2, 5.0) for rank in (0, 1))


def test_who_fails_first_has_the_word_and_who_it_broke_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair()
    first = pair.two.settle(InputError("the scorer is out of paper"))
    assert isinstance(first, SharedError)
    assert str(first) == "process 1 of 2: the scorer is out of paper"
    for error in (LostContact("Connection closed by peer"), ValueError("of its own"), InputError("too late")):
        quiet = pair.one.settle(error)
        assert isinstance(quiet, SystemExit)
        assert quiet.code == 2
    assert capsys.readouterr() == ("", "")


def test_a_fault_keeps_its_trace_and_says_whose_it_is() -> None:
    fault = ZeroDivisionError("no such share")
    assert Pair().two.settle(fault) is fault
    assert fault.__notes__ == ["This was process 1 of 2."]


def test_another_machine_repeats_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair()
    assert pair.one.board.claim(Failure(0, "the disk is full", 2, "elsewhere"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    pair.two.settle(LostContact("Connection closed by peer"))
    assert capsys.readouterr().err == "\nflowcredit: process 0 of 2, on elsewhere: the disk is full\n"


def test_ctrl_c_in_one_process_interrupts_the_others() -> None:
    pair = Pair()
    assert isinstance(pair.one.settle(KeyboardInterrupt()), KeyboardInterrupt)
    assert isinstance(pair.two.settle(LostContact("Connection closed by peer")), KeyboardInterrupt)


def test_a_broken_connection_names_who_gives_no_sign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "TOLD_S", 0.4)
    pair = Pair()
    pair.two.note("decoding", 7)
    with pytest.raises(LostContact), pair.one.meeting():
        raise RuntimeError("Connection closed by peer")
    settled = pair.one.settle(LostContact("Connection closed by peer"))
    assert isinstance(settled, SystemExit)
    assert settled.code == 1
    assert "process 1 of 2 is gone: no sign of life for 0 s, last seen decoding in iteration 7" in (
        capsys.readouterr().err
    )


def test_the_loss_of_the_first_machine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    left = Heartbeat(heartbeat.connect(5.0, environment), 1, 2, 5.0)
    del store
    settled = left.settle(LostContact("Connection closed by peer"))
    assert isinstance(settled, SystemExit)
    assert settled.code == 1
    assert "process 1 of 2 has lost the processes on the first machine" in capsys.readouterr().err


def test_before_they_join_one_process_tells_a_bad_recipe() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    agent = {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    told = [heartbeat.speaks_before_joining("no such file", {**agent, "RANK": rank}) for rank in "102"]
    assert told == [True, False, False]


def test_a_checkpoint_is_finished_before_sigterm_ends_the_process() -> None:
    ends: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ends.append(number))
    try:
        with processes.finishing():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert ends == []
        assert ends == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ACCELERATE_DYNAMO_MODE": "default"}, "accelerate launch has started one process"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE says 4 processes"),
        ({"PMI_SIZE": "x"}, "PMI_SIZE is 'x'; expected a whole number"),
    ],
)
def test_processes_that_would_each_be_alone_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        processes.refuse_pretence(environment)
    processes.refuse_pretence({"WORLD_SIZE": "2", "ACCELERATE_DYNAMO_MODE": "default", "PMI_SIZE": "2"})


STARTS = """
import os, subprocess, sys, time
from flowcredit.processes import PARENT
child = "import os, sys, time; from flowcredit import processes; processes.register();" \\
    " print(os.getpid(), processes.PARENT in os.environ, flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], env={**os.environ, PARENT: str(os.getpid())})
time.sleep(60)
"""


def test_a_process_ends_when_who_started_it_was_killed() -> None:
    parent = start("-c", STARTS)
    assert parent.stdout is not None
    pid, inherits = parent.stdout.readline().split()
    assert inherits == "False"  # What it starts in its turn is its own.
    os.kill(int(pid), 0)
    parent.kill()
    # Its end of the pipe closes when it has ended; the time-out is an error.
    parent.communicate(timeout=30)


def test_what_torchrun_quotes_moves_no_terminal(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    environment = {"TORCHELASTIC_ERROR_FILE": str(file)}
    processes.tell({"line": "prompts.txt:1: '\x1b[31mred\x07' is no scene"}, environment)
    message = json.loads(file.read_text())["message"]
    for told in (message["message"], message["extraInfo"]["py_callstack"]):
        assert "red" in told
        assert told.isprintable()


def test_a_run_is_resumed_as_it_was_started() -> None:
    run = Path("runs/my run")
    torchrun = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    here = launch.Place(8, 2, "first:29500").command
    assert processes.resume_command(run, {}) == "flowcredit train --resume 'runs/my run'"
    assert processes.resume_command(run, {**torchrun, processes.COMMAND: here}) == (
        "flowcredit launch --nproc 8 --nnodes 2 --rdzv-endpoint first:29500 train --resume 'runs/my run'"
    )
    assert processes.resume_command(run, torchrun).startswith("torchrun --nnodes=2 --rdzv-endpoint=... --n")


@pytest.mark.parametrize(
    ("words", "place", "said"),
    [
        (["evaluate", "x.yaml"], launch.Place(2), "several processes of train; got evaluate"),
        (["train", "x.yaml"], launch.Place(2, nnodes=2), "--nnodes without --rdzv-endpoint"),
        (["train", "x.yaml"], launch.Place(2, 1, "foo:1"), "--rdzv-endpoint foo:1 is where several machines"),
    ],
)
def test_what_cannot_be_launched_is_refused(words: list[str], place: launch.Place, said: str) -> None:
    with pytest.raises(InputError, match=said):
        launch.launch(words, place)


def test_a_heartbeat_tells_where_its_main_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    pair = Pair()
    pair.one.start()
    try:
        until = time.monotonic() + 10
        while not pair.two.board.signs(2)[0].place and time.monotonic() < until:
            threading.Event().wait(0.05)
    finally:
        pair.one.stop()
    assert pair.two.board.signs(2)[0].place.startswith("test_failing_processes.py:")
