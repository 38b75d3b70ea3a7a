"""The demo below its pages: the images of `sample`, the scores of `evaluate`, the credit of training."""

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from demo_run import RECIPES, make_run, studio_of
from flowcredit import cli
from flowcredit.assembly import assemble
from flowcredit.demo import command
from flowcredit.demo.compare_page import compare_page
from flowcredit.demo.comparing import Album
from flowcredit.demo.growing import grow
from flowcredit.demo.studio import Studio, asked_prompt, asked_seed, examples, moments
from flowcredit.demo.tree_page import tree_page
from flowcredit.errors import InputError
from flowcredit.evaluate import evaluate_command, sample_command
from flowcredit.experience import collect
from flowcredit.prompts import PromptSet, iteration_prompts
from flowcredit.recipe_io import load_recipe
from flowcredit.weights import trainable_parameters
from method_world import Silent
from test_check import FAMILIES
from tiny_qwen_image import TEXT_TOKENS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("demo"), "g2rpo", "algorithm.group_size=3")


@pytest.fixture(scope="module")
def studio(run_dir: Path) -> Studio:
    return studio_of(run_dir)


def prompt_of(studio: Studio, place: int = 0) -> PromptSet:
    return asked_prompt(studio, studio.heldout_prompts.prompts[place])


def pixels(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def shown_images(page: str) -> list[NDArray[np.uint8]]:
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    return [pixels(base64.b64decode(each)) for each in found]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_pictures_are_those_of_sample(
    method: str, run_dir: Path, studio: Studio, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if method == "lora":
        lora = ["algorithm.group_size=3", "weights={method: lora, rank: 4}"]
        run_dir = make_run(tmp_path, "g2rpo", *lora, "train.iterations=1")
        studio = studio_of(run_dir)
    recipe, prompt, newest = studio.recipe, prompt_of(studio), moments(studio)[-1].iteration
    album = Album(studio)
    base, aligned = (album.draw(prompt, 5, 2, iteration) for iteration in (0, newest))
    shown = shown_images(compare_page(prompt.prompts[0], base, aligned, "aligned", ("shapes",), ()))
    sample_command(recipe, None, prompt, tmp_path / "base", 2, 5)
    sample_command(recipe, run_dir, prompt, tmp_path / "aligned", 2, 5)
    names = [json.loads(line)["file"] for line in lines(tmp_path / "base" / "images.jsonl")]
    expected = [pixels((tmp_path / of / name).read_bytes()) for name in names for of in ("base", "aligned")]
    assert len(shown) == len(expected) == 4
    for one, other in zip(shown, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (shown[0] != shown[1]).any(), "training changed nothing, so the test could not fail"
    assert (shown[0] != shown[2]).any(), "two seeds gave one image"


def test_an_earlier_checkpoint_is_drawn_by_its_own_averaged_weights(studio: Studio) -> None:
    album, prompt = Album(studio), prompt_of(studio)
    before = {name: value.clone() for name, value in trainable_parameters(studio.model.network).items()}
    drawn = [album.draw(prompt, 0, 1, each.iteration).images for each in moments(studio)]
    assert [each.iteration for each in moments(studio)] == [0, 1, 2]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert album.draw(prompt, 0, 1, 1).images is drawn[1], "drawn anew"
    for name, value in trainable_parameters(studio.model.network).items():
        assert torch.equal(value, before[name]), "the base is no longer the base"


def test_scores_are_those_of_evaluate(run_dir: Path, studio: Studio, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    recipe = load_recipe(run_dir / "recipe.yaml", ["evaluation.prompts=1", "evaluation.seed=7"])
    evaluate_command(recipe, run_dir, out)
    told = json.loads(out.read_text(encoding="utf-8"))["rewards"]
    drawn = Album(studio).draw(prompt_of(studio), 7, 1, 2)
    assert set(drawn.scores) == set(told) == {"shapes", "shapes_exact"}
    for name, scores in drawn.scores.items():
        assert list(scores) == pytest.approx(told[name]["scores"], abs=1e-7)


def test_the_tree_has_the_numbers_that_training_logged(run_dir: Path, studio: Studio) -> None:
    """The run's second iteration had one prompt: rolled out again, it must come to what the log says."""
    logged = json.loads(lines(run_dir / "log.jsonl")[1])
    (row,) = iteration_prompts(len(studio.train_prompts), studio.recipe.seed, 1, 1)
    grown = grow(studio, studio.train_prompts.take([row]), studio.recipe.seed, 1)
    rewards = [row[0] for rows in grown.scores.values() for row in rows]
    assert sum(rewards) / len(rewards) == pytest.approx(logged["reward/shapes"], abs=1e-6)
    for place in grown.plan.transitions:
        k = grown.plan.segments[place].path[0]
        size = np.abs(grown.advantages[place]).mean()
        assert size == pytest.approx(logged[f"advantage/{k}"], abs=1e-4)


@pytest.mark.parametrize(
    "method", ["dense_grpo", "branch_grpo", "tempflow_grpo", "coca", "neighbor_grpo", "dpo", "mix_grpo"]
)
def test_advantages_are_the_trainers(method: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / f"shapes_{method}.yaml", ["watch=[]", "seed=3"])
    studio = studio_of(_only_recipe(tmp_path, recipe))
    prompt = prompt_of(studio, 1)
    grown = grow(studio, prompt, 3, 0)
    found = collect(assemble(recipe), prompt, 0, Silent())
    assert grown.advantages.keys() == found.advantages.keys()
    for place, each in found.advantages.items():
        assert grown.advantages[place] == tuple(each[0].tolist())
    for leaf, scores in found.scores.items():
        assert grown.scores[leaf] == tuple(map(tuple, scores[:, 0].T.tolist()))
    page = tree_page(grown)
    text = Read(page)
    assert text.tags.count("section") >= 2
    assert ("has no rollout tree" in page) == (method in ("dpo", "neighbor_grpo"))
    if method == "neighbor_grpo":
        assert len(grown.anchors) == recipe.algorithm.model_dump()["anchors"]


@pytest.mark.parametrize("family", FAMILIES)
def test_real_formats_are_drawn_and_rolled_out(family: str, tmp_path: Path) -> None:
    """Tiny random weights in the layout of each family, a reward and prompts of one's own."""
    build, guidance = FAMILIES[family]
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    recipe = load_recipe(
        RECIPES / "shapes_g2rpo.yaml",
        [
            f"model={{path: {build(tmp_path / 'model')}, height: 32, width: 32, guidance_scale: {guidance}}}",
            f"prompts={{train: {tmp_path / 'prompts.txt'}, heldout: {tmp_path / 'prompts.txt'}}}",
            f"model.max_sequence_length={TEXT_TOKENS if family == 'QwenImagePipeline' else 12}",
            *("grid={}", "evaluation={}", "algorithm.num_steps=4", "algorithm.train_steps=[0, 1]"),
            *("algorithm.group_size=3", "rewards=[simple_rewards:redness]", "watch=[]"),
        ],
    )
    studio = studio_of(_only_recipe(tmp_path, recipe))
    prompt = asked_prompt(studio, "a green ring")
    drawn = Album(studio).draw(prompt, 0, 2, 0)
    assert drawn.scores["simple_rewards:redness"] == pytest.approx(
        (drawn.images[:, 0] - drawn.images[:, 1]).mean((1, 2)).tolist(), abs=1e-6
    )
    grown = grow(studio, prompt, 0, 0)
    found = collect(assemble(recipe), prompt, 0, Silent())
    for place, each in found.advantages.items():
        assert grown.advantages[place] == tuple(each[0].tolist())
    assert tree_page(grown).count("<section") == 4


def _only_recipe(folder: Path, recipe: object) -> Path:
    from flowcredit.config import Recipe
    from flowcredit.recipe_io import dump_recipe

    assert isinstance(recipe, Recipe)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    return folder


def test_a_run_without_checkpoints_shows_its_base(tmp_path: Path, studio: Studio) -> None:
    bare = studio_of(_only_recipe(tmp_path, studio.recipe))
    assert [each.iteration for each in moments(bare)] == [0]


def test_checkpoints_come_and_go(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "going"
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "000002")
    studio = studio_of(copy)
    assert [each.words for each in moments(studio)] == [
        "the base model, before training",
        "iteration 1 of 2 (newest so far)",
    ]
    shutil.copytree(run_dir / "checkpoints" / "000002", copy / "checkpoints" / "000002")
    assert moments(studio)[-1].words.startswith("iteration 2 of 2 (final")
    shutil.rmtree(copy / "checkpoints" / "000001")
    for draw in (
        lambda: Album(studio).draw(prompt_of(studio), 0, 1, 1),
        lambda: grow(studio, prompt_of(studio), 0, 1),
    ):
        with pytest.raises(InputError, match=r"no checkpoint of iteration 1 any more \(kept now: 2\)"):
            draw()


def test_the_runs_folder_is_not_touched(run_dir: Path) -> None:
    def look() -> dict[str, tuple[int, int]]:
        return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(run_dir.rglob("*"))}

    before = look()
    studio = studio_of(run_dir)
    Album(studio).draw(prompt_of(studio), 0, 1, 2)
    grow(studio, prompt_of(studio), 0, 2)
    assert look() == before


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda s: asked_prompt(s, "  \n"), "type a prompt"),
        (lambda s: asked_prompt(s, "x" * 5000), "5000 characters"),
        (lambda s: asked_prompt(s, "a \ud800"), "surrogate"),
        (lambda s: asked_seed("seven"), "the seed is 'seven'"),
        (lambda s: asked_seed(""), "the seed is empty"),
        (lambda s: asked_seed("-1"), "0 or more"),
        (lambda s: asked_seed("1.5"), "whole number"),
        (lambda s: asked_seed("٣"), "whole number"),
        (lambda s: grow(s, asked_prompt(s, "an elephant"), 0, 2), "reward shapes cannot score this prompt"),
    ],
)
def test_bad_input_is_one_line(studio: Studio, act: Callable[[Studio], object], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        act(studio)
    assert "\n" not in str(caught.value)


def test_a_typed_prompt_of_the_bundled_world_is_scored(studio: Studio) -> None:
    """One that is in no file of the run, typed as people type."""
    asked = asked_prompt(studio, "A  white ring left of a cyan cross. ")
    assert asked.prompts == ("a white ring left of a cyan cross",)
    assert asked.columns["objects"] == (
        [{"shape": "ring", "colour": "white"}, {"shape": "cross", "colour": "cyan"}],
    )
    assert asked.columns["relation"] == ("left of",)
    assert set(Album(studio).draw(asked, 0, 1, 2).scores) == {"shapes", "shapes_exact"}


def test_a_prompt_that_rewards_cannot_score_is_drawn_without(studio: Studio) -> None:
    drawn = Album(studio).draw(asked_prompt(studio, "an elephant"), 0, 1, 2)
    assert drawn.images.shape == (1, 3, 32, 32)
    assert not drawn.scores
    assert "'objects' and 'relation'" in drawn.lacking["shapes"]
    page = compare_page("an elephant", drawn, drawn, "aligned", ("shapes",), ("shapes_exact",))
    assert "No score by shapes: it needs" in page


class Read(HTMLParser):
    """Tags and attributes as a browser would take them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_prompts_are_text(studio: Studio) -> None:
    hostile = """a circle"><script>alert(1)</script><img src=x onerror='alert(2)'>"""
    columns = {name: cells[:1] for name, cells in studio.heldout_prompts.columns.items()}
    prompt = PromptSet((hostile,), columns)
    drawn = Album(studio).draw(prompt, 0, 1, 0)
    for page in (
        compare_page(hostile, drawn, drawn, hostile, ("shapes",), ()),
        tree_page(grow(studio, prompt, 0, 0)),
    ):
        read = Read(page)
        assert "script" not in read.tags
        assert not [name for name in read.attributes if name.startswith("on")]
        assert "&lt;script&gt;" in page


def test_examples_are_the_heldout_prompts(studio: Studio) -> None:
    found = examples(studio)
    assert found[0] == studio.heldout_prompts.prompts[0]
    assert len(found) == len(set(found)) > 20


def test_without_gradio_one_line_tells_what_to_install(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["flowcredit", "demo", str(run_dir)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.count("\n") == 1
    assert 'pip install "flowcredit[demo]"' in said
