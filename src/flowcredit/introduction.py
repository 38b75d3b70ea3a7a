"""What a user is told before a run begins."""

from pathlib import Path

from rich.console import Console

from flowcredit.assembly import Setup
from flowcredit.console import say
from flowcredit.interfaces import ReadsLimitedText
from flowcredit.readiness import notes
from flowcredit.rewards.waiting import itself
from flowcredit.weights import trainable_parameters


def introduce(setup: Setup, run_dir: Path, console: Console) -> None:
    """What is about to run, and what a user should know of the prompts before it does."""
    recipe = setup.recipe
    trained = sum(p.numel() for p in trainable_parameters(setup.model.network).values())
    say(
        console,
        f"{recipe.name}: {setup.algorithm.name} on {recipe.model.path}, {trained:,} trained weights"
        f" ({recipe.weights.method}), on {setup.model.device}",
    )
    say(console, f"an iteration: {_iteration(setup)}")
    say(console, f"run folder: {run_dir}")
    for note in notes(recipe):
        say(console, note)
    trained_on = set(setup.train_prompts.prompts)
    shared = sum(prompt in trained_on for prompt in setup.heldout_prompts.prompts)
    if shared:
        say(
            console,
            f"{shared} of {len(setup.heldout_prompts)} held-out prompts are also trained on: the evaluation"
            " will not tell learning from memory",
        )
    for prompts in (setup.train_prompts, setup.heldout_prompts):
        say(console, prompts.describe())
        readers = {f"text encoder {name}": n for name, n in setup.model.truncated(prompts.prompts).items()}
        for name, reward in {**setup.rewards, **setup.watched}.items():
            reads = itself(reward)
            if isinstance(reads, ReadsLimitedText):
                readers[f"reward {name}"] = reads.truncated(prompts.prompts)
        for reader, cut in readers.items():
            if cut:
                share = f"{cut} of {len(prompts)} prompts ({cut / len(prompts):.0%})"
                say(console, f"  {share} are longer than the {reader} reads, and cut")


def _iteration(setup: Setup) -> str:
    plan, count = setup.algorithm.plan, setup.recipe.train.prompts_per_iteration
    if not plan.segments:
        return f"{count} pairs of images, read from files"
    return (
        f"{count} prompts, {count * plan.velocity_evaluations} velocity evaluations,"
        f" {count * plan.decodes} images, each scored by {', '.join(setup.rewards)}"
    )
