"""Prompt embeddings on disk: a text encoder reads each prompt once, over all runs.

Axes: P prompts; a row is one prompt's tensors, without the axis P.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcredit.destinations import check_folder
from flowcredit.errors import InputError, one_line
from flowcredit.interfaces import Conditioning

Encode = Callable[[list[str]], Conditioning]
PARTS = ("text_encoder", "tokenizer")
"""A pipeline's folders with these beginnings are what an embedding comes from."""


@dataclass(frozen=True)
class TextCache:
    """A folder of rows, a safetensors file each, named by the hash of the prompt.

    ``folder`` is that of one key, see `text_cache`: rows of other encoders or settings lie beside it.
    """

    folder: Path

    def through(self, encode: Encode, prompts: Sequence[str], device: torch.device) -> Conditioning:
        """``encode(prompts)`` on the device, but only prompts that are not there yet are encoded, each once.

        A row keeps the rounding of the batch in which it was first encoded. A file that cannot be read is
        written anew.
        """
        rows = {prompt: self._read(prompt) for prompt in dict.fromkeys(prompts)}
        missing = [prompt for prompt, row in rows.items() if row is None]
        if missing:
            encoded = encode(missing)
            for place, prompt in enumerate(missing):
                rows[prompt] = {name: value[place] for name, value in encoded.items()}
                self._write(prompt, rows[prompt] or {})
        chosen = [rows[prompt] or {} for prompt in prompts]
        return {name: torch.stack([row[name].to(device) for row in chosen]) for name in chosen[0]}

    def _file(self, prompt: str) -> Path:
        return self.folder / f"{hashlib.sha256(prompt.encode()).hexdigest()}.safetensors"

    def _read(self, prompt: str) -> dict[str, Tensor] | None:
        try:
            return load_file(self._file(prompt))
        except (FileNotFoundError, SafetensorError):
            return None
        except OSError as error:
            raise InputError(
                f"model.text_cache: {self._file(prompt)} cannot be read ({error.strerror}); mend or remove it"
            ) from None

    def _write(self, prompt: str, row: dict[str, Tensor]) -> None:
        # Of a name of its own: several processes may write the same prompt.
        partial = self._file(prompt).with_suffix(f".{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: value.cpu().contiguous() for name, value in row.items()}, partial)
            partial.replace(self._file(prompt))
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink()
            raise InputError(
                f"model.text_cache: nothing can be written in {self.folder} ({one_line(error)}); make room"
                " there, or choose another folder"
            ) from None


def text_cache(root: Path, pipeline: Path, settings: Sequence[str]) -> TextCache:
    """The cache below ``root`` for the text encoders of a pipeline folder, used with ``settings``.

    The key is a hash of the encoders' and tokenizers' files (names, sizes, times of change), the settings,
    and the versions of torch, transformers and diffusers. Raises InputError where nothing can be written.
    """
    check_folder(root, "model.text_cache")
    files = sorted(
        file
        for part in pipeline.iterdir()
        if part.name.startswith(PARTS)
        for file in part.rglob("*")
        if file.is_file()
    )
    stats = [(str(f.relative_to(pipeline)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    versions = {name: version(name) for name in ("torch", "transformers", "diffusers")}
    key = json.dumps([str(pipeline.resolve()), stats, list(settings), versions])
    return TextCache(root / hashlib.sha256(key.encode()).hexdigest()[:24])
