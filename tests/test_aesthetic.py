"""The aesthetic predictor against transformers' embedding and the published head, dropout and all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPModel

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.scoring import score_images
from tiny_clip import SIDE, as_pil, make_clip, processor, random_images

WIDTH = 8


class Published(nn.Module):
    """The layers as the project trains them: linear ones, and dropout that takes numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.Linear(24, 12), nn.Dropout(0.2)),
            *(nn.Linear(12, 6), nn.Dropout(0.1), nn.Linear(6, 4), nn.Linear(4, 1)),
        )

    def forward(self, embedding: Tensor) -> Tensor:
        return self.layers(embedding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_clip(tmp_path_factory.mktemp("aesthetic"))
    torch.manual_seed(8)
    state = Published().state_dict()
    torch.save(state, folder / "head.pth")
    save_file(state, folder / "head.safetensors")
    return folder


def load(folder: Path, head: str = "head.pth") -> Any:
    return load_reward("aesthetic", {"path": str(folder), "head": str(folder / head)}, "cpu")


@pytest.mark.parametrize("file", ["head.pth", "head.safetensors"])
def test_the_score_is_the_heads_of_the_embedding_at_length_one(folder: Path, file: str) -> None:
    images = random_images(4, 31, 45)
    model = CLIPModel.from_pretrained(folder).eval()
    config = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    pixels = processor(config)(images=as_pil(images), return_tensors="pt")["pixel_values"]
    head = Published().eval()
    head.load_state_dict(torch.load(folder / "head.pth", weights_only=True))
    with torch.no_grad():
        embedding = model.visual_projection(model.vision_model(pixels).pooler_output)
        expected = head(embedding / embedding.square().sum(dim=-1, keepdim=True).sqrt())[:, 0]
    scores = load(folder, file)(images, ["", "a", "b", "c"])
    assert scores.std() > 1e-4
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


def test_the_score_of_a_batch_is_that_of_its_images_under_autocast_too(folder: Path) -> None:
    images = random_images(4, 30, 30)
    rewards = {"aesthetic": load(folder)}
    together = score_images(rewards, images, ["a"] * 4, {}, batch_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = score_images(rewards, images, ["b"] * 4, {}, batch_size=1)
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"layers.0.weight": torch.ones(24, 5)},
            "takes an embedding of 5 numbers, but the CLIP in .* gives 8",
        ),
        ({"layers.7.weight": torch.ones(2, 4)}, "its last layer gives 2 numbers; expected one"),
        (
            {"layers.4.weight": torch.ones(6, 11)},
            r"'layers\.4\.weight' has the shape \[6, 11\], which does not fit",
        ),
        ({"layers.4.bias": None}, r"'layers\.4\.bias' is missing"),
        ({"layers.6.weight": None}, r"has no 'layers\.6\.weight'"),
        ({"layers.9.weight": torch.ones(2)}, r"'layers\.9\.weight' is unknown"),
        ({"layers.0.weight": torch.ones(24)}, r"has the shape \[24\], expected 2 dimensions"),
    ],
)
def test_faults_of_the_head_are_named(
    folder: Path, tmp_path: Path, changes: dict[str, Tensor | None], expected: str
) -> None:
    state = {**torch.load(folder / "head.pth", weights_only=True), **changes}
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, tmp_path / "bad.pth")
    with pytest.raises(InputError, match=r"bad\.pth: .*" + expected):
        load_reward("aesthetic", {"path": str(folder), "head": str(tmp_path / "bad.pth")}, "cpu")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"path": "x"}, r"needs the option 'head': sac\+logos\+ava1-l14-linearMSE\.pth"),
        ({"head": "x"}, "needs the option 'path': the folder of CLIP ViT-L/14"),
    ],
)
def test_wrong_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_reward("aesthetic", options, "cpu")


def test_a_head_that_is_no_file_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder; expected the aesthetic predictor's head"):
        load_reward("aesthetic", {"path": str(folder), "head": str(folder)}, "cpu")
    with pytest.raises(InputError, match=r"none\.pth: no such file; expected the aesthetic predictor's head"):
        load_reward("aesthetic", {"path": str(folder), "head": str(folder / "none.pth")}, "cpu")
