"""Tokenizers of the bundled world, written out file by file: the same bytes at every run.

Every word of the prompts is one token in both; anything else falls back to bytes (CLIP) or characters (T5).
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from flowcredit.shapes.scenes import COLOURS, NUMBERS, RELATIONS, SHAPES, plural

CLIP_CONTEXT = 16
T5_CONTEXT = 12


def words() -> tuple[str, ...]:
    """Every word of every prompt, in a fixed order."""
    sides = [word for relation in RELATIONS for word in relation.split()]
    listed = ["a", "and", "both", *NUMBERS.values(), *COLOURS, *SHAPES, *map(plural, SHAPES), *sides]
    return tuple(dict.fromkeys(listed))


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE uses."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    symbols = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [symbols[b] for b in (*kept, *rest)]


def _merges() -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent pair first, until every word is one token.

    Merges are applied in the order in which they were found, so what was trained is what a tokenizer does;
    merges listed word by word would break one another's words.
    """
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in words()]
    merges = []
    while any(len(symbols) > 1 for symbols in spelled):
        pairs = Counter(pair for symbols in spelled for pair in pairwise(symbols))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        spelled = [_merged(symbols, best) for symbols in spelled]
    return merges


def _merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for symbol in symbols:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return result


def write_clip_tokenizer(folder: Path) -> dict[str, int]:
    """``vocab.json``, ``merges.txt`` and the settings of a CLIP tokenizer; returns its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols = _byte_symbols()
    tokens = [*symbols, *(s + "</w>" for s in symbols), *("".join(pair) for pair in _merges())]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in _merges())]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    special |= {"unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": CLIP_CONTEXT, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return vocabulary


def write_t5_tokenizer(folder: Path) -> int:
    """A Unigram tokenizer as T5's, wrapped by ``T5TokenizerFast``; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [("\u2581" + word, -1.0) for word in words() if len(word) > 1]
    pieces += [("\u2581a", -1.0)]
    characters = "abcdefghijklmnopqrstuvwxyz0123456789,.!?'\"-\u2581"
    pieces += [(character, -10.0) for character in characters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", 1)]
    )
    wrapped = T5TokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_ids=0,
        model_max_length=T5_CONTEXT,
    )
    wrapped.save_pretrained(folder)
    return len(pieces)
