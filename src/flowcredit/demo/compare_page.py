"""Base and aligned side by side, as a part of the page. No tensors beyond the images that it shows.

Axes: N images, H and W their height and width.
"""

import math
from collections.abc import Sequence
from html import escape

from flowcredit.demo.comparing import Drawn
from flowcredit.demo.pictures import SMALL, whole


def compare_page(
    prompt: str, base: Drawn, aligned: Drawn, of: str, trained: Sequence[str], watched: Sequence[str]
) -> str:
    """HTML of the pairs, one a seed, and of their scores; ``of`` says which weights the right ones are."""
    small = " small" if max(base.images.shape[2:]) <= SMALL else ""
    roles = [(name, "trained") for name in trained] + [(name, "watched") for name in watched]
    pairs = "".join(_pair(prompt, base, aligned, index, of, roles) for index in range(len(base.seeds)))
    means = _means(base, aligned, roles) if len(base.seeds) > 1 else ""
    return (
        f'<div class="compare{small}"><p class="title">“{escape(prompt)}”</p>{_lacking(base, aligned)}'
        f'{means}<div class="pairs">{pairs}</div></div>'
    )


def _pair(
    prompt: str, base: Drawn, aligned: Drawn, index: int, of: str, roles: Sequence[tuple[str, str]]
) -> str:
    seed = base.seeds[index]
    said = escape(prompt, quote=True)
    pictures = "".join(
        f'<figure><img src="{whole(drawn.images[index])}"'
        f' alt="{said}: {escape(name, quote=True)}, seed {seed}">'
        f"<figcaption>{escape(name)}</figcaption></figure>"
        for drawn, name in ((base, "base"), (aligned, of))
    )
    rows = "".join(
        _row(name, role, base.scores[name][index], aligned.scores[name][index])
        for name, role in roles
        if name in base.scores and name in aligned.scores
    )
    table = _table(f"Seed {seed}", of, rows) if rows else f'<p class="soft">Seed {seed}</p>'
    return f'<div class="of-seed"><div class="pair">{pictures}</div>{table}</div>'


def _means(base: Drawn, aligned: Drawn, roles: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        _row(name, role, _mean(base.scores[name]), _mean(aligned.scores[name]))
        for name, role in roles
        if name in base.scores and name in aligned.scores
    )
    return (
        f'<div class="mean">{_table(f"Mean of {len(base.seeds)} seeds", "aligned", rows)}</div>'
        if rows
        else ""
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _table(caption: str, of: str, rows: str) -> str:
    return (
        f'<table><caption>{caption}</caption><thead><tr><th scope="col">Reward</th><th scope="col">base</th>'
        f'<th scope="col">{escape(of)}</th><th scope="col">change</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _row(name: str, role: str, before: float, after: float) -> str:
    change = after - before
    kind = "up" if change > 0 else "down" if change < 0 else "even"
    arrow = {"up": "▲", "down": "▼", "even": ""}[kind]
    return (
        f'<tr><th scope="row">{escape(name)} <span class="role">{role}</span></th><td>{_number(before)}</td>'
        f'<td>{_number(after)}</td><td class="{kind}">{arrow} {_number(change, True)}</td></tr>'
    )


def _number(value: float, signed: bool = False) -> str:
    if math.isnan(value):
        return "–"
    return (f"{value:+.3f}" if signed else f"{value:.3f}").replace("-", "−")


def _lacking(base: Drawn, aligned: Drawn) -> str:
    lines = {**aligned.lacking, **base.lacking}
    if not lines:
        return ""
    said = "".join(f"<li>No score by {escape(name)}: {escape(why)}.</li>" for name, why in lines.items())
    return f'<ul class="notes">{said}</ul>'
