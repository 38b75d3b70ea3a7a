"""What is installed works anywhere: the package brings its recipes and comparisons along."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flowcredit.compare.arms import read_comparison
from flowcredit.errors import InputError
from flowcredit.recipe_io import load_recipe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "flowcredit"


def test_every_file_that_is_no_source_is_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    named = {path for pattern in patterns["flowcredit"] for path in PACKAGE.glob(pattern) if path.is_file()}
    there = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert there - named == set()
    assert len([path for path in named if path.parent.name == "recipes"]) > 30


def test_recipes_are_found_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/shapes_g2rpo.yaml") == load_recipe(ROOT / "recipes/shapes_g2rpo.yaml")
    comparison = read_comparison(Path("comparisons/dense_grpo_ablations.yaml"))
    tables = [arm.load().noise.table for arm in comparison.arms]
    assert "comparisons/levels/shapes_dense_grpo.yaml" in tables
    # One's own file of the same name comes first, and nothing but these folders is looked for.
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/shapes_g2rpo.yaml").write_text("name: mine\n")
    with pytest.raises(InputError, match=r"recipes/shapes_g2rpo\.yaml"):
        load_recipe("recipes/shapes_g2rpo.yaml")
    for path in ("recipes/../recipes/shapes_dpo.yaml", "shapes/none.yaml", "recipes/none.yaml"):
        with pytest.raises(InputError, match="no such file"):
            load_recipe(path)


def test_the_program_plans_the_bundled_world_in_an_empty_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowcredit", "plan", "recipes/shapes_dense_grpo.yaml", "noise.eta=0.2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "velocity evaluations" in done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of an environment that has the wheel with [report], and nothing else."""
    root = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(root),
        str(copy_of_sources(root)),
    ]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = root.glob("*.whl")
    venv.create(root / "env", with_pip=False)
    python = root / "env" / "bin" / "python"
    # What an install with [report] brings, from this environment; nothing else that happens to be here.
    site = next((root / "env" / "lib").glob("python*")) / "site-packages"
    for name in needed("report"):
        there = distribution(name)
        for top in {file.parts[0] for file in there.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(there.locate_file(top))))
    install = [
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
        str(wheel),
    ]
    subprocess.run([*pip, *install], check=True, capture_output=True)
    return python.parent / "flowcredit"


def needed(*extras: str) -> set[str]:
    """The distributions that an install with these extras brings, as far as they are declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    found = set[tuple[str, frozenset[str]]]()
    waiting = [(Requirement(line).name, frozenset[str]()) for line in lines]
    while waiting:
        here = waiting.pop()
        if here in found:
            continue
        found.add(here)
        for need in map(Requirement, distribution(here[0]).requires or ()):
            markers = [need.marker is None or need.marker.evaluate({"extra": e}) for e in ("", *here[1])]
            if any(markers):
                waiting.append((need.name, frozenset(need.extras)))
    return {name for name, _ in found}


def test_the_core_install_is_small() -> None:
    """What an extra is there to bring, nothing of the core brings by the way."""
    large = {"torchvision", "open_clip_torch", "matplotlib", "pyarrow", "scikit-image", "onnxruntime", "ray"}
    assert not needed() & {*large, "tensorboard", "wandb", "trackio", "gradio", "mkdocs", "pytest"}
    assert "matplotlib" in needed("report")


def copy_of_sources(root: Path) -> Path:
    """Where a build may leave its folders."""
    sources = root / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    return sources


def run_installed(installed: Path, folder: Path, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [str(installed), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_holds_what_runs_and_nothing_else(installed: Path) -> None:
    (wheel,) = installed.parents[2].glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        metadata = content.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.split("/")[0] for name in names} == {"flowcredit", "flowcredit-0.1.0.dist-info"}
    own = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.is_file()}
    own = {path for path in own if "__pycache__" not in path}
    assert {name.removeprefix("flowcredit/") for name in names if name.startswith("flowcredit/")} == own
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert wheel.stat().st_size < 12 << 20


def test_the_installed_program_trains_the_bundled_world_in_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    assert run_installed(installed, tmp_path, "--version") == "flowcredit 0.1.0\n"
    short = [
        "train.iterations=1",
        "train.warmup_iterations=0",
        "train.prompts_per_iteration=2",
        "evaluation.prompts=4",
        "evaluation.images=4",
    ]
    run_installed(installed, tmp_path, "train", "recipes/shapes_g2rpo.yaml", *short, "watch=[]")
    run = tmp_path / "runs" / "shapes-g2rpo"
    assert (run / "final" / "model_index.json").is_file()
    assert "1 of 1 iterations" in (run / "report.html").read_text()
    record = json.loads((run / "log.jsonl").read_text())
    assert record["iteration"] == 1
    python = str(installed.with_name("python"))
    code = "import flowcredit; print(flowcredit.__file__)"
    found = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(installed.parents[1])


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("flowcredit tra", ["train"]),
        (
            "flowcredit train recipes/shapes_g2rpo_",
            ["recipes/shapes_g2rpo_long.yaml", "recipes/shapes_g2rpo_two_rewards.yaml"],
        ),
        ("flowcredit train mine.yaml train.learning", ["train.learning_rate="]),
        ("flowcredit train mine.yaml train.learning_rate=", []),
        ("flowcredit serve-reward aes", ["aesthetic"]),
    ],
)
def test_a_shell_completes(typed: str, offered: list[str], installed: Path, tmp_path: Path) -> None:
    asked = {
        "_FLOWCREDIT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    environment = {**os.environ, **asked}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(installed)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == offered, done.stderr
