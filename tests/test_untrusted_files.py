"""Files from elsewhere are data: no pickle is opened and no code run, whatever file it lies in."""

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_clip
from flowcredit.checkpoint import STATE_FILE, load_checkpoint
from flowcredit.errors import InputError
from flowcredit.evaluation_files import load_evaluation
from flowcredit.models.loading import load_model
from flowcredit.models.text_cache import TextCache
from flowcredit.noise_table import read_noise_table
from flowcredit.prompts import load_prompts
from flowcredit.recipe_io import load_recipe
from flowcredit.rewards import load_reward
from tiny_flux import build_tiny_flux

PACKAGE = Path(__file__).parent.parent / "src" / "flowcredit"
FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy"}
RUNS = {"eval", "exec", "compile", "execfile", "__import__"}


def unsafe(source: str) -> Iterator[str]:
    """Each place of a source that would open a pickle or run a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            # The name of its error opens nothing.
            harmless = names == ["UnpicklingError", "pickle"]
            yield from (
                f"{node.lineno}: {name}" for name in names if name.split(".")[0] in FORBIDDEN and not harmless
            )
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        wrong = (
            (called == "torch.load" and given.get("weights_only") != "True")
            or called in RUNS
            or called in {"os.system", "os.popen", "subprocess.getoutput", "torch.hub.load", "torch.jit.load"}
            or (called.endswith(("yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all")))
            or given.get("allow_pickle", "False") != "False"
            or given.get("trust_remote_code", "False") != "False"
            or given.get("shell", "False") != "False"
            or (".Auto" in f".{called}" and "trust_remote_code" not in given and "from_pretrained" in called)
            or called in {"np.load", "numpy.load", "csv.writer", "csv.DictWriter"}
        )
        if wrong:
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(t, Loader=x)",
        "yaml.unsafe_load(t)",
        "eval(t)",
        "exec(t)",
        "os.system(t)",
        "subprocess.run(t, shell=True)",
        "AutoTokenizer.from_pretrained(f)",
        "AutoModel.from_pretrained(f, trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(unsafe(source))


def test_no_source_opens_a_pickle_or_runs_a_text() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}:{place}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for place in unsafe(file.read_text(encoding="utf-8"))
    ]
    assert not found


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Must not be there at the end; that it can be is tried first."""
    made = tmp_path / "canary"
    pickle.loads(pickle.dumps(Trap(made)))
    made.rmdir()
    yield made
    assert not made.exists(), "code from the file was run"


def plain(trap: Trap, file: Path) -> None:
    file.write_bytes(pickle.dumps({"state_dict": {"weight": trap}}, protocol=2))


def zipped(trap: Trap, file: Path) -> None:
    torch.save({"state_dict": {"weight": trap}}, file)


Write = Callable[[Trap, Path], None]
FORMS = pytest.mark.parametrize("write", [plain, zipped])


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_flux(tmp_path_factory.mktemp("untrusted") / "model")


def load_flux(folder: Path, **changes: Any) -> Any:
    return load_model(
        folder,
        height=32,
        width=32,
        guidance_scale=1.0,
        max_sequence_length=12,
        dtype=torch.float32,
        device="cpu",
        decode_batch_size=1,
        **changes,
    )


NAMES = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}


@FORMS
def test_a_models_folder_with_pickles_beside_its_weights(
    flux: Path, canary: Path, tmp_path: Path, write: Write
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(flux, folder)
    for part in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        for ending in ("bin", "pt", "ckpt"):
            write(Trap(canary), folder / part / f"{NAMES.get(part, 'pytorch_model')}.{ending}")
    load_flux(folder)
    assert not canary.exists()


@FORMS
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_a_models_folder_with_pickles_for_weights(
    flux: Path, canary: Path, tmp_path: Path, part: str, write: Write
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(flux, folder)
    for file in (folder / part).glob("*.safetensors"):
        file.unlink()
    write(Trap(canary), folder / part / f"{NAMES.get(part, 'pytorch_model')}.bin")
    with pytest.raises(InputError, match=str(folder)) as caught:
        load_flux(folder)
    assert "weights_only=False" not in str(caught.value)
    write(Trap(canary), folder / part / f"{NAMES.get(part, 'model')}.safetensors")
    with pytest.raises(InputError, match="no whole safetensors file"):
        load_flux(folder)


@FORMS
@pytest.mark.parametrize(
    "name", ["pytorch_lora_weights.bin", "pytorch_lora_weights.safetensors", "lora.pt", "lora.ckpt"]
)
def test_a_lora(flux: Path, canary: Path, tmp_path: Path, name: str, write: Write) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    write(Trap(canary), folder / name)
    for lora in (folder, folder / name):
        with pytest.raises(InputError, match=r"model\.lora"):
            load_flux(flux, lora=lora)


@FORMS
@pytest.mark.parametrize("ending", ["pt", "pth", "bin", "ckpt", "safetensors"])
def test_rewards_weights(canary: Path, tmp_path: Path, ending: str, write: Write) -> None:
    file = tmp_path / f"weights.{ending}"
    write(Trap(canary), file)
    clip = str(tiny_clip.make_clip(tmp_path / "clip"))
    for name, options in (
        ("aesthetic", {"path": clip, "head": str(file)}),
        ("hps", {"path": str(file), "tokenizer": clip}),
        ("image_reward", {"path": str(file), "tokenizer": clip}),
    ):
        with pytest.raises(InputError, match="without running code from it"):
            load_reward(name, options, "cpu")


@FORMS
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_rewards_folder(canary: Path, tmp_path: Path, name: str, write: Write) -> None:
    clip = tiny_clip.make_clip(tmp_path / "clip")
    (clip / "model.safetensors").unlink()
    write(Trap(canary), clip / name)
    for reward in ("clip", "pickscore"):
        with pytest.raises(InputError, match="clip"):
            load_reward(reward, {"path": str(clip)}, "cpu")


@FORMS
def test_a_text_cache_is_written_anew(canary: Path, tmp_path: Path, write: Write) -> None:
    cache = TextCache(tmp_path)
    write(Trap(canary), tmp_path / f"{sha256(b'a').hexdigest()}.safetensors")
    encoded = cache.through(lambda prompts: {"x": torch.ones(len(prompts), 2)}, ["a"], torch.device("cpu"))
    assert encoded["x"].tolist() == [[1, 1]]


@FORMS
def test_a_checkpoint_with_the_right_digest(canary: Path, tmp_path: Path, write: Write) -> None:
    file = tmp_path / "weights.safetensors"
    write(Trap(canary), file)
    digest = sha256(file.read_bytes()).hexdigest()
    for name in (file.name, "../weights.safetensors"):
        content = {"iteration": 1, "sha256": {name: digest}, "state": {}}
        (tmp_path / STATE_FILE).write_text(json.dumps(content))
        with pytest.raises(InputError, match="checkpoint"):
            load_checkpoint(tmp_path)


READERS: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    *((f"prompts.{ending}", load_prompts) for ending in ("txt", "json", "jsonl", "csv", "tsv", "parquet")),
    *((f"prompts.{ending}", load_prompts) for ending in ("npy", "npz", "pkl", "pt", "pickle")),
    ("table.json", read_noise_table),
    ("evaluation.json", load_evaluation),
    ("recipe.yaml", load_recipe),
)


@FORMS
@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_files_of_text(
    canary: Path, tmp_path: Path, name: str, read: Callable[[Path], Any], write: Write
) -> None:
    write(Trap(canary), tmp_path / name)
    with pytest.raises(InputError, match=name):
        read(tmp_path / name)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/name:os.mkdir ", "!x {}"])
@pytest.mark.parametrize("read", [load_recipe, read_noise_table])
def test_tags_of_yaml(canary: Path, tmp_path: Path, tag: str, read: Callable[[Path], Any]) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(f"name: {tag.format(canary)}\n")
    with pytest.raises(InputError, match=r"file\.yaml:1: the YAML tag"):
        read(file)


def test_yaml_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    for name, text in (("bomb", "\n".join(lines)), ("digits", f"seed: {'9' * 5000}")):
        file = tmp_path / f"{name}.yaml"
        file.write_text(text)
        with pytest.raises(InputError, match=rf"{name}\.yaml:\d+: .*(more than 100,000|5000 digits)"):
            load_recipe(file)


WORDS = '{"iteration": 3, "prompts": ["a"], "rewards": {"x": {"scores": ["many"]}}, "images": null}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON: .* in line 1"),
        ("[]", "its parts are not what they should be"),
        ('{"iteration": 3}', "it has no 'images'"),
        (WORDS, "could not convert string to float: 'many'"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "000001.json").write_text(text)
    with pytest.raises(InputError, match=rf"000001\.json: not an evaluation of flowcredit \({why}\)"):
        load_evaluation(tmp_path / "000001.json")
