"""The tree of one prompt as a part of the page that can be played. No tensors."""

from html import escape

from flowcredit.demo.growing import Grown
from flowcredit.demo.layout import lay_out
from flowcredit.demo.tree_svg import TreePicture, picture_store
from flowcredit.demo.tree_words import credit_words, stage_table, stage_words


def tree_page(grown: Grown) -> str:
    """HTML of a player: its stages, each with picture, words and table, of which the first is shown."""
    whose = "the base model" if grown.iteration == 0 else f"the weights after iteration {grown.iteration}"
    method = escape(grown.algorithm.name)
    title = f'<p class="title"><b>{method}</b>, {whose}: “{escape(grown.prompt)}”</p>'
    if grown.pair is not None:
        return f'<div class="player">{title}{_pair(grown.pair)}</div>'
    notes = [credit_words(grown), _cost(grown), *([grown.shrunk] if grown.shrunk else [])]
    if not grown.plan.transitions:
        notes.insert(0, f"{grown.algorithm.name} has no rollout tree.")
    layout = lay_out(grown.plan)
    stages = []
    for stage in range(len(layout.stages)):
        words = stage_words(grown, layout, stage)
        picture = TreePicture(grown, layout, stage).svg(
            f"Rollout tree. {words} The numbers are in the table."
        )
        hidden = "" if stage == 0 else " hidden"
        stages.append(
            f'<section class="stage" data-words="{escape(words, quote=True)}"{hidden}>'
            f'<div class="wide" tabindex="0" role="region" aria-label="Picture of the tree">{picture}</div>'
            f"{stage_table(grown, layout, stage)}</section>"
        )
    return (
        f'<div class="player" data-stage="0">{title}{_controls(grown, len(stages))}'
        f'<p class="said" role="status">{escape(stage_words(grown, layout, 0))}</p>{picture_store(grown)}'
        f'{"".join(stages)}{_legend(grown)}<p class="soft">{"<br>".join(map(escape, notes))}</p></div>'
    )


def _controls(grown: Grown, count: int) -> str:
    return (
        '<div class="controls"><button type="button" data-does="play">Play</button>'
        '<button type="button" data-does="back">Back</button>'
        '<button type="button" data-does="on">Next</button>'
        f'<label><span>Stage</span> <input type="range" min="0" max="{count - 1}" value="0" step="1"></label>'
        f'<span class="at">1 of {count}</span></div>'
    )


def _legend(grown: Grown) -> str:
    parts = ['<i class="key ode"></i>ODE']
    if grown.plan.transitions:
        parts += [
            '<i class="key noise"></i>with noise',
            '<i class="key up"></i>advantage above 0',
            '<i class="key down"></i>below 0',
        ]
    if grown.predicted:
        parts.append('<i class="key foretold"></i>dashed frame: what a state foretells, not finished')
    return f'<p class="legend">{"".join(f"<span>{each}</span>" for each in parts)}</p>'


def _cost(grown: Grown) -> str:
    plan = grown.plan
    return (
        f"One real rollout for this prompt: {plan.velocity_evaluations} velocity evaluations, {plan.decodes}"
        f" images scored. The numbers at the pictures are the rewards of {grown.rewards[0]}."
    )


def _pair(pair: tuple[str, str]) -> str:
    return (
        '<p class="soft">This run learns from pairs of images in its prompt file: nothing is sampled, so'
        ' there is no rollout tree. The pair of this prompt:</p><div class="pair">'
        f'<figure><img src="{pair[0]}" alt="the chosen image"><figcaption>chosen</figcaption></figure>'
        f'<figure><img src="{pair[1]}" alt="the rejected image"><figcaption>rejected</figcaption>'
        "</figure></div>"
    )
