"""The bundled world: its checker on true and corrupted pictures, its split, its tokenizers, its CLIP."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPModel, CLIPTokenizer, T5TokenizerFast

from flowcredit.errors import InputError
from flowcredit.shapes import ASSETS, bundled_path, networks
from flowcredit.shapes.canvas import Placed, colour_rgb, render
from flowcredit.shapes.checker import check, check_batch, find_objects
from flowcredit.shapes.drawing import CLEAN, Sloppiness, draw
from flowcredit.shapes.language import PLACES, answers, noun_ids, noun_rows, train_language
from flowcredit.shapes.pretrain import tokens_of
from flowcredit.shapes.prompt_files import write
from flowcredit.shapes.scenes import COLOURS, SHAPES, TASKS, Scene, all_scenes, is_held_out
from flowcredit.shapes.text import CLIP_CONTEXT, T5_CONTEXT, words, write_clip_tokenizer, write_t5_tokenizer

PER_TASK = 150


def renders(task: str, seed: int, count: int = PER_TASK) -> tuple[np.ndarray, list[Scene]]:
    rng = np.random.default_rng(seed)
    scenes = all_scenes()[task]
    chosen = [scenes[i] for i in rng.integers(len(scenes), size=count)]
    return render(*draw(rng, chosen, CLEAN)), chosen


def checked(images: np.ndarray, scenes: list[Scene]) -> tuple[np.ndarray, np.ndarray]:
    records = [scene.record() for scene in scenes]
    return check_batch(images, [r["objects"] for r in records], [r["relation"] for r in records])


@pytest.mark.parametrize("task", TASKS)
def test_true_renders_are_right(task: str) -> None:
    graded, exact = checked(*renders(task, seed=5))
    assert exact.mean() >= 0.97
    assert graded.mean() > 0.95
    assert graded.min() >= 0
    assert graded.max() <= 1


@pytest.mark.parametrize("task", TASKS)
def test_pictures_of_other_scenes_are_wrong(task: str) -> None:
    """A picture is judged by its own prompt: the same pictures under one another's prompts fail."""
    images, scenes = renders(task, seed=6)
    others = [*scenes[1:], scenes[0]]
    differs = np.array([set(a.objects) != set(b.objects) for a, b in zip(scenes, others, strict=True)])
    assert differs.mean() > 0.5
    graded, exact = checked(images, others)
    own, _ = checked(images, scenes)
    assert not exact[differs].any()
    assert graded[differs].mean() < own[differs].mean() - 0.2


def picture(*objects: tuple[str, str, float, float], r: float = 5.0) -> np.ndarray:
    return render([[Placed(shape, x, y, r, colour_rgb(colour)) for shape, colour, x, y in objects]])[0]


RED_CIRCLE = [{"shape": "circle", "colour": "red"}]
TWO = [{"shape": "circle", "colour": "red"}, {"shape": "square", "colour": "blue"}]


def test_each_kind_of_fault_costs() -> None:
    right = picture(("circle", "red", 8, 16), ("square", "blue", 24, 16))
    score, exact = check(right, TWO, "left of")
    assert exact
    assert score > 0.97
    faults = {
        "colour": picture(("circle", "green", 8, 16), ("square", "blue", 24, 16)),
        "shape": picture(("cross", "red", 8, 16), ("square", "blue", 24, 16)),
        "swapped colours": picture(("circle", "blue", 8, 16), ("square", "red", 24, 16)),
        "missing": picture(("circle", "red", 8, 16)),
        "surplus": picture(
            ("circle", "red", 7, 8), ("square", "blue", 24, 8), ("ring", "white", 16, 25), r=4
        ),
        "side": picture(("circle", "red", 24, 16), ("square", "blue", 8, 16)),
        "above": picture(("circle", "red", 16, 8), ("square", "blue", 16, 24)),
        "nothing": picture(),
    }
    scores = {}
    for fault, image in faults.items():
        scores[fault], exact = check(image, TWO, "left of")
        assert not exact, fault
        assert scores[fault] < score - 0.1, fault
    assert scores["nothing"] == 0
    assert scores["swapped colours"] < scores["colour"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_every_shape_in_every_colour_is_named(shape: str, colour: str) -> None:
    (found,) = find_objects(picture((shape, colour, 15.3, 16.8)))
    assert (found.shape, found.colour) == (shape, colour)
    assert abs(found.x - 15.3) < 0.3
    assert abs(found.y - 16.8) < 0.3


def test_score_falls_as_a_picture_decays() -> None:
    """Partial credit is graded: more blur, more wobble, more noise, each a lower score."""
    image = picture(("triangle", "yellow", 16, 17), r=6)
    asked = [{"shape": "triangle", "colour": "yellow"}]
    kernel = np.ones(3) / 3

    def blur(times: int) -> np.ndarray:
        out = image.copy()
        for _ in range(times):
            for axis in (1, 2):
                out = np.apply_along_axis(lambda row: np.convolve(row, kernel, "same"), axis, out)
        return out

    scores = [check(blur(times), asked, None)[0] for times in (0, 1, 3, 6)]
    assert all(a > b for a, b in itertools.pairwise(scores))
    ragged = [
        check(render([[Placed("circle", 16, 16, 6, colour_rgb("red"), (a, 3, 0.4))]])[0], RED_CIRCLE, None)[0]
        for a in (0.0, 0.1, 0.2, 0.3)
    ]
    assert all(a > b for a, b in itertools.pairwise(ragged))


def test_a_group_rarely_ties() -> None:
    """Pictures that all fulfil a prompt still differ in score: a group of them teaches something."""
    rng = np.random.default_rng(1)
    scene = all_scenes()["single_object"][0]
    images = render(*draw(rng, [scene] * 64, Sloppiness(0, 0, 0, 0, 0, ragged=1.0)))
    graded, exact = checked(images, [scene] * 64)
    assert exact.mean() > 0.8
    assert len(np.unique(graded)) > 60


def test_touching_objects_of_two_colours_are_two() -> None:
    found = find_objects(picture(("square", "red", 10, 16), ("square", "blue", 18.5, 16)))
    assert sorted((f.shape, f.colour) for f in found) == [("square", "blue"), ("square", "red")]


@pytest.mark.parametrize("image", [np.zeros((3, 32, 32)), np.ones((3, 32, 32)), np.full((3, 32, 32), 0.5)])
def test_an_empty_canvas_scores_nothing(image: np.ndarray) -> None:
    assert check(image, RED_CIRCLE, None) == (0.0, False)


def test_noise_scores_little() -> None:
    image = np.random.default_rng(0).random((3, 32, 32))
    score, exact = check(image, RED_CIRCLE, None)
    assert score < 0.3
    assert not exact


def test_split_by_content() -> None:
    for task, scenes in all_scenes().items():
        held = [scene for scene in scenes if is_held_out(scene)]
        assert 0.1 < len(held) / len(scenes) < 0.35, task

        # What is asked for, without the order in which it is named.
        def content(scene: Scene) -> tuple:
            names = sorted(f"{o.colour} {o.shape}" for o in scene.objects)
            return (*names, None)

        if task != "position":
            kept = {content(scene) for scene in scenes if not is_held_out(scene)}
            assert kept.isdisjoint({content(scene) for scene in held}), task
    position = {scene.prompt: scene for scene in all_scenes()["position"]}
    for prompt, scene in position.items():
        assert scene.relation is not None
        first, second = prompt.split(f" {scene.relation} ")
        opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
        mirrored = position[f"{second} {opposite[scene.relation]} {first}"]
        assert is_held_out(scene) == is_held_out(mirrored), prompt


def test_shipped_prompt_files_are_what_the_package_writes(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_text() == (ASSETS / name).read_text()
    train = [json.loads(line)["prompt"] for line in (ASSETS / "train.jsonl").read_text().splitlines()]
    held = [json.loads(line)["prompt"] for line in (ASSETS / "heldout.jsonl").read_text().splitlines()]
    assert not set(train) & set(held)
    tasks = [json.loads(line)["task"] for line in (ASSETS / "heldout.jsonl").read_text().splitlines()]
    assert tasks[:6] == list(TASKS)


def test_every_word_is_one_token(tmp_path: Path) -> None:
    write_clip_tokenizer(tmp_path / "clip")
    write_t5_tokenizer(tmp_path / "t5")
    clip = CLIPTokenizer.from_pretrained(tmp_path / "clip")
    t5 = T5TokenizerFast.from_pretrained(tmp_path / "t5")
    assert [word for word in words() if len(clip(word).input_ids) != 3] == []
    assert [word for word in words() if len(t5(word).input_ids) != 2] == []
    prompts = {scene.prompt for scenes in all_scenes().values() for scene in scenes}
    assert max(len(clip(prompt).input_ids) for prompt in prompts) <= CLIP_CONTEXT
    assert max(len(t5(prompt).input_ids) for prompt in prompts) <= T5_CONTEXT
    pipeline = bundled_path("bundled:shapes")
    bundled = CLIPTokenizer.from_pretrained(pipeline / "tokenizer")
    bundled_t5 = T5TokenizerFast.from_pretrained(pipeline / "tokenizer_2")
    listed = sorted(prompts)
    assert bundled(listed).input_ids == clip(listed).input_ids
    assert bundled_t5(listed).input_ids == t5(listed).input_ids


def test_unknown_bundled_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="bundled:shapes/train"):
        bundled_path("bundled:shapes/trian")
    size = sum(f.stat().st_size for f in ASSETS.joinpath("pipeline").rglob("*") if f.is_file())
    assert size <= 12 * 2**20


def test_bundled_clip_finds_the_caption_among_64() -> None:
    folder = bundled_path("bundled:shapes-clip")
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    hits = total = 0
    for seed in range(4):
        scenes: dict[str, Scene] = {}
        rng = np.random.default_rng(100 + seed)
        while len(scenes) < 64:
            task = TASKS[rng.integers(len(TASKS))]
            scene = all_scenes()[task][rng.integers(len(all_scenes()[task]))]
            scenes.setdefault(scene.prompt, scene)
        images = torch.from_numpy(render(*draw(rng, list(scenes.values()), CLEAN)))
        pixels = (images - config["image_mean"][0]) / config["image_std"][0]
        tokens = tokenizer(list(scenes), padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**tokens, pixel_values=pixels).logits_per_image
        hits += int((logits.argmax(1) == torch.arange(64)).sum())
        total += 64
    assert hits / total >= 0.9


def test_what_captions_mean_by_hand() -> None:
    scenes = {scene.prompt: scene for scenes in all_scenes().values() for scene in scenes}
    three = answers(scenes["three blue squares"])
    assert three == [{"shape": 1, "colour": 4, "number": 2, "place": PLACES.index("alone")}]
    side = answers(scenes["a red circle left of a blue square"])
    assert [noun["place"] for noun in side] == [PLACES.index("left of"), PLACES.index("right of")]
    assert [noun["colour"] for noun in side] == [0, 4]
    free = answers(scenes["a circle and a cross"])
    assert [(noun["shape"], noun["colour"], noun["place"]) for noun in free] == [(0, 7, 1), (3, 7, 2)]


def test_text_encoders_come_to_understand_captions(tmp_path: Path) -> None:
    clip, t5 = networks.text_encoders(tmp_path)
    scenes = [scene for task in ("single_object", "two_objects") for scene in all_scenes()[task]]
    clip_ids, t5_ids = tokens_of(tmp_path, [scene.prompt for scene in scenes])
    nouns = noun_ids(T5TokenizerFast.from_pretrained(tmp_path / "tokenizer_2"))
    assert len(noun_rows(t5_ids, nouns)) == sum(len(scene.objects) for scene in scenes)
    assert train_language(clip, t5, clip_ids, t5_ids, nouns, scenes, steps=150) > 0.9


def test_pictures_from_the_web_are_dull_cluttered_and_in_reading_order() -> None:
    rng = np.random.default_rng(3)
    pair = list(all_scenes()["attribute_binding"][:400])
    dull = replace(CLEAN, dull=(0.5, 0.5))
    images = render(*draw(rng, pair[:50], dull))
    assert 0.3 < (images.max((1, 2, 3)) - images.min((1, 2, 3))).mean() < 0.75
    cluttered, _ = draw(rng, pair, replace(CLEAN, clutter=0.25))
    assert 0.18 < np.mean([len(picture) == 3 for picture in cluttered]) < 0.32
    ordered, _ = draw(rng, pair, replace(CLEAN, ordered=1.0))
    free, _ = draw(rng, pair, CLEAN)

    def first_is_left(pictures: list[list[Placed]]) -> float:
        return float(np.mean([p[0].x + 0.3 * p[0].y < p[1].x + 0.3 * p[1].y for p in pictures]))

    assert first_is_left(ordered) == 1.0
    assert 0.4 < first_is_left(free) < 0.6
