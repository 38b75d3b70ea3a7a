"""The policy update: shared velocities change nothing, settings do what they say, faults are refused."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from flowcredit.algorithms import g2rpo
from flowcredit.config import TrainSettings
from flowcredit.distributed import World
from flowcredit.errors import InputError
from flowcredit.faults import NonFinite
from flowcredit.methods import G2RPOSettings
from flowcredit.models.gaussian import GaussianMixtureFlow, MixtureVelocity
from flowcredit.objectives import policy_sets
from flowcredit.rollout import KeyedNoise, Rollout, rollout
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import make_kernel
from flowcredit.update import UpdateMetrics, learning_rate, update_policy

Schedule = Literal["constant", "cosine", "linear"]
PROMPTS = ("one", "two")
GROUP = 4
SETTINGS = G2RPOSettings(num_steps=6, train_steps=(0, 1, 3), group_size=GROUP, strides=(1, 2))
KERNEL = make_kernel("flow_sde", shifted_linear(6, 2.0), 0.7)


def mixture() -> GaussianMixtureFlow:
    means = torch.tensor([[2.0, 0.0, -1.0], [-1.0, 1.5, 0.5]], dtype=torch.float64)
    variances, weights = torch.tensor([0.1, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    return GaussianMixtureFlow(means, variances, weights, prompt_spread=0.5, dtype=torch.float64)


def weights_of(model: GaussianMixtureFlow) -> MixtureVelocity:
    network = model.network
    assert isinstance(network, MixtureVelocity)
    return network


def roll(model: GaussianMixtureFlow) -> tuple[Rollout, dict[int, Tensor]]:
    plan = g2rpo(SETTINGS).plan
    noise = KeyedNoise(model, 1, 0, range(len(PROMPTS)))
    done = rollout(model, plan, model.encode(PROMPTS), shifted_linear(6, 2.0), KERNEL, noise, 50)
    generator = torch.Generator().manual_seed(0)
    advantages = {
        segment: torch.randn(len(PROMPTS), GROUP, generator=generator, dtype=torch.float64)
        for segment in plan.transitions
    }
    return done, advantages


def update(
    model: GaussianMixtureFlow, rolled: tuple[Rollout, dict[int, Tensor]], rate: float, **settings: object
) -> tuple[UpdateMetrics, int]:
    done, advantages = rolled
    steps = []
    updating = TrainSettings.model_validate(
        {"mixed_precision": "no", "max_grad_norm": 1e6, "micro_batch_size": 64, **settings}
    )
    metrics = update_policy(
        model,
        model.encode(PROMPTS),
        policy_sets(done.transitions, advantages, KERNEL, updating),
        torch.optim.SGD(model.network.parameters(), lr=rate),
        updating,
        lambda: steps.append(1),
    )
    return metrics, len(steps)


def test_gradient_is_that_of_every_branch_for_itself() -> None:
    """One velocity a state serves its group; by hand, every branch evaluates its own."""
    model = mixture()
    done, advantages = roll(model)
    total = torch.zeros((), dtype=torch.float64)
    cond = model.encode(PROMPTS)
    for step in done.transitions:
        for prompt in range(len(PROMPTS)):
            for branch in range(GROUP):
                x = step.x[prompt]
                v = model.velocity(
                    x, x.new_full((1,), step.sigma), {"offset": cond["offset"][prompt : prompt + 1]}
                )
                new = KERNEL(x, v, step.k, step.k_next).log_prob(step.x_next[prompt, :, branch], 1)
                ratio = torch.exp(new - step.log_prob[prompt, :, branch])
                total = total - (ratio * advantages[step.segment][prompt, branch]).sum() / (3 * 2 * GROUP)
    expected = torch.autograd.grad(total, [weights_of(model).means, weights_of(model).logits])
    before = [weights_of(model).means.detach().clone(), weights_of(model).logits.detach().clone()]
    metrics, steps = update(model, (done, advantages), 1.0, update="accumulated")
    assert steps == 1
    assert metrics["loss"] == pytest.approx(total.item(), abs=1e-9)
    for old, new, gradient in zip(
        before, [weights_of(model).means, weights_of(model).logits], expected, strict=True
    ):
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(old - new.detach(), gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["accumulated", "per_step"])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_micro_batches_change_nothing(kind: str, size: int) -> None:
    whole, parts = mixture(), mixture()
    one, _ = update(whole, roll(whole), 1e-3, update=kind)
    many, _ = update(parts, roll(parts), 1e-3, update=kind, micro_batch_size=size)
    torch.testing.assert_close(weights_of(parts).means, weights_of(whole).means, rtol=0, atol=1e-12)
    assert many["loss"] == pytest.approx(one["loss"], abs=1e-12)
    assert many["clip_fraction_high"] == pytest.approx(one["clip_fraction_high"])


def test_per_step_moves_the_ratio_and_clips_and_accumulated_does_not() -> None:
    model = mixture()
    moved, steps = update(model, roll(model), 0.05, update="per_step", clip_range=1e-4)
    assert steps == 3
    assert moved["on_policy_deviation"] < 1e-12
    assert moved["ratio_max_deviation"] > 1e-4
    assert moved["clip_fraction_low"] > 0
    assert moved["clip_fraction_high"] > 0
    model = mixture()
    still, steps = update(model, roll(model), 0.05, update="accumulated", clip_range=1e-4)
    assert steps == 1
    assert still["ratio_max_deviation"] < 1e-12
    assert still["clip_fraction_low"] == still["clip_fraction_high"] == 0


def test_gradients_are_scaled_to_the_largest_norm() -> None:
    model = mixture()
    before = weights_of(model).means.detach().clone()
    metrics, _ = update(model, roll(model), 1.0, update="accumulated", max_grad_norm=1e-3)
    moved = torch.cat(
        [
            (weights_of(model).means - before).flatten(),
            weights_of(model).logits - torch.log(torch.tensor([0.4, 0.6], dtype=torch.float64)),
        ]
    )
    assert metrics["grad_norm"] > 1e-2
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_off_policy_rollout_is_refused_in_float32() -> None:
    model = mixture()
    rolled = roll(model)
    with torch.no_grad():
        weights_of(model).means.add_(0.05)
    with pytest.raises(InputError, match=r"on-policy ratio is .* away from 1"):
        update(model, rolled, 1e-3)
    update(model, rolled, 1e-3, mixed_precision="bf16")


def test_a_gradient_that_is_not_finite_is_refused_before_weights_change() -> None:
    model = mixture()
    done, advantages = roll(model)
    first = next(iter(advantages))
    advantages[first] = torch.full_like(advantages[first], torch.nan)
    before = weights_of(model).means.detach().clone()
    with pytest.raises(NonFinite, match=r"the loss is nan in a batch of 2 states") as caught:
        update(model, (done, advantages), 1e-3, micro_batch_size=8)
    assert torch.equal(weights_of(model).means, before)
    fault = caught.value.fault
    assert fault is not None
    # The batch is that of the first step's states alone, which the loss's gradient is not finite at.
    assert fault.kind == "loss"
    assert fault.tensors["x"].shape[0] == 2
    assert fault.tensors["grad_v"].isnan().all()
    x = torch.cat([step.x for step in done.transitions if step.segment == first]).flatten(0, 1)
    assert torch.equal(fault.tensors["x"], x[: len(fault.tensors["x"])])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
    ],
)
def test_learning_rate(schedule: Schedule, expected: list[float]) -> None:
    settings = TrainSettings(iterations=6, warmup_iterations=2, lr_schedule=schedule, learning_rate=0.01)
    rates = [learning_rate(settings, iteration) for iteration in range(6)]
    assert rates == pytest.approx([0.01 * share for share in expected])


class Twin(World):
    """This process and one like it, which has called the network once more often."""

    def largest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def summed(self, values: Sequence[int]) -> list[int]:
        return [2 * value for value in values]

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        return None

    def told(self, value: Any) -> list[Any]:
        return [value, [*value[:4], value[4] + 1]] if isinstance(value, list) else [value, value]


def test_a_process_that_calls_the_network_more_often_is_found() -> None:
    model = mixture()
    done, advantages = roll(model)
    settings = TrainSettings.model_validate({"mixed_precision": "no"})
    with pytest.raises(AssertionError, match="processes do not call the network equally often"):
        update_policy(
            model,
            model.encode(PROMPTS),
            policy_sets(done.transitions, advantages, KERNEL, settings),
            torch.optim.SGD(model.network.parameters(), lr=0.1),
            settings,
            lambda: None,
            world=Twin(0, 2),
        )
