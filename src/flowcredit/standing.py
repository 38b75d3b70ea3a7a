"""How well a run has stood at its evaluations, and which of its checkpoints are the best.

An evaluation's standing is the sum, over trained rewards, of weight times the mean change since before the
training, each in units of the reward's standard deviation over prompts then.
"""

import math
import statistics
from collections.abc import Mapping

from flowcredit.comparison import Evaluation, summarise
from flowcredit.errors import InputError
from flowcredit.evaluation_files import load_evaluation
from flowcredit.run_folder import RunFolder


def standing(base: Evaluation, now: Evaluation, weights: Mapping[str, float]) -> float:
    """See above; ``weights`` by the names of the trained rewards. NaN where one has no score at all."""
    total = 0.0
    for name, weight in weights.items():
        before = [score for score in base.scores[name] if not math.isnan(score)]
        unit = (statistics.stdev(before) if len(before) > 1 else 0.0) or 1.0
        total += weight * (summarise(now.scores[name]).mean - summarise(base.scores[name]).mean) / unit
    return total


def evaluations_of(folder: RunFolder) -> dict[int, Evaluation]:
    """The evaluations of a run that can be read, by iteration, in order."""
    found = {}
    for path in sorted(folder.evaluation(0).parent.glob("*.json")):
        try:
            evaluation, _ = load_evaluation(path)
        except InputError:
            continue
        found[evaluation.iteration] = evaluation
    return found


def best_iterations(folder: RunFolder, weights: Mapping[str, float], count: int) -> list[int]:
    """The ``count`` best evaluated iterations after the first, best first; of equal ones the earlier.

    Without an evaluation from before the training there is nothing to compare with, and none is best.
    """
    found = evaluations_of(folder)
    base = found.pop(0, None)
    if base is None or not count or not weights:
        return []
    standings = {iteration: standing(base, each, weights) for iteration, each in found.items()}
    there = [iteration for iteration, value in standings.items() if not math.isnan(value)]
    return sorted(there, key=lambda iteration: (-standings[iteration], iteration))[:count]
