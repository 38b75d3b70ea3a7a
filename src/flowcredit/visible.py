"""Foreign text on its way to a terminal, a log or a Markdown page: it shows, and does nothing else there."""

import unicodedata


def visible(text: str) -> str:
    """The text on one line, each control character as its escape: a line feed as ``\\n``, ESC as ``\\x1b``.

    So are the marks that turn the direction of writing, and halves of surrogate pairs; spaces of every
    script stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)


def visible_lines(text: str) -> str:
    """The same for a text whose line feeds are meant."""
    return "\n".join(map(visible, text.split("\n")))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def markdown(text: str) -> str:
    """The text on one line of Markdown, in a table too: no mark-up, link, image or HTML comes of it."""
    line = " ".join(visible(" ".join(text.split())).split())
    for mark in "\\`*|[]":
        line = line.replace(mark, f"\\{mark}")
    return line.replace("&", "&amp;").replace("<", "&lt;")


def code_span(text: str) -> str:
    """The text on one line as code inside a paragraph of Markdown."""
    line = visible(text)
    ticks = "`" * (_longest_run(line) + 1)
    # A code span that begins or ends with a backtick needs a space there, which is not shown.
    edge = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{edge}{line}{edge}{ticks}"


def code_block(language: str, text: str) -> str:
    """A fenced block of Markdown that nothing inside it can close."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    longest = run = 0
    for character in text:
        run = run + 1 if character == "`" else 0
        longest = max(longest, run)
    return longest
