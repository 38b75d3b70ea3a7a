"""GenEval's rules by hand, and the reward against transformers' own processors on random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPModel, YolosConfig, YolosForObjectDetection
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

import tiny_clip
from flowcredit.errors import InputError
from flowcredit.rewards import load_reward, required_columns
from flowcredit.rewards.geneval import COLORS
from flowcredit.rewards.geneval_rules import Found, Wanted, degree, is_right, read_wanted, relations
from flowcredit.scoring import score_images
from tiny_clip import SIDE, make_clip, make_tokenizer, processor

LONGEST = 48
LABELS = {0: "mouse", 1: "bench", 2: "cow"}


def box(x: float, y: float, size: float = 10.0, confidence: float = 0.9) -> Found:
    return Found((x - size / 2, y - size / 2, x + size / 2, y + size / 2), confidence)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (-30, 0, {"left of"}),
        (30, 1, {"right of"}),
        (2, -30, {"above"}),
        (0, 30, {"below"}),
        (-30, 30, {"left of", "below"}),
        # The margin is a tenth of both sizes, 2 pixels here: nearer than that is nowhere.
        (2, 1.9, set()),
        (2.5, 0, set()),
        (4.5, 0, {"right of"}),
    ],
)
def test_where_one_box_lies_to_another(x: float, y: float, expected: set[str]) -> None:
    assert relations(box(100 + x, 100 + y), box(100, 100)) == expected


def red(name: str, found: Any) -> list[str]:
    return ["red"] * len(found)


TWO = {"bench": (box(10, 50), box(90, 50)), "cow": (box(50, 50),)}


@pytest.mark.parametrize(
    ("wanted", "unwanted", "right", "by_degrees"),
    [
        ((Wanted("bench", 2),), (), True, 1.0),
        ((Wanted("bench", 1),), (), True, 0.0),
        ((Wanted("bench", 2),), (Wanted("bench", 3),), True, 1.0),
        ((Wanted("bench", 1),), (Wanted("bench", 2),), False, 0.0),
        ((Wanted("bench", 4),), (), False, 0.5),
        ((Wanted("dog", 1),), (), False, 0.0),
        ((Wanted("cow", 1, "red"), Wanted("bench", 2, "red")), (), True, 1.0),
        ((Wanted("cow", 1, "blue"),), (), False, 0.5),
        ((Wanted("cow", 1), Wanted("bench", 2, "red")), (), True, 1.0),
        # Counted wrongly, a colour gives nothing: parts 1, 2/3 and 0.
        ((Wanted("cow", 1), Wanted("bench", 3, "red")), (), False, 5 / 9),
        # One bench lies left of the cow, the other does not.
        ((Wanted("cow", 1), Wanted("bench", 2, None, ("left of", 0))), (), False, 2 / 3),
        # Of one wanted bench the first is looked at; by degrees its count is wrong.
        ((Wanted("cow", 1), Wanted("bench", 1, None, ("left of", 0))), (), True, 1 / 3),
        ((Wanted("cow", 1, "blue"), Wanted("bench", 1, None, ("left of", 0))), (), False, 0.25),
        ((Wanted("bench", 1), Wanted("cow", 1, None, ("right of", 0))), (), True, 1 / 3),
    ],
)
def test_verdicts_by_hand(
    wanted: tuple[Wanted, ...], unwanted: tuple[Wanted, ...], right: bool, by_degrees: float
) -> None:
    assert is_right(wanted, unwanted, TWO, red) is right
    assert degree(wanted, TWO, red) == pytest.approx(by_degrees)


def test_metadata_of_the_benchmark_is_read_and_other_is_refused() -> None:
    entries = [
        {"class": "bench", "count": 1},
        {"class": "cow", "count": 2, "color": "red", "position": ["above", 0]},
    ]
    assert read_wanted(entries, "include") == (Wanted("bench", 1), Wanted("cow", 2, "red", ("above", 0)))
    for entry, told in (
        ({"count": 1}, "keys class and count"),
        ({"class": "cow", "count": 0}, "count is 0"),
        ({"class": "cow", "count": 1, "position": ["near", 0]}, "expected one of left of, "),
        ({"class": "cow", "count": 1, "position": ["above", 1]}, "an earlier entry"),
    ):
        with pytest.raises(ValueError, match=f"include, entry 2.*{told}"):
            read_wanted([entries[0], entry], "include")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    detector = tmp_path_factory.mktemp("yolos")
    torch.manual_seed(3)
    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=12,
        use_mid_position_embeddings=False,
        id2label=LABELS,
        label2id={name: number for number, name in LABELS.items()},
    )
    model = YolosForObjectDetection(config)
    # Weights large enough that some objects are seen with confidence, and not the same in every image.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.7)
    model.save_pretrained(detector)
    YolosImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(detector)
    return detector, clip_that_reads_to_the_end(tmp_path_factory.mktemp("clip"))


def clip_that_reads_to_the_end(folder: Path) -> Path:
    """A CLIP for texts of 48 letters, whose random weights tell colours apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_clip, "CONTEXT", LONGEST)
        make_clip(folder)
    model = CLIPModel.from_pretrained(folder)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.4)
    model.save_pretrained(folder)
    return folder


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(count, 3, 40, 56, generator=generator) * 255).round() / 255


def test_found_objects_are_those_of_transformers_own_code(folders: tuple[Path, Path]) -> None:
    reward: Any = load_reward("geneval", {"detector": str(folders[0]), "clip": str(folders[1])}, "cpu")
    model = YolosForObjectDetection.from_pretrained(folders[0]).eval()
    own = YolosImageProcessorPil.from_pretrained(folders[0])
    seen = 0
    for image in images(3):
        picture = Image.fromarray((image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
        with torch.no_grad():
            out = model(**own(picture, return_tensors="pt"))
        chances = out.logits[0].softmax(-1)
        expected: dict[str, list[tuple[float, list[float]]]] = {}
        for row, (x, y, w, h) in zip(chances, out.pred_boxes[0].tolist(), strict=True):
            label = int(row[:-1].argmax())
            if float(row[label]) > 0.3:
                corners = [(x - w / 2) * 56, (y - h / 2) * 40, (x + w / 2) * 56, (y + h / 2) * 40]
                expected.setdefault(LABELS[label], []).append((float(row[label]), corners))
        if "mouse" in expected:
            expected["computer mouse"] = expected.pop("mouse")
        found = reward._objects(image, 0.3)
        assert found.keys() == expected.keys()
        for name, entries in expected.items():
            entries.sort(key=lambda entry: -entry[0])
            assert [each.confidence for each in found[name]] == pytest.approx(
                [e[0] for e in entries], abs=1e-5
            )
            for each, (_, corners) in zip(found[name], entries, strict=True):
                assert each.box == pytest.approx(corners, abs=1e-3)
                seen += 1
    assert seen > 3


def test_a_colour_is_the_nearest_of_averaged_texts(folders: tuple[Path, Path]) -> None:
    reward: Any = load_reward("geneval", {"detector": str(folders[0]), "clip": str(folders[1])}, "cpu")
    model, tokenizer = CLIPModel.from_pretrained(folders[1]).eval(), make_tokenizer(folders[1])
    own = processor({"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}})
    named = set()
    for image in images(4):
        named.add(reward._color(image, "cow", Found((3.2, 5.1, 30.7, 38.0), 0.9)))
        pixels = np.asarray((image * 255).round().to(torch.uint8).permute(1, 2, 0))[5:38, 3:31]
        likeness = []
        for color in COLORS:
            texts = [
                f"a photo of a {color} cow",
                f"a photo of a {color}-colored cow",
                f"a photo of a {color} object",
            ]
            tokens = tokenizer(
                texts, padding="max_length", truncation=True, max_length=LONGEST, return_tensors="pt"
            )
            with torch.no_grad():
                text = model.get_text_features(**tokens).pooler_output
                seen = model.get_image_features(
                    pixel_values=own(Image.fromarray(pixels), return_tensors="pt").pixel_values
                ).pooler_output[0]
            mean = (text / text.norm(dim=-1, keepdim=True)).mean(0)
            likeness.append(float(mean @ seen / mean.norm() / seen.norm()))
        assert (
            reward._color(image, "cow", Found((3.2, 5.1, 30.7, 38.0), 0.9))
            == COLORS[int(np.argmax(likeness))]
        )
    assert len(named) > 1


def test_scores_follow_each_images_own_metadata(folders: tuple[Path, Path]) -> None:
    options = {"detector": str(folders[0]), "clip": str(folders[1])}
    reward: Any = load_reward("geneval", options, "cpu")
    assert required_columns(reward) == ("tag", "include")
    shown = images(4)
    counts = [len(reward._objects(image, 0.3).get("cow", ())) for image in shown]
    assert max(counts) > 1
    columns: dict[str, list[Any]] = {
        "tag": ["single_object"] * 4,
        "include": [[{"class": "cow", "count": max(1, count)}] for count in counts],
        "exclude": [None, [], None, [{"class": "cow", "count": 1}]],
    }
    together = score_images({"geneval": reward}, shown, ["cows"] * 4, columns, batch_size=4)
    alone = score_images({"geneval": reward}, shown, ["cows"] * 4, columns, batch_size=1)
    assert torch.equal(together, alone)
    assert together[0].tolist() == [float(count > 0 and i < 3) for i, count in enumerate(counts)]
    graded: Any = load_reward("geneval", {**options, "graded": True}, "cpu")
    columns["include"] = [[{"class": "cow", "count": 2}]] * 4
    found = graded(shown, ["cows"] * 4, columns["tag"], columns["include"])
    assert found.tolist() == pytest.approx([1 - abs(count - 2) / 2 for count in counts])
    # Counting asks for more confidence.
    sure = [len(reward._objects(image, 0.9).get("cow", ())) for image in shown]
    assert sure != counts
    found = graded(shown, ["cows"] * 4, ["counting"] * 4, columns["include"])
    assert found.tolist() == pytest.approx([1 - abs(count - 2) / 2 for count in sure])


def test_what_cannot_be_judged_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    reward: Any = load_reward("geneval", {"detector": str(folders[0]), "clip": str(folders[1])}, "cpu")
    with pytest.raises(ValueError, match="the detector knows no 'dog'; it knows bench, cow, mouse"):
        reward(images(1), ["a dog"], ["single_object"], [[{"class": "dog", "count": 1}]])
    with pytest.raises(
        InputError, match=r"not a complete object detector \(there is no config\.json in it\)"
    ):
        load_reward("geneval", {"detector": str(tmp_path), "clip": str(folders[1])}, "cpu")
    with pytest.raises(InputError, match="not a complete object detector"):
        load_reward("geneval", {"detector": str(folders[1]), "clip": str(folders[1])}, "cpu")
    with pytest.raises(InputError, match="needs the option 'clip'"):
        load_reward("geneval", {"detector": str(folders[0])}, "cpu")
