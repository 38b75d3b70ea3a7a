"""Diffusion-DPO's objective on a flow that is known exactly, against a few lines of its own."""

import math
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor

from flowcredit.advantages import image_advantages
from flowcredit.config import TrainSettings
from flowcredit.models.gaussian import GaussianMixtureFlow, MixtureVelocity
from flowcredit.preference import extremes, noise_levels, pair_draws, pair_sets
from flowcredit.time_grid import shifted_linear
from flowcredit.update import UpdateMetrics, update_policy
from flowcredit.weights import reference_copy, weights_replaced

PROMPTS = ("one", "two", "three")
BETA = 3.0
GRID = shifted_linear(6, 3.0)


def mixture() -> GaussianMixtureFlow:
    means = torch.tensor([[2.0, 0.0, -1.0], [-1.0, 1.5, 0.5]], dtype=torch.float64)
    variances, weights = torch.tensor([0.1, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    return GaussianMixtureFlow(means, variances, weights, prompt_spread=0.5, dtype=torch.float64)


def weights_of(model: GaussianMixtureFlow) -> list[Tensor]:
    network = model.network
    assert isinstance(network, MixtureVelocity)
    return [network.means, network.logits]


def some_images() -> Tensor:
    return torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def update(
    model: GaussianMixtureFlow,
    reference: dict[str, Tensor],
    drawn: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    **settings: object,
) -> tuple[UpdateMetrics, int]:
    """Train on two pairs, of the third prompt and of the first."""
    updating = TrainSettings.model_validate(
        {"mixed_precision": "no", "max_grad_norm": 1e6, "update": "accumulated", **settings}
    )
    sets = pair_sets(some_images(), torch.tensor([2, 0]), *drawn, BETA)
    steps: list[int] = []

    def before() -> AbstractContextManager[None]:
        return weights_replaced(model.network, reference)

    metrics = update_policy(
        model, model.encode(PROMPTS), sets, optimizer, updating, lambda: steps.append(1), before
    )
    return metrics, len(steps)


def by_hand(
    model: GaussianMixtureFlow, reference: GaussianMixtureFlow, drawn: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """The margin of every draw of every pair, one state at a time."""
    margins = []
    for noise, sigmas in zip(*drawn, strict=True):
        for pair, prompt in enumerate((PROMPTS[2], PROMPTS[0])):
            errors = []
            for image in some_images()[pair]:
                s = sigmas[pair]
                state = ((1 - s) * image + s * noise[pair])[None]
                for flow in (model, reference):
                    off = flow.velocity(state, s[None], flow.encode([prompt]))[0] - noise[pair] + image
                    errors.append(off.square().mean())
            chosen, chosen_before, rejected, rejected_before = errors
            margins.append(-BETA / 2 * ((chosen - chosen_before) - (rejected - rejected_before)))
    return margins


def drawn_pairs(model: GaussianMixtureFlow, draws: int = 3) -> tuple[Tensor, Tensor]:
    return pair_draws(model, GRID, seed=1, iteration=4, places=[7, 9], draws=draws)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_loss_gradient_and_metrics_are_those_of_a_few_lines(size: int) -> None:
    model, reference = mixture(), mixture()
    with torch.no_grad():
        for value in weights_of(model):
            value.add_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(2)))
    drawn = drawn_pairs(model)
    margins = by_hand(model, reference, drawn)
    loss = torch.stack([torch.log(1 + torch.exp(-margin)) for margin in margins]).mean()
    expected = torch.autograd.grad(loss, weights_of(model))
    before = [value.detach().clone() for value in weights_of(model)]
    optimizer = torch.optim.SGD(model.network.parameters(), lr=1.0)
    metrics, steps = update(model, reference_copy(reference.network), drawn, optimizer, micro_batch_size=size)
    assert steps == 1
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert metrics["implicit_margin"] == pytest.approx(
        sum(margin.item() for margin in margins) / 6, abs=1e-12
    )
    above = sum(margin.item() > 0 for margin in margins)
    assert 0 < above < 6
    assert metrics["implicit_accuracy"] == pytest.approx(above / 6)
    assert "on_policy_deviation" not in metrics
    for old, new, gradient in zip(before, weights_of(model), expected, strict=True):
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(old - new.detach(), gradient, rtol=1e-9, atol=1e-12)


def test_before_the_first_update_nothing_is_preferred() -> None:
    model = mixture()
    optimizer = torch.optim.SGD(model.network.parameters(), lr=1e-3)
    metrics, _ = update(model, reference_copy(model.network), drawn_pairs(model), optimizer)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-15)
    assert metrics["implicit_margin"] == 0
    assert metrics["implicit_accuracy"] == 0
    assert metrics["grad_norm"] > 1e-2


def test_the_margin_of_a_pair_grows_as_it_is_trained_on() -> None:
    model = mixture()
    reference, drawn = reference_copy(model.network), drawn_pairs(model, 8)
    optimizer = torch.optim.Adam(model.network.parameters(), lr=0.02)
    told = [update(model, reference, drawn, optimizer, micro_batch_size=16)[0] for _ in range(25)]
    margins = [metrics["implicit_margin"] for metrics in told]
    assert margins[0] == 0
    assert margins[5] > 0.05
    assert margins[24] > 2 * margins[5]
    assert told[24]["loss"] < told[5]["loss"] < math.log(2)
    assert told[24]["implicit_accuracy"] > 0.7


def test_each_draw_is_a_step_where_steps_are_taken_one_by_one() -> None:
    model = mixture()
    optimizer = torch.optim.SGD(model.network.parameters(), lr=1e-3)
    reference = reference_copy(model.network)
    assert update(model, reference, drawn_pairs(model), optimizer, update="per_step")[1] == 3


def test_without_a_pair_nothing_moves() -> None:
    model = mixture()
    before = [value.detach().clone() for value in weights_of(model)]
    optimizer = torch.optim.AdamW(model.network.parameters(), lr=1.0, weight_decay=0.5)
    metrics = update_policy(
        model, model.encode(PROMPTS), (), optimizer, TrainSettings(), lambda: pytest.fail("a step was taken")
    )
    assert metrics == {}
    assert all(torch.equal(old, new) for old, new in zip(before, weights_of(model), strict=True))


def test_noise_levels_follow_any_grid() -> None:
    u = torch.linspace(0, 1, 41, dtype=torch.float64)
    torch.testing.assert_close(noise_levels(shifted_linear(7), u), 1 - u)
    uneven = torch.tensor([1.0, 0.9, 0.4, 0.0], dtype=torch.float64)
    expected = np.interp(u.numpy(), [0, 1 / 3, 2 / 3, 1], uneven.numpy())
    torch.testing.assert_close(noise_levels(uneven, u), torch.from_numpy(expected))
    # On a fine grid, the shift of SD3 itself.
    torch.testing.assert_close(
        noise_levels(shifted_linear(1000, 3.0), u), 3 * (1 - u) / (3 - 2 * u), atol=1e-6, rtol=0
    )


def test_noise_levels_are_drawn_from_the_logit_normal() -> None:
    model = mixture()
    _, sigmas = pair_draws(model, shifted_linear(5), 0, 0, range(4), 500)
    logits = torch.logit(1 - sigmas)
    assert abs(logits.mean().item()) < 0.07
    assert logits.std().item() == pytest.approx(1, abs=0.05)


def test_draws_depend_on_their_keys_alone() -> None:
    model = mixture()
    noises, sigmas = drawn_pairs(model)
    assert noises.shape == (3, 2, 3)
    alone = pair_draws(model, GRID, seed=1, iteration=4, places=[9], draws=2)
    assert torch.equal(alone[0][:, 0], noises[:2, 1])
    assert torch.equal(alone[1][:, 0], sigmas[:2, 1])
    assert len(set(sigmas.flatten().tolist())) == 6
    for other in ({"seed": 2}, {"iteration": 5}, {"places": [8, 10]}):
        keys = {"seed": 1, "iteration": 4, "places": [7, 9], **other}
        assert not torch.isclose(pair_draws(model, GRID, draws=3, **keys)[1], sigmas).any()  # type: ignore[arg-type]


def test_pairs_are_the_ends_of_groups_that_differ() -> None:
    nan = math.nan
    rewards = torch.tensor(
        [
            [[0.2, 0.9, 0.1, 0.4], [0.5, 0.5, 0.5, 0.5], [nan, nan, 0.3, nan], [nan, 0.3, 0.1, nan]],
            [[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [nan, 1.0, nan, nan], [0.0, 0.0, 0.0, 0.0]],
        ]
    )
    advantages = image_advantages(rewards, torch.tensor([1.0, 1.0]))
    ends, differ = extremes(advantages)
    assert differ.tolist() == [True, False, False, True]
    assert ends[differ].tolist() == [[1, 2], [1, 2]]
    ends, differ = extremes(image_advantages(rewards, torch.tensor([-1.0, 0.0])))
    assert ends[differ].tolist() == [[2, 1], [2, 1]]
    assert not extremes(torch.zeros(3, 4))[1].any()


def test_several_rewards_rank_by_their_weighted_advantages() -> None:
    """By hand: standardised, the first reward is (-1.1, 0.9, 0.2) or so whatever its unit."""
    first, second = torch.tensor([[0.0, 100.0, 60.0]]), torch.tensor([[0.3, 0.0, 0.4]])
    both = torch.stack([first, second])
    assert extremes(image_advantages(both, torch.tensor([1.0, 1.0])))[0].tolist() == [[2, 0]]
    assert extremes(image_advantages(both, torch.tensor([1.0, 0.1])))[0].tolist() == [[1, 0]]
    assert extremes(image_advantages(both, torch.tensor([0.1, 1.0])))[0].tolist() == [[2, 1]]
    # Their plain sum is the first reward's, by its unit.
    assert extremes(image_advantages(both, torch.ones(2), "rewards"))[0].tolist() == [[1, 0]]
