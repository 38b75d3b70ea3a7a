"""ImageReward against a BLIP in the checkpoint's own names, written here in plain torch."""

import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import BertTokenizer

from flowcredit.errors import InputError
from flowcredit.rewards import load_reward
from flowcredit.scoring import score_images
from tiny_clip import as_pil, random_images

SIDE, PATCH, WIDTH, TEXT_WIDTH, CONTEXT = 32, 8, 32, 24, 35
CHANNEL_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
CHANNEL_STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])
PROMPTS = ["a red cat", "two blue dogs in the snow", "a red cat", "x" * 50]


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, keep: Tensor | None = None) -> Tensor:
    """[B, L, D] and [B, N, D]; ``keep`` [B, N] is 1 where a key may be seen."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if keep is not None:
        logits = logits + (1.0 - keep[:, None, None, :].float()) * -10000.0
    return (logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


class VitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.proj(attend(query, key, value, heads=16))


class VitMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class VitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn, self.mlp = VitAttention(), VitMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.patch_embed = PatchEmbed()
        self.blocks = nn.ModuleList(VitBlock() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class BertOut(nn.Module):
    """A linear layer, the residual, the norm."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, TEXT_WIDTH), nn.LayerNorm(TEXT_WIDTH, eps=1e-12)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertSelf(nn.Module):
    def __init__(self, source: int) -> None:
        super().__init__()
        self.query = nn.Linear(TEXT_WIDTH, TEXT_WIDTH)
        self.key, self.value = nn.Linear(source, TEXT_WIDTH), nn.Linear(source, TEXT_WIDTH)


class BertAttention(nn.Module):
    def __init__(self, source: int) -> None:
        super().__init__()
        self.self, self.output = BertSelf(source), BertOut(TEXT_WIDTH)

    def forward(self, x: Tensor, source: Tensor, keep: Tensor | None) -> Tensor:
        parts = self.self
        mixed = attend(parts.query(x), parts.key(source), parts.value(source), heads=12, keep=keep)
        return self.output(mixed, x)


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(TEXT_WIDTH, 40)


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.crossattention = BertAttention(TEXT_WIDTH), BertAttention(WIDTH)
        self.intermediate, self.output = Intermediate(), BertOut(40)

    def forward(self, x: Tensor, keep: Tensor, image: Tensor) -> Tensor:
        x = self.attention(x, x, keep)
        x = self.crossattention(x, image, None)
        return self.output(nn.functional.gelu(self.intermediate.dense(x)), x)


class Embeddings(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, TEXT_WIDTH)
        self.position_embeddings = nn.Embedding(40, TEXT_WIDTH)
        self.LayerNorm = nn.LayerNorm(TEXT_WIDTH, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(40)[None])

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        return self.LayerNorm(self.word_embeddings(ids) + self.position_embeddings(positions))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer() for _ in range(2))


class Bert(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embeddings, self.encoder = Embeddings(words), Encoder()


class Blip(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.visual_encoder, self.text_encoder = Vit(), Bert(words)
        self.vision_proj, self.text_proj = nn.Linear(WIDTH, 8), nn.Linear(TEXT_WIDTH, 8)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(TEXT_WIDTH, 20), nn.Dropout(0.2), nn.Linear(20, 12), nn.Dropout(0.2)),
            *(nn.Linear(12, 6), nn.Dropout(0.1), nn.Linear(6, 4), nn.Linear(4, 1)),
        )


class Reference(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.blip, self.mlp = Blip(words), Mlp()

    def forward(self, pixels: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        image = self.blip.visual_encoder(pixels)
        x = self.blip.text_encoder.embeddings(ids)
        for layer in self.blip.text_encoder.encoder.layer:
            x = layer(x, keep, image)
        return (self.mlp.layers(x[:, 0])[:, 0] - 0.16717362830052426) / 1.0333394966054072


def make_tokenizer(folder: Path) -> int:
    """A WordPiece tokenizer of letters in the files of bert-base-uncased; the number of its tokens."""
    letters = [*string.ascii_lowercase, *("##" + letter for letter in string.ascii_lowercase)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}, do_lower_case=True).save_pretrained(folder)
    return len(words)


def read_ids(prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Start, letters, end, cut to the context with the end kept, then zeros; and where there are tokens."""
    ids = torch.zeros(len(prompts), CONTEXT, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        inner = [
            5 + string.ascii_lowercase.index(letter) + (26 if place else 0)
            for word in prompt.split()
            for place, letter in enumerate(word)
        ]
        tokens = [2, *inner[: CONTEXT - 2], 3]
        row[: len(tokens)] = torch.tensor(tokens)
    return ids, ids != 0


def torchvision_crop(images: Tensor) -> Tensor:
    """Shorter side to SIDE by Pillow, then the centre as torchvision rounds it, normalised."""
    cut = []
    for image in as_pil(images):
        width, height = image.size
        longer = int(SIDE * max(image.size) / min(image.size))
        size = (SIDE, longer) if width <= height else (longer, SIDE)
        small = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (round((side - SIDE) / 2.0) for side in size)
        cut.append(small.crop((left, top, left + SIDE, top + SIDE)))
    raw = torch.stack([torch.tensor(list(image.tobytes())).view(SIDE, SIDE, 3) for image in cut])
    return ((raw / 255 - CHANNEL_MEAN) / CHANNEL_STD).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("image_reward")
    words = make_tokenizer(folder)
    torch.manual_seed(6)
    model = Reference(words + 2).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search("embed|cls_token", name) and "LayerNorm" not in name:
                parameter.mul_(0.02)  # so small that the epsilon of the norms counts
            elif parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))  # not what a new model begins with
            elif re.search(r"mlp\.layers|crossattention", name):
                parameter.mul_(2)  # so that image and prompt both matter
    torch.save(model.state_dict(), folder / "ImageReward.pt")
    return folder, model


def load(folder: Path, file: Path | None = None) -> Any:
    options = {"path": str(file or folder / "ImageReward.pt"), "tokenizer": str(folder)}
    return load_reward("image_reward", options, "cpu")


@pytest.mark.parametrize("shape", [(40, 40), (32, 35), (61, 39), (32, 32)])
def test_the_score_is_that_of_the_checkpoints_own_network(
    files: tuple[Path, Reference], shape: tuple[int, int]
) -> None:
    folder, model = files
    images = random_images(4, *shape)
    with torch.no_grad():
        expected = model(torchvision_crop(images), *read_ids(PROMPTS))
    reward = load(folder)
    scores = reward(images, PROMPTS)
    assert scores.std() > 0.02
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert reward.truncated(PROMPTS) == 1


def test_both_image_and_prompt_count(files: tuple[Path, Reference]) -> None:
    reward = load(files[0])
    image = random_images(1, 40, 40)
    by_prompt = reward(image.expand(3, -1, -1, -1), ["a red cat", "a blue cat", "snow"])
    by_image = reward(random_images(3, 40, 40), ["a red cat"] * 3)
    assert by_prompt.unique().numel() == by_image.unique().numel() == 3


def test_the_score_of_a_batch_is_that_of_its_images_under_autocast_too(files: tuple[Path, Reference]) -> None:
    images = random_images(4, 40, 40)
    rewards = {"image_reward": load(files[0])}
    together = score_images(rewards, images, PROMPTS, {}, batch_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = score_images(rewards, images, PROMPTS, {}, batch_size=1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_half_precision_files_are_scored_in_float32(files: tuple[Path, Reference], tmp_path: Path) -> None:
    folder, model = files
    half = {n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    torch.save(half, tmp_path / "half.pt")
    reward = load(folder, tmp_path / "half.pt")
    assert {p.dtype for part in (reward.vision, reward.text, reward.head) for p in part.parameters()} == {
        torch.float32
    }
    images = random_images(4, 40, 40)
    torch.testing.assert_close(reward(images, PROMPTS), load(folder)(images, PROMPTS), atol=2e-2, rtol=0)


LAYER = "blip.text_encoder.encoder.layer.1."


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"mlp.layers.0.weight": None},
            "has no 'mlp.layers.0.weight', so it is no checkpoint of this reward",
        ),
        ({LAYER + "crossattention.self.key.bias": None}, f"'{LAYER}crossattention.self.key.bias' is missing"),
        ({"blip.visual_encoder.norm.bias": None}, "'blip.visual_encoder.norm.bias' is missing"),
        ({"blip.itm_head.weight": torch.ones(2)}, "'blip.itm_head.weight' is unknown"),
        ({"mlp.layers.9.weight": torch.ones(2)}, "'mlp.layers.9.weight' is unknown"),
        ({"blip.visual_encoder.pos_embed": torch.ones(1, 12, 32)}, "has 12 places; expected one more than"),
        ({LAYER + "output.dense.weight": torch.ones(3, 3)}, "has the shape [3, 3], which does not fit"),
        (
            {"blip.visual_encoder.patch_embed.proj.weight": torch.ones(30, 3, 8, 8)},
            "a width of 30; expected a multiple of 16, the heads of ViT-L",
        ),
        (
            {"blip.text_encoder.embeddings.word_embeddings.weight": torch.ones(60, 24)},
            "59 tokens with [DEC] and [ENC], but the model knows 60; expected that of bert-base-uncased",
        ),
    ],
)
def test_faults_of_the_files_are_named(
    files: tuple[Path, Reference], tmp_path: Path, changes: dict[str, Tensor | None], expected: str
) -> None:
    folder, model = files
    state = {name: tensor for name, tensor in {**model.state_dict(), **changes}.items() if tensor is not None}
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(InputError, match=re.escape(expected)) as caught:
        load(folder, tmp_path / "bad.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"path": "x"}, "needs the option 'tokenizer': the folder of bert-base-uncased's tokenizer"),
        ({"tokenizer": "x"}, r"needs the option 'path': ImageReward\.pt"),
        ({"path": "x", "tokenizer": "x"}, r"x: no such file; expected the checkpoint of ImageReward v1\.0"),
    ],
)
def test_wrong_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_reward("image_reward", options, "cpu")
