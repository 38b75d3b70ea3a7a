"""Where a reward is made: figures known by construction, and the command's folder."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from flowcredit.cli import app
from flowcredit.diagnostics import Diagnosis, gains, rank_correlations, stride_spread, variance_shares
from flowcredit.report.diagnosis_files import described, diagnosis_of_run, write_diagnosis

SHAPES = Path(__file__).parents[1] / "recipes" / "shapes_g2rpo.yaml"


def made(states: torch.Tensor, branches: torch.Tensor | None = None) -> Diagnosis:
    steps = len(states)
    if branches is None:
        branches = torch.zeros(1, 1, 1, 2)
    return Diagnosis(
        reward="made",
        noise_kind="flow_sde",
        sigmas=[1 - k / steps for k in range(steps)] + [0.0],
        noise=[0.5] * (steps - 1),
        states=states.tolist(),
        branch_steps=list(range(len(branches))),
        strides=list(range(1, branches.shape[1] + 1)),
        branches=branches.tolist(),
    )


def test_independent_gains_explain_their_own_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 200, 50, generator=generator, dtype=torch.float64)
    parts *= torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    start = torch.randn(200, 1, generator=generator, dtype=torch.float64).expand(200, 50)
    found = made(torch.cat([start[None], start + parts.cumsum(0)]))
    shares = variance_shares(found)
    assert sum(shares) == pytest.approx(1.0)
    assert shares == pytest.approx([1 / 21, 4 / 21, 16 / 21], abs=0.02)
    torch.testing.assert_close(gains(found), parts)


def test_rank_correlation_rises_to_one_and_shares_ranks_between_ties() -> None:
    final = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    reversed_order, tied = torch.tensor([[9.0, 7.0, 5.0, 1.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    found = rank_correlations(made(torch.stack([torch.zeros(1, 4), reversed_order, tied, final])))
    # Ranks 1.5, 1.5, 3.5, 3.5 against 1, 2, 3, 4: covariance 4, norms 2 and sqrt(5).
    assert found == pytest.approx([-1.0, 4 / (2 * 5**0.5), 1.0])


def test_spread_over_strides_and_between_directions() -> None:
    # Two strides of three directions: +-1 about 0, 10 and 20.
    branches = torch.tensor([[[[-1.0, 9.0, 19.0]], [[1.0, 11.0, 21.0]]]])
    within, between = stride_spread(made(torch.zeros(2, 1, 3), branches))
    assert within == pytest.approx([2**0.5])
    assert between == pytest.approx([10.0])


def test_the_command_writes_numbers_figures_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "run" / "diagnosis"
    changes = ["algorithm={num_steps: 4, group_size: 3}", "train.prompts_per_iteration=2"]
    result = CliRunner().invoke(
        app, ["diagnose", str(SHAPES), *changes, "--out", str(out), "--prompts", "3"], catch_exceptions=False
    )
    assert result.exit_code == 0
    found = diagnosis_of_run(tmp_path / "run")
    assert found is not None
    assert torch.tensor(found.states).shape == (4, 3, 3)
    assert torch.tensor(found.branches).shape == (3, 3, 3, 3)
    # The start is shared by a group; every later state is a trajectory's own.
    assert torch.tensor(found.states[0]).std(-1).max() == 0
    assert torch.tensor(found.states[-1]).std(-1).max() > 0
    for name in ("gains", "states", "variance", "strides"):
        with Image.open(out / f"{name}.png") as picture:
            assert picture.width >= 900
    page = (out / "diagnosis.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == 4
    assert "http" not in page.replace("http-equiv", "")
    assert described(found) in page
    assert "rank correlation after it" in result.output


def test_a_diagnosis_of_a_run_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert diagnosis_of_run(tmp_path) is None
    write_diagnosis(made(torch.rand(3, 1, 4)), tmp_path / "diagnosis", "made", "name: made\n")
    content = json.loads((tmp_path / "diagnosis" / "diagnosis.json").read_text())
    (tmp_path / "diagnosis" / "diagnosis.json").write_text(json.dumps(content | {"more": 1}))
    with pytest.raises(ValueError, match="cannot be read as a diagnosis"):
        diagnosis_of_run(tmp_path)
