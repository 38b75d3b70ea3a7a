"""Small prompt files that broke tools of this kind, each through the program itself on a tiny pipeline."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flowcredit.cli import main
from tiny_flux import build_tiny_flux

CASES = Path(__file__).parent / "cases" / "prompts"

Train = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_flux(tmp_path_factory.mktemp("cases") / "model")


@pytest.fixture
def train(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Train:
    """Trains one iteration on a file; gives exit code, stdout and stderr."""

    def run(name: str) -> tuple[int, str, str]:
        recipe = {
            "name": "case",
            "output": str(tmp_path / "runs"),
            "model": {
                "path": str(model),
                "height": 32,
                "width": 32,
                "max_sequence_length": 12,
                "dtype": "float32",
            },
            "prompts": {"train": str(CASES / name), "heldout": str(CASES / "commas.txt")},
            "algorithm": {"name": "g2rpo", "num_steps": 2, "group_size": 2, "strides": [1]},
            "rewards": ["simple_rewards:redness"],
            "train": {"iterations": 1, "prompts_per_iteration": 1, "mixed_precision": "no"},
            "evaluation": {"prompts": 1, "images": 0},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        monkeypatch.setattr(sys, "argv", ["flowcredit", "train", str(tmp_path / "recipe.yaml")])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


CUT = "  1 of 1 prompts (100%) are longer than the text encoder {} reads, and cut\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bom.txt", ["2 prompts from", "bom.txt\n"]),
        ("crlf_blank_lines.txt", ["2 prompts from", "crlf_blank_lines.txt (3 blank lines skipped)\n"]),
        ("no_final_newline.txt", ["2 prompts from"]),
        ("duplicates.jsonl", ["3 prompts from"]),
        ("three_hundred_words.txt", ["1 prompt from", CUT.format("clip"), CUT.format("t5")]),
        ("commas.txt", ["1 prompt from"]),
    ],
)
def test_what_is_read(train: Train, name: str, said: list[str]) -> None:
    code, out, _ = train(name)
    assert code == 0
    for words in said:
        assert words in out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("latin1.txt", ["latin1.txt:2: not UTF-8", "convert it with: iconv"]),
        ("empty.txt", ["empty.txt: holds no prompts"]),
        ("broken_line.jsonl", ["broken_line.jsonl:2: not valid JSON"]),
        ("missing_key.jsonl", ['missing_key.jsonl:2: no "prompt" in this row; its keys: "text"']),
    ],
)
def test_what_is_refused(train: Train, name: str, said: list[str]) -> None:
    code, _, err = train(name)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    for words in said:
        assert words in err
