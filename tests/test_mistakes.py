"""Wrong words on the command line: one line and exit code 2, as for any other bad input."""

import sys

import pytest

from flowcredit import cli

MEANT = "recipes/shapes_g2rpo.yaml"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan a.yaml --gpus 0", "flowcredit plan: Invalid value for '--gpus': "),
        ("plan", "flowcredit plan: Missing argument 'RECIPE|RUN'; see flowcredit plan --help\n"),
        ("trian a.yaml", "flowcredit: No such command 'trian'. Did you mean 'train'?; see flowcredit --help"),
        ("plan --gpu 3 a.yaml", "flowcredit plan: No such option: --gpu (Possible options: --gpus)"),
        (
            "train --resume",
            "flowcredit train: Option '--resume' requires an argument; see flowcredit train --help\n",
        ),
        (
            "evaluate nowhere",
            "flowcredit: nowhere: no such file; expected the folder of a run, or a recipe in",
        ),
        (
            "settings train.cilp_range",
            "flowcredit: no setting has 'train.cilp_range' in its name; did you mean",
        ),
        ("train \x1b[31m --x", "flowcredit train: No such option: --x"),
        *(
            (f"plan recipes/{name}", f"flowcredit: recipes/{name}: no such file (did you mean {MEANT}?); ")
            for name in ("shapes_g2rpo.yml", "shapes_g2rpo.yam", "shapes_g2rp", "shapes_grpo.YAML")
        ),
    ],
)
def test_wrong_words_are_one_line(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flowcredit", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    assert said.err.startswith(told)
    assert said.err.count("\n") == 1
