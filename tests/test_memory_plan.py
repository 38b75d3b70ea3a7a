"""What `flowcredit plan` says of parameters and memory, against models and against measured memory."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import full_size
import memory
import pytest
import torch
import transformers
from allocations import peak_of
from diffusers import AutoencoderKL, FluxTransformer2DModel
from safetensors import safe_open

from flowcredit.errors import InputError
from flowcredit.memory import folders
from flowcredit.memory.activations import Passes
from flowcredit.memory.counts import NETWORKS, count_parameters, network_shapes
from flowcredit.memory.estimate import Estimate, estimate
from flowcredit.memory.families import FAMILIES, Inputs
from flowcredit.models.loading import ADAPTERS, load_model
from flowcredit.quiet import quiet_libraries
from flowcredit.recipe_io import load_recipe
from flowcredit.shapes import bundled_path
from flowcredit.weights import prepare_weights, trainable_parameters
from tiny_flux import build_tiny_flux

RECIPES = Path(__file__).parent.parent / "recipes"
PUBLISHED = json.loads((Path(folders.__file__).parent / "published.json").read_text())
PARTS = [
    pytest.param(config, id=f"{name} {part}")
    for name, model in PUBLISHED["models"].items()
    for part, config in model["parts"].items()
    if config["_class_name"] != "AutoencoderKLQwenImage"
]

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    with quiet_libraries():
        yield


def planned(recipe: str, *overrides: str) -> Estimate:
    settings = load_recipe(RECIPES / recipe, overrides)
    found = estimate(settings)
    assert found is not None
    return found


@pytest.mark.parametrize("case", memory.CASES)
def test_planned_memory_is_what_a_run_takes(case: str, tmp_path: Path) -> None:
    """Part by part, and the most that rollout, scoring and update take, with and beside what stands."""
    family, changes = memory.CASES[case]
    found = memory.compare(memory.make_recipe(tmp_path, family, changes))
    assert {"VAE", "rollout's own", "training's own", "phase: training"} <= set(found.measured)
    for name, size in found.measured.items():
        assert found.planned[name] == pytest.approx(size, rel=0.2), name
    for name in ("transformer weights", "unet weights", "adapter weights", "moving average"):
        assert found.planned.get(name) == found.measured.get(name), name


def meta_model(config: dict[str, Any]) -> Any:
    kind, fields = config["_class_name"], {k: v for k, v in config.items() if k != "_class_name"}
    with torch.device("meta"):
        if kind == "AutoencoderKL":
            levels = len(fields["block_out_channels"])
            return AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * levels,
                up_block_types=("UpDecoderBlock2D",) * levels,
                **fields,
            )
        if kind in NETWORKS:
            return getattr(diffusers, kind)(**fields)
        model = getattr(transformers, kind)
        return model(model.config_class(**fields))


@pytest.mark.parametrize("config", PARTS)
def test_published_configs_give_the_models_own_parameters(config: dict[str, Any]) -> None:
    kind = config["_class_name"]
    model = meta_model(config)
    if kind in NETWORKS:
        assert network_shapes(kind, config) == {k: tuple(v.shape) for k, v in model.named_parameters()}
    # What save_pretrained writes: buffers such as SD3's positions too, tied weights once.
    stored = {id(value): value.numel() for value in model.state_dict(keep_vars=True).values()}
    assert count_parameters(kind, config) == sum(stored.values())


def test_published_reward_models_are_counted() -> None:
    for reward in PUBLISHED["rewards"]:
        config = transformers.CLIPConfig(**{k: v for k, v in reward.items() if k != "names"})
        with torch.device("meta"):
            model = transformers.CLIPModel(config)
        for name in reward["names"]:
            assert folders.published_reward(Path("somewhere") / name) == model.num_parameters()


def test_families_are_those_of_the_adapters() -> None:
    assert FAMILIES.keys() == ADAPTERS.keys()
    for name, where in ADAPTERS.items():
        module, _, attribute = where.partition(":")
        adapter = getattr(__import__(module, fromlist=[attribute]), attribute)
        assert (FAMILIES[name].part, FAMILIES[name].targets) == (adapter.part, adapter.lora_targets)


def test_trained_parameters_of_the_bundled_model() -> None:
    model = load_model(
        bundled_path("bundled:shapes"),
        height=32,
        width=32,
        guidance_scale=3.5,
        max_sequence_length=12,
        dtype=torch.float32,
        device="cpu",
        decode_batch_size=1,
    )
    total = sum(value.numel() for value in model.network.parameters())
    assert planned("shapes_g2rpo.yaml").trained == total
    prepare_weights(model.network, "lora", rank=5, targets=("attn.to_q", "ff.net.2", "proj_mlp"))
    trained = sum(value.numel() for value in trainable_parameters(model.network).values())
    lora = "weights={method: lora, rank: 5, targets: [attn.to_q, ff.net.2, proj_mlp]}"
    found = planned("shapes_g2rpo.yaml", lora)
    assert found.trained == trained
    by_name = {part.name: part.size for part in found.parts}
    assert by_name["adapter weights"] == by_name["gradients"] == 4 * trained
    assert by_name["Adam's moments"] == 8 * trained


def test_headers_are_read_as_safetensors_has_them(tmp_path: Path) -> None:
    build_tiny_flux(tmp_path)
    file = tmp_path / "transformer/diffusion_pytorch_model.safetensors"
    with safe_open(file, "pt") as opened:
        own = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    assert folders.read_shapes(tmp_path / "transformer") == own
    # A variant that loading would not take, and the same weights in shards.
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert folders.read_shapes(tmp_path / "transformer") is None
    network = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(tmp_path / "transformer"))
    network.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert folders.read_shapes(tmp_path / "shards") == own
    next((tmp_path / "shards").glob("*00002-of*.safetensors")).unlink()
    with pytest.raises(InputError, match=r"00002-of.* is not there"):
        folders.read_shapes(tmp_path / "shards")


@pytest.mark.parametrize(
    "content", [b"", b"\x08", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 4) + b"[1]  "]
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model.safetensors: no safetensors file"):
        folders.read_shapes(tmp_path)


def _layer_norm_of_a_gpu(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.native_layer_norm(x.float(), *rest)[0]


class _RMSNormOfAGPU(torch.autograd.Function):
    """One operation that keeps its float32 input, a scale a row, and gives float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, scale, weight = ctx.saved_tensors
        return grads[0] * scale * weight, (grads[0] * x * scale).flatten(0, -2).sum(0)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_gpus_rules_for_norms_are_those_of_autocast(checkpoints: bool) -> None:
    """No GPU here: norms are made to compute as CUDA's autocast lets them, and measured on the CPU."""
    config = {**memory.NETWORKS["flux"]().config}
    network = FluxTransformer2DModel.from_config(config).requires_grad_(False)
    prepare_weights(network, "full")
    if checkpoints:
        network.enable_gradient_checkpointing()
    rows, tokens, words = 2, 144, 32

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = network(
                hidden_states=torch.zeros(rows, tokens, 16),
                encoder_hidden_states=torch.zeros(rows, words, 16),
                pooled_projections=torch.zeros(rows, 16),
                timestep=torch.ones(rows),
                guidance=torch.ones(rows),
                txt_ids=torch.zeros(words, 3),
                img_ids=torch.zeros(tokens, 3),
                return_dict=False,
            )[0]
        out.float().sum().backward()

    def rms_norm(self: torch.nn.RMSNorm, x: torch.Tensor) -> Any:
        return _RMSNormOfAGPU.apply(x.float(), self.weight)

    with (
        mock.patch("torch.nn.functional.layer_norm", _layer_norm_of_a_gpu),
        mock.patch("torch.nn.RMSNorm.forward", rms_norm),
    ):
        measured = peak_of(step)
    component = folders.Component("transformer", "FluxTransformer2DModel", config, None)
    inputs = Inputs((tokens, 16), (words, 16), 16, (4, 24, 24))

    def run(gpu: bool) -> int:
        passes = Passes(
            NETWORKS[component.kind], component, inputs, 4, 2, gpu, True, 0, lambda name: False, checkpoints
        )
        return passes.training(rows, accumulating=False)[0]

    assert run(gpu=True) == pytest.approx(measured, rel=0.1)
    if not checkpoints:
        assert run(gpu=False) < 0.95 * run(gpu=True)


FEW_BLOCKS: dict[str, dict[str, Any]] = {
    "FLUX.1-dev": {"num_layers": 1, "num_single_layers": 2},
    "stable-diffusion-3.5-medium": {"num_layers": 3, "dual_attention_layers": [0]},
    "Qwen-Image": {"num_layers": 2},
}


@pytest.mark.parametrize("name", FEW_BLOCKS)
@pytest.mark.parametrize(("method", "checkpoints"), [("lora", True), ("lora", False), ("full", True)])
def test_activations_at_full_width_are_those_of_torchs_fake_tensors(
    name: str, method: full_size.Method, checkpoints: bool
) -> None:
    case = full_size.make_case(name, method, checkpoints, FEW_BLOCKS[name])
    assert full_size.planned(case) == pytest.approx(full_size.faked(case), rel=0.1)


def test_offloaded_parts_are_not_there_while_the_network_works() -> None:
    nothing = ("model.offload=[]", "scoring.offload=false")
    whole = planned("sd35_medium_g2rpo_lora_24gb.yaml", *nothing)
    waiting = ("model.offload=[text_encoders]", "scoring.offload=true")
    less = planned("sd35_medium_g2rpo_lora_24gb.yaml", *waiting)
    sizes = {part.name: part.size or 0 for part in whole.parts}
    away = sizes["text encoders"] + sizes["reward pickscore"]
    assert whole.phases["training"] - less.phases["training"] == away
    assert whole.phases["scoring"] - less.phases["scoring"] == sizes["text encoders"]


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.name)
def test_every_recipe_is_planned_before_anything_is_downloaded(file: Path) -> None:
    found = planned(file.name)
    assert found.peak is not None
    assert found.trained is not None
    assert not found.unknown or {"geneval", "image_reward"} >= {
        name.removeprefix("reward ") for name in found.unknown
    }


def test_the_recipes_for_one_gpu_fit_it() -> None:
    """With a tenth left for the device's own, workspaces and fragments."""
    for recipe, gigabytes in (("sd35_medium_g2rpo_lora_24gb.yaml", 24), ("flux1_dev_g2rpo_lora.yaml", 80)):
        peak = planned(recipe).peak
        assert peak is not None
        assert peak < 0.9 * gigabytes * 2**30, recipe
