"""DenseGRPO's calibration: the rule, a world with a known answer, the command and its table."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flowcredit import calibrate
from flowcredit.algorithms import dense_grpo
from flowcredit.assembly import Setup, build_kernel
from flowcredit.calibrate import calibrate_command
from flowcredit.calibration import Balance, balances, begin, finished, judge, measure_gains, settled_levels
from flowcredit.config import CalibrationSettings, Recipe
from flowcredit.errors import InputError
from flowcredit.models.gaussian import GaussianFlow
from flowcredit.noise_table import NoiseTable, read_noise_table
from flowcredit.prompts import PromptSet
from flowcredit.recipe_io import load_recipe
from flowcredit.time_grid import shifted_linear
from flowcredit.transition import make_kernel

STEPS = 5
SHAPES = Path(__file__).parents[1] / "recipes" / "shapes_g2rpo.yaml"
SMALL = (
    "algorithm={name: dense_grpo, num_steps: 3, group_size: 2}",
    "train.prompts_per_iteration=2",
    "calibration={trajectories: 6, rounds: 3}",
)


def test_a_noise_table_is_a_list_of_levels(tmp_path: Path) -> None:
    file = tmp_path / "levels.yaml"
    file.write_text("- 0.7\n- 1\n- 1e-3\n", encoding="utf-8")
    assert read_noise_table(file) == NoiseTable((0.7, 1.0, 0.001), None, str(file))
    file.write_text('{"levels": [0.5],\n "grid": [1, 0.5, 0], "more": 1}', encoding="utf-8")
    assert read_noise_table(file) == NoiseTable((0.5,), (1.0, 0.5, 0.0), str(file))
    for content, told in [
        ("- 0.7\n- -1\n", r"levels\.yaml:2: level 1 is -1"),
        ("[0.7,\n .nan]", r"levels\.yaml:2: level 1 is NaN"),
        ("- true\n", "level 0 is true"),
        ("0.7", "expected a list"),
        ("[]", "expected a list"),
        ('{"psi": [1]}', "expected a list with a level for each grid step"),
        ('{"levels": []}', r"levels is \[\]; expected a list"),
        ('{"levels": [1,\n null]}', r"levels\.yaml:2: level 1 is null"),
        ('{"levels": [1], "grid": [1,\n -1]}', r"levels\.yaml:2: sigma 1 is -1"),
    ]:
        file.write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=told):
            read_noise_table(file)


def even(share: float) -> Balance:
    return Balance(share, 1 - share, 0.0, 1.0)


def test_a_balanced_step_rises_and_another_falls() -> None:
    settings = CalibrationSettings(step=0.1, floor=0.5, tolerance=0.1)
    state = begin([1.0, 2.0, 0.52, 0.3], settings)
    assert state.levels == (1.0, 2.0, 0.52, 0.5)
    state = judge(state, (even(0.54), even(0.44), even(0.2), even(0.9)), settings)
    # Too many gains are no balance either: the rule asks for both alike.
    assert state.levels == pytest.approx((1.1, 1.8, 0.5, 0.5))
    state = judge(state, (even(0.40), even(0.44), even(0.2), even(0.5)), settings)
    assert state.levels == pytest.approx((1.05, 1.6, 0.5, 0.525))
    assert [state.turns(k) for k in range(4)] == [1, 0, 0, 1]
    assert settled_levels(state) == pytest.approx((1.05, 1.6, 0.5, 0.5))


def test_it_ends_when_all_have_settled_or_lie_at_the_floor_or_rounds_run_out() -> None:
    settings = CalibrationSettings(step=0.5, floor=0.9, turns=2, rounds=5)
    state = begin([1.0, 1.0], settings)
    ended = []
    for first in (0.5, 0.2, 0.5, 0.2, 0.2):
        state = judge(state, (even(first), even(0.1)), settings)
        ended.append(finished(state, settings))
    # The second lies at the floor from its second round on; the first has turned twice after three.
    assert ended == [False, False, True, True, True]
    restless = begin([1.0], settings)
    for _ in range(5):
        assert not finished(restless, settings)
        restless = judge(restless, (even(0.5),), settings)
    assert finished(restless, settings)


def test_balances_count_neither_ties_nor_what_has_no_score() -> None:
    found = balances(torch.tensor([[0.3, -0.1, 0.0, torch.nan], [0.2, 0.2, 0.2, 0.2]]))
    assert [found[0].gained, found[0].lost] == pytest.approx([1 / 3, 1 / 3])
    assert found[0].mean == pytest.approx(0.2 / 3)
    assert (found[1].gained, found[1].lost, found[1].spread) == (1.0, 0.0, 0.0)


def quadratic(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Highest where every latent is 1: decoding is the logistic function."""
    pixels = images[:, 0, 0].double().clamp(1e-7, 1 - 1e-7)
    return -((torch.log(pixels / (1 - pixels)) - 1.0) ** 2).sum(-1)


def gaussian_setup(reward: Any, **calibration: Any) -> Setup:
    recipe = Recipe.model_validate(
        {
            "name": "gaussian",
            "model": {"path": "none"},
            "prompts": {"train": "none", "heldout": "none"},
            "algorithm": {"name": "dense_grpo", "num_steps": STEPS, "group_size": 64},
            "rewards": ["quadratic"],
            "rollout": {"batch_size": 100_000},
            "scoring": {"batch_size": 100_000},
            "train": {"prompts_per_iteration": 64},
            "calibration": calibration,
        }
    )
    model = GaussianFlow(torch.tensor([0.5, 1.5, 1.0]), torch.tensor([0.5, 0.2, 0.8]))
    grid = shifted_linear(STEPS, 3.0)
    prompts = PromptSet(("one", "two"))
    return Setup(
        recipe,
        cast("Any", model),
        dense_grpo(cast("Any", recipe.algorithm)),
        grid,
        make_kernel("flow_sde", grid, 0.7),
        {"quadratic": reward},
        {},
        prompts,
        prompts,
        None,
    )


def test_calibrated_levels_are_those_at_which_gains_are_balanced() -> None:
    """An independent search, by halving, for the level whose excess of losses is just tolerated."""
    tolerance = 0.1
    setup = gaussian_setup(quadratic, trajectories=4096, tolerance=tolerance, step=0.15, turns=3)
    settings = setup.recipe.calibration
    state = begin([2.0] * (STEPS - 1), settings)
    while not finished(state, settings):
        state = judge(state, balances(measure_gains(setup, state.levels, len(state.rounds))), settings)
    assert len(state.rounds) < settings.rounds
    levels = settled_levels(state)
    found = []
    for k in range(STEPS - 1):
        low, high = 0.01, 4.0
        for _ in range(9):
            middle = (low + high) / 2
            tried = [middle if j == k else level for j, level in enumerate(levels)]
            balance = balances(measure_gains(setup, tried, 1000))[k]
            low, high = (middle, high) if balance.lost - balance.gained < tolerance else (low, middle)
        found.append((low + high) / 2)
    assert max(found) / min(found) > 1.5
    assert list(levels) == pytest.approx(found, rel=0.2)


def test_a_reward_without_signal_is_refused() -> None:
    constant = gaussian_setup(lambda images, prompts: torch.full((len(images),), 0.25), trajectories=64)
    with pytest.raises(InputError, match=r"reward 'quadratic' is 0\.25 for all of \d+ images: a constant"):
        measure_gains(constant, [0.5] * (STEPS - 1), 0)
    silent = gaussian_setup(lambda images, prompts: [None] * len(images), trajectories=64)
    with pytest.raises(InputError, match="gave no image a score"):
        measure_gains(silent, [0.5] * (STEPS - 1), 0)


def small_recipe(*overrides: str) -> Recipe:
    return load_recipe(SHAPES, [*SMALL, *overrides])


def test_a_stopped_calibration_goes_on_to_the_same_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halted = tmp_path / "whole.json", tmp_path / "halted.json"
    calibrate_command(small_recipe(), whole)
    calls = []

    def stopping(*arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure_gains(*arguments)

    monkeypatch.setattr(calibrate, "measure_gains", stopping)
    with pytest.raises(KeyboardInterrupt):
        calibrate_command(small_recipe(), halted)
    assert not halted.exists()
    with pytest.raises(InputError, match=r"rounds of another calibration \(settings\.seed differ\)"):
        calibrate_command(small_recipe("seed=1"), halted)
    calibrate_command(small_recipe(), halted)
    assert json.loads(halted.read_text()) == json.loads(whole.read_text())
    assert len(calls) == 5  # two rounds, the one stopped, the third, and the check at the end
    assert not halted.with_name("halted.json.rounds").exists()
    with pytest.raises(InputError, match="exists already"):
        calibrate_command(small_recipe(), halted)


def test_the_table_serves_the_grid_that_it_was_made_for(tmp_path: Path) -> None:
    out = tmp_path / "psi.json"
    calibrate_command(small_recipe(), out)
    table = read_noise_table(out)
    content = json.loads(out.read_text())
    assert table.levels == tuple(content["levels"])
    assert {"settings", "prompts", "weights_sha256", "grid"} <= content["trace"].keys()
    recipe = small_recipe(f"noise={{table: {out}}}")
    assert recipe.noise.kind == "table"
    kernel = build_kernel(recipe, shifted_linear(3, 3.0))
    x = torch.zeros(1, 1)
    dt = float(shifted_linear(3, 3.0)[1] - shifted_linear(3, 3.0)[2])
    assert float(kernel(x, x, 1, 2).std) == pytest.approx(table.levels[1] * dt**0.5)
    with pytest.raises(InputError, match="was calibrated for 3 steps"):
        build_kernel(recipe, shifted_linear(4, 3.0))
    with pytest.raises(InputError, match="was calibrated for 3 steps"):
        build_kernel(recipe, shifted_linear(3, 2.0))


def test_a_step_that_draws_noise_needs_a_level_above_0(tmp_path: Path) -> None:
    table = tmp_path / "levels.yaml"
    table.write_text("[0.5, 0.0, 0.5]", encoding="utf-8")
    recipe = small_recipe(f"noise={{table: {table}}}")
    with pytest.raises(InputError, match=r"levels\.yaml: the level of step 1 is 0, but dense_grpo draws"):
        build_kernel(recipe, shifted_linear(3, 3.0))
    table.write_text("[0.5, 0.5, 0.0]", encoding="utf-8")
    build_kernel(recipe, shifted_linear(3, 3.0))  # the last step is the ODE's


def test_a_runs_noise_is_calibrated_for_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @contextmanager
    def watched(model: Any, run_dir: Path | None) -> Iterator[int]:
        seen.append(run_dir)
        yield 0

    monkeypatch.setattr(calibrate, "weights_of", watched)
    calibrate_command(small_recipe("calibration.rounds=1"), tmp_path / "psi.json", tmp_path / "run")
    assert seen == [tmp_path / "run"]


def test_only_gains_can_be_calibrated(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"algorithm\.name is 'g2rpo'; expected dense_grpo"):
        calibrate_command(load_recipe(SHAPES), tmp_path / "psi.json")
