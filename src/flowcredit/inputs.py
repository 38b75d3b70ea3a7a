"""What a run reads beside its recipe: held to digests that it wrote down as it began."""

from flowcredit.assembly import Setup
from flowcredit.credit import Preferences
from flowcredit.digests import files_digest, model_digests, placed, reward_digests, text_digest
from flowcredit.errors import InputError
from flowcredit.evaluation_files import load_evaluation
from flowcredit.image_pairs import pair_files
from flowcredit.noise_table import read_noise_table
from flowcredit.prompts import PromptSet
from flowcredit.run_folder import RunFolder


def input_digests(setup: Setup) -> dict[str, str]:
    """A digest of everything from a file that decides a run's course, by the setting that names it.

    Prompts by what is read of them, pairs of images, levels of noise, each part of the model, a LoRA, and
    the models of rewards that have them. Rewards of one's own and remote ones are not looked into.
    """
    recipe = setup.recipe
    found = {
        "prompts.train": _prompts(setup.train_prompts),
        "prompts.heldout": _prompts(setup.heldout_prompts),
    }
    objective = setup.algorithm.objective
    if isinstance(objective, Preferences) and objective.columns is not None:
        images = pair_files(setup.train_prompts, objective.columns)
        found["prompts.train, its images"] = files_digest(images)
    if recipe.noise.table is not None:
        table = read_noise_table(recipe.noise.table)
        found["noise.table"] = text_digest([table.levels, table.grid])
    return found | model_digests(recipe) | reward_digests(recipe)


def refuse_other_inputs(folder: RunFolder, setup: Setup) -> None:
    """InputError where what a run was begun with is no longer what its recipe's paths lead to."""
    begun, now = folder.begun_with(), input_digests(setup)
    other = [name for name, digest in begun.items() if now.get(name) != digest]
    first = folder.evaluation(0)
    if "prompts.heldout" not in other and first.exists():
        # Runs of versions before there were digests.
        other += ["prompts.heldout"] * (load_evaluation(first)[0].prompts != setup.heldout_prompts.prompts)
    if other:
        told = "; ".join(placed(each, setup.recipe) for each in other)
        raise InputError(
            f"{folder.path}: changed since the run began: {told}. A resumed run would be another one: put"
            " back what was there, or start one under another name"
        )


def _prompts(prompts: PromptSet) -> str:
    return text_digest([prompts.prompts, sorted(prompts.columns.items())])
