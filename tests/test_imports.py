"""The shape of the house: imports run downward, files and functions stay short, light commands stay light."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "flowcredit"

FLOORS = (
    ("errors", "visible", "nearest"),
    ("processes", "own_code"),
    ("heartbeat",),
    ("distributed", "background"),
    ("sharding", "interrupts"),
    (
        "text_file",
        "disk",
        "quiet",
        "versions",
        "yaml_lines",
        "sections",
        "shapes",
        "image_grid",
        "console",
        "published",
        "pipeline_folder",
        "limits",
        "known_rewards",
        "destinations",
    ),
    ("lora_file",),
    ("visiting",),
    ("methods", "running"),
    ("config",),
    ("recipe_io", "prompt_files", "noise_table"),
    ("faults", "completion"),
    ("prompts",),
    ("plan", "time_grid", "credit", "image_pairs"),
    ("noise", "step_rewards", "plan_picture"),
    ("transition", "advantages"),
    ("policy_loss",),
    ("interfaces",),
    ("algorithms",),
    ("rollout", "scoring", "memory", "costs"),
    ("models", "rewards", "scaling"),
    ("objectives", "demands", "leaf_scoring", "readiness"),
    ("neighbours", "preference"),
    ("weights", "checkpoint", "update", "run_folder", "export", "comparison"),
    ("assembly", "training_log", "resuming", "trackers", "digests"),
    ("evaluation_files",),
    ("standing",),
    ("sampling", "progress", "guard", "inputs"),
    ("measurement", "experience", "introduction", "model_card"),
    ("evaluate", "calibration", "diagnostics"),
    ("report", "calibrate", "check"),
    ("recovery",),
    ("trainer", "serving", "compare"),
    ("api", "cli_inputs", "plan_command", "launch", "demo", "mistakes"),
    ("checkpoint_export", "replay"),
    ("tool_commands",),
    ("cli",),
    ("__main__",),
)
"""Rooms from the ground up. A room imports from lower floors alone, never from beside itself."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LIGHT = (
    "errors",
    "processes",
    "launch",
    "mistakes",
    "scaling",
    "visible",
    "text_file",
    "yaml_lines",
    "sections",
    "running",
    "methods",
    "published",
    "config",
    "recipe_io",
    "prompt_files",
    "prompts",
    "plan",
    "plan_picture",
    "credit",
    "algorithms",
    "costs",
    "cli",
    "run_folder",
    "tool_commands",
    "cli_inputs",
    "plan_command",
    "memory/estimate",
    "memory/folders",
    "memory/tape",
    "memory/fitness",
    "readiness",
    "digests",
    "pipeline_folder",
    "lora_file",
    "limits",
    "known_rewards",
    "own_code",
    "destinations",
)
HEAVY = {
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "scipy",
    "matplotlib",
    "pyarrow",
    "huggingface_hub",
    "gradio",
    "fastapi",
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _sources() -> list[Path]:
    return sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def _imported(file: Path, inside_functions: bool = True) -> Iterator[str]:
    """Dotted names of the modules that a file imports, ``from a import b`` as both a and a.b."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if inside_functions else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import; write the full name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _rooms_imported(file: Path) -> set[str]:
    names = [name.split(".") for name in _imported(file)]
    rooms = {parts[1] for parts in names if parts[0] == "flowcredit" and len(parts) > 1}
    return rooms - {"__version__"}


def test_every_room_has_a_floor() -> None:
    assert {_room(file) for file in _sources()} <= FLOOR.keys()


@pytest.mark.parametrize("file", _sources(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_downward(file: Path) -> None:
    here = _room(file)
    for room in _rooms_imported(file) - {here}:
        assert room in FLOOR, f"{here} imports flowcredit.{room}, which has no floor"
        assert FLOOR[room] < FLOOR[here], f"{here} imports {room}, which does not lie below it"


def test_models_rewards_and_methods_never_meet() -> None:
    apart = {"models", "rewards", "algorithms"}
    for file in _sources():
        if (here := _room(file)) in apart:
            assert not _rooms_imported(file) & (apart - {here}), f"{file} knows another of {sorted(apart)}"


@pytest.mark.parametrize("room", LIGHT)
def test_light_rooms_load_nothing_heavy_at_import(room: str) -> None:
    alone = PACKAGE / f"{room}.py"
    for file in [alone] if alone.exists() else sorted((PACKAGE / room).rglob("*.py")):
        imported = {name.split(".")[0] for name in _imported(file, inside_functions=False)}
        assert not imported & HEAVY, file


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_and_functions_stay_short() -> None:
    long = []
    for folder in ("src", "tests", "benchmarks", "reliability", "tools"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            name = file.relative_to(ROOT)
            if text.count("\n") > MAX_FILE_LINES:
                long.append(f"{name}: {text.count(chr(10))} lines")
            for function in _functions(ast.parse(text)):
                lines = (function.end_lineno or 0) - function.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{name}:{function.lineno} {function.name}: {lines} lines")
    assert not long


LIGHT_COMMANDS = (
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["plan", str(ROOT / "recipes" / "shapes_g2rpo.yaml")],
    ["plan", str(ROOT / "recipes" / "flux1_dev_g2rpo_lora.yaml")],
    ["settings"],
    ["serve-reward", "--help"],
    ["compare", "--help"],
    ["launch", "--help"],
    ["demo", "--help"],
    ["plan", str(ROOT / "recipes" / "flux1_dev_g2rpo_hps.yaml"), "--gpus", "64"],
    ["train", "no_such_recipe.yaml"],
)

PROBE = """
import sys
from flowcredit.cli import main
sys.argv = ["flowcredit", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", *sorted({name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("words", LIGHT_COMMANDS, ids=lambda words: " ".join(words[:2])[:20])
def test_light_commands_answer_without_torch(words: list[str]) -> None:
    """In a process of its own: here torch may be loaded already."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == (2 if "no_such_recipe.yaml" in words else 0), done.stderr
    loaded = set(done.stdout.splitlines()[-1].removeprefix("loaded:").split())
    assert "typer" in loaded
    assert not loaded & HEAVY
