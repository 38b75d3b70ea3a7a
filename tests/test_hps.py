"""HPS v2.1 against a network in open_clip's names written here in plain torch, and Pillow's filter."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPModel

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.rewards.hps import Square
from flowcredit.scoring import score_images
from tiny_clip import CONTEXT, as_pil, make_clip, make_tokenizer, random_images

SIDE, PATCH, WORDS, EMBEDDING = 24, 8, 514, 16
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])
PROMPTS = ["a red cat", "two blue dogs in the snow", "a red cat", "x"]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    """Attention through torch's own fused module, which is where open_clip's names come from."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 16, batch_first=True)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Stack(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn((SIDE // PATCH) ** 2 + 1, width))
        self.conv1 = nn.Conv2d(3, width, PATCH, PATCH, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Stack(width, layers)
        self.proj = nn.Parameter(torch.randn(width, EMBEDDING) / width**0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(pixels), 1, -1)
        x = self.ln_pre(torch.cat([first, patches], dim=1) + self.positional_embedding)
        return self.ln_post(self.transformer(x)[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """ViT-H-14 made small: two widths, 16 heads in each tower, exact GELU, texts padded with 0."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.positional_embedding = nn.Parameter(torch.randn(CONTEXT, width))
        self.text_projection = nn.Parameter(torch.randn(width, EMBEDDING) / width**0.5)
        self.logit_scale = nn.Parameter(torch.tensor(4.6))
        self.visual = Visual(48, layers=3)
        self.transformer = Stack(width, layers=2)
        self.token_embedding = nn.Embedding(WORDS, width)
        self.ln_final = nn.LayerNorm(width)

    def encode_text(self, ids: Tensor) -> Tensor:
        mask = torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1)
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding, mask)
        return self.ln_final(x)[torch.arange(len(ids)), ids.argmax(dim=-1)] @ self.text_projection

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        image = nn.functional.normalize(self.visual(pixels), dim=-1)
        return (image * nn.functional.normalize(self.encode_text(ids), dim=-1)).sum(-1)


def open_clip_ids(prompts: list[str], tokenizer: Any) -> Tensor:
    """Start, letters, end, cut to the context with the end kept, then zeros."""
    rows = torch.zeros(len(prompts), CONTEXT, dtype=torch.long)
    for row, prompt in zip(rows, prompts, strict=True):
        inner = tokenizer(prompt, add_special_tokens=False)["input_ids"][: CONTEXT - 2]
        ids = [WORDS - 2, *inner, WORDS - 1]
        row[: len(ids)] = torch.tensor(ids)
    return rows


def pillow_square(images: Tensor, size: int) -> Tensor:
    """The picture by Pillow in floating point, a channel at a time, on a black square, normalised."""
    squares = torch.zeros(len(images), 3, size, size)
    for index, image in enumerate(as_pil(images)):
        scale = size / max(image.size)
        width, height = (round(side * scale) for side in image.size)
        for channel in range(3):
            plane = Image.fromarray((np.asarray(image)[..., channel] / 255).astype(np.float32))
            small = torch.from_numpy(np.array(plane.resize((width, height), Image.Resampling.BICUBIC)))
            top, left = (size - height) // 2, (size - width) // 2
            squares[index, channel, top : top + height, left : left + width] = small
    return (squares - MEAN[:, None, None]) / STD[:, None, None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OpenClip]:
    folder = tmp_path_factory.mktemp("hps")
    make_tokenizer(folder)
    torch.manual_seed(4)
    model = OpenClip().eval()
    torch.save({"epoch": 2, "name": "hps", "state_dict": model.state_dict()}, folder / "HPS.pt")
    return folder, model


def load(folder: Path, name: str = "HPS.pt") -> Any:
    return load_reward("hps", {"path": str(folder / name), "tokenizer": str(folder)}, "cpu")


@pytest.mark.parametrize("shape", [(48, 48), (24, 24), (37, 61), (55, 20), (12, 24), (9, 15)])
def test_the_square_is_pillows(shape: tuple[int, int]) -> None:
    images = random_images(2, *shape)
    torch.testing.assert_close(Square(SIDE)(images), pillow_square(images, SIDE), atol=2e-5, rtol=0)


def test_hps_from_the_original_file_is_open_clips_cosine(files: tuple[Path, OpenClip]) -> None:
    folder, model = files
    images = random_images(4, 30, 44)
    reward = load(folder)
    with torch.no_grad():
        expected = model(pillow_square(images, SIDE), open_clip_ids(PROMPTS, reward.tokenizer))
    scores = reward(images, PROMPTS)
    assert scores.std() > 0.02
    torch.testing.assert_close(scores, expected, atol=2e-6, rtol=0)
    assert reward.truncated(PROMPTS) == 1


def test_hps_of_a_batch_is_that_of_its_images_under_autocast_too(files: tuple[Path, OpenClip]) -> None:
    images = random_images(4, 30, 30)
    rewards = {"hps": load(files[0])}
    together = score_images(rewards, images, PROMPTS, {}, batch_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = score_images(rewards, images, PROMPTS, {}, batch_size=1)
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=0)


def test_bare_prefixed_and_half_precision_files_are_read(
    files: tuple[Path, OpenClip], tmp_path: Path
) -> None:
    folder, model = files
    make_tokenizer(tmp_path)
    images = random_images(4, 24, 24)
    expected = load(folder)(images, PROMPTS)
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({**state, "module.attn_mask": torch.zeros(CONTEXT, CONTEXT)}, tmp_path / "bare.pt")
    torch.testing.assert_close(load(tmp_path, "bare.pt")(images, PROMPTS), expected, atol=0, rtol=0)
    torch.save({name: tensor.half() for name, tensor in state.items()}, tmp_path / "half.pt")
    half = load(tmp_path, "half.pt")
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    torch.testing.assert_close(half(images, PROMPTS), expected, atol=5e-3, rtol=0)


def test_the_folder_form_gives_the_score_of_the_file(files: tuple[Path, OpenClip], tmp_path: Path) -> None:
    """The folder's own image processor would cut the picture; HPS pads it."""
    folder, _ = files
    from_file = load(folder)
    make_clip(tmp_path)
    from_file.model.save_pretrained(tmp_path)
    images = random_images(4, 30, 44)
    from_folder: Any = load_reward("hps", {"path": str(tmp_path)}, "cpu")
    assert isinstance(from_folder.model, CLIPModel)
    torch.testing.assert_close(from_folder(images, PROMPTS), from_file(images, PROMPTS), atol=1e-6, rtol=0)


def damaged(state: dict[str, Tensor], fault: str) -> dict[str, Any]:
    layer = "visual.transformer.resblocks.1."
    if fault == "no patches":
        return {name: tensor for name, tensor in state.items() if name != "visual.conv1.weight"}
    if fault == "missing":
        return {name: t for name, t in state.items() if not name.startswith(layer + "ln_1")}
    if fault == "unknown":
        return {**state, "score_predictor.weight": torch.ones(2)}
    if fault == "shape":
        return {**state, layer + "attn.in_proj_weight": torch.ones(48, 48)}
    if fault == "grid":
        return {**state, "visual.positional_embedding": torch.ones(12, 48)}
    if fault == "width":
        return {**state, "visual.conv1.weight": torch.ones(40, 3, 8, 8)}
    return {"a": "text"}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("no patches", "has no 'visual.conv1.weight', so it is no checkpoint of this reward; found"),
        (
            "missing",
            "'visual.transformer.resblocks.1.ln_1.bias', 'visual.transformer.resblocks.1.ln_1.weight'",
        ),
        ("unknown", "'score_predictor.weight' is unknown; expected exactly the weights"),
        ("shape", "in_proj_weight' has the shape [48, 48], which does not fit"),
        ("grid", "has 12 rows; expected one more than a square number"),
        ("width", "a tower of width 40; expected a multiple of 16"),
        ("text", "'a' is no tensor"),
    ],
)
def test_faults_of_the_checkpoint_are_named(
    files: tuple[Path, OpenClip], tmp_path: Path, fault: str, expected: str
) -> None:
    make_tokenizer(tmp_path)
    torch.save(damaged(files[1].state_dict(), fault), tmp_path / "bad.pt")
    with pytest.raises(InputError, match=r"bad\.pt: .*" + re.escape(expected)) as caught:
        load(tmp_path, "bad.pt")
    assert "\n" not in str(caught.value)


class Trap:
    """What a hostile checkpoint holds: an object whose unpickling runs a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("sprung"),))


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path)
    torch.save({"state_dict": {"visual.proj": Trap()}}, tmp_path / "trap.pt")
    (tmp_path / "text.pt").write_text("version https://git-lfs.github.com/spec/v1")
    for name in ("trap.pt", "text.pt"):
        with pytest.raises(
            InputError, match=r"cannot be read as the checkpoint of HPS v2\.1 without running code"
        ):
            load(tmp_path, name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"path": "nowhere.pt"}, "a file holds no tokenizer; give the option 'tokenizer'"),
        (
            {"path": "nowhere.pt", "tokenizer": "x"},
            "nowhere.pt: no such file; expected the checkpoint of HPS",
        ),
        ({"path": "x", "tokenizer": 3}, "option 'tokenizer' is 3; expected the folder of CLIP's tokenizer"),
    ],
)
def test_wrong_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_reward("hps", options, "cpu")


def test_a_tokenizer_with_another_end_is_refused(files: tuple[Path, OpenClip], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.eos_token = "!"
    tokenizer.save_pretrained(tmp_path)
    options = {"path": str(files[0] / "HPS.pt"), "tokenizer": str(tmp_path)}
    with pytest.raises(InputError, match="ends a text with token 0, but the model expects 513"):
        load_reward("hps", options, "cpu")
