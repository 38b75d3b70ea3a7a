"""One real rollout of a run's own plan for one prompt, with its scores, credit and pictures.

Axes: R rewards, P prompts (here one), W samples of a prompt at a segment, *D latent dimensions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowcredit.algorithms import Algorithm
from flowcredit.assembly import Setup, build_grid, build_kernel
from flowcredit.config import Recipe
from flowcredit.credit import Preferences
from flowcredit.demo.comparing import check_scored
from flowcredit.demo.pictures import thumb
from flowcredit.demo.shrinking import shrunk
from flowcredit.demo.studio import BASE, Studio, check_kept
from flowcredit.errors import InputError
from flowcredit.evaluate import weights_of
from flowcredit.experience import Experience, explore
from flowcredit.image_pairs import read_pairs
from flowcredit.interfaces import FlowModel
from flowcredit.leaf_scoring import decode_images
from flowcredit.neighbours import NeighbourStep
from flowcredit.plan import Plan
from flowcredit.prompts import PromptSet
from flowcredit.rollout import Rollout

State = tuple[int | None, int]
"""A segment, None for the initial noise, and the sample of the prompt at its end."""


@dataclass(frozen=True)
class Grown:
    """A tree with all that is shown of it: numbers as plain floats, pictures as data URIs."""

    plan: Plan
    algorithm: Algorithm
    recipe: Recipe
    prompt: str
    iteration: int
    sigmas: tuple[float, ...]
    rewards: tuple[str, ...] = ()
    scores: Mapping[int, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """By scored segment, for each of its samples, one number a reward; NaN for no score."""
    advantages: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """By transition, or where a method credits images by scored segment, one number a sample."""
    finished: Mapping[State, str] = field(default_factory=dict)
    """Pictures of what scored segments end in."""
    predicted: Mapping[State, str] = field(default_factory=dict)
    """Pictures of the images that states foretell, x - s v, where a velocity is kept."""
    anchors: tuple[int, ...] = ()
    """Neighbor GRPO: the samples that are stepped by the trained model."""
    pair: tuple[str, str] | None = None
    """Pairs of a file: the chosen picture and the rejected one."""
    shrunk: str | None = None


class _Quiet:
    """Nobody is told how far it is."""

    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, units: int) -> None:
        pass


def grow(studio: Studio, prompt: PromptSet, seed: int, iteration: int) -> Grown:
    """Roll out, score and credit one prompt as the iteration after ``iteration`` would, by its weights.

    ``seed`` stands for the run's in the draw of the noises. Raises InputError where there is no such
    checkpoint, a trained reward cannot score the prompt, or fails.
    """
    check_kept(studio, iteration)
    setup, said = _setup(studio, seed, iteration)
    pairs_of_file = _columns(setup.algorithm) is not None
    if not pairs_of_file:
        check_scored(setup.rewards, prompt)
    plan = setup.algorithm.plan_at(iteration)
    grown = Grown(
        plan,
        setup.algorithm,
        setup.recipe,
        prompt.prompts[0],
        iteration,
        tuple(setup.grid.tolist()),
        tuple(setup.rewards),
        shrunk=said,
    )
    if pairs_of_file:
        return replace(grown, pair=_pair(setup, prompt))
    run_dir = None if iteration == BASE else studio.folder.path
    with studio.lock, weights_of(studio.model, run_dir, iteration, averaged=False):
        ran, found = explore(setup, prompt, iteration, _Quiet())
        assert ran is not None, "this method samples"
        return replace(
            grown,
            scores={leaf: _rows(each[:, 0].T) for leaf, each in found.scores.items()},
            advantages={place: tuple(each[0].tolist()) for place, each in found.advantages.items()},
            finished=_finished(studio, ran),
            predicted=_predicted(studio, plan, ran, setup.grid),
            anchors=_anchors(ran, found),
        )


def _setup(studio: Studio, seed: int, iteration: int) -> tuple[Setup, str | None]:
    recipe = studio.recipe
    algorithm, _, said = shrunk(recipe.algorithm, recipe.seed, iteration)
    seeded = recipe.model_copy(update={"seed": seed})
    grid = build_grid(recipe.grid, studio.model, recipe.algorithm.num_steps)
    kernel = build_kernel(recipe, grid)
    prompts = studio.train_prompts, studio.heldout_prompts
    setup = Setup(
        seeded, studio.model, algorithm, grid, kernel, studio.rewards, studio.watched, *prompts, None
    )
    return setup, said


def _columns(algorithm: Algorithm) -> tuple[str, str] | None:
    objective = algorithm.objective
    return objective.columns if isinstance(objective, Preferences) else None


def _pair(setup: Setup, prompt: PromptSet) -> tuple[str, str]:
    columns = _columns(setup.algorithm)
    assert columns is not None
    text = prompt.prompts[0]
    train = setup.train_prompts
    if text not in train.prompts:
        raise InputError(
            "this run learns from pairs of images in its prompt file, and samples nothing: take a prompt of"
            f" that file, such as {train.prompts[0]!r}"
        )
    row = train.take([train.prompts.index(text)])
    chosen, rejected = read_pairs(row, columns, setup.recipe.model.height, setup.recipe.model.width)[0]
    return thumb(chosen, 256), thumb(rejected, 256)


def _rows(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.tolist())


def _finished(studio: Studio, ran: Rollout) -> dict[State, str]:
    """Leaves that several segments share are decoded once."""
    done: dict[int, list[str]] = {}
    found: dict[State, str] = {}
    for leaf, states in ran.leaves.items():
        if id(states) not in done:
            done[id(states)] = _pictures(studio, states[0])
        found |= {(leaf, sample): picture for sample, picture in enumerate(done[id(states)])}
    return found


def _predicted(studio: Studio, plan: Plan, ran: Rollout, grid: Tensor) -> dict[State, str]:
    """What the states before noisy and before recorded steps foretell."""
    starts = {plan.segments[step.segment].parent: step.x - step.sigma * step.v for step in ran.transitions}
    for segment, (x, x_next) in ran.recorded.items():
        k, k_next = plan.segments[segment].path
        v = (x_next - x) / (grid[k_next] - grid[k]).to(x)
        starts[plan.segments[segment].parent] = x - grid[k].to(x) * v
    found: dict[State, str] = {}
    for parent, images in starts.items():
        found |= {(parent, sample): picture for sample, picture in enumerate(_pictures(studio, images[0]))}
    return found


def _pictures(studio: Studio, states: Tensor) -> list[str]:
    """[W, *D] states at sigma 0 to pictures, decoded in batches."""
    model: FlowModel = studio.model
    with torch.no_grad():
        parts = [decode_images(model, part) for part in states.split(studio.recipe.scoring.batch_size)]
    return [thumb(image) for part in parts for image in part]


def _anchors(ran: Rollout, found: Experience) -> tuple[int, ...]:
    """The samples from which the trained steps of Neighbor GRPO start."""
    first = next((each for each in found.sets if isinstance(each, NeighbourStep)), None)
    if first is None:
        return ()
    starts = next(iter(ran.recorded.values()))[0][0]
    return tuple(
        sorted(
            sample
            for sample, state in enumerate(starts)
            if any(torch.equal(state.to(row), row[0]) for row in first.x)
        )
    )
