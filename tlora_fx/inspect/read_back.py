"""Dataclasses from JSON and back: what `ssm.json` and `program.json` are read with."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(data: Any) -> str:
    """A dataclass as text, its fields in their order."""
    return json.dumps(dataclasses.asdict(data), indent=1, ensure_ascii=False) + "\n"


def many_to_json(data: Iterable[Any]) -> str:
    """Dataclasses as a list."""
    found = [dataclasses.asdict(item) for item in data]
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def from_json(kind: type[T], text: str, schema: int) -> T:
    """Read a dataclass back; fields that this version does not know are passed over.

    schema    number of the layout that the text must have
    raises    ValueError, KeyError or TypeError for what is no such data
    """
    data = json.loads(text)
    if data["schema"] != schema:
        raise ValueError(f"schema {data['schema']}, expected {schema}")
    made: T = build(kind, data)
    return made


def build(kind: Any, data: Any) -> Any:
    """A value of a type from what json.loads made of it.

    raises    KeyError for a missing field, TypeError for one of another type
    """
    return _builder(kind)(data)


@cache
def _builder(kind: Any) -> Callable[[Any], Any]:
    """What builds values of a type; made once, for a program has thousands of nodes."""
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if typing.get_origin(kind) is list:
        one = _builder(typing.get_args(kind)[0])
        return lambda data: [one(item) for item in _checked(list, data)]
    if typing.get_origin(kind) is dict:
        value = _builder(typing.get_args(kind)[1])
        return lambda data: {name: value(item) for name, item in _checked(dict, data).items()}
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    taken = {*options, *([int] if float in options else [])}

    def plain(data: Any) -> Any:
        if type(data) in taken:
            return data
        raise TypeError(f"{data!r} is no {kind}")

    return plain


def _dataclass(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    # A field with a default is one that came later: an older file may lack it.
    fields = [
        (field.name, _builder(hints[field.name]), _needed(field))
        for field in dataclasses.fields(kind)
    ]

    def make(data: Any) -> Any:
        given = _checked(dict, data)
        return kind(**{
            name: one(given[name]) for name, one, needed in fields if needed or name in given
        })  # fmt: skip

    return make


def _needed(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _checked(kind: type[T], data: Any) -> T:
    if isinstance(data, kind):
        return data
    raise TypeError(f"{data!r} is no {kind.__name__}")
