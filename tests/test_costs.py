"""What an iteration costs, counted by hand and against a run; and how many a budget pays for."""

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor

from flowcredit import trainer
from flowcredit.compare.budget import Budget, iterations_within, parse_budget
from flowcredit.config import Recipe
from flowcredit.costs import Cost, iteration_costs
from flowcredit.errors import InputError
from flowcredit.methods import METHODS
from flowcredit.models.flux import FluxFlow
from flowcredit.recipe_io import load_recipe
from tiny_flux import build_tiny_flux

SMALL: dict[str, dict[str, object]] = {
    "g2rpo": {"train_steps": [0, 1, 2, 3]},
    "tempflow_grpo": {"seeds": 2, "group_size": 4},
    "branch_grpo": {"split_steps": [0, 1, 2], "pruned_depths": 1, "iterations_per_depth": 2},
    "mix_grpo": {"window_size": 2, "iterations_per_position": 3},
    "flow_grpo_fast": {"window_size": 2, "initial_noise": "shared"},
}


def recipe(algorithm: dict[str, object], **others: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "x",
            "model": {"path": "p"},
            "prompts": {"train": "t", "heldout": "h"},
            "rewards": ["shapes", "clip"],
            "algorithm": algorithm,
            "train": {"prompts_per_iteration": 2, "iterations": 7, **others},
        }
    )


G2RPO = {"name": "g2rpo", "num_steps": 4, "group_size": 4, "strides": [1, 2]}


def test_the_cost_of_an_iteration_by_hand() -> None:
    """A prompt: a trunk of 2; 4 branches of step 0 with 3 fine states and a coarse one of its own, 8 images;
    4 of step 1 with 2 states, whose coarse path is the fine one, 4 images; the trunk's 2 states trained."""
    one = next(iteration_costs(recipe(G2RPO)))
    assert one == Cost(rollout=2 * 26, trained=2 * 2, decodes=2 * 12, reward_calls=2 * 12 * 2)
    assert one.velocity_evaluations == 56
    with_kl = next(iteration_costs(recipe(G2RPO, kl_weight=0.1)))
    assert (with_kl.reference, with_kl.velocity_evaluations) == (4, 60)


def test_trajectories_and_neighbours_by_hand() -> None:
    flow = next(iteration_costs(recipe({"name": "flow_grpo", "num_steps": 4, "group_size": 3})))
    assert (flow.rollout, flow.trained, flow.decodes) == (2 * 12, 2 * 9, 2 * 3)
    neighbour = {
        "name": "neighbor_grpo",
        "num_steps": 4,
        "group_size": 3,
        "anchors": 2,
        "train_steps": [0, 2],
    }
    cost = next(iteration_costs(recipe(neighbour)))
    assert (cost.rollout, cost.trained, cost.reference) == (2 * 12, 2 * 4, 0)


def test_a_sliding_window_costs_less_the_later_it_is() -> None:
    mix = {
        "name": "mix_grpo",
        "num_steps": 4,
        "group_size": 3,
        "window_size": 1,
        "iterations_per_position": 2,
    }
    costs = [cost.rollout // 2 for cost in islice(iteration_costs(recipe(mix)), 7)]
    # The shared steps up to the window's own state, then three samples each to the image; and again.
    assert costs == [1 + 9, 1 + 9, 2 + 6, 2 + 6, 3 + 3, 3 + 3, 1 + 9]


def test_budgets_by_hand() -> None:
    tried = recipe(G2RPO)
    counts = {"nfe=56": 1, "nfe=111": 1, "nfe=112": 2, "calls=48": 1, "calls=480": 10, "nfe=5.6e2": 10}
    for text, count in counts.items():
        assert iterations_within(tried, parse_budget(text)) == count, text
    # Half a second a velocity evaluation: 28 seconds an iteration.
    assert iterations_within(tried, Budget("seconds", 100), pace=0.5) == 3


@pytest.mark.parametrize(
    ("budget", "price"),
    [
        (Budget("nfe", 55), "one iteration costs 56 velocity evaluations, more than the budget of 55"),
        (Budget("calls", 47), "costs 48 reward calls"),
        (Budget("seconds", 27), "costs 28 seconds of training"),
        (Budget("seconds", 0.25), "more than the budget of 0.25; raise it"),
    ],
)
def test_a_budget_below_one_iteration_is_refused_with_its_price(budget: Budget, price: str) -> None:
    with pytest.raises(InputError, match=price):
        iterations_within(recipe(G2RPO), budget, pace=0.5)


@pytest.mark.parametrize("text", ["", "nfe", "nfe=", "nfe=-1", "nfe=inf", "steps=5", "4e5", "nfe=nan"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--budget: got '.*'; expected such as nfe=4e5"):
        parse_budget(text)


def test_a_budget_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowcredit.compare.budget.MOST_ITERATIONS", 1000)
    assert iterations_within(recipe(G2RPO), Budget("nfe", 56_000)) == 1000
    with pytest.raises(InputError, match="more than 1,000 iterations"):
        iterations_within(recipe(G2RPO), Budget("nfe", 56_056))


@pytest.mark.parametrize("kind", ["nfe", "calls"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_spends_a_budget_but_for_less_than_one_iteration(name: str, kind: str) -> None:
    settings = {"num_steps": 6, "group_size": 8, **SMALL.get(name, {}), "name": name}
    tried = recipe(settings)
    budget = Budget(kind, 20_000)
    count = iterations_within(tried, budget)
    costs = [
        cost.velocity_evaluations if kind == "nfe" else cost.reward_calls
        for cost in islice(iteration_costs(tried), count + 1)
    ]
    assert sum(costs[:count]) <= budget.amount < sum(costs)
    assert count > 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    root = tmp_path_factory.mktemp("costs")
    build_tiny_flux(root / "pipeline")
    (root / "prompts.txt").write_text("a red circle\na blue square\na star\n")

    def build(algorithm: dict[str, object], **train: object) -> Recipe:
        content = {
            "name": "tiny",
            "model": {"path": str(root / "pipeline"), "height": 16, "width": 16, "max_sequence_length": 8},
            "prompts": dict.fromkeys(("train", "heldout"), str(root / "prompts.txt")),
            "algorithm": algorithm,
            "rewards": ["simple_rewards:redness", "simple_rewards:brightness"],
            "train": {"iterations": 3, "prompts_per_iteration": 2, "mixed_precision": "no", **train},
            "evaluation": {"every": 0, "prompts": 3, "images": 0},
        }
        (root / "recipe.yaml").write_text(yaml.safe_dump(content))
        return load_recipe(root / "recipe.yaml")

    return build


@pytest.mark.parametrize(
    ("algorithm", "train"),
    [
        (G2RPO, {"kl_weight": 0.1}),
        (
            {
                "name": "mix_grpo",
                "num_steps": 3,
                # Of two images two rewards may cancel: then nothing is evaluated in training.
                "group_size": 3,
                "window_size": 1,
                "iterations_per_position": 1,
            },
            {},
        ),
        ({"name": "dense_grpo", "num_steps": 3, "group_size": 2}, {"kl_weight": 0.1, "micro_batch_size": 5}),
        ({"name": "neighbor_grpo", "num_steps": 3, "group_size": 3, "anchors": 2, "train_steps": [0, 1]}, {}),
    ],
    ids=lambda value: value.get("name") if isinstance(value, dict) else None,
)
@pytest.mark.usefixtures("one_thread")
def test_a_run_asks_the_network_as_often_as_was_counted(
    tiny: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: dict[str, object],
    train: dict[str, object],
) -> None:
    tried = tiny(algorithm, **train)
    asked = []
    velocity = FluxFlow.velocity

    def counted(self: FluxFlow, x: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        asked.append((len(x), torch.is_grad_enabled()))
        return velocity(self, x, sigma, cond)

    monkeypatch.setattr(FluxFlow, "velocity", counted)
    monkeypatch.setattr("flowcredit.report.build_report", lambda path: path)
    trainer.train(tried, tmp_path / "run", Console(quiet=True))
    total = sum(islice(iteration_costs(tried), 3), Cost())
    assert sum(count for count, learns in asked if learns) == total.trained
    evaluations = 2 * 3 * tried.algorithm.num_steps
    assert (
        sum(count for count, learns in asked if not learns) == total.rollout + total.reference + evaluations
    )
    last = yaml.safe_load((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert (last["velocity_evaluations"], last["decodes"], last["reward_calls"]) == (
        total.rollout,
        total.decodes,
        total.reward_calls,
    )
