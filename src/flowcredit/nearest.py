"""The known name that a misspelt one is likely to mean: near in letters, not merely the nearest there is."""

from collections.abc import Iterable

LETTERS_EACH = 4
"""One slip of the pen for so many letters, and one at least."""
SHORTEST_START = 3
"""Letters from which on a name's beginning is taken for the name."""


def nearest(wanted: str, known: Iterable[str]) -> str | None:
    """The known name with the fewest slips, or None.

    Besides names that are near, those count of which one begins the other, and those with a word too many or
    too few (``stepwise_grpo`` for ``stepwise_flow_grpo``), two at least being the same.

    A slip is a letter too many, one too few, another one, or two that changed places; upper and lower case
    are the same.
    """
    best: tuple[int, str] | None = None
    for name in known:
        slips = _slips(wanted.lower(), name.lower())
        allowed = max(1, min(len(wanted), len(name)) // LETTERS_EACH)
        shorter, longer = sorted((wanted.lower(), name.lower()), key=len)
        near = slips <= allowed and slips < len(shorter)
        begins = len(shorter) >= SHORTEST_START and longer.startswith(shorter)
        words = [set(each.split("_")) for each in (shorter, longer)]
        within = len(words[0]) > 1 and words[0] < words[1]
        if (near or begins or within) and (best is None or slips < best[0]):
            best = (slips, name)
    return None if best is None else best[1]


def _slips(one: str, other: str) -> int:
    """The optimal string alignment distance."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        last, before, row = before, row, [i]
        for j, against in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
