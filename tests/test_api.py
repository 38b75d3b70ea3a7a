"""Runs from Python: rewards, prompts and settings given beside a recipe, and what comes of them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from torch import Tensor

import flowcredit
from flowcredit import InputError, Trainer
from flowcredit.evaluation_files import load_evaluation
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
QUIET = Console(quiet=True)


def greenness(images: Tensor, prompts: Sequence[str], wanted: Sequence[float]) -> Tensor:
    return images[:, 1].mean((1, 2)) * images.new_tensor(wanted)


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.scale * images.mean((1, 2, 3))


twice = Scaled(2.0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("api")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.jsonl").write_text('{"text": "a red circle", "task": "one"}\n')
    content = {
        "name": "tiny",
        "output": str(root / "runs"),
        "model": {"path": str(root / "pipeline"), "height": 16, "width": 16, "max_sequence_length": 8},
        "prompts": {**dict.fromkeys(("train", "heldout"), str(root / "prompts.jsonl")), "column": "text"},
        "algorithm": {"name": "g2rpo", "num_steps": 2, "group_size": 2, "strides": [1]},
        "rewards": ["simple_rewards:redness"],
        "train": {
            "iterations": 2,
            "prompts_per_iteration": 1,
            "mixed_precision": "no",
            "learning_rate": 1e-3,
        },
        "evaluation": {"every": 0, "prompts": 4, "images": 0, "group_by": "task"},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    return root / "recipe.yaml"


def test_one_trains_with_a_function_rows_and_settings(recipe: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "grass", "wanted": 1.0}, {"prompt": "no grass", "wanted": -1.0}]
    trainer = Trainer(
        recipe,
        rewards=[greenness, twice],
        prompts=rows,
        settings={"output": str(tmp_path), "train.iterations": 1},
    )
    outcome = trainer.train(console=QUIET)
    assert outcome.folder == trainer.folder == tmp_path / "tiny"
    assert outcome.after.prompts == ("grass", "no grass")
    assert [each.name for each in trainer.recipe.rewards] == ["test_api:greenness", "test_api:twice"]
    scores = outcome.after.scores["test_api:greenness"]
    assert scores[0] > 0 > scores[1]
    before, _ = load_evaluation(tmp_path / "tiny/evaluations/000000.json")
    change = outcome.mean("test_api:twice").mean - sum(before.scores["test_api:twice"]) / 2
    assert outcome.change("test_api:twice").mean == pytest.approx(change)
    assert (outcome.weights / "model_index.json").is_file()
    # The run's own recipe stands alone: the command line goes on with it.
    again = Trainer(recipe, rewards=[greenness, twice], prompts=rows, settings={"output": str(tmp_path)})
    assert len((tmp_path / "tiny/log.jsonl").read_text().splitlines()) == 1
    with pytest.raises(InputError, match="exists already"):
        again.train(console=QUIET)
    assert Trainer(tmp_path / "tiny/recipe.yaml").train(resume=True, console=QUIET) == outcome


def test_rewards_by_name_and_prompts_of_the_recipe(recipe: Path) -> None:
    trainer = Trainer(recipe, rewards=["simple_rewards:brightness"], heldout=["a green cross"])
    assert [each.name for each in trainer.recipe.rewards] == ["simple_rewards:brightness"]
    assert trainer.recipe.evaluation.group_by is None
    kept = [json.loads(line) for line in Path(trainer.recipe.prompts.heldout).read_text().splitlines()]
    assert kept == [{"prompt": "a green cross"}]
    one = Trainer(recipe, rewards="simple_rewards:brightness")
    assert one.recipe.rewards == trainer.recipe.rewards
    split = Trainer(recipe, prompts=[{"prompt": "a", "task": "one"}])
    assert split.recipe.evaluation.group_by == "task"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rewards": lambda images, prompts: images.mean((1, 2, 3))}, "is found by no name in its module"),
        ({"rewards": Scaled(3.0)}, "is found by no name in its module"),
        ({"rewards": 3}, "^Trainer: rewards is 3; expected a function, the name of a reward, or a list"),
        ({"rewards": [None]}, "^Trainer: rewards is None; expected functions, or names of rewards"),
        ({"prompts": "a red circle"}, "^Trainer: prompts is 'a red circle'; expected a list of prompts"),
        ({"heldout": {"prompt": "a"}}, "^Trainer: heldout is {'prompt': 'a'}; expected a list of prompts"),
        ({"prompts": iter(["a"])}, "^Trainer: prompts is <list_iterator .*; expected a list of prompts"),
        ({"prompts": ["a", 3]}, "^Trainer: prompts, row 1, is 3; expected a text, or a row with a prompt"),
        ({"settings": ["seed=1"]}, r"^Trainer: settings is \['seed=1'\]; expected names and values"),
        ({"prompts": []}, "an empty list"),
        ({"prompts": [{"prompt": "a", "image": object()}]}, "row 0: cannot be kept as JSON"),
        ({"settings": {"train.iteration": 3}}, "train.iterations"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(recipe: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        Trainer(recipe, **given)
    assert "\n" not in str(caught.value)


def test_nothing_is_known_of_a_run_that_was_not_made(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="train first"):
        Trainer(recipe, settings={"output": str(tmp_path)}).outcome()


def test_the_names_of_the_package_are_all_there_and_import_nothing_heavy() -> None:
    for name in flowcredit.__all__:
        assert getattr(flowcredit, name) is not None
    assert sorted(flowcredit.__all__) == dir(flowcredit)
    with pytest.raises(AttributeError, match="no attribute 'trainer_of'"):
        _ = flowcredit.trainer_of
    code = "import sys, flowcredit; flowcredit.load_recipe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_runs_as_it_stands_but_shorter(tmp_path: Path) -> None:
    text = (ROOT / "examples/own_reward.py").read_text()
    short = text.replace('"train.iterations": 6', '"train.iterations": 1, "train.warmup_iterations": 0')
    short = short.replace('iteration": 8', f'iteration": 1, "output": "{tmp_path}"')
    assert 'iteration": 1' in short
    (tmp_path / "example.py").write_text(short.replace('"recipes/', f'"{ROOT}/recipes/'))
    command = [sys.executable, str(tmp_path / "example.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "redness " in done.stdout.splitlines()[-1]
    assert "weights: " in done.stdout.splitlines()[-1]
