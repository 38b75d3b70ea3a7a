"""One process of several: runs variants of a recipe one after the other. Started by ``test_distributed``.

torchrun ... distributed_worker.py RECIPE '{"name": ["setting=value", ...], ...}'
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from breaking import broken_losses
from flowcredit import trainer
from flowcredit.distributed import joined
from flowcredit.recipe_io import load_recipe

recipe, variants = sys.argv[1:]
with joined(timeout_s=120) as world:
    for name, overrides in json.loads(variants).items():
        settings = load_recipe(recipe, [*overrides, f"name={name}"])
        with broken_losses({0: 0, 1: 1} if name == "fault" else {}, world.rank):
            trainer.train(settings, Path(settings.output) / name, Console(quiet=True))
