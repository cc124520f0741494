"""Read YAML into plain values, and remember the line of each key.

Stricter than PyYAML's safe loader: a key stands once, no tag builds an object, an alias cannot
hold itself, and a file cannot unfold into millions of nodes. Scalars follow YAML 1.2: `2e-4` is
a number; `yes`, `no`, `1:30` and dates are text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tlora_fx.errors import JobFileMissingError, JobFileSyntaxError

KeyPath: TypeAlias = tuple[str | int, ...]

NODE_LIMIT = 100_000
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML declares it, add_implicit_resolver fills it)


_SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
for _name, (_pattern, _first) in _SCALARS.items():
    _firsts = [*_first, ""] if _name == "null" else list(_first)
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _firsts)


@dataclass(frozen=True, slots=True)
class Located:
    """What a YAML file holds, and where.

    value  mappings, lists, texts, numbers, true, false and null
    lines  the line, from 1, of what a path of keys and list indices leads to
    """

    value: Any
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest thing that holds it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_yaml(path: Path) -> Located:
    """Read one YAML document from a file.

    raises  JobFileMissingError, JobFileSyntaxError
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobFileSyntaxError("the job file is not UTF-8", file=path, found=error) from None
    except OSError as error:
        reason = error.strerror or error
        raise JobFileMissingError("the job file cannot be read", file=path, found=reason) from None
    try:
        return _read_text(path, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else path
        what = f"the job file is no YAML: {error.problem or error.context}"
        help = "look at the indentation, the colons and the quotes before that place"
        raise JobFileSyntaxError(what, file=where, help=help) from None
    except yaml.YAMLError as error:
        raise JobFileSyntaxError("the job file is no YAML", file=path, found=error) from None
    except RecursionError:
        raise JobFileSyntaxError("the job file is nested too deeply", file=path) from None


def _read_text(path: Path, text: str) -> Located:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise JobFileSyntaxError("the job file is empty", file=path)
        walk = _Walk(path, loader)
        return Located(walk.value(node, ()), walk.lines)
    finally:
        loader.dispose()


@dataclass(slots=True)
class _Walk:
    """Turns YAML nodes into plain values."""

    path: Path
    loader: _Loader
    lines: dict[KeyPath, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    nodes: int = 0

    def value(self, node: yaml.Node, at: KeyPath) -> Any:
        self.nodes += 1
        if self.nodes > NODE_LIMIT:
            raise self.error(f"the job file unfolds into more than {NODE_LIMIT} values", node)
        if id(node) in self.open:
            raise self.error("an alias stands inside what it names", node)
        if not node.tag.startswith(_TAG):
            raise self.error(f"the tag '{node.tag}' is not read", node)
        self.lines.setdefault(at, node.start_mark.line + 1)
        self.open.add(id(node))
        try:
            return self._plain(node, at)
        finally:
            self.open.discard(id(node))

    def _plain(self, node: yaml.Node, at: KeyPath) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(item, (*at, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in ("null", "bool", "float", "str"):
            return self._scalar(kind, node)
        if isinstance(node, yaml.ScalarNode) and kind == "int":
            return self._whole(node)
        raise self.error(f"the tag '!!{kind}' is not read here", node)

    def _scalar(self, kind: str, node: yaml.ScalarNode) -> Any:
        try:
            return getattr(self.loader, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError):
            raise self.error(f"'{node.value}' is no {kind}", node) from None

    def _whole(self, node: yaml.ScalarNode) -> int:
        # PyYAML reads 010 as eight and 1:30 as ninety.
        try:
            return int(node.value, 16 if node.value.startswith("0x") else 10)
        except ValueError:
            raise self.error("a whole number cannot be read", node) from None

    def _mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                several = isinstance(value_node, yaml.SequenceNode)
                merged.extend(value_node.value if several else [value_node])
                continue
            key = self._key(key_node)
            if key in found:
                first = self.lines[(*at, key)]
                raise self.error(f"the key '{key}' stands twice, first in line {first}", key_node)
            self.lines[(*at, key)] = key_node.start_mark.line + 1
            found[key] = self.value(value_node, (*at, key))
        for other in merged:
            # What stands here wins over what is merged in, and so does its line.
            extra = self.value(other, at)
            if not isinstance(extra, dict):
                raise self.error("'<<' merges mappings only", other)
            found = extra | found
        return found

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error("a key is no plain text", node)
        return str(node.value)

    def error(self, what: str, node: yaml.Node) -> JobFileSyntaxError:
        return JobFileSyntaxError(what, file=f"{self.path}:{node.start_mark.line + 1}")
