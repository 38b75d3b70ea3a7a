"""The same run on one, two and four processes: the same noises, groups, scores and weights."""

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from flowcredit import distributed, trainer
from flowcredit.config import Recipe
from flowcredit.distributed import World, join
from flowcredit.errors import InputError
from flowcredit.evaluation_files import load_evaluation
from flowcredit.recipe_io import load_recipe
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parent
TRAJECTORIES = "algorithm={name: %s, num_steps: 4, group_size: 3%s}"
VARIANTS = {
    # Five prompts on two or four processes: the last has fewer, of four one has none.
    "uneven": ["train.prompts_per_iteration=5"],
    "dead": ["rewards=[{name: 'simple_rewards:redness_but_of_blue'}]", "train.update=accumulated"],
    "lora": ["weights.method=lora", "weights.rank=4", "weights.alpha=8", "train.kl_weight=0.1"],
    "batch": [TRAJECTORIES % ("flow_grpo", ", advantage_std: batch"), "train.ema_decay=0.5"],
    "overlap": ["scoring.overlap=true", "rollout.prompts=1", "scoring.batch_size=2"],
    # Only the process that has a prompt with blue in it sees a loss that is no number; no process steps.
    # With this seed the first process has such a prompt in the first iteration, the second in the second.
    "fault": [
        "rewards=[{name: 'simple_rewards:huge_for_blue'}]",
        "train.on_nonfinite=skip",
        "train.prompts_per_iteration=2",
        "seed=7",
    ],
    "turning": [TRAJECTORIES % ("turning_point_grpo", "")],
    "coca": [TRAJECTORIES % ("coca", "")],
    "neighbours": [TRAJECTORIES % ("neighbor_grpo", ", anchors: 2, train_steps: [0, 1]")],
    "branches": [
        "algorithm={name: branch_grpo, num_steps: 5, group_size: 4, split_steps: [0, 1], kept_leaves: 2}"
    ],
}
SHARDED = {
    "sharded": ["train.prompts_per_iteration=5", "train.kl_weight=0.1", "train.ema_decay=0.5"],
    "sharded-lora": ["weights.method=lora", "weights.rank=4", "weights.alpha=8", "train.kl_weight=0.1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distributed")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\na green cross\nblue\na red ring\n")
    recipe = {
        "name": "tiny",
        "model": {
            "path": str(root / "pipeline"),
            "height": 32,
            "width": 32,
            "max_sequence_length": 12,
            "dtype": "float32",
        },
        "prompts": {"train": str(root / "prompts.txt"), "heldout": str(root / "prompts.txt")},
        "algorithm": {"name": "g2rpo", "num_steps": 4, "group_size": 3, "strides": [1, 2]},
        "rewards": [{"name": "simple_rewards:redness"}],
        "train": {
            "iterations": 3,
            "prompts_per_iteration": 4,
            "learning_rate": 1e-3,
            # Adam turns rounding of gradients near 0 into whole steps: with this they count as 0.
            "adam_epsilon": 1e-5,
            "mixed_precision": "no",
            "micro_batch_size": 3,
        },
        "rollout": {"batch_size": 7},
        "scoring": {"batch_size": 5},
        "evaluation": {"every": 0, "prompts": 5, "images": 4},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def launch(folder: Path, processes: int, variants: dict[str, list[str]], out: Path) -> None:
    """Run variants on several processes with the tests' own worker."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]),
    }
    named = {name: [*overrides, f"output={out}"] for name, overrides in variants.items()}
    arguments = ["--standalone", f"--nproc_per_node={processes}", str(HERE / "distributed_worker.py")]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *arguments,
            str(folder / "recipe.yaml"),
            json.dumps(named),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def alone(folder: Path, overrides: list[str], run: Path) -> None:
    recipe: Recipe = load_recipe(folder / "recipe.yaml", overrides)
    trainer.train(recipe, run, Console(quiet=True))


def checkpoints(run: Path) -> dict[str, torch.Tensor]:
    files = (run / "checkpoints" / "000003").glob("*.safetensors")
    return {f"{file.stem}/{name}": value for file in files for name, value in load_file(file).items()}


def assert_same_run(one: Path, several: Path) -> None:
    left, right = checkpoints(one), checkpoints(several)
    assert left.keys() == right.keys()
    assert left
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=0, atol=1e-5, msg=name)
    first = load_file(one / "checkpoints" / "000002" / "weights.safetensors")
    moved = max(float((left[f"weights/{name}"] - value).abs().max()) for name, value in first.items())
    assert moved > 1e-4, "nothing was learned, so nothing is shown"
    for a, b in zip(log_of(one), log_of(several), strict=True):
        assert a.keys() == b.keys()
        for name, number in a.items():
            if name not in {"seconds", "velocity_evaluations"}:
                assert b[name] == pytest.approx(number, abs=2e-4), name
    before, after = (load_evaluation(run / "evaluations" / "000003.json")[0] for run in (one, several))
    assert before.prompts == after.prompts
    for name, scores in before.scores.items():
        assert after.scores[name] == pytest.approx(scores, abs=1e-4)
    assert (one / "images" / "000003.png").exists() == (several / "images" / "000003.png").exists()


def log_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(folder: Path) -> Path:
    """Every variant on one process."""
    out = folder / "one"
    for name, overrides in {**VARIANTS, **SHARDED}.items():
        alone(folder, overrides, out / name)
    return out


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_change_nothing(folder: Path, single: Path, processes: int) -> None:
    out = folder / f"on {processes}"
    launch(folder, processes, VARIANTS, out)
    for name in VARIANTS:
        assert_same_run(single / name, out / name)
    assert [each["skipped_steps"] > 0 for each in log_of(single / "fault")] == [True, True, False]
    if processes == 2:
        kept = sorted(
            path.relative_to(out / "fault/faults") for path in (out / "fault/faults").rglob("batch-*")
        )
        assert [str(path) for path in kept] == [
            "000000-loss/batch-0.safetensors",
            "000001-loss/batch-1.safetensors",
        ]

    if processes == 2:
        ends = [folder / "resumed alone", folder / "resumed from two"]
        for run, end in zip((single, out), ends, strict=True):
            shutil.copytree(run / "uneven", end)
            trainer.resume(end, ["train.iterations=4"], Console(quiet=True))
        left, right = (load_file(end / "checkpoints" / "000004" / "weights.safetensors") for end in ends)
        for name, value in left.items():
            torch.testing.assert_close(right[name], value, rtol=0, atol=1e-5, msg=name)


def test_a_network_spread_over_processes_trains_alike(folder: Path, single: Path) -> None:
    out = folder / "sharded"
    sharded = {name: [*settings, "parallel.sharding=sharded"] for name, settings in SHARDED.items()}
    launch(folder, 2, sharded, out)
    for name in SHARDED:
        assert_same_run(single / name, out / name)
        for file in (single / name / "final").rglob("*.safetensors"):
            theirs = load_file(out / name / "final" / file.relative_to(single / name / "final"))
            for key, value in load_file(file).items():
                torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-5)


def test_averaged_weights_are_what_is_exported(single: Path) -> None:
    (exported,) = (single / "batch" / "final" / "transformer").glob("*.safetensors")
    averaged = load_file(single / "batch" / "checkpoints" / "000003" / "ema.safetensors")
    for name, value in load_file(exported).items():
        assert torch.equal(value, averaged[name]), name


def test_one_process_has_nothing_to_spread_over(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"parallel.sharding is 'sharded', but there is one process"):
        alone(folder, ["parallel.sharding=sharded"], tmp_path / "run")


@given(count=st.integers(1, 40), size=st.integers(1, 9))
def test_shares_are_equally_long_and_hold_every_prompt_once(count: int, size: int) -> None:
    shares = [World(rank, size).share(count) for rank in range(size)]
    assert [place for share in shares for place in share.places[: share.own]] == list(range(count))
    assert len({len(share.places) for share in shares}) == 1
    assert all(0 <= place < count for share in shares for place in share.places)


def test_without_torchrun_there_is_one_process() -> None:
    world = join({})
    assert (world.rank, world.size, world.first) == (0, 1, True)
    assert world.told({"a": 1}) == [{"a": 1}]
    assert world.largest([3, 1]) == world.summed([3, 1]) == [3, 1]


@given(sizes=st.lists(st.integers(1, 12), max_size=20))
def test_messages_hold_every_gradient_once_and_are_bounded(sizes: list[int]) -> None:
    grads = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "MESSAGE", 10)
        sent = list(distributed.messages(grads))
    assert [id(grad) for part in sent for grad in part] == [id(grad) for grad in grads]
    assert all(sum(grad.numel() for grad in part) <= 10 or len(part) == 1 for part in sent)
    joined = [a + b for a, b in pairwise([sum(grad.numel() for grad in part) for part in sent])]
    assert all(size > 10 for size in joined), "two messages that would have been one"
