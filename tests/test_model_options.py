"""Options of the model that change how it computes, not what: compiled blocks, slices and tiles."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxPipeline
from rich.console import Console
from safetensors.torch import load_file

from flowcredit import trainer
from flowcredit.errors import InputError
from flowcredit.models import compiling, places
from flowcredit.models.compiling import as_written, compile_network
from flowcredit.models.loading import PipelineFlow, load_model
from flowcredit.recipe_io import load_recipe
from flowcredit.weights import adapter_disabled, prepare_weights, trainable_parameters
from tiny_diffusion import build_tiny_diffusion
from tiny_flux import build_tiny_flux, euler_images, load_tiny_flux, pipeline_images
from tiny_qwen_image import build_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a red circle", "a blue square left of a red circle"]
QUIET = Console(quiet=True)
compiles = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed"
)
"""Torch's own tracing reads that attribute; outside the tests it hides the warning."""
FAMILIES = [build_tiny_flux, build_tiny_sd3, build_tiny_qwen_image, build_tiny_diffusion]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_flux(tmp_path_factory.mktemp("flux"))


def load(folder: Path, **changes: Any) -> PipelineFlow:
    settings: dict[str, Any] = {
        "height": 32,
        "width": 32,
        "guidance_scale": 4.0,
        "max_sequence_length": 24,
        "dtype": torch.float32,
        "device": "cpu",
        "decode_batch_size": 4,
    }
    return load_model(folder, **{**settings, **changes})


def some_state(model: PipelineFlow, count: int = 3) -> torch.Tensor:
    return model.initial_noise(count, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("build", FAMILIES)
def test_slices_decode_to_the_same_images(build: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = build(tmp_path)
    plain, sliced = load(folder), load(folder, vae_slicing=True)
    sizes: list[int] = []
    sliced.pipeline.vae.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    x = some_state(plain)
    torch.testing.assert_close(sliced.decode(x), plain.decode(x), atol=1e-5, rtol=0)
    assert sizes == [1, 1, 1]


def small_tiles(vae: Any) -> None:
    """Tiles of 16 pixels: these images are smaller than a tile of the published size."""
    vae.tile_sample_min_size, vae.tile_latent_min_size = 16, 4


def test_tiles_are_diffusers_own(folder: Path) -> None:
    model, plain = load_tiny_flux(folder), FluxPipeline.from_pretrained(folder, local_files_only=True)
    whole = euler_images(model, PROMPTS)
    tiled = load(folder, vae_tiling=True, guidance_scale=3.5, max_sequence_length=12)
    plain.vae.enable_tiling()
    for vae in (tiled.pipeline.vae, plain.vae):
        small_tiles(vae)
    found = euler_images(tiled, PROMPTS)
    torch.testing.assert_close(found, pipeline_images(plain, PROMPTS), atol=1e-4, rtol=0)
    assert (found - whole).abs().max() > 0.01, "tiles of this size must show"


@pytest.mark.parametrize("setting", ["vae_slicing", "vae_tiling"])
def test_a_vae_that_has_none_is_named(folder: Path, setting: str) -> None:
    model = load_tiny_flux(folder)

    class Undivided(torch.nn.Module):
        pass

    model.pipeline.vae = Undivided()
    settings = load(folder, **{setting: True}).settings
    with pytest.raises(InputError, match=rf"model.{setting} is true, but Undivided has no enable_"):
        places.divide_decoding(model.pipeline, settings)


def gradients_of(model: PipelineFlow) -> dict[str, torch.Tensor]:
    model.network.zero_grad()
    model.velocity(some_state(model, 2), torch.tensor([0.8, 0.4]), model.encode(PROMPTS)).sum().backward()
    return {n: p.grad for n, p in trainable_parameters(model.network).items() if p.grad is not None}


@compiles
@pytest.mark.parametrize("build", [build_tiny_sd3, build_tiny_qwen_image])
def test_compiled_blocks_give_the_same_velocities(build: Callable[[Path], Path], tmp_path: Path) -> None:
    model = load(build(tmp_path))
    cond, x, sigma = model.encode(PROMPTS), some_state(model, 2), torch.tensor([0.8, 0.4])
    with torch.no_grad():
        expected = model.velocity(x, sigma, cond)
        graphs: list[int] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(1)
            return graph.forward

        compile_network(model.network, model.device, backend)
        tried_out = len(graphs)
        torch.testing.assert_close(model.velocity(x, sigma, cond), expected, atol=1e-5, rtol=0)
    assert len(graphs) > tried_out


@compiles
@pytest.mark.parametrize("build", [build_tiny_flux, build_tiny_diffusion])
def test_compiled_blocks_give_the_same_velocities_and_gradients(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    """By the backend that runs the captured graphs as they are: what is compiled, not how fast."""
    model = load(build(tmp_path))
    prepare_weights(model.network, "lora", rank=2, targets=model.lora_targets)
    names = list(model.network.state_dict())
    cond, x = model.encode(PROMPTS), some_state(model, 2)

    def velocity_and_gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.network.zero_grad()
        velocity = model.velocity(x, torch.tensor([0.8, 0.4]), cond)
        velocity.square().mean().backward()
        trained = trainable_parameters(model.network)
        return velocity.detach(), {n: p.grad for n, p in trained.items() if p.grad is not None}

    velocity, gradients = velocity_and_gradients()
    captured: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(1)
        return graph.forward

    compile_network(model.network, model.device, backend)
    tried_out = len(captured)
    compiled, of_compiled = velocity_and_gradients()
    assert len(captured) > tried_out
    torch.testing.assert_close(compiled, velocity, atol=1e-5, rtol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_compiled[name], gradient, msg=name)
    assert list(model.network.state_dict()) == names
    assert all(".lora_" in name for name in gradients)
    with torch.no_grad(), adapter_disabled(model.network):
        reference = model.velocity(x, torch.tensor([0.8, 0.4]), cond)
        with as_written():
            expected = model.velocity(x, torch.tensor([0.8, 0.4]), cond)
    torch.testing.assert_close(reference, expected, atol=1e-5, rtol=0)


@compiles
def test_compiled_blocks_run_again_under_gradient_checkpointing(folder: Path) -> None:
    model = load_tiny_flux(folder)
    prepare_weights(model.network, "full")
    plain = gradients_of(model)
    compile_network(model.network, model.device, "eager")
    model.set_gradient_checkpointing(True)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, plain[name], msg=name)


def recipe_file(folder: Path, target: Path) -> Path:
    (target / "prompts.txt").write_text("a red circle\na blue square\na green cross\n")
    recipe = {
        "name": "tiny",
        "model": {
            "path": str(folder),
            "height": 32,
            "width": 32,
            "max_sequence_length": 12,
            "dtype": "float32",
            "compile": True,
        },
        "prompts": dict.fromkeys(("train", "heldout"), str(target / "prompts.txt")),
        "algorithm": {"name": "g2rpo", "num_steps": 3, "group_size": 3, "strides": [1, 2]},
        "rewards": ["simple_rewards:redness"],
        "train": {
            "iterations": 2,
            "prompts_per_iteration": 2,
            "learning_rate": 1e-3,
            "mixed_precision": "no",
            "ema_decay": 0.5,
        },
        "weights": {"method": "lora", "rank": 2, "alpha": 4},
        "rollout": {"batch_size": 4},
        "evaluation": {"every": 0, "prompts": 3},
    }
    (target / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return target / "recipe.yaml"


@compiles
def test_a_compiled_run_is_on_policy_resumes_exactly_and_exports(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # Captures graphs, and runs them as they are.
    file = recipe_file(folder, tmp_path)
    whole, halves, plain = tmp_path / "whole", tmp_path / "halves", tmp_path / "plain"
    trainer.train(load_recipe(file), whole, QUIET)
    trainer.train(load_recipe(file, ["train.iterations=1"]), halves, QUIET)
    torch.compiler.reset()  # As in a new process, whose first batches are of other sizes.
    trainer.resume(halves, ["train.iterations=2"], QUIET)
    trainer.train(load_recipe(file, ["model.compile=false"]), plain, QUIET)
    for name in ("weights", "optimizer", "ema"):
        states = [load_file(run / f"checkpoints/000002/{name}.safetensors") for run in (whole, halves, plain)]
        assert states[0].keys() == states[1].keys() == states[2].keys()
        for key, value in states[0].items():
            assert torch.equal(value, states[1][key]), key
            torch.testing.assert_close(value, states[2][key], atol=1e-4, rtol=1e-3, msg=key)
    for line in (whole / "log.jsonl").read_text().splitlines():
        assert json.loads(line)["on_policy_deviation"] < 1e-5
    lora, other = (load_file(run / "final/pytorch_lora_weights.safetensors") for run in (whole, plain))
    assert lora.keys() == other.keys()


@compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of torch's compiler in torch itself.
def test_the_default_compiler_computes_the_same(folder: Path) -> None:
    """Inductor itself, with the machine's C++ compiler; skipped where it cannot be used."""
    model = load_tiny_flux(folder)
    cond, x, sigma = model.encode(PROMPTS), some_state(model, 2), torch.tensor([0.8, 0.4])
    with torch.no_grad():
        expected = model.velocity(x, sigma, cond)
    try:
        compile_network(model.network, model.device)
    except InputError as error:
        pytest.skip(str(error))
    with torch.no_grad():
        found = model.velocity(x, sigma, cond)
        with as_written():
            again = model.velocity(x, sigma, cond)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(again, expected)
    assert not torch.equal(found, expected), "fused kernels round otherwise"


@compiles
@pytest.mark.parametrize("said", ["No working C++ compiler found in g++\n  and more", ""])
def test_a_compiler_that_cannot_be_used_is_one_line(folder: Path, said: str) -> None:
    model = load_tiny_flux(folder)

    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError(said)

    with pytest.raises(InputError, match=r"torch cannot compile for cpu: .*model\.compile=false") as caught:
        compile_network(model.network, model.device, backend)
    assert "\n" not in str(caught.value)
    assert said.split("\n")[0] in str(caught.value)
