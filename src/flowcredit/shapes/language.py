"""The text encoders' own training: to understand a caption, before anything is drawn.

Encoders of published models have read the web before they meet a picture. Ours learn what the world's few
sentences mean: at every noun T5 must know the shape, colour, number and place of what it stands for, and
CLIP's pooled output must know all that the caption names. The probes that ask them are thrown away.

Axes: B captions, L tokens of the longest.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowcredit.shapes.scenes import COLOURS, NUMBERS, RELATIONS, SHAPES, Scene, plural

PLACES = ("alone", "first", "second", *RELATIONS)
"""Where an object stands among those named; for a relation, on which side of the other."""
_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
QUESTIONS = {
    "shape": len(SHAPES),
    "colour": len(COLOURS) + 1,
    "number": len(NUMBERS) + 1,
    "place": len(PLACES),
}
"""What is asked at a noun, and how many answers there are."""


def answers(scene: Scene) -> list[dict[str, int]]:
    """For each noun of the caption, in order, the number of the right answer to each question."""
    nouns = scene.objects[:1] if scene.task == "counting" else scene.objects
    number = len(scene.objects) - 1 if scene.task == "counting" else 0
    result = []
    for i, asked in enumerate(nouns):
        if scene.relation is not None:
            place = scene.relation if i == 0 else _OPPOSITE[scene.relation]
        else:
            place = "alone" if len(nouns) == 1 else ("first", "second")[i]
        result.append(
            {
                "shape": SHAPES.index(asked.shape),
                "colour": len(COLOURS) if asked.colour is None else list(COLOURS).index(asked.colour),
                "number": number,
                "place": PLACES.index(place),
            }
        )
    return result


def noun_rows(tokens: Tensor, nouns: Tensor) -> Tensor:
    """[B, L] token ids and the ids of nouns to [M, 2]: row and place of every noun, in reading order."""
    return torch.isin(tokens, nouns).nonzero()


class Probes(nn.Module):
    """Linear readers: of one T5 state at a noun, and of CLIP's pooled state for the whole caption."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.noun = nn.ModuleDict({name: nn.Linear(width, count) for name, count in QUESTIONS.items()})
        self.caption = nn.Linear(width, 2 * sum(QUESTIONS.values()))


def train_language(
    clip: Any, t5: Any, clip_ids: Tensor, t5_ids: Tensor, nouns: Tensor, scenes: Sequence[Scene], steps: int
) -> float:
    """Train both encoders in place on captions and what they mean; the share of nouns wholly understood.

    ``clip_ids`` and ``t5_ids`` are [N, L] token ids of N scenes; ``nouns`` the ids of nouns in T5's.
    """
    torch.manual_seed(5)
    probes = Probes(t5.config.d_model)
    parameters = [*clip.parameters(), *t5.parameters(), *probes.parameters()]
    optimizer = torch.optim.AdamW(parameters, 2e-3, weight_decay=0.01)
    meant = [answers(scene) for scene in scenes]
    understood = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 100, (steps - step) / (steps / 2))
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(scenes), (256,), generator=generator)
        where = noun_rows(t5_ids[rows], nouns)
        chosen = [meant[row] for row in rows.tolist()]
        asked = [noun for each in chosen for noun in each]
        states = t5(t5_ids[rows]).last_hidden_state[where[:, 0], where[:, 1]]
        loss = torch.zeros(())
        right = torch.ones(len(asked), dtype=torch.bool)
        for name, reader in probes.noun.items():
            truth = torch.tensor([noun[name] for noun in asked])
            guess = reader(states)
            loss = loss + F.cross_entropy(guess, truth)
            right &= guess.argmax(1) == truth
        pooled = probes.caption(clip(clip_ids[rows]).pooler_output)
        loss = loss + F.binary_cross_entropy_with_logits(pooled, _everything(chosen)) * 10
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        understood = float(right.float().mean())
    for parameter in (*clip.parameters(), *t5.parameters()):
        parameter.requires_grad_(False)
    return understood


def _everything(chosen: Sequence[Sequence[dict[str, int]]]) -> Tensor:
    """[B, 2 Q] float: the answers of the first noun, then of the second, as zeros and ones."""
    size = sum(QUESTIONS.values())
    result = torch.zeros(len(chosen), 2 * size)
    for row, nouns in enumerate(chosen):
        for place, noun in enumerate(nouns):
            start = place * size
            for name, count in QUESTIONS.items():
                result[row, start + noun[name]] = 1
                start += count
    return result


def noun_ids(tokenizer: Any) -> Tensor:
    """The T5 tokens that stand for shapes, one or several of them."""
    words = [*SHAPES, *map(plural, SHAPES)]
    return torch.tensor([tokenizer.convert_tokens_to_ids("▁" + word) for word in words])
