"""What lies at a recipe's paths when a run is gone on with: the same as when it began, or it is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from flowcredit import trainer
from flowcredit.assembly import assemble
from flowcredit.cli_inputs import open_source
from flowcredit.errors import InputError
from flowcredit.inputs import input_digests
from flowcredit.recipe_io import load_recipe
from flowcredit.shapes import bundled_path
from tiny_flux import build_tiny_flux

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)
WEIGHTS = "diffusion_pytorch_model.safetensors"


def recipe_in(root: Path, **more: object) -> Path:
    content = {
        "name": "tiny",
        "model": {
            "path": str(root / "pipeline"),
            "height": 16,
            "width": 16,
            "max_sequence_length": 8,
            "dtype": "float32",
        },
        "prompts": {"train": str(root / "train.jsonl"), "heldout": str(root / "heldout.txt")},
        "algorithm": {"name": "g2rpo", "num_steps": 2, "group_size": 2, "strides": [1]},
        "noise": {"table": str(root / "levels.json")},
        "rewards": ["simple_rewards:redness"],
        "watch": [{"name": "clip", "options": {"path": str(root / "clip")}}],
        "train": {"iterations": 1, "prompts_per_iteration": 1, "mixed_precision": "no"},
        "evaluation": {"every": 0, "prompts": 2, "images": 0},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content | more))
    return root / "recipe.yaml"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with everything that it read beside it."""
    root = tmp_path_factory.mktemp("inputs")
    build_tiny_flux(root / "pipeline")
    shutil.copytree(bundled_path("bundled:shapes-clip"), root / "clip")
    (root / "train.jsonl").write_text('{"prompt": "a red circle", "tag": 1}\n{"prompt": "a blue square"}\n')
    (root / "heldout.txt").write_text("a green circle\na red square\nnever evaluated\n")
    (root / "levels.json").write_text("[0.4, 0.5]")
    trainer.train(load_recipe(recipe_in(root)), root / "run", QUIET)
    return root


def one_weight(file: Path) -> None:
    """A small change of one weight, in the middle of the file."""
    tensors = load_file(file)
    name = sorted(tensors)[len(tensors) // 2]
    flat = tensors[name].view(-1)
    flat[0] = flat[0] * 1.01 + 0.001
    save_file(tensors, file, {"format": "pt"})


def text(file: Path, old: str, new: str) -> None:
    found = file.read_text()
    assert old in found
    file.write_text(found.replace(old, new))


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a prompt to train on": (
        "prompts.train (",
        lambda root: text(root / "train.jsonl", "blue", "green"),
    ),
    "a column": ("prompts.train (", lambda root: text(root / "train.jsonl", '"tag": 1', '"tag": 2')),
    "a further prompt": (
        "prompts.train (",
        lambda root: text(root / "train.jsonl", "square", 'square"}\n{"prompt": "a cross'),
    ),
    "a prompt to evaluate on": (
        "prompts.heldout (",
        lambda root: text(root / "heldout.txt", "green", "white"),
    ),
    "a noise level": ("noise.table (", lambda root: text(root / "levels.json", "0.5", "0.6")),
    "a weight of the network": (
        "model.path, its transformer (",
        lambda root: one_weight(root / "pipeline/transformer" / WEIGHTS),
    ),
    "a setting of the VAE": (
        "model.path, its vae (",
        lambda root: text(root / "pipeline/vae/config.json", '"scaling_factor": ', '"scaling_factor": 1'),
    ),
    "a weight of a reward": (
        "path of the reward clip",
        lambda root: one_weight(root / "clip/model.safetensors"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_not_gone_on_with_on_other_files(change: str, world: Path, tmp_path: Path) -> None:
    told, made = CHANGES[change]
    kept = shutil.copytree(world, tmp_path / "kept")
    before = (world / "run" / "log.jsonl").read_bytes()
    try:
        made(world)
        with pytest.raises(InputError, match="changed since the run began: ") as caught:
            trainer.resume(world / "run", ["train.iterations=2"], QUIET)
        assert told in str(caught.value)
        assert str(caught.value).count(", its ") + str(caught.value).count("prompts.") <= 1
        assert (world / "run" / "log.jsonl").read_bytes() == before
    finally:
        shutil.rmtree(world)
        shutil.copytree(kept, world)


def test_what_does_not_matter_may_change(world: Path, tmp_path: Path) -> None:
    """Blank lines, prompts beyond those evaluated, a table's form, files of variants, notes."""
    kept = shutil.copytree(world, tmp_path / "kept")
    try:
        text(world / "train.jsonl", "\n", "\n\n")
        text(world / "heldout.txt", "never evaluated\n", "another\nand one more\n")
        (world / "levels.json").write_text('{"levels": [0.40, 5e-1]}')
        network = world / "pipeline/transformer"
        shutil.copy(network / WEIGHTS, network / WEIGHTS.replace(".", ".fp16."))
        (world / "pipeline/README.md").write_text("read")
        trainer.resume(world / "run", ["train.iterations=2"], QUIET)
        assert len((world / "run" / "log.jsonl").read_text().splitlines()) == 2
    finally:
        shutil.rmtree(world)
        shutil.copytree(kept, world)


def test_all_that_has_changed_is_told_at_once(world: Path, tmp_path: Path) -> None:
    run = shutil.copytree(world / "run", tmp_path / "run")
    begun = json.loads((run / "inputs.json").read_text())
    assert {"prompts.train", "prompts.heldout", "noise.table", "model.path, its transformer"} <= set(begun)
    (run / "inputs.json").write_text(json.dumps(dict.fromkeys(begun, "0" * 64)))
    with pytest.raises(InputError) as caught:
        trainer.resume(run, [], QUIET)
    assert str(caught.value).count("; ") == len(begun) - 1


def test_a_run_without_digests_is_held_to_the_prompts_of_its_first_evaluation(
    world: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(world / "run", tmp_path / "run")
    (run / "inputs.json").unlink()
    trainer.resume(run, [], QUIET)
    file = run / "evaluations" / "000000.json"
    text(file, "a green circle", "another prompt")
    with pytest.raises(InputError, match=r"changed since the run began: prompts\.heldout"):
        trainer.resume(run, [], QUIET)


def test_digests_that_cannot_be_read_are_told(world: Path, tmp_path: Path) -> None:
    run = shutil.copytree(world / "run", tmp_path / "run")
    (run / "inputs.json").write_text("{")
    with pytest.raises(InputError, match=r"inputs\.json: not readable .*; remove it to go on"):
        trainer.resume(run, [], QUIET)


def test_other_images_of_pairs_and_another_lora_are_seen(world: Path, tmp_path: Path) -> None:
    from PIL import Image

    for place, name in enumerate(("chosen.png", "rejected.png")):
        Image.new("RGB", (16, 16), (place * 200, 0, 0)).save(world / name)
    pairs = world / "pairs.jsonl"
    pairs.write_text('{"prompt": "a red circle", "chosen": "chosen.png", "rejected": "rejected.png"}\n')
    more = {
        "algorithm": {"name": "dpo", "pairs": "file"},
        "noise": {},
        "rewards": [],
        "weights": {"method": "lora", "rank": 1, "alpha": 1},
        "prompts": {"train": str(pairs), "heldout": str(world / "heldout.txt")},
    }
    recipe = load_recipe(recipe_in(world, **more))
    trainer.train(recipe, tmp_path / "run", QUIET)
    lora = tmp_path / "run" / "final"
    Image.new("RGB", (16, 16), (0, 0, 9)).save(world / "rejected.png")
    with pytest.raises(InputError, match=r"began: prompts\.train, its images \(.*pairs\.jsonl\)\. A resumed"):
        trainer.resume(tmp_path / "run", ["train.iterations=2"], QUIET)

    setup = assemble(load_recipe(recipe_in(world, **more), [f"model.lora={lora}"]))
    before = input_digests(setup)
    one_weight(lora / "pytorch_lora_weights.safetensors")
    after = input_digests(setup)
    assert [name for name in before if before[name] != after[name]] == ["model.lora"]


def test_a_run_that_is_looked_at_on_another_model_says_so(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = world / "run", world / "pipeline" / "vae" / "config.json"
    before = config.read_bytes()
    try:
        assert open_source(str(run), ["seed=4"])[1] == run
        assert capsys.readouterr().err == ""
        text(config, '"scaling_factor": ', '"scaling_factor": 1')
        open_source(str(run), [])
        told = f"{run}: changed since the run began: model.path, its vae ({world / 'pipeline'}). What is"
        assert capsys.readouterr().err.startswith(told)
        # A model that was chosen on purpose, or is not there: nothing to say here.
        open_source(str(run), [f"model.path={world / 'clip'}"])
        shutil.move(world / "pipeline", world / "elsewhere")
        open_source(str(run), [])
        assert capsys.readouterr().err == ""
    finally:
        if (world / "elsewhere").exists():
            shutil.move(world / "elsewhere", world / "pipeline")
        config.write_bytes(before)
