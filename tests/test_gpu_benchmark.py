"""benchmarks/gpu.py on a small model: every line is printed, and what does not depend on time is right."""

import re

import gpu
import pytest
import torch
from diffusers import FluxTransformer2DModel
from flux_shaped import TINY

from flowcredit.quiet import quiet_libraries

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_small_model_runs_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet_libraries():
        assert gpu.main(["--tiny"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"### .+, \d{4}-\d\d-\d\d, torch ", out)
    rows = dict(row.strip("| ").split(" | ") for row in out.splitlines() if row.startswith("| "))
    parameters = sum(value.numel() for value in _network().parameters())
    assert rows["full: blocks"] == f"1 double, 2 single; {parameters / 1e6:.1f} million parameters"
    for name in (
        "naive / wavefront, time",
        "wavefront / bare forwards, time",
        "velocity evaluations a second",
    ):
        assert float(rows[name]) > 0
    assert float(rows["largest difference of a latent"].split()[0]) < 0.05
    for method in ("lora", "full"):
        assert float(rows[f"{method}: ratio on a fresh rollout, its largest distance from 1"]) < 1e-2
        assert re.fullmatch(r"\d+\.\d{3} s", rows[f"{method}: a training step (2 states)"])
        for phase in ("rollout", "training"):
            ratio = re.search(r"measured ([\d.]+)\)", rows[f"{method}: peak of {phase}"])
            assert ratio is not None
            assert float(ratio[1]) == pytest.approx(1, abs=0.2)


def _network() -> torch.nn.Module:
    return FluxTransformer2DModel(**TINY.network, num_layers=1, num_single_layers=2)


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"gpu\.py: torch sees no GPU.*--tiny.*\n", printed.err)
