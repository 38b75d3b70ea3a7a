"""`flowcredit check` on tiny pipelines of every family: it says what holds, and what does not."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from flowcredit import trainer
from flowcredit.assembly import Setup, assemble
from flowcredit.check import Finding, check_command, first_update, parity, rewards_tell_apart
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.models.loading import ADAPTERS
from flowcredit.weights import fingerprints, trainable_parameters
from tiny_diffusion import build_tiny_diffusion
from tiny_flux import build_tiny_flux
from tiny_qwen_image import TEXT_TOKENS, build_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES: dict[str, tuple[Callable[[Path], Path], float]] = {
    "FluxPipeline": (build_tiny_flux, 3.5),
    "QwenImagePipeline": (build_tiny_qwen_image, 4.0),
    "StableDiffusion3Pipeline": (build_tiny_sd3, 4.0),
    "StableDiffusionPipeline": (build_tiny_diffusion, 5.0),
}


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    root = tmp_path_factory.mktemp("check")
    (root / "prompts.txt").write_text("a red circle\na blue square\n")

    def make(family: str = "FluxPipeline", **sections: Any) -> Recipe:
        build, guidance = FAMILIES[family]
        folder = root / family
        if not folder.exists():
            build(folder)
        content: dict[str, Any] = {
            "name": "tiny",
            "model": {
                "path": str(folder),
                "height": 32,
                "width": 32,
                "guidance_scale": guidance,
                "max_sequence_length": TEXT_TOKENS if family == "QwenImagePipeline" else 12,
                "dtype": "float32",
                "device": "cpu",
            },
            "prompts": dict.fromkeys(("train", "heldout"), str(root / "prompts.txt")),
            "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 3, "strides": [1]},
            "rewards": ["simple_rewards:redness"],
            "train": {"mixed_precision": "no", "learning_rate": 1e-3},
        }
        for name, section in sections.items():
            content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
        return Recipe.model_validate(content)

    return make


def test_every_family_is_checked() -> None:
    assert FAMILIES.keys() == ADAPTERS.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_recipe_passes_in_float32(family: str, recipe_of: Callable[..., Recipe]) -> None:
    console = Console(record=True, width=250, file=io.StringIO())
    assert check_command(recipe_of(family), console)
    said = console.export_text()
    assert said.count("\nok  ") == 6
    assert f"{family}'s own call, 4 steps: largest difference" in said
    assert "and 0 of 0 others" in said


def texts(found: Iterator[Finding], holds: bool) -> list[str]:
    return [finding.text for finding in found if finding.holds is holds]


def test_a_lora_moves_alone(recipe_of: Callable[..., Recipe]) -> None:
    setup = assemble(recipe_of(weights={"method": "lora", "rank": 2}))
    frozen = {n: p for n, p in setup.model.network.named_parameters() if not p.requires_grad}
    before = fingerprints(frozen)
    assert texts(first_update(setup), holds=False) == []
    assert fingerprints(frozen) == before


def off_by_a_little(setup: Setup) -> None:
    """An adapter that forgets a hundredth of the velocity."""
    real = setup.model.velocity
    setup.model.velocity = lambda x, sigma, cond: 0.99 * real(x, sigma, cond)  # type: ignore[method-assign]


def test_a_wrong_adapter_is_found(recipe_of: Callable[..., Recipe]) -> None:
    setup = assemble(recipe_of())
    assert parity(setup).holds
    off_by_a_little(setup)
    assert not parity(setup).holds


def test_rewards_that_say_nothing_are_found(recipe_of: Callable[..., Recipe]) -> None:
    rewards = ["simple_rewards:redness", "test_check:always_half", "test_check:none_for_black"]
    setup = assemble(recipe_of(rewards=rewards))
    wrong = texts(rewards_tell_apart(setup), holds=False)
    assert [text.split()[1] for text in wrong] == ["test_check:always_half:", "test_check:none_for_black:"]
    assert "black nan" in wrong[1]
    setup = assemble(recipe_of(rewards=["test_check:always_half"]))
    (no_advantage, nothing_moved) = texts(first_update(setup), holds=False)
    assert "the largest is 0.00" in no_advantage
    assert "moved 0 of" in nothing_moved


def always_half(images: torch.Tensor, prompts: list[str]) -> list[float]:
    return [0.5] * len(images)


def none_for_black(images: torch.Tensor, prompts: list[str]) -> list[float | None]:
    return [float(image.mean()) or None for image in images]


def test_a_weight_that_moves_without_being_trained_is_found(recipe_of: Callable[..., Recipe]) -> None:
    setup = assemble(recipe_of(weights={"method": "lora", "rank": 2}))
    stray = next(p for p in setup.model.network.parameters() if not p.requires_grad)
    trained = next(iter(trainable_parameters(setup.model.network).values()))

    def touch(_: torch.Tensor) -> None:
        stray.data.add_(1e-3)

    trained.register_post_accumulate_grad_hook(touch)
    (wrong,) = texts(first_update(setup), holds=False)
    assert "and 1 of" in wrong


def test_training_stops_where_the_first_update_moves_nothing(
    recipe_of: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    recipe = recipe_of(train={"iterations": 1, "prompts_per_iteration": 1, "mixed_precision": "no"})
    with pytest.raises(InputError, match="the first update moved no trained weight"):
        trainer.train(recipe, tmp_path / "run", Console(quiet=True))
