"""Recipes in and out: a YAML file and overrides to settings, settings to YAML, and what differs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.nearest import nearest
from flowcredit.sections import Section
from flowcredit.text_file import read_text
from flowcredit.yaml_lines import Path as KeyPath
from flowcredit.yaml_lines import dump_yaml, parse_yaml

Settings = TypeVar("Settings", bound=Section)

# What pydantic found wrong, as the end of "expected ...".
_EXPECTED = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
    "tuple_type": "a list",
    "too_short": "at least {min_length} in the list",
    "too_long": "at most {max_length} in the list",
    "dict_type": "names with values below it",
    "model_type": "settings below it",
    "model_attributes_type": "settings below it",
}
_RANK = {"extra_forbidden": 0, "missing": 2}


@dataclass(frozen=True)
class Change:
    """A setting whose value differs between two recipes."""

    setting: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.setting}: {_show(self.before)} -> {_show(self.after)}"


@dataclass(frozen=True)
class SettingInfo:
    """What a reader needs to know of a setting; ``default`` is as in YAML, None if it is required."""

    setting: str
    default: str | None
    description: str


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe, changes it by ``overrides`` ("train.learning_rate=1e-5") and checks all of it.

    Raises InputError, one line, with file and line or with the override at fault.
    """
    return load_settings(Recipe, path, overrides)


def load_settings(
    kind: type[Settings], path: str | Path, overrides: Sequence[str] = (), what: str = "a recipe"
) -> Settings:
    """``load_recipe`` for any tree of sections; ``what`` names the file's part in the messages."""
    source = str(path)
    located = parse_yaml(read_text(Path(path), f"{what} in YAML"), source)
    data = located.value
    if not isinstance(data, dict):
        found = "nothing" if data is None else _show(data)
        raise InputError(f"{source}: holds {found}; expected {what}: names with values, as `name: my_run`")
    places = {key_path: f"{source}:{line}" for key_path, line in located.lines.items()}
    for override in overrides:
        _apply(kind, data, places, override)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(_first_problem(kind, error, data, places, source)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML that ``load_recipe`` reads to an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def recipe_diff(a: Recipe, b: Recipe) -> list[Change]:
    """The settings in which ``b`` differs from ``a``, in the order of the recipe."""
    before, after = dict(_leaves(a)), dict(_leaves(b))
    return [
        Change(setting, before.get(setting), after.get(setting))
        for setting in {**before, **after}
        if before.get(setting) != after.get(setting)
    ]


def list_settings(kind: type[Section] = Recipe) -> list[SettingInfo]:
    """Every setting below ``kind``, those in lists of sections as ``rewards.0.weight``.

    Where several sections may stand, such as the methods, all of them, described with their name.
    """
    return [
        SettingInfo(
            name,
            None if field.is_required() else _show(field.get_default(call_default_factory=True)),
            (f"{owner}: " if owner else "") + " ".join((field.description or "").split()) + _choices(field),
        )
        for name, field, owner in _fields(kind)
    ]


def settings_named(word: str | None) -> list[SettingInfo]:
    """Those of ``list_settings`` with a word in their name, whatever its case; all without one.

    Raises InputError, with the nearest name, where there is none.
    """
    known = list_settings()
    found = [each for each in known if word is None or word.strip().lower() in each.setting]
    if not found:
        parts = {part: None for each in known for part in (each.setting, *each.setting.split("."))}
        close = nearest(str(word), parts)
        meant = f"did you mean '{close}'?" if close else "flowcredit settings lists them all"
        raise InputError(f"no setting has {word!r} in its name; {meant}")
    return found


def settings_page() -> str:
    """Every setting as a page in Markdown, a section of the recipe at a time."""
    lines = [
        "# Every setting",
        "",
        "Made by `flowcredit settings --markdown`. `train.learning_rate=1e-5` on the command line changes a",
        "value; in a file each dot is a level.",
    ]
    section = ""
    for each in list_settings():
        head = each.setting.partition(".")[0] if "." in each.setting else "the run"
        if head != section:
            section = head
            lines += ["", f"## {section}", "", "| setting | default | what it is |", "|---|---|---|"]
        default = "required" if each.default is None else f"`{each.default}`"
        cells = (f"`{each.setting}`", default, each.description)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _apply(kind: type[Section], data: dict[str, Any], places: dict[KeyPath, str], override: str) -> None:
    """Sets one value in ``data``; whether its name is known is for the check of the whole to say."""
    label = f"override '{override}'"
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"{label}: expected setting=value, such as train.learning_rate=1e-5")
    value = parse_yaml(text, label, numbered=False).value
    target: Any = data
    path: KeyPath = ()
    for depth, key in enumerate(keys):
        step: Any = _list_index(target, key, _dotted(path), label) if isinstance(target, list) else key
        path = (*path, step)
        if depth == len(keys) - 1:
            target[step] = value
            break
        below = target[step] if isinstance(target, list) else target.get(step)
        if not isinstance(below, dict | list):
            if below is not None and not (isinstance(below, str) and _section_at(kind, path, data)):
                raise InputError(
                    f"{label}: {_dotted(path)} is {_show(below)} and holds no '{keys[depth + 1]}'"
                )
            # A section may be absent, or stand as its name alone.
            below = target[step] = {} if below is None else {"name": below}
            places[path] = label
        target = below
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]
    places[path] = label


def _list_index(target: list[Any], key: str, name: str, label: str) -> int:
    if key.isascii() and key.isdigit() and int(key) < len(target):
        return int(key)
    known = f"0 to {len(target) - 1}" if target else "none, it is empty"
    raise InputError(f"{label}: '{key}' is no place in the list '{name}'; its places: {known}")


def _first_problem(
    kind: type[Section], error: ValidationError, data: Any, places: dict[KeyPath, str], source: str
) -> str:
    problems: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        problems.setdefault(_real_path(detail, data), []).append(detail)
    # Where a part of a value is wrong, what pydantic says of the whole adds nothing.
    paths = [p for p in problems if not any(q[: len(p)] == p and q != p for q in problems)]
    # A misspelt name may be why another is missing, so it goes first.
    path = min(paths, key=lambda p: _RANK.get(problems[p][0]["type"], 1))
    where = next((places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in places), source)
    others = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return f"{where}: {_sentence(kind, path, problems[path], data)}{others}"


def _real_path(detail: ErrorDetails, data: Any) -> KeyPath:
    """The error's place in the data: without the names of union members that pydantic puts between."""
    path: list[str | int] = []
    for place, part in enumerate(detail["loc"]):
        is_key = isinstance(data, dict) and part in data
        if is_key or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            data = data[part]
            path.append(part)
        elif detail["type"] == "missing" and isinstance(part, str) and place == len(detail["loc"]) - 1:
            path.append(part)
    if detail["type"] == "cross_check":
        setting: str = detail["ctx"]["setting"]
        path += [int(part) if part.isdigit() else part for part in setting.split(".")]
    return tuple(path)


def _sentence(kind: type[Section], path: KeyPath, details: list[ErrorDetails], data: Any) -> str:
    name = _dotted(path)
    detail = details[0]
    if detail["type"] == "extra_forbidden":
        return f"unknown setting '{name}'{_of_method(kind, path, data)}; {_nearest_setting(kind, path, data)}"
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        return f"the setting '{name}' is required and missing"
    if detail["type"] == "cross_check":
        return f"{name}: {detail['msg']}"
    expected = " or ".join(dict.fromkeys(_expected(each) for each in details))
    found = detail["ctx"]["tag"] if detail["type"] == "union_tag_invalid" else detail["input"]
    sentence = f"{name} is {_show(found)}; expected {expected}"
    if detail["type"] in ("literal_error", "union_tag_invalid") and isinstance(found, str):
        choices = expected.replace("'", "").replace(" or ", ", ").split(", ")
        close = nearest(found, choices)
        sentence += f"; did you mean '{close}'?" if close and len(choices) > 1 else ""
    return sentence


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return f"at least {int(detail['loc'][-1]) + 1} in the list"
    if detail["type"] not in _EXPECTED:
        return detail["msg"]
    bounds = detail.get("ctx", {})
    short = {key: f"{value:g}" if isinstance(value, float) else value for key, value in bounds.items()}
    return _EXPECTED[detail["type"]].format(**short)


def _nearest_setting(kind: type[Section], path: KeyPath, data: Any) -> str:
    """What to write in place of an unknown name: its neighbour first, else the like anywhere, else all."""
    wanted = str(path[-1])
    here = _section_at(kind, path[:-1], data)
    assert here is not None
    prefix = [str(part) for part in path[:-1]]
    everywhere = {name: name.rsplit(".", 1)[-1] for name, *_ in _fields(kind)}
    if "." in wanted and wanted in everywhere:
        return f"in a file, each dot is a level: {wanted.replace('.', ': {')}: ...{'}' * wanted.count('.')}"
    if close := nearest(wanted, here.model_fields):
        return f"did you mean '{'.'.join([*prefix, close])}'?"
    # Another kind of this section has a setting of this very name: it is not misspelt.
    misspelt = ".".join([*prefix, wanted]) not in everywhere
    if misspelt and (close := nearest(wanted, everywhere.values())):
        full = next(name for name, last in everywhere.items() if last == close)
        return f"did you mean '{full}'?"
    return f"known here: {', '.join(here.model_fields)}"


def _of_method(kind: type[Section], path: KeyPath, data: Any) -> str:
    """Where the settings depend on a name, such as a method's, that name."""
    if len(path) != 2 or not isinstance(path[0], str):
        return ""
    field = kind.model_fields.get(path[0])
    section = data.get(path[0])
    if field is None or len(_sections(field.annotation)) < 2 or not isinstance(section, dict):
        return ""
    name = section.get("name", "this one")
    return f" of {path[0]} {name} (another {path[0]} takes its settings whole: '{path[0]}={{name: ...}}')"


def _section_at(kind: type[Section], path: KeyPath, data: Any) -> type[Section] | None:
    """The class of settings at ``path``; where several may stand, the one that the data's ``name`` means."""
    for part in path:
        data = data[part]
        if isinstance(part, str):
            field = kind.model_fields.get(part)
            choices = _sections(field.annotation) if field else []
            if not choices:
                return None
            named = data.get("name") if isinstance(data, dict) else data
            kind = next((each for each in choices if _default_name(each) == named), choices[0])
    return kind


def _choices(field: FieldInfo) -> str:
    """The values of a setting that takes one of a few, as an end to its description."""
    found = list(_literals(field.annotation))
    return f" One of {', '.join(found)}." if len(found) > 1 else ""


def _literals(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    elif not isinstance(annotation, type):
        for part in get_args(annotation):
            yield from _literals(part)


def _default_name(kind: type[Section]) -> Any:
    return kind.model_fields["name"].default if "name" in kind.model_fields else None


def _fields(kind: type[Section], prefix: str = "", owner: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Dotted names and fields; the third is the method to which a setting belongs, if it is one's alone."""
    for name, field in kind.model_fields.items():
        below = _sections(field.annotation)
        if not below:
            yield prefix + name, field, owner
        in_list = bool(below) and field.annotation not in below and _is_tuple(field.annotation)
        for section in below:
            only = _default_name(section) if len(below) > 1 else owner
            yield from _fields(section, f"{prefix}{name}.{'0.' if in_list else ''}", only)


def _is_tuple(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is tuple


def _sections(annotation: Any) -> list[type[Section]]:
    """The section classes inside an annotation such as ``tuple[Annotated[A | B, ...], ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all settings below ``section``."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, tuple) and _sections(field.annotation):
            for place, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{name}.{place}.")
        else:
            yield prefix + name, value


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def _show(value: Any) -> str:
    """A value as it would be written in a recipe, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=list)
    return text if len(text) <= 60 else f"{text[:57]}..."
