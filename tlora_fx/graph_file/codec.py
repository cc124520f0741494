"""Arguments and tags of nodes as JSON, and back."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file.symbols import ModesIn, ModesOut
from tlora_fx.ir.graph import AdapterSite, LayerPlan, TensorRef
from tlora_fx.provenance import Origin

# Names of torch's constants: {"dtype": "float32"}.
CONSTANTS = {
    "dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format
}  # fmt: skip
OBJECTS = {cls.__name__: cls for cls in (TensorRef, AdapterSite, LayerPlan)}
# Passes leave objects of their own on nodes.
PASSES = "tlora_fx.passes."
NodeOut = Callable[[fx.Node], Any]
NodeIn = Callable[[str, int], fx.Node]


class Encoder:
    """Writes values; origins and fake modes are gathered for the whole document."""

    def __init__(self) -> None:
        self.modes = ModesOut()
        self.origins: list[Any] = []
        self._places: dict[Origin, int] = {}

    def encode(self, value: Any, node: NodeOut) -> Any:
        """A value as JSON.

        node      what a node is written as
        raises    GraphNotStorable
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, fx.Node):
            return node(value)
        if isinstance(value, (list, tuple, dict, slice)):
            return self._container(value, node)
        return self._object(value, node)

    def origin(self, origin: Origin) -> int:
        """The place of an origin in the document; what it was made from comes before it."""
        stack = [origin]
        while stack:
            last = stack[-1]
            unknown = [source for source in last.sources if source not in self._places]
            if unknown:
                stack.extend(unknown)
                continue
            stack.pop()
            if last not in self._places:
                self._places[last] = len(self.origins)
                sources = [self._places[source] for source in last.sources]
                self.origins.append([last.key, last.made_by, last.target, sources])
        return self._places[origin]

    def _container(self, value: Any, node: NodeOut) -> Any:
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return {"slice": [self.encode(part, node) for part in parts]}
        if isinstance(value, dict):
            pairs = value.items()
            return {"dict": [[self.encode(k, node), self.encode(v, node)] for k, v in pairs]}
        items = [self.encode(item, node) for item in value]
        return items if isinstance(value, list) else {"tuple": items}

    def _object(self, value: Any, node: NodeOut) -> Any:
        for name, kind in CONSTANTS.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, complex):
            return {"complex": [self.encode(part, node) for part in (value.real, value.imag)]}
        if value is ...:
            return {"ellipsis": True}
        if isinstance(value, Origin):
            return {"origin": self.origin(value)}
        is_meta = isinstance(value, torch.Tensor) and value.is_meta
        if is_meta or isinstance(value, (FakeTensor, torch.SymInt)):
            return {"value": self.modes.value(value)}
        cls = type(value)
        name = cls.__name__ if cls in OBJECTS.values() else f"{cls.__module__}:{cls.__qualname__}"
        if dataclasses.is_dataclass(value) and (name in OBJECTS or name.startswith(PASSES)):
            names = [item.name for item in dataclasses.fields(value)]
            fields = {name: self.encode(getattr(value, name), node) for name in names}
            return {"object": name, "fields": fields}
        raise GraphNotStorable(
            "a graph holds a value that a graph file cannot keep",
            kind=f"{cls.__module__}.{cls.__qualname__}",
            found=repr(value)[:200],
            help="hold numbers, text, tuples and nodes in arguments and tags",
        )


class Decoder:
    """Reads values: what `Encoder` wrote, and nothing else."""

    def __init__(self, modes: list[Any], origins: list[Any]) -> None:
        self.modes = ModesIn(modes)
        self.origins: list[Origin] = []
        for key, made_by, target, sources in origins:
            made_from = tuple(self.origins[place] for place in sources)
            self.origins.append(Origin(key, made_by, target, made_from))

    def decode(self, data: Any, node: NodeIn) -> Any:
        """A value of its JSON.

        node      finds a node by the list that it is in, "node" or "erased", and its place
        raises    GraphFileNotReadable
        """
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, list):
            return [self.decode(item, node) for item in data]
        kind = next(iter(data))
        found = data[kind]
        if kind in ("node", "erased"):
            return node(kind, found)
        if kind == "tuple":
            return tuple(self.decode(item, node) for item in found)
        if kind == "dict":
            return {self.decode(k, node): self.decode(v, node) for k, v in found}
        if kind == "slice":
            return slice(*(self.decode(item, node) for item in found))
        return self._object(kind, data, node)

    def _object(self, kind: str, data: Any, node: NodeIn) -> Any:
        found = data[kind]
        if kind in CONSTANTS:
            constant = getattr(torch, found)
            return constant if isinstance(constant, CONSTANTS[kind]) else _unknown(data)
        if kind == "object":
            fields = {name: self.decode(item, node) for name, item in data["fields"].items()}
            return _class(found)(**fields)
        simple: dict[str, Callable[[], Any]] = {
            "float": lambda: float(found),
            "complex": lambda: complex(*(self.decode(part, node) for part in found)),
            "device": lambda: torch.device(found),
            "ellipsis": lambda: ...,
            "origin": lambda: self.origins[found],
            "value": lambda: self.modes.value(found),
        }
        return simple[kind]() if kind in simple else _unknown(data)


def _class(name: str) -> type[Any]:
    """A class that passes leave on nodes."""
    if name in OBJECTS:
        return OBJECTS[name]
    module, _, cls = name.partition(":")
    found = getattr(importlib.import_module(module), cls, None) if name.startswith(PASSES) else None
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        return found
    result: type[Any] = _unknown(name)
    return result


def _unknown(data: Any) -> Any:
    raise GraphFileNotReadable(
        "the graph file holds a value of no known kind",
        found=repr(data)[:200],
        help="the file is damaged, or another version wrote it",
    )
