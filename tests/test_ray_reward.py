"""The reward ``ray``: scores as the same reward gives them here, and every way in which an actor fails."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward, required_columns
from flowcredit.rewards.ray_actors import RayReward, load_ray
from flowcredit.scoring import PartialFailure, RewardError, score_images

OWN = """
import os, time
from pathlib import Path

def judge(images, prompts, level):
    if "bad" in prompts:
        raise KeyError("cannot read 'bad'")
    if "slow" in prompts:
        time.sleep(60)
    if "short" in prompts:
        return [1.0]
    images *= 255  # in place, as some rewards do
    return [None if p == "none" else float(i[0, 0, 0]) + 100 * l for i, p, l in zip(images, prompts, level)]

def dies(images, prompts, once):
    for marker in once:
        if not Path(marker).exists():
            Path(marker).touch()
            os._exit(9)
    return images.mean((1, 2, 3))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a user's module lies."""
    where = tmp_path_factory.mktemp("own")
    (where / "own_ray_reward.py").write_text(OWN)
    yield where
    ray.shutdown()


def make(folder: Path, function: str, **options: Any) -> RayReward:
    chosen = {"reward": f"own_ray_reward:{function}", "device": "cpu", "working_dir": str(folder), **options}
    return load_ray({"num_cpus": 0.0, **chosen})


@pytest.fixture(scope="module")
def judge(folder: Path) -> RayReward:
    """Two actors, three images at a time; Ray runs on this machine from here on."""
    return make(folder, "judge", actors=2, batch_size=3, shared_as="judge")


def images_of(*levels: int) -> Tensor:
    images = torch.zeros(len(levels), 3, 4, 4)
    images[:] = torch.tensor(levels)[:, None, None, None] / 255
    return images


def score(reward: Any, images: Tensor, prompts: Sequence[str], **columns: Any) -> list[float]:
    return score_images({"ray": reward}, images, prompts, columns, batch_size=64)[0].tolist()


def test_scores_come_in_the_order_of_the_images_from_any_number_of_actors(judge: RayReward) -> None:
    assert required_columns(judge) == ("level",)
    images, prompts = images_of(*range(10, 18)), ["p"] * 7 + ["none"]
    found = score(judge, images, prompts, level=list(range(8)), unused=["x"] * 8)
    assert found[:7] == pytest.approx([10 + i + 100 * i for i in range(7)])
    assert math.isnan(found[7])
    assert float(images[0, 0, 0, 0]) == pytest.approx(10 / 255)


def test_only_the_image_at_fault_goes_without_a_score(judge: RayReward) -> None:
    images, prompts = images_of(51, 102, 153), ["a", "bad", "c"]
    with pytest.raises(PartialFailure) as failed:
        judge(images=images, prompts=prompts, level=[0, 0, 1])
    assert failed.value.scores[[0, 2]].tolist() == pytest.approx([51, 253])
    assert failed.value.reasons.keys() == {1}
    with pytest.raises(RewardError, match=r"'bad': .*KeyError: .*cannot read 'bad'.*own_ray_reward.py, line"):
        score(judge, images, prompts, level=[0, 0, 1])


def test_a_wrong_number_of_scores_is_told(judge: RayReward) -> None:
    with pytest.raises(RewardError, match="returned 1 scores for 2 images in its actor"):
        score(judge, images_of(1, 2), ["a", "short"], level=[0, 0])


def test_processes_can_share_actors_by_a_name(judge: RayReward, folder: Path) -> None:
    again = make(folder, "judge", actors=2, batch_size=1, shared_as="judge", timeout=0.2)
    assert [actor._actor_id for actor in again.actors] == [actor._actor_id for actor in judge.actors]
    with pytest.raises(RewardError, match=r"gave no answer within 0\.2 s"):
        score(again, images_of(1), ["slow"], level=[0])


def test_a_registered_reward_scores_as_it_does_here_to_the_last_bit(judge: RayReward) -> None:
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    prompts = ["a red circle", "two blue squares", "a ring"]
    options = {"path": "bundled:shapes-clip"}
    there = load_ray({"reward": "clip", "options": options, "device": "cpu", "num_cpus": 0.0})
    assert score(there, images, prompts) == score(load_reward("clip", options, "cpu"), images, prompts)


def test_an_actor_that_dies_is_started_anew_until_that_is_too_often(
    judge: RayReward, folder: Path, tmp_path: Path
) -> None:
    reward = make(folder, "dies", restarts=1)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert score(reward, images_of(51, 102), ["a", "b"], once=[first, first]) == pytest.approx([0.2, 0.4])
    assert Path(first).exists()
    with pytest.raises(RewardError, match=r"an actor of 'own_ray_reward:dies' is lost: .*died"):
        score(reward, images_of(51), ["a"], once=[second])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs the option 'reward'"),
        ({"reward": "shapes", "actor": 2}, r"unknown option 'actor' \(did you mean 'actors'\?\)"),
        ({"reward": "ray"}, "'ray' again"),
        ({"reward": "shapse"}, r"unknown reward 'shapse' \(did you mean 'shapes'\?\)"),
        (
            {"reward": "shapes", "num_gpus": 64.0, "start_timeout": 0.5},
            r"64 GPUs each .*cluster has .* 0 GPUs",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(judge: RayReward, options: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        load_reward("ray", options, "cpu")
    assert "\n" not in str(refused.value)
