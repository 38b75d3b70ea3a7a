"""What rewards demand of prompts, told with file and line before a model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowcredit import assembly
from flowcredit.assembly import assemble
from flowcredit.config import Recipe
from flowcredit.demands import check_prompts
from flowcredit.errors import InputError
from flowcredit.prompts import PromptSet, load_prompts
from flowcredit.rewards.chat import ChatJudge
from flowcredit.rewards.geneval import GenEvalReward
from flowcredit.rewards.ocr import OcrReward
from flowcredit.rewards.waiting import waiting


def ocr() -> Any:
    return OcrReward(read=lambda image: "", distance=lambda a, b: len(b))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a door with \\"Open\\""}\n\n{"prompt": "a door"}\n'
        '{"prompt": "a wall", "text": "Shut"}\n{"prompt": "a sign \\"  \\""}\n'
    )
    return path


def test_the_first_prompt_without_words_to_write_is_named(file: Path) -> None:
    prompts = load_prompts(file)
    with pytest.raises(InputError) as caught:
        check_prompts({"ocr": ocr()}, prompts, "stop")
    said = str(caught.value)
    assert said.startswith(f"{file}:3: reward 'ocr': nothing to be written in the prompt 'a door'")
    assert "(2 of 4 prompts cannot be scored)" in said
    check_prompts({"ocr": ocr()}, prompts.take([0, 2]), "stop")
    check_prompts({"ocr": ocr()}, prompts, "skip")
    with pytest.raises(InputError, match=rf"^{file}:5: .*'a sign"):
        check_prompts({"ocr": ocr()}, prompts.take([2, 3]), "stop")


def test_prompts_from_no_file_are_named_by_their_source() -> None:
    with pytest.raises(InputError, match=r"^the command line: reward 'ocr': nothing"):
        check_prompts({"ocr": ocr()}, PromptSet(("a door",)), "stop")


def test_a_column_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "text": 3}\n')
    with pytest.raises(InputError, match=r"p\.jsonl:1: reward 'ocr': the column 'text' holds 3"):
        check_prompts({"ocr": ocr()}, load_prompts(tmp_path / "p.jsonl"), "stop")


def geneval() -> Any:
    unused: Any = None
    labels = {0: "mouse", 1: "bench"}
    return GenEvalReward(unused, unused, labels, unused, graded=False, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"include": [{"class": "bench", "count": 1}]}, None),
        ({"include": [{"class": "computer mouse", "count": 1}]}, None),
        ({"include": None}, "include is None; expected a list of objects"),
        ({"include": "bench"}, "include is 'bench'; expected a list"),
        ({"include": []}, "include is empty"),
        ({"include": [{"class": "dog", "count": 1}]}, "the detector knows no 'dog'; it knows bench, mouse"),
        ({"include": [{"class": "bench", "count": 1}], "exclude": [{"class": "dog", "count": 1}]}, "'dog'"),
        ({"include": [{"class": "bench"}]}, "include, entry 1: count is None"),
        ({"include": [{"class": "bench", "count": 1, "position": 3}]}, "int"),
    ],
)
def test_metadata_of_geneval(columns: Mapping[str, Any], told: str | None) -> None:
    refusal = geneval().refusal("a photo", columns)
    assert (refusal is None) if told is None else (told in str(refusal))


def test_a_column_of_the_judges_question_may_not_be_empty() -> None:
    unused: Any = None
    judge = ChatJudge(unused, "m", "{prompt}: is it {style}? {prompt}", unused, (1, 5), False, 1, 1, unused)
    assert judge.refusal("a cat", {"style": "oil"}) is None
    assert (
        judge.refusal("a cat", {"style": None})
        == "its question needs the column 'style', which is empty here"
    )


@dataclass(frozen=True)
class Picky:
    """A user's own reward with networks and a demand."""

    network: torch.nn.Module

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.mean((1, 2, 3))

    def modules(self) -> Sequence[torch.nn.Module]:
        return [self.network]

    def refusal(self, prompt: str, columns: Mapping[str, Any]) -> str | None:
        return "too short" if len(prompt) < 3 else None


def test_a_reward_that_waits_on_the_cpu_still_demands() -> None:
    picky: Any = Picky(torch.nn.Linear(1, 1))
    reward: Any = waiting(picky, torch.device("cpu"))
    assert reward is not picky
    with pytest.raises(InputError, match="reward 'mine': too short"):
        check_prompts({"mine": reward}, PromptSet(("long enough", "no")), "stop")


@pytest.mark.parametrize("bad", ["train", "heldout"])
@pytest.mark.parametrize("how", ["rewards", "watch"])
def test_a_run_is_refused_before_its_model_is_loaded(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, how: str
) -> None:
    good = tmp_path / "good.txt"
    good.write_text('a door with "Open"\n')
    loads = {"ocr": ocr, "other": lambda: Picky(torch.nn.Linear(1, 1))}
    monkeypatch.setattr(assembly, "load_reward", lambda name, options, device: loads[name]())
    reached: list[Recipe] = []

    def build_model(recipe: Recipe, world: Any) -> Any:
        reached.append(recipe)
        raise InputError("the model is loaded")

    monkeypatch.setattr(assembly, "build_model", build_model)
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "model": {"path": "nowhere"},
            "prompts": {"train": str(good), "heldout": str(good), bad: str(file)},
            "rewards": ["other"],
            how: ["ocr"],
        }
    )
    watched_in_training = (bad, how) == ("train", "watch")
    with pytest.raises(
        InputError, match="model is loaded" if watched_in_training else r"jsonl:3: reward 'ocr'"
    ):
        assemble(recipe)
    assert len(reached) == watched_in_training
