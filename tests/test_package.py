"""What is installed works anywhere: the package brings its recipes and comparisons along."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
