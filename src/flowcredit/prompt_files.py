"""The formats of prompt files, each read to rows: a mapping of the row's columns, and where it stands."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowcredit.errors import InputError
from flowcredit.text_file import read_text

HUB = "hf:"
"""How a data set of the hub is named: ``hf:owner/name``, or in full ``hf:owner/name@revision#split``."""
FORMATS = (
    "a .txt, .jsonl, .json, .csv, .tsv or .parquet file, a folder of .parquet files, or hf:owner/name for a"
    " data set of the Hugging Face hub"
)
_A_PROMPT_FILE = "a prompt file"


@dataclass(frozen=True)
class Row:
    """One row: its columns by name, and its place for messages, such as "prompts.csv:7"."""

    where: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """The rows of a prompt file, and how many blank lines were passed over."""

    rows: tuple[Row, ...]
    skipped_blank: int = 0


def read_rows(path: Path, source: str, column: str) -> Rows:
    """Read a prompt file by its ending, a folder of parquet files, or a data set of the hub.

    A ``.txt`` file has one prompt a line, put under ``column``; so has a ``.json`` list of texts. A
    ``.jsonl`` file has one object a line, a ``.json`` file may have a list of objects; ``.csv`` and ``.tsv``
    files begin with a line of column names. ``source`` names the file in messages. Raises InputError with
    file and line.
    """
    if source.startswith(HUB):
        return _parquet(_hub_files(source), source)
    if path.is_dir():
        return _parquet(_files_in(path, source), source)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{source}: not a prompt file by its ending; expected {FORMATS}")
    return reader(path, source, column)


def _lines(path: Path, source: str, column: str) -> tuple[list[tuple[str, str]], int]:
    """The lines that hold something, each with its place, and the number of blank ones."""
    lines = read_text(path, _A_PROMPT_FILE).split("\n")
    if lines[-1] == "":
        lines.pop()
    filled = [(f"{source}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    return filled, len(lines) - len(filled)


def _txt(path: Path, source: str, column: str) -> Rows:
    filled, skipped = _lines(path, source, column)
    return Rows(tuple(Row(where, {column: line}) for where, line in filled), skipped)


def _jsonl(path: Path, source: str, column: str) -> Rows:
    filled, skipped = _lines(path, source, column)
    rows = []
    for where, line in filled:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where}: not valid JSON: {error.msg} at column {error.colno}; expected one JSON object a"
                " line"
            ) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: {_beyond(error)}") from None
        rows.append(Row(where, _object(where, value, column)))
    return Rows(tuple(rows), skipped)


def _json(path: Path, source: str, column: str) -> Rows:
    try:
        content = json.loads(read_text(path, _A_PROMPT_FILE))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{source}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}; expected a list"
            " of texts or of objects (one object a line is a .jsonl file)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: {_beyond(error)}") from None
    if not isinstance(content, list):
        raise InputError(f"{source}: holds {json_type(content)}; expected a list of texts or of objects")
    rows = []
    for number, value in enumerate(content, start=1):
        where = f"{source}: entry {number}"
        rows.append(Row(where, {column: value} if isinstance(value, str) else _object(where, value, column)))
    return Rows(tuple(rows))


def _beyond(error: Exception) -> str:
    found = "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"
    return f"JSON that is not read: {found}; expected plain rows"


def _object(where: str, value: object, column: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected a JSON object with the key "{column}", got {json_type(value)}')
    return value


def _separated(separator: str) -> Callable[[Path, str, str], Rows]:
    def read(path: Path, source: str, column: str) -> Rows:
        text = read_text(path, _A_PROMPT_FILE)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header: Sequence[str] | None = None
        rows: list[Row] = []
        skipped = 0
        for where, fields in _records(reader, source):
            if not any(field.strip() for field in fields):
                skipped += 1
            elif header is None:
                header = _header(where, fields)
            elif len(fields) != len(header):
                raise InputError(
                    f"{where}: {len(fields)} fields, but the first line names {len(header)} columns"
                    f" ({', '.join(header)}); put quotes around a text that holds {separator!r}"
                )
            else:
                rows.append(Row(where, dict(zip(header, fields, strict=True))))
        return Rows(tuple(rows), skipped)

    return read


def _records(reader: Any, source: str) -> Iterator[tuple[str, list[str]]]:
    """Records with the line that each begins on: a quoted text may go over several lines."""
    while True:
        where = f"{source}:{reader.line_num + 1}"
        try:
            yield where, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{where}: not readable as separated values ({error})") from None


def _header(where: str, fields: Sequence[str]) -> Sequence[str]:
    names = [field.strip() for field in fields]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"{where}: the column {repeated[0]!r} is named twice; expected distinct names")
    return names


def _files_in(folder: Path, source: str) -> list[Path]:
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
        raise InputError(f"{source}: a folder without .parquet files (it holds {held}); expected {FORMATS}")
    return files


def _parquet(files: Sequence[Path], source: str) -> Rows:
    """Columns of bytes, such as pictures, are left out."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"{source}: reading parquet needs pyarrow; install it with: pip install 'flowcredit[data]'"
        ) from None
    rows: list[Row] = []
    for file in files:
        try:
            schema = pyarrow.parquet.read_schema(file)
            wanted = [field.name for field in schema if not _holds_bytes(field.type)]
            table = pyarrow.parquet.read_table(file, columns=wanted)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{file}: not readable as parquet ({reason})") from None
        rows += [Row(f"{file}: row {i}", values) for i, values in enumerate(table.to_pylist(), start=1)]
    return Rows(tuple(rows))


def _holds_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _hub_files(source: str) -> list[Path]:
    """The parquet files of a data set's split, from the local cache or downloaded into it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, split = source.removeprefix(HUB).partition("#")
    name, _, revision = name.partition("@")
    fetch = partial(
        snapshot_download,
        name,
        repo_type="dataset",
        revision=revision or None,
        allow_patterns=["*.parquet"],
    )
    failures = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
    try:
        folder = fetch()
    except failures as error:
        try:
            # Versions of the library before 2 ask the hub for a given revision even if it is in the cache.
            folder = fetch(local_files_only=True)
        except failures:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"{source}: this data set cannot be fetched ({reason}); expected hf:owner/name of one that is"
                " stored as parquet, or download it and give the folder"
            ) from None
    files = _files_in(Path(folder), source)
    if not split:
        return files
    # The hub's layouts: data/train-00000-of-00003.parquet, or default/train/0000.parquet.
    chosen = [
        file for file in files if split in file.relative_to(folder).parts or file.stem.split("-")[0] == split
    ]
    if not chosen:
        held = ", ".join(sorted({file.stem.split("-")[0] for file in files})[:8])
        raise InputError(f"{source}: no split {split!r} among its files; there are: {held}")
    return chosen


def json_type(value: object) -> str:
    """What a value is called in a message."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


_READERS: Mapping[str, Callable[[Path, str, str], Rows]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": lambda path, source, column: _parquet([path], source),
}
