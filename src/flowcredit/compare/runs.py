"""The runs of a comparison: folders, recipes, lengths; what of them is done, and what still has to be."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

from flowcredit.compare.arms import Arm, Comparison
from flowcredit.compare.budget import Budget, iterations_within
from flowcredit.config import Recipe
from flowcredit.costs import Cost, iteration_costs
from flowcredit.errors import InputError
from flowcredit.recipe_io import Change, dump_recipe, load_recipe, recipe_diff
from flowcredit.run_folder import RunFolder, write_text

PLACES = ("output",)
"""Settings that say where a run lies: the same place may be written in several ways."""


LOOK_S = 0.2
ITS_OWN = ("name", "output", "seed", "train.iterations", "evaluation.every")
"""Settings that follow from the comparison itself."""


@dataclass(frozen=True)
class Run:
    """One seed of an arm: the run's folder, and its recipe with the length that the budget gives it."""

    arm: Arm
    seed: int
    folder: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def iterations(self) -> int:
        return self.recipe.train.iterations

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe that the run is started with."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def console_file(self) -> Path:
        """What the run's processes said."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def memory_file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.memory.json")

    def costs(self) -> list[Cost]:
        """Of the first 0, 1, 2, ... iterations."""
        return list(accumulate(islice(iteration_costs(self.recipe), self.iterations), initial=Cost()))

    @property
    def trained(self) -> bool:
        """Whether the run is finished: evaluated at its end, and its weights exported with their card."""
        folder = RunFolder(self.folder)
        return folder.evaluation(self.iterations).is_file() and (folder.final / "README.md").is_file()

    def done(self) -> int:
        """Finished iterations, as its log tells."""
        return len(RunFolder(self.folder).logged_iterations())

    def train(self) -> list[str]:
        """The words that start the run or go on with it, behind ``flowcredit``."""
        if RunFolder(self.folder).recipe.is_file():
            return ["train", "--resume", str(self.folder)]
        if self.folder.is_dir():
            # Left by a process that was killed before it wrote the recipe.
            RunFolder(self.folder).recipe.with_name("recipe.yaml.partial").unlink(missing_ok=True)
            self.folder.rmdir()
        # The folder of a comparison may have been moved since its recipes were written.
        return ["train", str(self.recipe_file), f"output={json.dumps(str(self.folder.parent))}"]

    @property
    def own_steps(self) -> int:
        """Sampling steps of the evaluations during the run."""
        return self.recipe.evaluation.num_steps or self.recipe.algorithm.num_steps


def plan_runs(comparison: Comparison, budget: Budget, out: Path, paces: dict[str, float]) -> list[Run]:
    """Every arm with every seed, each as long as the budget lets it be.

    ``paces``: seconds a velocity evaluation by the arm's slug, for a budget of seconds. Raises InputError
    where a recipe is wrong or the budget is less than one of its iterations.
    """
    runs = []
    for arm in comparison.arms:
        _refuse_its_own(arm)
        recipes = [arm.load([f"seed={seed}"]) for seed in comparison.seeds]
        try:
            counts = [iterations_within(recipe, budget, paces.get(arm.slug)) for recipe in recipes]
            _refuse_a_warmup_alone(recipes[0], min(counts), budget)
        except InputError as error:
            raise arm.wrong(error) from None
        every = math.ceil(max(counts) / comparison.points)
        for seed, count in zip(comparison.seeds, counts, strict=True):
            recipe = arm.load(
                [
                    f"seed={seed}",
                    f"name=seed-{seed}",
                    f"output={json.dumps(str(out / arm.slug))}",
                    f"train.iterations={count}",
                    f"evaluation.every={every}",
                ]
            )
            runs.append(Run(arm, seed, out / arm.slug / f"seed-{seed}", recipe))
    return runs


def _refuse_a_warmup_alone(recipe: Recipe, count: int, budget: Budget) -> None:
    warmup = recipe.train.warmup_iterations
    if count <= warmup:
        raise InputError(
            f"a budget of {budget.words} pays for {count} iteration{'s' * (count > 1)}, and the learning rate"
            f" rises over {warmup} (train.warmup_iterations); raise it, or set that below {count}"
        )


def _refuse_its_own(arm: Arm) -> None:
    for text in arm.overrides:
        if text.partition("=")[0] in ITS_OWN:
            raise arm.wrong(
                InputError(
                    f"override '{text}': a comparison sets this itself, from its seeds, budget, points and"
                    " --out; leave it out"
                )
            )


def refuse_others(out: Path, runs: Sequence[Run], budget: Budget) -> None:
    """InputError where the folder holds runs of other settings or another budget than are asked for."""
    if plan_file(out).is_file() and (before := str(_read_plan(out)["budget"])) != str(budget):
        raise InputError(
            f"{out}: holds a comparison at a budget of {before}, asked for {budget}; choose another --out"
        )
    for run in runs:
        for file in (RunFolder(run.folder).recipe, run.recipe_file):
            changes = differences(load_recipe(file), run.recipe) if file.is_file() else []
            if changes:
                more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
                raise InputError(
                    f"{file}: {run.name} was asked for with other settings before ({changes[0]}{more}); ask"
                    " for the same, or choose another --out"
                )


def wait_until_free(runs: Sequence[Run], patience_s: float, tell: Callable[[str], None]) -> None:
    """Wait where processes of a comparison that was killed are still at work: they save, and end.

    Raises InputError for one that does not in ``patience_s``.
    """
    until = time.monotonic() + patience_s
    told = False
    for folder in (RunFolder(run.folder) for run in runs):
        while folder.recipe.is_file():
            try:
                with folder.owned():
                    break
            except InputError:
                if time.monotonic() > until:
                    raise
            if not told:
                tell(f"waiting for a process that is still at work in {folder.path}")
            told = True
            time.sleep(LOOK_S)


def differences(before: Recipe, after: Recipe) -> list[Change]:
    """Changes of settings that make it another run."""
    return [change for change in recipe_diff(before, after) if change.setting not in PLACES]


def write_recipes(runs: Sequence[Run]) -> None:
    for run in runs:
        if not run.recipe_file.is_file():
            write_text(run.recipe_file, dump_recipe(run.recipe))


def write_plan(out: Path, budget: Budget, paces: dict[str, float]) -> None:
    """Keep what the lengths of the runs were computed from."""
    write_text(plan_file(out), json.dumps({"budget": str(budget), "paces": paces}, indent=1) + "\n")


def read_paces(out: Path) -> dict[str, float]:
    """Seconds a velocity evaluation by arm, as measured before; empty where none were."""
    if not plan_file(out).is_file():
        return {}
    return {slug: float(pace) for slug, pace in _read_plan(out)["paces"].items()}


def plan_file(out: Path) -> Path:
    return out / "plan.json"


def _read_plan(out: Path) -> dict[str, dict[str, float]]:
    try:
        found: dict[str, dict[str, float]] = json.loads(plan_file(out).read_text(encoding="utf-8"))
        _ = found["budget"], found["paces"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{plan_file(out)}: not what flowcredit compare wrote ({error}); choose another --out"
        ) from None
    return found
