"""A look at a recipe before anything is loaded: it refuses what loading refuses, lists what is missing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowcredit.assembly import build_model
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.export import LORA_FILE, export_weights
from flowcredit.memory.estimate import estimate
from flowcredit.plan_command import plan_command
from flowcredit.readiness import look_over
from flowcredit.recipe_io import load_recipe
from tiny_diffusion import build_tiny_diffusion
from tiny_flux import build_tiny_flux
from tiny_qwen_image import build_tiny_qwen_image
from tiny_sd3 import build_tiny_sd3

RECIPES = Path(__file__).parent.parent / "recipes"
BUILD: dict[str, Callable[[Path], Path]] = {
    "flux": build_tiny_flux,
    "sd3": build_tiny_sd3,
    "qwen": build_tiny_qwen_image,
    "diffusion": build_tiny_diffusion,
}
PART = {"flux": "transformer", "sd3": "transformer", "qwen": "transformer", "diffusion": "unet"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = BUILD[family](tmp_path_factory.mktemp(family) / "model")
        return folders[family]

    return folder


def recipe_for(folder: Path, *overrides: str) -> Recipe:
    size = ["model.height=32", "model.width=32", "model.max_sequence_length=24", "model.guidance_scale=1"]
    return load_recipe(
        RECIPES / "shapes_g2rpo.yaml", [f"model.path={folder}", "model.device=cpu", *size, *overrides]
    )


def refused(act: Callable[[Recipe], object], recipe: Recipe) -> str:
    with pytest.raises(InputError) as caught:
        act(recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", BUILD)
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_what_loads_is_let_pass(
    built: Callable[[str], Path], tmp_path: Path, family: str, weights: str
) -> None:
    """All families, in full and with a LoRA below it that a run left."""
    recipe = recipe_for(built(family), f"weights.method={weights}")
    assert look_over(recipe) == ()
    model = build_model(recipe)
    if weights == "lora":
        lora = export_weights(model, tmp_path / "lora")
        with_lora = recipe_for(built(family), f"model.lora={lora}")
        assert look_over(with_lora) == ()
        build_model(with_lora)


SETTINGS: dict[str, tuple[str, list[str], str]] = {
    "size": ("flux", ["model.height=36"], "height is 36 pixels; this model makes multiples of 8"),
    "size of sd3": ("sd3", ["model.width=36"], "width is 36 pixels; this model makes multiples of 8"),
    "size of sd": ("diffusion", ["model.width=36"], "width is 36 pixels; this model makes multiples of 8"),
    "larger than sd3": ("sd3", ["model.width=4096"], "width is 4096 pixels; this model makes at most"),
    "text": ("flux", ["model.max_sequence_length=513"], "max_sequence_length is 513 tokens; expected 1 to"),
    "text of qwen": ("qwen", ["model.max_sequence_length=1025"], "expected 1 to 1024"),
    "negative": ("flux", ["model.negative_prompt=blur"], "negative_prompt is 'blur', but this model reads"),
    "negative of sd": ("diffusion", ["model.negative_prompt=blur"], "reads none at guidance_scale 1"),
    "targets": (
        "flux",
        ["weights={method: lora, targets: [to_q, to_w]}"],
        "LoRA target 'to_w' names no linear layer of FluxTransformer2DModel; nearest: ",
    ),
    "target of a convolution": (
        "diffusion",
        ["weights={method: lora, targets: [conv_in]}"],
        "LoRA target 'conv_in' names no linear layer of UNet2DConditionModel; nearest: ",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_the_model_cannot_have_are_refused_in_the_words_of_loading(
    built: Callable[[str], Path], case: str
) -> None:
    family, overrides, words = SETTINGS[case]
    recipe = recipe_for(built(family), *overrides)
    assert words in refused(look_over, recipe)
    loaded = refused(build_model, recipe)
    assert loaded == refused(lambda asked: plan_command(asked, as_json=False), recipe)


def cut(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def pointer(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def reconfigured(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def renamed(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({f"x.{name}": value for name, value in tensors.items()}, file, metadata={"format": "pt"})


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


FILES: dict[str, tuple[str, str, Callable[[Path], None], str]] = {
    "cut short": ("flux", "transformer", cut, "no whole safetensors file of"),
    "text encoder cut short": ("sd3", "text_encoder_3", cut, "no whole safetensors file of"),
    "pointer": ("flux", "vae", pointer, "no safetensors file"),
    "more layers": (
        "flux",
        "transformer",
        reconfigured(num_layers=2),
        "weights that are missing",
    ),
    "fewer layers": ("sd3", "transformer", reconfigured(num_layers=1), "weights that are unknown"),
    "other width": ("qwen", "transformer", reconfigured(joint_attention_dim=24), "of another shape"),
    "other names": ("diffusion", "unet", renamed, "unet: weights that are missing"),
    "other words": ("flux", "text_encoder", reconfigured(vocab_size=77), "text_encoder: weights that are of"),
    "other depth of t5": ("flux", "text_encoder_2", reconfigured(d_ff=33), "text_encoder_2: weights that"),
    "no config": ("flux", "transformer", no_config, "transformer/config.json: no such file"),
    "no config of t5": ("flux", "text_encoder_2", no_config, "text_encoder_2/config.json: no such file"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_do_not_load_are_refused_and_named(
    built: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    family, part, change, words = FILES[case]
    folder = tmp_path / "model"
    shutil.copytree(built(family), folder)
    change(folder / part)
    recipe = recipe_for(folder)
    assert words in refused(lambda asked: plan_command(asked, as_json=False), recipe)
    assert f"model/{part}" in refused(look_over, recipe)
    refused(build_model, recipe)


def test_parts_that_are_missing(built: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(built("flux"), folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    file.unlink()
    recipe = recipe_for(folder)
    (line,) = look_over(recipe)
    assert line.startswith(f"{folder}/transformer: no weights; expected diffusion_pytorch_model.safetensors")
    assert "not there yet" in plan_command(recipe, as_json=False)
    assert json.loads(plan_command(recipe, as_json=True))["not_there"] == [line]
    assert "transformer: no weights; expected diffusion_pytorch_model" in refused(build_model, recipe)
    variant = folder / "transformer" / "diffusion_pytorch_model.fp16.safetensors"
    shutil.copyfile(next((folder / "vae").glob("*.safetensors")), variant)
    assert (
        "no weights that are taken (it has diffusion_pytorch_model.fp16.safetensors)" in look_over(recipe)[0]
    )
    assert "no weights that are taken" in refused(build_model, recipe)
    # Torch's older format is let pass: it has no header to look at.
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"")
    assert look_over(recipe) == ()
    shutil.rmtree(folder / "transformer")
    assert "transformer/config.json: no such file" in refused(look_over, recipe)


def test_a_lora_of_another_model_is_refused(built: Callable[[str], Path], tmp_path: Path) -> None:
    loras = {}
    for family in ("sd3", "diffusion"):
        model = build_model(recipe_for(built(family), "weights.method=lora"))
        loras[family] = export_weights(model, tmp_path / family)
    narrow = tmp_path / "narrow" / LORA_FILE
    narrow.parent.mkdir()
    own = build_model(recipe_for(built("flux"), "weights.method=lora"))
    tensors = load_file(export_weights(own, tmp_path / "own") / LORA_FILE)
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    save_file({**tensors, name: torch.zeros(2, 5)}, narrow, metadata={"format": "pt"})
    for lora, why in (
        (loras["sd3"], "it adapts transformer_blocks."),
        (loras["diffusion"], "its layers are those of a unet, not of a transformer"),
        (narrow, "inputs there, 5 in the LoRA"),
    ):
        recipe = recipe_for(built("flux"), f"model.lora={lora}")
        told = refused(look_over, recipe)
        assert f"model.lora {lora}: is no LoRA for this FluxTransformer2DModel: " in told
        assert why in told
        assert refused(build_model, recipe) == told


def test_what_is_not_there_yet_is_listed_setting_by_setting(tmp_path: Path) -> None:
    recipe = load_recipe(
        RECIPES / "flux1_dev_g2rpo_lora.yaml",
        [f"model.lora={tmp_path}/lora", f"noise={{table: {tmp_path}/psi.json}}"],
    )
    missing = look_over(recipe)
    beginnings = ("model.lora ", "model.path ", "prompts.train ", "prompts.heldout ", "noise.table ")
    for beginning in (*beginnings, "reward hps, path ", "reward clip, path "):
        assert sum(line.startswith(beginning) for line in missing) == 1, beginning
    text = plan_command(recipe, as_json=False)
    assert all(f"  {line}" in text for line in missing)
    assert look_over(load_recipe(RECIPES / "shapes_g2rpo.yaml")) == ()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rewards=[clop]"], "unknown reward 'clop' (did you mean 'clip'?)"),
        (["watch=[]", "rewards=[{name: clip, options: {pat: x}}]"], "reward 'clip': unknown option 'pat'"),
        (["evaluation.group_by=colour"], "evaluation.group_by is 'colour'"),
        (["prompts.train=prompts.doc"], "prompts.doc: not a prompt file by its ending"),
        (["prompts.column=text"], 'no "text" in this row'),
        (["noise={table: psi.json}"], "psi.json: a noise table has 3 levels: expected one for each of 6 "),
        (["algorithm={name: dpo, pairs: file}", "rewards=[]"], "no column 'chosen' of images"),
    ],
)
def test_settings_and_files_that_do_not_fit_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.doc").write_text("a red circle\n")
    Path("psi.json").write_text("[0.1, 0.2, 0.3]")
    assert words in refused(look_over, load_recipe(RECIPES / "shapes_g2rpo.yaml", overrides))


def test_sharded_parts_are_divided_among_processes() -> None:
    recipe = load_recipe(RECIPES / "flux1_dev_g2rpo_hps.yaml", ["parallel.sharding=sharded"])
    one, eight = estimate(recipe, 1), estimate(recipe, 8)
    assert one is not None
    assert eight is not None
    before, after = ({part.name: part.size or 0 for part in each.parts} for each in (one, eight))
    for name in ("transformer weights", "Adam's moments", "gradients", "optimizer's own"):
        assert after[name] == pytest.approx(before[name] / 8, rel=1e-6), name
    assert after["text encoders"] == before["text encoders"]
    # A block of FLUX.1-dev has 340 million numbers, of a block of its second kind 141 million.
    assert 2 * 339e6 * 2 < after["gathered weights"] < 2 * 341e6 * 2 + 300e6
    assert one.peak is not None
    assert eight.peak is not None
    saved = sum(before[name] - after[name] for name in ("transformer weights", "Adam's moments", "gradients"))
    assert eight.peak < one.peak - saved
    text = plan_command(recipe, as_json=False)
    assert "on each of 2 processes, the network's parts divided among them" in text
    assert json.loads(plan_command(recipe, True, 8))["model"]["peak_bytes"] == eight.peak
    with pytest.raises(InputError, match=r"--processes 1, but parallel\.sharding is 'sharded'"):
        plan_command(recipe, as_json=False, asked=1)
