"""Results that the papers print, to stand beside one's own. Numbers only: no model was run for them here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class Published:
    """A table of a paper: its source, its test, the columns, and rows of a name with a value a column."""

    source: str
    test: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]


PUBLISHED: Mapping[str, Published] = {
    "g2rpo": Published(
        source="G²RPO, arXiv 2510.01982",
        test="FLUX.1-dev, 400 prompts of HPSv2's test",
        columns=("HPS-v2.1", "CLIP", "PickScore", "ImageReward", "UnifiedReward"),
        rows=(
            ("FLUX.1-dev", (0.305, 0.388, 0.226, 1.040, 3.621)),
            ("DanceGRPO on HPS", (0.353, 0.375, 0.228, 1.233, 3.548)),
            ("MixGRPO on HPS", (0.378, 0.358, 0.225, 1.266, 3.421)),
            ("G²RPO, stride 1, on HPS", (0.376, 0.351, 0.228, 1.286, 3.469)),
            ("G²RPO on HPS", (0.385, 0.355, 0.229, 1.313, 3.487)),
            ("DanceGRPO on HPS and CLIP", (0.331, 0.389, 0.227, 1.128, 3.569)),
            ("MixGRPO on HPS and CLIP", (0.363, 0.399, 0.230, 1.436, 3.661)),
            ("G²RPO, stride 1, on HPS and CLIP", (0.372, 0.395, 0.234, 1.421, 3.688)),
            ("G²RPO on HPS and CLIP", (0.376, 0.406, 0.235, 1.483, 3.783)),
        ),
    ),
    "g2rpo_strides": Published(
        source="G²RPO, arXiv 2510.01982",
        test="FLUX.1-dev trained on HPS and CLIP, by strides, 400 prompts of HPSv2's test",
        columns=("HPS-v2.1", "CLIP", "PickScore", "ImageReward", "UnifiedReward"),
        rows=(
            ("{1}", (0.372, 0.395, 0.234, 1.421, 3.688)),
            ("{1, 2}", (0.375, 0.404, 0.234, 1.468, 3.759)),
            ("{1, 3}", (0.378, 0.404, 0.234, 1.465, 3.760)),
            ("{1, 2, 3}", (0.376, 0.406, 0.235, 1.483, 3.783)),
        ),
    ),
    "g2rpo_steps": Published(
        source="G²RPO, arXiv 2510.01982",
        test="FLUX.1-dev trained on HPS and CLIP, by inference steps, 400 prompts of HPSv2's test",
        columns=("HPS-v2.1", "CLIP", "PickScore", "ImageReward", "UnifiedReward"),
        rows=(
            ("MixGRPO, 10 steps", (0.358, 0.401, 0.230, 1.431, 3.641)),
            ("G²RPO, 10 steps", (0.378, 0.408, 0.235, 1.519, 3.805)),
            ("MixGRPO, 20 steps", (0.363, 0.401, 0.230, 1.430, 3.651)),
            ("G²RPO, 20 steps", (0.376, 0.407, 0.235, 1.511, 3.806)),
        ),
    ),
    "dense_grpo": Published(
        source="DenseGRPO, arXiv 2601.20218",
        test="SD3.5-M, each column trained and tested on its own task",
        columns=("GenEval", "OCR accuracy", "PickScore"),
        rows=(
            ("SD3.5-M", (0.63, 0.59, 21.72)),
            ("Flow-GRPO", (0.95, 0.92, 23.31)),
            ("Flow-GRPO with CoCA", (0.96, 0.93, 23.63)),
            ("DenseGRPO", (0.97, 0.95, 24.64)),
        ),
    ),
    "dense_grpo_drawbench": Published(
        source="DenseGRPO, arXiv 2601.20218",
        test="SD3.5-M trained on PickScore, DrawBench",
        columns=("Aesthetic", "DeQA", "ImageReward", "PickScore"),
        rows=(
            ("SD3.5-M", (5.39, 4.07, 0.87, 22.34)),
            ("Flow-GRPO", (5.92, 4.22, 1.28, 23.53)),
            ("Flow-GRPO with CoCA", (6.22, 4.16, 1.32, 23.80)),
            ("DenseGRPO", (6.35, 4.06, 1.41, 24.55)),
        ),
    ),
}
"""By the name that ``flowcredit evaluate --beside`` takes."""


def published_table(name: str) -> Table:
    """One of ``PUBLISHED`` for the console; KeyError for another name."""
    found = PUBLISHED[name]
    table = Table(
        title=f"Published: {found.source}; {found.test}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("model", overflow="fold")
    for column in found.columns:
        table.add_column(column, justify="right")
    for row, values in found.rows:
        table.add_row(row, *(f"{value:g}" for value in values))
    return table
