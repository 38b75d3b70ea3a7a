"""CLIP score: the cosine of image and text embedding of any transformers ``CLIPModel``, in float32.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", arXiv 2103.00020;
as a reward in G²RPO (arXiv 2510.01982) and DanceGRPO (arXiv 2505.07818).

Axes: B images, T distinct texts, H and W image height and width, E embedding dimensions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.quiet import quiet_libraries
from flowcredit.rewards.files import loading_fault, loading_reason, read_json
from flowcredit.rewards.preprocessing import read_preprocessing
from flowcredit.shapes import bundled_path


@dataclass(frozen=True)
class ClipScore:
    """The reward: cosine in [-1, 1], without the logit scale."""

    model: Any
    tokenizer: Any
    preprocessing: Callable[[Tensor], Tensor]
    """[B, 3, H, W] in [0, 1] to what the image encoder takes."""
    context: int
    """Tokens that the text encoder takes; longer texts are cut there, end token kept."""
    device: torch.device

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32; each distinct text is encoded once."""
        texts = list(dict.fromkeys(prompts))
        rows = torch.tensor([texts.index(prompt) for prompt in prompts], device=self.device)
        return (self.embed_images(images) * self.embed_texts(texts)[rows]).sum(dim=-1)

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many of the prompts are longer than the context, so that their end is not scored."""
        lengths = (len(ids) for ids in self.tokenizer(list(prompts))["input_ids"])
        return sum(length > self.context for length in lengths)

    def modules(self) -> tuple[nn.Module, ...]:
        """The network, for `interfaces.HoldsModules`."""
        return (self.model,)

    def embed_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, E] float32 of length one."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            pixels = self.preprocessing(images).to(self.device)
            return _unit(self.model.get_image_features(pixel_values=pixels))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """T texts to [T, E] float32 of length one."""
        # Always padded to the context: a text's embedding must not depend on its neighbours in a batch.
        tokens = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.context, return_tensors="pt"
        ).to(self.device)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return _unit(
                self.model.get_text_features(
                    input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
                )
            )


def load_clip_score(path: str, device: torch.device) -> ClipScore:
    """Load the CLIP score from a folder written by ``CLIPModel`` and ``CLIPProcessor.save_pretrained``.

    Args:
        path: the folder, or a bundled name such as ``bundled:shapes-clip``.

    Raises:
        InputError: no such folder, or one that holds no complete CLIP model.
    """
    folder = bundled_path(path)
    return clip_score(load_clip_model(folder), folder, read_preprocessing(folder), device)


def clip_score(
    model: Any, tokenizer: Path, preprocessing: Callable[[Tensor], Tensor], device: torch.device
) -> ClipScore:
    """A ``CLIPModel`` with the tokenizer of a folder, frozen, in float32 and on the device."""
    text = model.config.text_config
    words = load_tokenizer(tokenizer, text.vocab_size)
    # The text encoder looks for the end token; old configurations say 2 and mean the largest number.
    if text.eos_token_id not in (2, words.eos_token_id):
        raise InputError(
            f"{tokenizer}: its tokenizer ends a text with token {words.eos_token_id}, but the model expects "
            f"{text.eos_token_id}; expected the tokenizer that belongs to the model"
        )
    ready = model.float().to(device).eval().requires_grad_(False)
    return ClipScore(ready, words, preprocessing, text.max_position_embeddings, device)


def load_clip_model(folder: Path) -> Any:
    """The ``CLIPModel`` of a folder; InputError if there is none, or not every weight of it and no other."""
    config = read_json(folder, "config.json")
    if config.get("model_type") != "clip":
        raise InputError(
            f"{folder / 'config.json'}: model_type is {config.get('model_type')!r}, expected 'clip': this "
            "reward takes the folder of a transformers CLIPModel"
        )
    from transformers import CLIPModel

    try:
        with quiet_libraries("transformers"):
            model, report = CLIPModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise InputError(_incomplete(folder, loading_reason(error))) from error
    fault = loading_fault(report)
    if fault is not None:
        raise InputError(_incomplete(folder, fault))
    return model


def load_tokenizer(folder: Path, vocabulary: int) -> Any:
    """The tokenizer of a folder in transformers' layout.

    Args:
        vocabulary: how many tokens the model knows.

    Raises:
        InputError: no tokenizer there, or one with more tokens than that.
    """
    from transformers import AutoTokenizer

    # Where these files are missing, transformers makes a tokenizer without a single word.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        raise InputError(
            f"{folder}: no tokenizer.json, vocab.json or vocab.txt; expected the folder of a transformers "
            "tokenizer"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,  # Left open, it may ask on the terminal.
        )
    except (OSError, ValueError) as error:
        raise InputError(_incomplete(folder, str(error).splitlines()[0])) from error
    if len(tokenizer) > vocabulary:
        raise InputError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens, but the model knows {vocabulary}; "
            "expected the tokenizer that belongs to the model"
        )
    return tokenizer


def _incomplete(folder: Path, reason: str) -> str:
    return (
        f"{folder}: not a complete CLIP model ({reason}); expected the files that CLIPModel and "
        "CLIPProcessor write with save_pretrained"
    )


def _unit(features: Any) -> Tensor:
    """[B, E] of length one; transformers 4 returns the features, 5 an object that holds them."""
    embedding: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return nn.functional.normalize(embedding.float(), dim=-1)
