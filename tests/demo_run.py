"""Runs of the bundled world for tests of the demo: small, with averaged weights that have moved."""

import io
from pathlib import Path

from rich.console import Console

from flowcredit import trainer
from flowcredit.demo.studio import Studio, open_studio
from flowcredit.recipe_io import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
SMALL = (
    "train.iterations=2",
    "train.warmup_iterations=0",
    "train.learning_rate=2e-3",
    "train.prompts_per_iteration=1",
    "checkpoint.keep_last=2",
    "evaluation.prompts=2",
    "evaluation.images=2",
    "evaluation.every=0",
    "logging.trackers=[]",
    "watch=[{name: shapes_exact}]",
)


def make_run(folder: Path, method: str, *overrides: str) -> Path:
    """Train a recipe of the bundled world for two iterations of one prompt each."""
    recipe = load_recipe(RECIPES / f"shapes_{method}.yaml", [*SMALL, *overrides])
    run_dir = folder / method
    trainer.train(recipe, run_dir, Console(file=io.StringIO()))
    return run_dir


def studio_of(run_dir: Path, *overrides: str) -> Studio:
    return open_studio(load_recipe(run_dir / "recipe.yaml", overrides), run_dir)
