"""The card of exported weights: what was trained on what, how, and what it measured; Markdown, for a hub."""

import json
from pathlib import Path

import yaml

from flowcredit.comparison import Evaluation, compare, format_summary, moment
from flowcredit.config import Recipe
from flowcredit.recipe_io import dump_recipe
from flowcredit.run_folder import write_text
from flowcredit.versions import versions
from flowcredit.visible import code_block, code_span, markdown

PAPERS = {
    "g2rpo": "G²RPO (Granular-GRPO), arXiv 2510.01982",
    "dense_grpo": "DenseGRPO, arXiv 2601.20218",
    "flow_grpo": "Flow-GRPO, arXiv 2505.05470",
    "dpo": "Diffusion-DPO, arXiv 2311.12908",
}


def write_model_card(
    folder: Path, recipe: Recipe, pipeline: str, before: Evaluation | None, after: Evaluation
) -> Path:
    """Write ``README.md`` beside exported weights and return its path.

    ``pipeline`` is the class of the diffusers pipeline that loads them. Without an evaluation ``before``
    training, the results stand alone.
    """
    path = folder / "README.md"
    write_text(path, model_card(recipe, pipeline, before, after))
    return path


def model_card(recipe: Recipe, pipeline: str, before: Evaluation | None, after: Evaluation) -> str:
    """The card's text."""
    lora = recipe.weights.method == "lora"
    rewards = ", ".join(
        markdown(reward.name) + ("" if reward.weight == 1 else f" (weight {reward.weight:g})")
        for reward in recipe.rewards
    )
    told = (
        f"rewards: {rewards}" if rewards else f"on the pairs of images in {code_span(recipe.prompts.train)}"
    )
    method = recipe.algorithm.name
    head = [
        "---",
        "library_name: diffusers",
        "pipeline_tag: text-to-image",
        f"base_model: {_quoted(recipe.model.path)}",
        f"tags: [flowcredit, {method}{', lora' if lora else ''}]",
        "---",
        "",
        f"# {recipe.name}",
        "",
        f"{'A LoRA for' if lora else 'All weights of'} {code_span(recipe.model.path)}, aligned by"
        f" reinforcement learning: {PAPERS.get(method, method)}, {after.iteration} iterations of"
        f" {recipe.train.prompts_per_iteration} prompts, {told}.",
        "",
        *_usage(recipe, pipeline, lora),
        "",
        f"## Results on {len(after.prompts)} held-out prompts",
        "",
        *_results(recipe, before, after),
        "",
        "## Recipe",
        "",
        code_block("yaml", dump_recipe(recipe).rstrip()),
        "",
        f"Made with {', '.join(versions())}.",
    ]
    return "\n".join(head) + "\n"


def _usage(recipe: Recipe, pipeline: str, lora: bool) -> list[str]:
    source = _literal(recipe.model.path if lora else "THIS_FOLDER")
    load = [f"pipeline = {pipeline}.from_pretrained({source}, dtype=torch.bfloat16)"]
    if recipe.model.lora is not None:
        load.append(f"pipeline.load_lora_weights({_literal(recipe.model.lora)})")
        load.append("pipeline.fuse_lora()")
        load.append("pipeline.unload_lora_weights()")
    if lora:
        load.append('pipeline.load_lora_weights("THIS_FOLDER")')
    return [code_block("python", "\n".join(["import torch", f"from diffusers import {pipeline}", "", *load]))]


def _results(recipe: Recipe, before: Evaluation | None, after: Evaluation) -> list[str]:
    trained = {reward.name for reward in recipe.rewards}
    steps = recipe.evaluation.num_steps or recipe.algorithm.num_steps
    first = after if before is None else before
    columns = ["reward", "role", moment(first)] + ([] if before is None else [moment(after), "change"])
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for line in compare(first, None if before is None else after):
        name = line.reward if line.group is None else f"{line.reward}: {line.group}"
        cells = [
            markdown(name),
            "trained" if line.reward in trained else "watched",
            format_summary(line.before),
        ]
        if line.after is not None and line.change is not None:
            cells += [format_summary(line.after), format_summary(line.change, signed=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"{steps} deterministic steps; ± is one standard error over the prompts."]


def _quoted(text: str) -> str:
    """A text on one line of YAML, whatever is in it."""
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=float("inf")).strip()


def _literal(text: str) -> str:
    """A text in Python, between double quotes."""
    return json.dumps(text, ensure_ascii=not text.isprintable())
