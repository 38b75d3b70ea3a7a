"""A folder in diffusers' layout, as far as its JSON files and the headers of its weights tell: no tensor is
read, and nothing heavy is imported."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError

TOKENIZER_FILES = frozenset({"tokenizer.json", "vocab.json", "spiece.model"})
"""A tokenizer's folder holds its vocabulary in one of these."""
STEMS = ("diffusion_pytorch_model", "model")
"""Weights are loaded from STEM.safetensors, or from the shards that STEM.safetensors.index.json names."""
LONGEST_HEADER = 100_000_000
"""Bytes: the safetensors library refuses longer ones."""

Shapes = Mapping[str, tuple[int, ...]]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. InputError where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; expected the folder whole, as diffusers writes it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise InputError(f"{file}: a JSON {type(found).__name__}; expected an object")
    return found


def read_index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a pipeline folder. InputError where there is none."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise InputError(
            f"model {folder}: {found}; expected a folder in diffusers' layout, with a model_index.json "
            "(download a hub model first and give the local folder)"
        )
    file = folder / "model_index.json"
    if not file.is_file():
        entries = sorted(entry.name for entry in folder.iterdir())
        found = ", ".join(entries[:8]) + (", ..." if len(entries) > 8 else "") if entries else "nothing"
        raise InputError(
            f"model {folder}: no model_index.json (the folder has {found}); expected a whole pipeline as "
            "written by diffusers' save_pretrained"
        )
    return read_json(file)


def components(folder: Path) -> tuple[str, ...]:
    """The subfolders of a pipeline folder that hold its parts, by its model_index.json."""
    return tuple(key for key, there in _listed(read_index(folder)).items() if there)


def absent_components(folder: Path) -> tuple[str, ...]:
    """The parts that a pipeline folder lists as null, such as a T5 that was left out."""
    return tuple(key for key, there in _listed(read_index(folder)).items() if not there)


def _listed(index: Mapping[str, Any]) -> dict[str, bool]:
    return {key: value[0] is not None for key, value in index.items() if isinstance(value, list) and value}


def check_components(folder: Path) -> None:
    """InputError unless every part is there, tokenizers with a vocabulary."""
    listed = components(folder)
    missing = [name for name in listed if not (folder / name).is_dir()]
    if missing:
        raise InputError(
            f"model {folder}: {', '.join(missing)} missing; model_index.json lists "
            f"{', '.join(listed)}, each a folder of that name"
        )
    # From an empty folder transformers makes a tokenizer of three tokens, without a word.
    for name in listed:
        files = {file.name for file in (folder / name).iterdir()}
        if name.startswith("tokenizer") and not files & TOKENIZER_FILES:
            raise InputError(
                f"{folder / name}: no vocabulary (found {', '.join(sorted(files)) or 'nothing'}); "
                f"expected one of {', '.join(sorted(TOKENIZER_FILES))}"
            )


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that loading a part takes, none where there are none.

    Files of a variant, such as ``model.fp16.safetensors``, are not loaded. InputError where an index names a
    file that is not there.
    """
    for stem in STEMS:
        whole, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if whole.is_file():
            return (whole,)
        if index.is_file():
            named = read_json(index).get("weight_map")
            if not isinstance(named, dict):
                raise InputError(f"{index}: has no weight_map; expected the index that diffusers writes")
            shards = sorted({str(shard) for shard in named.values()})
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing:
                raise InputError(
                    f"{index}: names {missing[0]}, which is not there; download the folder whole"
                )
            return tuple(folder / shard for shard in shards)
    return ()


def has_weights(folder: Path) -> bool:
    """Whether loading a part finds weights: in safetensors, or in torch's older format.

    The latter is read without running code from it (``weights_only``), but has no header to look at.
    """
    older = ("diffusion_pytorch_model.bin", "pytorch_model.bin")
    there = any((folder / f"{name}{end}").is_file() for name in older for end in ("", ".index.json"))
    return there or bool(weight_files(folder))


def no_weights(folder: Path) -> str:
    """What to say of a part without weights."""
    stem = STEMS[1] if folder.name.startswith("text_encoder") else STEMS[0]
    held = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt"))
    found = f"no weights that are taken (it has {', '.join(held[:4])})" if held else "no weights"
    return (
        f"{folder}: {found}; expected {stem}.safetensors, or the shards of {stem}.safetensors.index.json"
        " (files of a variant, such as fp16, are not taken: rename them)"
    )


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file: eight bytes of length, then JSON, then as many bytes as that
    says. InputError where it is none, or not whole."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= LONGEST_HEADER:
            raise InputError(f"{file}: no safetensors file (its header would be {length} bytes long)")
        text = stream.read(length)
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        data = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InputError(f"{file}: no safetensors file (its header is no table of tensors)") from None
    size, told = file.stat().st_size, 8 + length + data
    if size != told:
        raise InputError(
            f"{file}: no whole safetensors file of {size:,} bytes (its header tells {told:,}); was its"
            " download cut short?"
        )
    return shapes


def sort_metadata(file: Path) -> None:
    """Write a safetensors file anew with its metadata in the order of their names.

    The library keeps them in a table of random order, so that equal content gives other bytes each time.
    """
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
