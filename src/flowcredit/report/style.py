"""How every figure looks: colours of Okabe and Ito, told apart without colour vision.

matplotlib is imported here at the top: import this module only where figures are made.
"""

import io
from typing import Any

from matplotlib.figure import Figure

from flowcredit.visible import visible

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#9A5B8F"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
WIDTH = 8.8
"""Inches across: at 96 pixels an inch, the text column of the page."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#4a4f57",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "xtick.color": "#4a4f57",
    "ytick.color": "#4a4f57",
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.columnspacing": 1.2,
    "legend.handlelength": 1.7,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "flowcredit",
}


def drawn(text: str) -> str:
    """The text for a figure, in which matplotlib reads dollars as formulas and XML takes no controls."""
    return visible(text).replace("$", r"\$")


def to_svg(figure: Figure) -> str:
    out = io.StringIO()
    # Without a date the same run gives the same page.
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
