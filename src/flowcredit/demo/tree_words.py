"""What is said of a tree, stage by stage, and the tables of its numbers. No tensors."""

import math
from collections.abc import Sequence
from html import escape

from flowcredit.credit import Neighbours, Preferences
from flowcredit.demo.growing import Grown
from flowcredit.demo.layout import Layout
from flowcredit.demo.tree_svg import number, picture_id, shown, sign
from flowcredit.plan import Segment

THUMB = 56

RULES = {
    "leaves": "rewards are normalised within the group of images that are finished alike (mean 0, deviation"
    " 1); a step has the {combine} of those of the images below it",
    "fused": "a step's reward is the mean reward of the images below it, normalised within the group",
    "state": "a step's reward is that of the image that the ODE makes of the state where it ends; these are"
    " normalised within the group",
    "gain": "a step's reward is the gain from the image of the state where it begins to that of the state"
    " where it ends, both finished by the ODE; gains are normalised within the group",
    "turning": "a step's reward is its gain, at turning points the gain to the end; these are normalised"
    " within the group",
    "similarity": "the image's advantage is shared out to the steps by how much of the likeness to the image"
    " is still to come, and normalised again",
}


def credit_words(grown: Grown) -> str:
    """How rewards become advantages, in a sentence."""
    objective, credit = grown.algorithm.objective, grown.algorithm.credit
    if isinstance(objective, Neighbours):
        return (
            "No branches: neighbours start from initial noises that lie near one another, and follow"
            " the ODE. The advantage belongs to an image; steps of the anchors, drawn anew for each"
            " iteration, are compared with the neighbours' states."
        )
    if isinstance(objective, Preferences):
        return (
            "No branches, and no credit for steps: images are drawn by the ODE from separate noises, and the"
            " best and the worst become a pair to learn from."
        )
    rule = RULES[credit.rule].format(combine=credit.combine)
    cut = "" if credit.clamp is None else f", cut at ±{credit.clamp:g}"
    scope = {"trajectory": " over all steps", "siblings": ", those of one start"}.get(credit.scope, "")
    whole = (
        " The deviation is that of all prompts of an iteration in training, here of this prompt alone."
        if credit.spread == "batch"
        else ""
    )
    return f"Advantages: {rule}{scope}{cut}.{whole}"


def stage_words(grown: Grown, layout: Layout, stage: int) -> str:
    """What happens at a stage, in plain words."""
    plan, place = grown.plan, layout.stages[stage].segment
    if stage == 0:
        count = plan.root_width
        if count > 1:
            alike = ", close to one another" if plan.root_correlation else ""
            return f"{count} initial noises for the prompt{alike}."
        return "One initial noise for the prompt, which all samples share."
    if place is None:
        named = "advantage of every step" if plan.transitions else "advantage of every image"
        return f"The whole: {plan.decodes} finished images, and the {named}." + _pair_words(grown)
    segment = plan.segments[place]
    (k, k_next), before = segment.path, plan.width(place) // segment.fan_out
    sigmas = f"σ {grown.sigmas[k]:.2f} to {grown.sigmas[k_next]:.2f}"
    if segment.recorded:
        return (
            f"Grid index {k} to {k_next} ({sigmas}): an Euler step that is trained, of {before} neighbours."
        )
    fans = f"{segment.fan_out} branches from " if segment.fan_out > 1 else "from "
    said = f"Grid index {k} to {k_next} ({sigmas}): a step with noise, {fans}"
    said += ("one state" if before == 1 else f"each of {before} states") + "."
    return said + _finish_words(grown, place) + _training_words(segment)


def _finish_words(grown: Grown, place: int) -> str:
    plan = grown.plan
    below = [each for each in plan.segments if each.parent == place and each.scored]
    if not below:
        return ""
    steps = [str(len(each.path) - 1) for each in below]
    goes_on = any(each.parent == place and not each.scored for each in plan.segments)
    what = "Each state" if goes_on else "Each branch"
    many = (
        f", in {' and in '.join(steps)} steps"
        if len(steps) > 1
        else f" in {steps[0]} step{'s' * (steps != ['1'])}"
    )
    return f" {what} is finished by the ODE{many}, decoded and scored."


def _training_words(segment: Segment) -> str:
    if not segment.trained:
        return " The policy does not learn from this step in this iteration."
    if segment.kept is not None:
        return f" Of these the {segment.kept} with the highest and lowest advantages are trained."
    return ""


def _pair_words(grown: Grown) -> str:
    ends = chosen_and_rejected(grown)
    if ends is None:
        return ""
    return f" The pair: image {ends[0] + 1} is chosen, image {ends[1] + 1} rejected."


def chosen_and_rejected(grown: Grown) -> tuple[int, int] | None:
    """Of a method of pairs, the samples with the highest and lowest advantage; None without a preference."""
    if not isinstance(grown.algorithm.objective, Preferences) or not grown.plan.scored:
        return None
    values = grown.advantages[grown.plan.scored[0]]
    best, worst = max(values), min(values)
    return (values.index(best), values.index(worst)) if best > worst else None


def stage_table(grown: Grown, layout: Layout, stage: int) -> str:
    """The numbers of a stage: those of a step's samples, at the end those of all steps and images."""
    place = layout.stages[stage].segment
    if stage == 0:
        return ""
    if place is None:
        return _final_images(grown) + _all_advantages(grown)
    return _step_table(grown, place)


def _step_table(grown: Grown, place: int) -> str:
    plan, segment = grown.plan, grown.plan.segments[place]
    leaves = [i for i, each in enumerate(plan.segments) if each.parent == place and each.scored]
    under = plan.leaves_under(place)
    head = ["Sample", *(_leaf_name(grown, leaf) for leaf in leaves)]
    foretold = not leaves and (segment.parent, 0) in grown.predicted
    if foretold:
        head.append("What its start foretells")
    if not leaves:
        head.append("Mean of its images")
    credited = place in grown.advantages
    rows = []
    for sample in range(plan.width(place)):
        cells = [str(sample + 1)]
        cells += [_scored_picture(grown, leaf, sample) for leaf in leaves]
        if foretold:
            start = (segment.parent, sample // segment.fan_out)
            cells.append(_thumb("predicted", start, f"foretold at the start of sample {sample + 1}"))
        if not leaves:
            cells.append(_means(grown, under, plan.width(place), sample))
        if credited:
            cells.append(_bar(grown.advantages[place][sample]))
        rows.append(cells)
    return _table("Samples of this step", head + ["Advantage"] * credited, rows)


def _leaf_name(grown: Grown, leaf: int) -> str:
    steps = len(grown.plan.segments[leaf].path) - 1
    return f"Finished in {steps} step{'s' if steps != 1 else ''}"


def _final_images(grown: Grown) -> str:
    """The images of methods whose samples each come to one."""
    if len(grown.plan.scored) != 1:
        return ""
    leaf = grown.plan.scored[0]
    credited, ends = leaf in grown.advantages, chosen_and_rejected(grown)
    rows = []
    for sample in range(grown.plan.width(leaf)):
        cells = [str(sample + 1), _scored_picture(grown, leaf, sample)]
        if credited:
            cells.append(_bar(grown.advantages[leaf][sample]))
        if ends is not None:
            cells.append("chosen" if sample == ends[0] else "rejected" if sample == ends[1] else "")
        rows.append(cells)
    return _table(
        "Images", ["Image", "Rewards", *["Advantage"] * credited, *["Pair"] * (ends is not None)], rows
    )


def _all_advantages(grown: Grown) -> str:
    """A row a sample, a column a step, where all steps have as many samples."""
    steps = [i for i in grown.plan.transitions if i in grown.advantages]
    if not steps:
        return ""
    widest = max(grown.plan.width(i) for i in steps)
    head = ["Sample", *(f"Step {grown.plan.segments[i].path[0]}" for i in steps)]
    rows = []
    for sample in range(widest):
        values = [grown.advantages[i][sample] if sample < grown.plan.width(i) else math.nan for i in steps]
        rows.append([str(sample + 1), *(_coloured(each) for each in values)])
    return _table("Advantages of all steps", head, rows)


def _scored_picture(grown: Grown, leaf: int, sample: int) -> str:
    words = f"image of sample {sample + 1}"
    return _thumb("finished", (leaf, sample), words) + _rewards(grown, grown.scores[leaf][sample])


def _thumb(kind: str, state: tuple[int | None, int], words: str) -> str:
    middle = THUMB / 2
    return (
        f'<svg class="thumb" role="img" aria-label="{words}" width="{THUMB}" height="{THUMB}">'
        f"{shown(picture_id(kind, state), middle, middle, THUMB)}</svg>"
    )


def _means(grown: Grown, leaves: Sequence[int], width: int, sample: int) -> str:
    """Mean rewards of the images below a sample; of those that have a score."""
    found = []
    for reward in range(len(grown.rewards)):
        values = [
            row[reward]
            for leaf in leaves
            for row in _below(grown.scores[leaf], width, sample)
            if not math.isnan(row[reward])
        ]
        found.append(sum(values) / len(values) if values else math.nan)
    return _rewards(grown, found)


def _below(rows: Sequence[tuple[float, ...]], width: int, sample: int) -> Sequence[tuple[float, ...]]:
    many = len(rows) // width
    return rows[sample * many : (sample + 1) * many]


def _rewards(grown: Grown, values: Sequence[float]) -> str:
    return "".join(
        f'<span class="score"><b>{number(value)}</b> {escape(name)}</span>'
        for name, value in zip(grown.rewards, values, strict=True)
    )


def _coloured(value: float) -> str:
    return "" if math.isnan(value) else f'<span class="{sign(value)}">{number(value, signed=True)}</span>'


def _bar(value: float) -> str:
    width = min(100.0, 100 * abs(value) / 3)
    return f'{_coloured(value)}<i class="bar {sign(value)}" style="width: {width / 2:.0f}px"></i>'


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{each}</td>" for each in cells[1:])}</tr>'
        for cells in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )
