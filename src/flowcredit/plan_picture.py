"""A plan as a picture in text. No tensors."""

from collections.abc import Sequence
from itertools import pairwise

from flowcredit.plan import Plan


def _rows(plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
    """Segments gathered into rows that read on in one line, and the rows that hang from each row."""
    row_of: list[int] = []
    rows: list[list[int]] = []
    hanging: list[list[int]] = []
    is_parent = {segment.parent for segment in plan.segments}
    for position, segment in enumerate(plan.segments):
        parent = segment.parent
        goes_on = (
            parent is not None
            and rows[row_of[parent]][-1] == parent
            and segment.fan_out == 1
            and not _has_better_heir(plan, position, is_parent)
        )
        if parent is not None and goes_on:
            row_of.append(row_of[parent])
            rows[row_of[parent]].append(position)
            continue
        row_of.append(len(rows))
        rows.append([position])
        hanging.append([])
        if position > 0:
            hanging[0 if parent is None else row_of[parent]].append(row_of[position])
    return rows, hanging


def _has_better_heir(plan: Plan, position: int, is_parent: set[int | None]) -> bool:
    """Whether a later sibling carries the trajectory on while this one ends: the row is the sibling's."""
    if position in is_parent:
        return False
    parent = plan.segments[position].parent
    return any(
        other.parent == parent and other.fan_out == 1 and later in is_parent
        for later, other in enumerate(plan.segments)
        if later > position
    )


def _draw_row(plan: Plan, row: Sequence[int], canvas: list[str], cell: int) -> None:
    first = plan.segments[row[0]].path[0]
    canvas[first * cell] = "●" if row[0] == 0 else "├"
    for position in row:
        segment = plan.segments[position]
        for a, b in pairwise(segment.path):
            line = "~" if segment.stochastic else "─"
            canvas[a * cell + 1 : b * cell] = line * ((b - a) * cell - 1)
            canvas[b * cell] = "●"


def _row_note(plan: Plan, row: Sequence[int]) -> str:
    note = f"×{plan.width(row[-1])}"
    noisy = [plan.segments[i] for i in row if plan.segments[i].stochastic]
    left_out = [str(segment.path[0]) for segment in noisy if not segment.trained]
    if noisy:
        note += " untrained" if len(left_out) == len(noisy) else " trained"
    if 0 < len(left_out) < len(noisy):
        note += f" but from {', '.join(left_out)}"
    for kept in sorted({segment.kept for segment in noisy if segment.trained and segment.kept is not None}):
        note += f" ({kept} kept)"
    return note + (" scored" if plan.segments[row[-1]].scored else "")


def describe(plan: Plan) -> str:
    """The plan as a picture in text, with its cost."""
    if not plan.segments:
        return "nothing is sampled for training"
    cell = len(str(plan.num_steps)) + 1
    rows, hanging = _rows(plan)
    size = plan.num_steps * cell + 1
    lines: list[str] = []

    def start(row: int) -> int:
        return plan.segments[rows[row][0]].path[0]

    def draw(row: int, bars: frozenset[int]) -> None:
        canvas = [" "] * size
        for column in bars:
            canvas[column * cell] = "│"
        _draw_row(plan, rows[row], canvas, cell)
        lines.append("".join(canvas) + "  " + _row_note(plan, rows[row]))
        # Late branches first: the bars of the earlier ones then cross only blank columns.
        below = sorted(hanging[row], key=lambda r: (-start(r), r))
        for place, child in enumerate(below):
            waiting = frozenset(start(r) for r in below[place + 1 :])
            draw(child, bars | waiting)
            if start(child) not in waiting:
                _close(lines, start(child) * cell)

    def _close(drawn: list[str], column: int) -> None:
        for place in range(len(drawn) - 1, -1, -1):
            if drawn[place][column] == "├":
                drawn[place] = drawn[place][:column] + "└" + drawn[place][column + 1 :]
                return

    draw(0, frozenset())
    header = "".join(str(i).ljust(cell) for i in range(plan.num_steps + 1)).rstrip()
    return "\n".join(
        [
            f"{plan.num_steps} steps, initial noises for a prompt: {plan.root_width}"
            "    ── Euler   ~~ stochastic   ×N: N samples for a prompt",
            header,
            *lines,
            f"velocity evaluations for a prompt: {plan.velocity_evaluations}"
            f" (nothing shared: {plan.naive_velocity_evaluations})",
            f"decodes: {plan.decodes}   scores for each reward: {plan.scores}"
            f"   transitions: {len(plan.transitions)}",
        ]
    )
