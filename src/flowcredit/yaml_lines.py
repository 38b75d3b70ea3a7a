"""YAML that remembers its lines: the 1.2 core schema, no repeated keys, nothing executed.

PyYAML follows YAML 1.1, where ``1e-5`` is a text and ``no`` is false; a recipe needs neither surprise.
"""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from flowcredit.errors import InputError

Path = tuple[str | int, ...]
"""Keys and list indices from the root."""

_COLLECTIONS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_MOST_VALUES = 100_000
"""Aliases let a file of a kilobyte stand for more values than memory holds."""
_UNICODE_BREAKS = frozenset("\x85\u2028\u2029")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Reads plain scalars as YAML 1.2 does, by the patterns above alone."""


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would not read as a text; short lists stand on one line."""

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        inline = not any(isinstance(item, dict | list | tuple) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=inline)

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML escapes these only between double quotes, and elsewhere folds them like line ends.
        style = '"' if _UNICODE_BREAKS.intersection(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


@dataclass(frozen=True)
class Located:
    """A value of dicts, lists and scalars, and the line (from 1) on which each part of it stands."""

    value: Any
    lines: dict[Path, int]


def parse_yaml(text: str, source: str, numbered: bool = True) -> Located:
    """Reads one YAML document; errors (InputError) begin with ``source`` and, if ``numbered``, the line."""
    lines: dict[Path, int] = {}
    try:
        root = yaml.compose(text, Loader=_Loader)
        value = None if root is None else _build(root, (), lines)
    except _Refused as error:
        where, why = error.line, str(error)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = mark.line + 1 if mark else 1
        why = "not valid YAML: " + " ".join(part for part in (error.context, error.problem) if part)
    except yaml.YAMLError as error:
        where, why = 1, f"not valid YAML: {' '.join(str(error).split())}"
    except RecursionError:
        where, why = 1, "refers to itself, or is nested too deeply; write the values out"
    else:
        return Located(value, lines)
    raise InputError(f"{source}:{where}: {why}" if numbered else f"{source}: {why}")


def dump_yaml(value: Any) -> str:
    """Block YAML in the order of ``value``; ``parse_yaml`` gives the same value back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Refused(Exception):
    def __init__(self, node: yaml.Node, why: str) -> None:
        super().__init__(why)
        self.line: int = node.start_mark.line + 1


def _build(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(lines) > _MOST_VALUES:
        raise _Refused(node, f"more than {_MOST_VALUES:,} values, counted with what aliases repeat")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if node.tag not in _COLLECTIONS:
        raise _Refused(node, f"the YAML tag '{node.tag}' is not read; write a plain value")
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, place), lines) for place, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise _Refused(key_node, f"a name must be a text, got {key_node.value!r}; put it in quotes")
        if key in mapping:
            first = lines[(*path, key)]
            raise _Refused(key_node, f"'{key}' stands here again after line {first}; keep one of them")
        lines[(*path, key)] = key_node.start_mark.line + 1
        mapping[key] = _build(value_node, (*path, key), lines)
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            try:
                return int(text)
            except ValueError:
                raise _Refused(node, f"a number of {len(text)} digits; write a shorter one") from None
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case tag:
            raise _Refused(node, f"the YAML tag '{tag}' is not read; write a plain value")
