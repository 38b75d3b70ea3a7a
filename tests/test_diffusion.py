"""Stable Diffusion as a flow, against diffusers' own pipeline with DDIM, and what it refuses."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from adapters import train_stand_in, updated_once, velocities_by_row, with_and_without_checkpointing
from flowcredit.errors import InputError
from flowcredit.export import export_weights
from flowcredit.weights import prepare_weights
from tiny_diffusion import build_tiny_diffusion, load_plain, load_tiny_diffusion, plain_images
from tiny_flux import euler_images

PROMPTS = ["a red circle", "a blue square left of a red circle"]
SCHEDULERS: dict[str, dict[str, Any]] = {
    "epsilon": {},
    "epsilon to the end": {"set_alpha_to_one": True},
    "v": {"prediction_type": "v_prediction"},
    "v from pure noise": {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "set_alpha_to_one": True,
    },
}

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A pipeline folder by its scheduler, built once."""
    built: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in built:
            built[kind] = build_tiny_diffusion(tmp_path_factory.mktemp("sd"), **SCHEDULERS[kind])
        return built[kind]

    return folder


@pytest.fixture(scope="module")
def folder(folder_of: Folder) -> Path:
    return folder_of("epsilon")


PARITY = [
    *(
        (kind, scale, *size)
        for kind in ("epsilon", "v")
        for scale in (1.0, 5.0)
        for size in ((32, 32), (24, 40))
    ),
    ("epsilon to the end", 5.0, 24, 40),
    ("v from pure noise", 5.0, 24, 40),
]


@pytest.mark.parametrize(("kind", "guidance_scale", "height", "width"), PARITY)
def test_without_noise_the_image_is_the_pipelines(
    folder_of: Folder, kind: str, guidance_scale: float, height: int, width: int
) -> None:
    plain = load_plain(folder_of(kind))
    expected = plain_images(plain, PROMPTS, guidance_scale=guidance_scale, height=height, width=width)
    model = load_tiny_diffusion(folder_of(kind), guidance_scale=guidance_scale, height=height, width=width)
    images = euler_images(model, PROMPTS, num_steps=4)
    assert images.shape == (2, 3, height, width)
    assert expected.std() > 0.1, "a grey image would agree with anything"
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_steps", [2, 10])
def test_parity_at_other_numbers_of_steps_and_of_the_adapters_own_pipeline(
    folder: Path, num_steps: int
) -> None:
    model = load_tiny_diffusion(folder)
    expected = plain_images(load_plain(folder), PROMPTS, num_steps=num_steps)
    images = euler_images(model, PROMPTS, num_steps=num_steps)
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    again = plain_images(model.pipeline, PROMPTS, num_steps=num_steps)
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)


def test_parity_would_notice_guidance_schedule_and_text(folder_of: Folder) -> None:
    model = load_tiny_diffusion(folder_of("epsilon"))
    images = euler_images(model, PROMPTS, num_steps=4)
    negative = load_tiny_diffusion(folder_of("epsilon"), negative_prompt="a red square")
    weaker = load_tiny_diffusion(folder_of("epsilon"), guidance_scale=4.0)
    others = {
        "guidance": euler_images(weaker, PROMPTS, num_steps=4),
        "negative": euler_images(negative, PROMPTS, num_steps=4),
        "end": euler_images(load_tiny_diffusion(folder_of("epsilon to the end")), PROMPTS, num_steps=4),
        "prediction": euler_images(load_tiny_diffusion(folder_of("v")), PROMPTS, num_steps=4),
        "text": euler_images(model, ["a red circles", PROMPTS[1]], num_steps=4),
    }
    for name, other in others.items():
        assert (images - other).abs().max() > 4e-4, name
    expected = plain_images(load_plain(folder_of("epsilon")), PROMPTS, negative_prompt="a red square")
    torch.testing.assert_close(others["negative"], expected, atol=1e-4, rtol=0)


class Oracle(torch.nn.Module):
    """A network that knows image and noise, and notes when it is asked."""

    def __init__(self, x0: torch.Tensor, eps: torch.Tensor, alphas: torch.Tensor, v: bool) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(()))
        self.x0, self.eps, self.alphas, self.v = x0, eps, alphas, v
        self.asked: list[float] = []

    def forward(self, noisy: torch.Tensor, timestep: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        self.asked += timestep.tolist()
        a = self.alphas[timestep.long()].sqrt()[:, None, None, None]
        b = (1 - self.alphas[timestep.long()]).sqrt()[:, None, None, None]
        torch.testing.assert_close(noisy, a * self.x0 + b * self.eps, atol=2e-5, rtol=0)
        return (a * self.eps - b * self.x0 if self.v else self.eps,)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_states_lie_on_straight_lines_between_the_ends_of_sampling(folder_of: Folder, kind: str) -> None:
    """Where image and noise are known: the network sees x_t of diffusers' own add_noise, v is constant."""
    model = load_tiny_diffusion(folder_of(kind), guidance_scale=1.0)
    scheduler = load_plain(folder_of(kind)).scheduler
    generator = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, 1, 4, 8, 8, generator=generator)
    noisy = scheduler.add_noise(x0, eps, torch.tensor([999]))
    oracle = Oracle(x0, eps, scheduler.alphas_cumprod, kind.startswith("v"))
    model.network = oracle
    grid = model.time_grid(5)
    cond = model.encode(["a"])
    x, velocities = noisy, []
    for k in range(5):
        velocities.append(model.velocity(x, grid[k].to(torch.float32).expand(1), cond))
        x = x + float(grid[k + 1] - grid[k]) * velocities[-1]
    assert oracle.asked == [999, 799, 599, 399, 199]
    for v in velocities[1:]:
        torch.testing.assert_close(v, velocities[0], atol=1e-4, rtol=0)
    last = float(scheduler.final_alpha_cumprod)
    end = math.sqrt(last) * x0 + math.sqrt(1 - last) * eps
    pixels = model.pipeline.vae.decode(end / 0.18215, return_dict=False)[0]
    torch.testing.assert_close(model.decode(x), (pixels / 2 + 0.5).clamp(0, 1), atol=1e-4, rtol=0)


def test_times_between_those_of_training_are_interpolated(folder: Path) -> None:
    model = load_tiny_diffusion(folder, guidance_scale=1.0)
    asked: list[float] = []
    model.network.register_forward_pre_hook(lambda _, given: asked.extend(given[1].tolist()))
    sigma = torch.tensor([1.0, 0.97, 0.5, 0.01, 1e-4])
    x = model.initial_noise(5, torch.Generator().manual_seed(0))
    v = model.velocity(x, sigma, model.encode(["a"] * 5))
    assert torch.isfinite(v).all()
    assert asked[0] == 999
    assert sorted(asked, reverse=True) == asked
    assert 0 <= asked[-1] < 1
    assert any(time != round(time) for time in asked)


# Sums over threads are ordered by the batch.
@pytest.mark.usefixtures("one_thread")
def test_a_rows_velocity_is_its_own(folder: Path) -> None:
    model = load_tiny_diffusion(folder)
    together, alone, under_another_text = velocities_by_row(model, [*PROMPTS, "a"])
    # Convolutions over one row and over several are summed in another order; torch 2.7 differs by 1.7e-5.
    torch.testing.assert_close(together, alone, atol=4e-5, rtol=1e-5)
    assert (under_another_text - alone).abs().flatten(1).amax(1).min() > 1e-3


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradient_checkpointing_keeps_every_gradient(
    folder: Path, method: Literal["full", "lora"], autocast: torch.dtype | None
) -> None:
    found = with_and_without_checkpointing(load_tiny_diffusion(folder, autocast=autocast), method, PROMPTS)
    assert found.checkpointed_runs == 2 * found.plain_runs > 0, "the blocks did not run again"
    assert found.checkpointed.keys() == found.plain.keys()
    assert any(bool(gradient.any()) for gradient in found.plain.values())
    torch.testing.assert_close(found.checkpointed, found.plain)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_update_moves_the_trained_weights_alone(folder: Path, method: Literal["full", "lora"]) -> None:
    done = updated_once(load_tiny_diffusion(folder), method, PROMPTS)
    assert done.metrics["on_policy_deviation"] == 0.0
    assert done.metrics["grad_norm"] > 0
    assert done.moved <= done.trained
    # Text leaves the last block of a joint transformer unused, and what leads there has no gradient.
    assert done.reached > 0.6


def test_autocast_stays_close(folder_of: Folder) -> None:
    exact, reduced = (load_tiny_diffusion(folder_of("v"), autocast=dtype) for dtype in (None, torch.bfloat16))
    cond, x = exact.encode(PROMPTS), exact.initial_noise(2, torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.3])
    with torch.no_grad():
        v, rounded = exact.velocity(x, sigma, cond), reduced.velocity(x, sigma, cond)
    assert rounded.dtype == torch.float32
    assert 1e-5 < (v - rounded).norm() / v.norm() < 0.05


def test_exported_lora_has_the_same_strength_in_plain_diffusers(folder: Path, tmp_path: Path) -> None:
    model = load_tiny_diffusion(folder)
    train_stand_in(model, "lora", size=0.1)
    images = euler_images(model, PROMPTS, num_steps=4)
    lora = export_weights(model, tmp_path / "lora")
    plain = load_plain(folder)
    assert (images - plain_images(plain, PROMPTS)).abs().max() > 0.02, "the LoRA does nothing"
    plain.load_lora_weights(lora)
    torch.testing.assert_close(plain_images(plain, PROMPTS), images, atol=1e-5, rtol=0)


def test_exported_pipeline_gives_the_trained_image(folder: Path, tmp_path: Path) -> None:
    model = load_tiny_diffusion(folder)
    train_stand_in(model, "full", size=0.02)
    images = euler_images(model, PROMPTS, num_steps=4)
    export = export_weights(model, tmp_path / "export")
    torch.testing.assert_close(plain_images(load_plain(export), PROMPTS), images, atol=1e-5, rtol=0)
    assert (images - euler_images(load_tiny_diffusion(folder), PROMPTS, num_steps=4)).abs().max() > 0.02
    source = folder / "scheduler" / "scheduler_config.json"
    assert (export / "scheduler" / "scheduler_config.json").read_bytes() == source.read_bytes()


def test_a_safety_checker_is_not_read_and_is_kept(tmp_path: Path) -> None:
    folder = build_tiny_diffusion(tmp_path / "sd")
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "model.safetensors").write_bytes(b"as it was")
    model = load_tiny_diffusion(folder)
    assert model.pipeline.safety_checker is None
    export = export_weights(model, tmp_path / "export")
    assert (export / "safety_checker" / "model.safetensors").read_bytes() == b"as it was"


def test_truncated_prompts_are_counted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_tiny_diffusion(folder)
    over = " ".join(["red"] * 300)
    assert model.truncated(["a red circle", over]) == {"clip": 1}
    assert torch.isfinite(euler_images(model, [over, "a"], num_steps=2)).all()
    assert capfd.readouterr() == ("", "")


def test_grids_have_their_steps_up_to_the_number_of_training(folder_of: Folder) -> None:
    for kind in ("epsilon", "epsilon to the end"):
        model = load_tiny_diffusion(folder_of(kind))
        for num_steps in (1, 3, 7, 50):
            assert model.time_grid(num_steps).shape == (num_steps + 1,)
        with pytest.raises(InputError, match="num_steps is 1001; expected 1 to 1000"):
            model.time_grid(1001)
    assert load_tiny_diffusion(folder_of("epsilon to the end")).time_grid(1000).shape == (1001,)
    with pytest.raises(InputError, match="scheduler: at 1000 steps a time grid does not fall"):
        load_tiny_diffusion(folder_of("epsilon")).time_grid(1000)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({"prediction_type": "sample"}, "prediction_type is 'sample'; expected epsilon or v_prediction"),
        ({"rescale_betas_zero_snr": True}, r"pure noise at the last timestep .* expected 'v_prediction'"),
        ({"thresholding": True}, "thresholding is true"),
    ],
)
def test_schedulers_that_no_flow_follows(tmp_path: Path, scheduler: dict[str, Any], message: str) -> None:
    folder = build_tiny_diffusion(tmp_path)
    file = folder / "scheduler" / "scheduler_config.json"
    changed = json.loads(file.read_text()) | {"_class_name": "DDIMScheduler", "clip_sample": False}
    file.write_text(json.dumps(changed | scheduler))
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        load_tiny_diffusion(folder)


def test_other_schedulers_sizes_and_targets_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"height is 36 pixels; .*multiples of 8, such as 32 or 40"):
        load_tiny_diffusion(folder, height=36)
    with pytest.raises(InputError, match=r"'attn1' names no linear layer of UNet2DConditionModel"):
        prepare_weights(load_tiny_diffusion(folder).network, "lora", targets=["attn1"])
    other = build_tiny_diffusion(tmp_path)
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(other / "scheduler")
    index = json.loads((other / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (other / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"FlowMatchEulerDiscreteScheduler has no noise levels"):
        load_tiny_diffusion(other)
