"""What only a whole iteration of a method shows: where its parts meet."""

import numpy as np
import pytest
import torch

from flowcredit.methods import NeighborGRPOSettings
from flowcredit.neighbours import NeighbourStep
from flowcredit.rollout import KeyedNoise, rollout
from method_world import PROMPTS, gather, world


def test_coca_sees_the_images_that_its_states_predict() -> None:
    setup = world({"name": "coca", "num_steps": 4, "group_size": 4}, rewards=["simple_rewards:contrast"])
    found = gather(setup)
    plan, cond = setup.algorithm.plan, setup.model.encode(PROMPTS)
    noise = KeyedNoise(setup.model, setup.recipe.seed, 0, range(len(PROMPTS)))
    done = rollout(setup.model, plan, cond, setup.grid, setup.kernel, noise, 64)
    (leaf,) = plan.scored
    image = done.leaves[leaf].numpy()
    rewards = found.scores[leaf][0].double().numpy()
    for prompt in range(len(PROMPTS)):
        own = rewards[prompt]
        terminal = (own - own.mean()) / own.std(ddof=1)
        shares = np.empty((3, 4))
        for k, step in enumerate(done.transitions):
            for sample in range(4):
                x = step.x[prompt, sample]
                offset = {"offset": cond["offset"][prompt : prompt + 1]}
                v = setup.model.velocity(x[None], x.new_full((1,), float(setup.grid[k])), offset)[0]
                predicted = (x - float(setup.grid[k]) * v).detach().numpy()
                end = image[prompt, sample]
                cosine = predicted @ end / np.linalg.norm(predicted) / np.linalg.norm(end)
                shares[k, sample] = 1 - cosine
        credit = terminal * shares / shares[0]
        expected = (credit - credit.mean()) / credit.std(ddof=1)
        for k, step in enumerate(done.transitions):
            np.testing.assert_allclose(found.advantages[step.segment][prompt].numpy(), expected[k], rtol=1e-4)


def test_neighbours_advantages_are_cut_as_any_others() -> None:
    rewards = [{"name": "simple_rewards:brightness", "weight": 100.0}]
    tree = {"name": "neighbor_grpo", "num_steps": 4, "group_size": 4, "anchors": 2, "train_steps": [1]}
    found = gather(world({**tree, "advantage_clamp": 0.5}, rewards=rewards))
    (step,) = found.sets
    assert isinstance(step, NeighbourStep)
    assert float(step.advantages.abs().max()) == 0.5
    whole = gather(world({**tree, "advantage_clamp": 1000.0}, rewards=rewards)).sets[0]
    assert isinstance(whole, NeighbourStep)
    assert float(whole.advantages.abs().max()) > 5
    torch.testing.assert_close(step.advantages, whole.advantages.clamp(-0.5, 0.5))


@pytest.mark.parametrize("perturbation", [0.1, 0.7])
def test_neighbours_lie_as_far_apart_as_they_are_told(perturbation: float) -> None:
    """Over many iterations the mean squared distance of two starts is 2 sigma^2 a dimension."""
    assert NeighborGRPOSettings().perturbation == 0.3
    tree = {"name": "neighbor_grpo", "num_steps": 4, "group_size": 4, "anchors": 2, "train_steps": [0]}
    setup = world({**tree, "perturbation": perturbation})
    squares = []
    for iteration in range(50):
        (step,) = gather(setup, iteration).sets
        assert isinstance(step, NeighbourStep)
        first, second = step.x[0::2, 0], step.x[1::2, 0]
        squares.append(((first - second) ** 2).flatten())
    assert float(torch.cat(squares).mean()) == pytest.approx(2 * perturbation**2, rel=0.2)
