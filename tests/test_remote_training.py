"""Whole runs through the command line with a reward behind HTTP: one that works, one that dies on the way."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_service import HANG_UP, Answer, Asked, Fake, closed_port, fake_service
from flowcredit import cli
from flowcredit.evaluation_files import load_evaluation
from test_http_reward import HEALTH, red_levels
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

LEAVES = 12
"""Images of one iteration, by hand: 4 branches at each of 2 steps; from the first the strides 1 and 2 end
apart, from the second together."""

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remote")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\n")
    recipe = {
        "name": "tiny",
        "model": {
            "path": "pipeline",
            "height": 32,
            "width": 32,
            "max_sequence_length": 12,
            "dtype": "float32",
        },
        "prompts": {"train": "prompts.txt", "heldout": "prompts.txt"},
        "algorithm": {
            "name": "g2rpo",
            "num_steps": 4,
            "train_steps": [0, 1],
            "group_size": 4,
            "strides": [1, 2],
        },
        "rewards": ["simple_rewards:redness"],
        "train": {
            "iterations": 1,
            "prompts_per_iteration": 1,
            "learning_rate": 1e-3,
            "mixed_precision": "no",
            "micro_batch_size": 8,
        },
        "scoring": {"batch_size": 64},
        "evaluation": {"every": 0, "prompts": 2, "images": 0},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than these runs; one run below draws them."""
    monkeypatch.setattr("flowcredit.report.build_report", lambda run_dir: run_dir / "report.html")


@pytest.fixture
def train(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs ``flowcredit train`` with the reward of a service; gives the exit code and stderr."""
    monkeypatch.chdir(root)

    def call(fake: Fake | str, *overrides: str) -> tuple[int, str]:
        url = fake if isinstance(fake, str) else fake.url
        options = json.dumps({"url": url, "backoff": 0.001, "retries": 2})
        words = [f"output={tmp_path}", f"rewards=[{{name: http/red, options: {options}}}]", *overrides]
        monkeypatch.setattr(sys, "argv", ["flowcredit", "train", "recipe.yaml", *words])
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().err

    return call


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def redness(asked: Asked) -> Any:
    """Here red is the first pixel's alone: enough to tell images apart."""
    return HEALTH if asked.method == "GET" else {"scores": [level / 255 for level in red_levels(asked)]}


def dying(posts: int, last: Any) -> Callable[[Asked], Any]:
    """A service that answers so many requests for scores, and ``last`` to all further ones."""
    left = iter(range(posts))

    def respond(asked: Asked) -> Any:
        dead = asked.method == "POST" and next(left, None) is None
        return last if dead else redness(asked)

    return respond


@pytest.mark.usefixtures("no_report")
def test_a_run_is_trained_by_a_service(train: Run, tmp_path: Path) -> None:
    with fake_service(redness) as fake:
        assert train(fake) == (0, "")
        before, iteration, after = fake.posts()
        scores = [level / 255 for level in red_levels(Asked("POST", "/", {}, iteration))]
    assert [len(body["images"]) for body in (before, iteration, after)] == [2, LEAVES, 2]
    assert before["prompts"] == ["a red circle", "a blue square"]
    assert len(set(iteration["prompts"])) == 1
    [record] = log_of(tmp_path / "tiny")
    # The log's mean is over scored segments, so that the images of the second step count twice.
    assert min(scores) < record["reward/http/red"] < max(scores)
    assert (record["missing/http/red"], record["failed/http/red"]) == (0, 0)
    assert record["reward_calls"] == LEAVES
    assert record["grad_norm"] > 0


@pytest.mark.usefixtures("no_report")
def test_images_without_a_score_are_counted_as_missing_not_as_failed(train: Run, tmp_path: Path) -> None:
    def respond(asked: Asked) -> Any:
        answer = redness(asked)
        if asked.method == "POST" and len(answer["scores"]) == LEAVES:
            answer["scores"][1] = answer["scores"][5] = None
        return answer

    with fake_service(respond) as fake:
        assert train(fake)[0] == 0
    [record] = log_of(tmp_path / "tiny")
    assert (record["missing/http/red"], record["failed/http/red"]) == (2, 0)
    assert record["grad_norm"] > 0


LAST = {"hangs up": HANG_UP, "html": Answer(b"<html>moved</html>")}


@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
def test_a_service_that_dies_stops_the_run_and_no_finished_iteration_is_lost(
    train: Run, tmp_path: Path, last: Answer
) -> None:
    with fake_service(dying(2, last)) as fake:
        code, err = train(fake, "train.iterations=2")
        assert code == 2
        assert err.count("\n") == 1
        assert "reward 'http/red' failed on the prompt 'a " in err
        assert f"(and {LEAVES - 1} more in its batch): {fake.url}" in err
        assert "Traceback" not in err
    assert [record["iteration"] for record in log_of(tmp_path / "tiny")] == [1]
    assert (tmp_path / "tiny/checkpoints/000001").is_dir()


def test_under_skip_the_run_goes_on_and_the_log_counts_what_is_missing(train: Run, tmp_path: Path) -> None:
    with fake_service(dying(2, HANG_UP)) as fake:
        assert train(fake, "train.iterations=2", "scoring.on_error=skip")[0] == 0
    first, second = log_of(tmp_path / "tiny")
    assert (first["missing/http/red"], first["failed/http/red"]) == (0, 0)
    assert (second["missing/http/red"], second["failed/http/red"]) == (LEAVES, LEAVES)
    assert second["reward/http/red"] is None
    assert second["dead_groups"] == 1
    assert (tmp_path / "tiny/report.html").is_file()
    after, _ = load_evaluation(tmp_path / "tiny/evaluations/000002.json")
    assert all(score is None or score != score for score in after.scores["http/red"])


def test_a_service_that_is_down_is_refused_before_anything_is_made(train: Run, tmp_path: Path) -> None:
    url = closed_port()
    code, err = train(url, "scoring.on_error=skip")
    assert code == 2
    assert err.startswith(
        f"flowcredit: reward 'http': {url}/health: the connection failed: Connection refused"
    )
    assert err.count("\n") == 1
    assert not (tmp_path / "tiny").exists()
