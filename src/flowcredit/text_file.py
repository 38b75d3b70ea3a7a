"""Reading a user's text file: UTF-8 with or without a byte order mark, any line ending."""

from contextlib import suppress
from pathlib import Path

from flowcredit.errors import InputError
from flowcredit.nearest import nearest

PACKAGE = Path(__file__).parent
BROUGHT_ALONG = ("recipes", "comparisons")
"""Folders of the package whose files are found by ``recipes/NAME.yaml`` wherever one works."""


def found(path: Path) -> Path:
    """The path, or where nothing is there, the package's own file of that name."""
    inside = PACKAGE / path
    own = not path.is_absolute() and path.parts[:1] and path.parts[0] in BROUGHT_ALONG
    return inside if own and ".." not in path.parts and not path.exists() and inside.is_file() else path


def _meant(path: Path) -> str:
    """The file that is probably meant, by its neighbours' names and those brought along; empty for none."""
    beside: list[Path] = []
    with suppress(OSError):
        beside = list(path.parent.iterdir())
    kinds = {_kind(path)} if path.suffix else {_kind(file) for file in beside}
    names = {str(file) for file in beside if file.is_file() and _kind(file) in kinds}
    if not path.is_absolute() and _kind(path) in ("", ".yaml"):
        names |= {
            str(file.relative_to(PACKAGE)) for own in BROUGHT_ALONG for file in (PACKAGE / own).glob("*.yaml")
        }
    stems = {Path(name).stem: name for name in sorted(names)}
    close = nearest(path.stem, stems)
    return "" if close is None else f" (did you mean {stems[close]}?)"


def _kind(path: Path) -> str:
    """The ending, that of YAML however it is written."""
    return ".yaml" if path.suffix.lower().startswith(".y") else path.suffix


def read_text(path: Path, what: str) -> str:
    """The text of ``path`` with line feeds only; ``what`` names the file's part in the messages.

    A ``recipes/NAME.yaml`` or ``comparisons/NAME.yaml`` that is not there is the package's own.
    Raises InputError: the file is missing, is a folder, cannot be read, or is not UTF-8 (with its first
    bad line and the command that converts it).
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder; expected {what}, a file")
    try:
        raw = found(path).read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such file{_meant(path)}; expected {what} (paths are relative to {Path.cwd()})"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected {what}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The decoder counts from behind the byte order mark where there is one, which holds no line feed.
        line = error.object[: error.start].count(b"\n") + 1
        encoding = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise InputError(
            f"{path}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02x}); if the file is {encoding}, "
            f"convert it with: iconv -f {encoding} -t UTF-8 {path} > {path.stem}.utf8{path.suffix}"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
