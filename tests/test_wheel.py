"""The wheel, built, installed beside its core requirements alone, and run in an empty folder."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "flowcredit"
LARGEST = 10 * 2**20
"""Bytes of a wheel; nearly all of it is the bundled model, 8.9 MiB."""
SMALL = (
    "train.iterations=1",
    "train.warmup_iterations=0",
    "train.prompts_per_iteration=1",
    "algorithm.train_steps=[0]",
    "algorithm.group_size=2",
    "algorithm.strides=[1]",
    "watch=[]",
    "evaluation.prompts=2",
    "evaluation.images=1",
)


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """A command's output, in an environment without the repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files in its folder, and finds those of an earlier one."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, source / "src/flowcredit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", "dist")
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def requirements(name: str, extras: frozenset[str] = frozenset({""})) -> set[str]:
    """The installed distributions that one needs, itself among them."""
    found, waiting = set[tuple[str, frozenset[str]]](), [(name, extras)]
    while waiting:
        here = waiting.pop()
        if here in found:
            continue
        found.add(here)
        for line in distribution(here[0]).requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in here[1]):
                waiting.append((need.name, frozenset({"", *need.extras})))
    return {each for each, _ in found}


def core() -> set[str]:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return set.union(*(requirements(Requirement(line).name) for line in lines))


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and of the rest what its core install brings."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in core():
        there = distribution(name)
        for top in {
            file.parts[0] for file in there.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(there.locate_file(top))))
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    mine = {
        f"flowcredit/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = about.removesuffix("METADATA")
    assert {name for name in names if not name.startswith(info)} == mine
    assert f"{info}licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert wheel.stat().st_size < LARGEST
    for kind in ("recipes/shapes_g2rpo.yaml", "comparisons/g2rpo_table1.yaml", "report/page.html.j2"):
        assert f"flowcredit/{kind}" in names
    weights = "flowcredit/shapes/assets/pipeline/transformer/diffusion_pytorch_model.safetensors"
    assert weights in names


def test_the_core_install_is_small() -> None:
    """What only an extra brings is not needed by the core, not even by way of something else."""
    heavy = {"torchvision", "open_clip_torch", "matplotlib", "pyarrow", "scikit-image", "gradio", "ray"}
    assert not core() & {*heavy, "onnxruntime", "tensorboard", "wandb", "mkdocs", "pytest"}


def test_the_bundled_world_is_trained_in_an_empty_folder(place: Path, tmp_path: Path) -> None:
    where = run(place / "python", "-c", "import flowcredit; print(flowcredit.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(place.parent)
    assert run(place / "flowcredit", "--version", cwd=tmp_path) == "flowcredit 0.1.0\n"
    run(place / "flowcredit", "train", "recipes/shapes_g2rpo.yaml", *SMALL, cwd=tmp_path, OMP_NUM_THREADS="1")
    done = tmp_path / "runs/shapes-g2rpo"
    assert (done / "final/transformer/config.json").is_file()
    assert len((done / "log.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("flowcredit tra", {"train"}),
        ("flowcredit serve-reward --p", {"--port"}),
        ("flowcredit plan recipes/shapes_g2", {
            "recipes/shapes_g2rpo.yaml", "recipes/shapes_g2rpo_long.yaml",
            "recipes/shapes_g2rpo_two_rewards.yaml",
        }),
        ("flowcredit train mi", {"mine.yaml"}),
        ("flowcredit train runs/", set()),
        ("flowcredit evaluate runs/", {"runs/first"}),
    ],
)  # fmt: skip
def test_bash_is_told_what_may_follow(place: Path, tmp_path: Path, typed: str, offered: set[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/recipe.yaml").touch()
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    said = run(place / "flowcredit", cwd=tmp_path, _FLOWCREDIT_COMPLETE="complete_bash", **asked).split()
    assert set(said) == offered


def test_the_script_for_bash_asks_the_program(place: Path, tmp_path: Path) -> None:
    script = run(place / "flowcredit", "--show-completion", "bash", cwd=tmp_path)
    assert "_FLOWCREDIT_COMPLETE=complete_bash" in script
    assert "complete -o default -F _flowcredit_completion flowcredit" in script
