"""docs/porting.md, followed to the letter on a small AuraFlow: what it shows is what a user gets."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AuraFlowPipeline

from flowcredit.cli import main
from flowcredit.errors import InputError
from flowcredit.models.loading import load_model
from tiny_aura_flow import build_tiny_aura_flow

GUIDE = Path(__file__).parents[1] / "docs" / "porting.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """The guide's blocks in order, each with the file that its first line names, or "" for a command."""
    found = []
    for _, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        name = re.match(r"# (\S+\.(?:py|yaml))\n", text)
        found.append((name[1] if name else "", text))
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a model and prompts, where the guide's adapter lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    build_tiny_aura_flow(tmp_path / "models/aura-flow")
    (tmp_path / "aura_flow.py").write_text(dict(blocks())["aura_flow.py"])
    monkeypatch.delitem(sys.modules, "aura_flow", raising=False)
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, command


@pytest.mark.usefixtures("one_thread")
def test_every_step_of_the_guide_does_what_it_says(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []
    for name, text in blocks():
        done.append(name or text.strip())
        if name:
            (here / name).write_text(text)
        if name == "parity.py":
            runpy.run_path(name)
            said = capsys.readouterr().out
            assert said.count("largest difference of a pixel") == 2
        elif text.startswith("flowcredit check"):
            run(text, monkeypatch)
            lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ok", "NO"))]
            assert len(lines) >= 6
            assert all(line.startswith("ok") for line in lines)
            (ratio,) = (line for line in lines if "ratio on the fresh rollout" in line)
            assert "off 1 by 0.0e+00" in ratio
        elif text.startswith("flowcredit train"):
            run(text, monkeypatch)
    assert done == ["aura_flow.py", "parity.py", "recipe.yaml", "flowcredit check recipe.yaml", *done[-1:]]
    assert done[-1] == "flowcredit train recipe.yaml"
    plain = AuraFlowPipeline.from_pretrained("models/aura-flow", local_files_only=True)
    plain.load_lora_weights("runs/aura-flow/final")
    assert plain.transformer.peft_config


def test_the_comparison_would_notice_a_wrong_answer(here: Path) -> None:
    adapter = (here / "aura_flow.py").read_text()
    for right, wrong in (
        ("timestep=sigma.to(dtype)", "timestep=1000 * sigma.to(dtype)"),
        ("/ vae.config.scaling_factor", "/ vae.config.scaling_factor + 0.1"),
        ("out.to(torch.float32)", "-out.to(torch.float32)"),
    ):
        assert right in adapter
        (here / "aura_flow.py").write_text(adapter.replace(right, wrong))
        sys.modules.pop("aura_flow", None)
        (here / "parity.py").write_text(dict(blocks())["parity.py"])
        with pytest.raises(AssertionError, match="step 1 is wrong"):
            runpy.run_path("parity.py")


def load(adapter: str | None) -> None:
    load_model(
        "models/aura-flow",
        adapter=adapter,
        height=32,
        width=32,
        guidance_scale=1.0,
        max_sequence_length=12,
        dtype=torch.float32,
        device="cpu",
        decode_batch_size=1,
    )


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (None, r"'AuraFlowPipeline' has no adapter; .*or an adapter of your own in model\.adapter"),
        ("aura_flow", r"model\.adapter 'aura_flow': expected 'module:attribute'"),
        ("aura_flo:AuraFlow", r"model\.adapter 'aura_flo:AuraFlow': importing 'aura_flo' raised ModuleNotF"),
        ("aura_flow:AuraFlo", r"has no 'AuraFlo' \(did you mean 'AuraFlow'\?\)"),
        ("aura_flow:TEXT", r"model\.adapter 'aura_flow:TEXT' has no from_folder\(folder, settings\)"),
        ("half:Half", r"model\.adapter 'half:Half': its model has no call_arguments, decode, device, enc"),
    ],
)
def test_what_is_no_adapter_is_refused(here: Path, adapter: str | None, message: str) -> None:
    (here / "half.py").write_text(
        "class Half:\n    part = 'transformer'\n\n"
        "    @classmethod\n    def from_folder(cls, folder, settings):\n        return cls()\n"
    )
    with pytest.raises(InputError, match=message):
        load(adapter)


def test_planning_a_recipe_runs_nothing_of_its_adapter(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "recipe.yaml").write_text(dict(blocks())["recipe.yaml"])
    (here / "aura_flow.py").write_text("raise SystemExit('it ran')\n")
    run("flowcredit plan recipe.yaml", monkeypatch)
    assert "velocity evaluations" in capsys.readouterr().out
    assert "aura_flow" not in sys.modules
    recipe = yaml.safe_load((here / "recipe.yaml").read_text())
    recipe["model"]["adapter"] = "aura_flow"
    (here / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(sys, "argv", ["flowcredit", "plan", "recipe.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "model.adapter 'aura_flow': expected 'module:attribute'" in capsys.readouterr().err
