"""Modules that wait on the CPU: on their device exactly while they work, with results as before.

Without a second device the move itself is watched: a stand-in for the copy marks the weights that visit.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny_clip
from flowcredit import visiting
from flowcredit.models.loading import PipelineFlow, load_model
from flowcredit.models.own_call import pipeline_images
from flowcredit.rewards import load_reward
from flowcredit.rewards.waiting import waiting
from flowcredit.scoring import score_images
from tiny_diffusion import build_tiny_diffusion
from tiny_flux import build_tiny_flux
from tiny_qwen_image import build_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "a blue square"]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of weights that visit the device, of all visits."""
    addresses: list[int] = []

    def copy(data: Tensor, device: torch.device) -> Tensor:
        assert device == CPU
        there = data.clone()
        addresses.append(there.data_ptr())
        return there

    monkeypatch.setattr(visiting, "_copy", copy)
    return addresses


def watch(module: nn.Module, moved: Sequence[int]) -> list[bool]:
    """At each call of the module, whether all its weights are visiting."""
    seen: list[bool] = []
    module.register_forward_pre_hook(
        lambda *_: seen.append(all(p.data_ptr() in moved for p in module.parameters()))
    )
    return seen


def addresses(*modules: nn.Module) -> list[int]:
    return [value.data_ptr() for module in modules for value in module.state_dict().values()]


def test_weights_and_buffers_visit_and_the_originals_come_back(moved: list[int]) -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    tied[2].weight = tied[0].weight
    before, values = addresses(tied), {name: v.clone() for name, v in tied.state_dict().items()}
    with visiting.visiting([tied, tied[0]], CPU):
        assert all(address in moved for address in addresses(tied))
        assert tied[2].weight is tied[0].weight
    assert addresses(tied) == before
    # Two weights and two biases of the layers, one of them shared, and five of the normalisation.
    assert len(moved) == 3 + 5
    with pytest.raises(KeyError), visiting.visiting([tied], CPU):
        raise KeyError
    assert addresses(tied) == before
    assert all(torch.equal(value, values[name]) for name, value in tied.state_dict().items())


def test_users_of_several_threads_share_one_visit(moved: list[int]) -> None:
    layer = nn.Linear(2, 2)
    home, guest, together = addresses(layer), visiting.Guest([layer], CPU), Barrier(2, timeout=30)
    seen: list[bool] = []

    def use() -> None:
        with guest.on_device():
            together.wait()
            seen.append(addresses(layer) != home)
            together.wait()

    threads = [Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]
    assert len(moved) == 2, "one visit of two tensors"
    assert addresses(layer) == home


def load(folder: Path, **changes: Any) -> PipelineFlow:
    settings: dict[str, Any] = {
        "height": 32,
        "width": 32,
        "guidance_scale": 4.0,
        "max_sequence_length": 24,
        "dtype": torch.float32,
        "device": "cpu",
        "decode_batch_size": 2,
    }
    return load_model(folder, **{**settings, **changes})


@pytest.mark.parametrize(
    "build", [build_tiny_flux, build_tiny_sd3, build_tiny_qwen_image, build_tiny_diffusion]
)
def test_encoders_and_vae_are_on_the_device_only_while_they_work(
    build: Callable[[Path], Path], tmp_path: Path, moved: list[int]
) -> None:
    folder = build(tmp_path / "model")
    plain, model = load(folder), load(folder, offload=("text_encoders", "vae"))
    parts = model.pipeline.components
    encoders = [part for name, part in parts.items() if name.startswith("text_enc") and part is not None]
    home = addresses(*encoders, model.pipeline.vae)
    read, decoded = watch(encoders[-1], moved), watch(model.pipeline.vae.decoder, moved)
    cond = model.encode(PROMPTS)
    assert read == [True]
    x = model.initial_noise(3, torch.Generator().manual_seed(0))
    images = model.decode(x)
    assert decoded
    assert all(decoded)
    visits = len(moved)
    with torch.no_grad():
        model.velocity(x[:2], torch.tensor([0.9, 0.5]), cond)
    assert len(moved) == visits
    assert addresses(*encoders, model.pipeline.vae) == home
    for name, value in plain.encode(PROMPTS).items():
        torch.testing.assert_close(cond[name], value, atol=1e-5, rtol=0)
    torch.testing.assert_close(images, plain.decode(x), atol=1e-5, rtol=0)


def test_a_part_that_was_not_named_stays(tmp_path: Path, moved: list[int]) -> None:
    model = load(build_tiny_flux(tmp_path / "model"), offload=("vae",))
    model.encode(PROMPTS)
    assert not moved
    model.decode(model.initial_noise(1, torch.Generator().manual_seed(0)))
    assert len(moved) == len(model.pipeline.vae.state_dict())


def test_encoders_stay_where_they_are_while_the_cache_knows_the_prompts(
    tmp_path: Path, moved: list[int]
) -> None:
    folder, settings = build_tiny_sd3(tmp_path / "model"), {"text_cache_folder": tmp_path / "cache"}
    load(folder, **settings).encode(PROMPTS)
    model = load(folder, offload=("text_encoders",), **settings)
    model.encode(PROMPTS)
    assert not moved, "the negative prompt, too, is in the cache"
    model.encode(["another"])
    assert moved


def test_the_pipelines_own_call_finds_its_parts_on_the_device(tmp_path: Path, moved: list[int]) -> None:
    folder = build_tiny_sd3(tmp_path / "model")
    model = load(folder, offload=("text_encoders", "vae"), max_sequence_length=12)
    seen = watch(model.pipeline.text_encoder_3, moved), watch(model.pipeline.vae.decoder, moved)
    own = pipeline_images(model, PROMPTS, 2, torch.Generator().manual_seed(0))
    assert all(seen[0])
    assert seen[1] == [True]
    plain = load(folder, max_sequence_length=12)
    theirs = pipeline_images(plain, PROMPTS, 2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip.make_clip(tmp_path_factory.mktemp("clip"))


def test_a_rewards_networks_are_on_the_device_only_while_it_scores(
    clip_folder: Path, moved: list[int]
) -> None:
    loaded: Any = load_reward("clip", {"path": str(clip_folder)}, "cpu")
    images = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    prompts = ["a cat", "a dog", "a cat"]
    expected = score_images({"clip": loaded}, images, prompts, {}, batch_size=2)
    home, seen = addresses(loaded.model), watch(loaded.model.vision_model, moved)
    rewards = {"clip": waiting(loaded, CPU)}
    found = score_images(rewards, images, prompts, {}, batch_size=2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # Memory lies elsewhere, and rounds so.
    assert seen == [True, True]
    assert addresses(loaded.model) == home


class Scorer(nn.Module):
    """A user's reward that is a module itself, and fails on one prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(
        self, images: Tensor, prompts: Sequence[str], bonus: Sequence[float], **others: Any
    ) -> Tensor:
        self.seen.append(self.factor.weight.data_ptr())
        if "bad" in prompts:
            raise OSError("bad prompt")
        with torch.no_grad():
            return self.factor(images.mean((1, 2, 3))[:, None])[:, 0] + torch.tensor(bonus)


def test_a_module_as_reward_keeps_its_columns_and_leaves_after_a_failure(moved: list[int]) -> None:
    scorer: Any = Scorer().requires_grad_(False)
    home = scorer.factor.weight.data_ptr()
    rewards = {"mine": waiting(scorer, CPU)}
    images = torch.zeros(2, 3, 4, 4)
    columns: dict[str, Sequence[Any]] = {"bonus": [1.0, 2.0], "other": [None, None]}
    scores = score_images(rewards, images, ["good", "bad"], columns, batch_size=2, on_error="skip")[0]
    assert scores[0].item() == pytest.approx(1.0 + scorer.factor.bias.item())
    assert scores[1].isnan()
    assert all(address in moved for address in scorer.seen)
    assert scorer.factor.weight.data_ptr() == home


def test_a_reward_without_networks_is_itself() -> None:
    def plain(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.mean((1, 2, 3))

    reward: Any = plain
    assert waiting(reward, CPU) is reward
