"""Arguments and tags of nodes as JSON, and back."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as sizes
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.ir.graph import AdapterSite, LayerPlan, Origin, TensorRef

FUNCTIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in ("Add", "Mul", "Pow", "Rational")},
    **{
        name: getattr(sizes, name)
        for name in ("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing",
                     "Max", "Min")
        if hasattr(sizes, name)
    },
}  # fmt: skip
# Names of torch's constants: {"dtype": "float32"}.
CONSTANTS = {
    "dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format
}  # fmt: skip
OBJECTS = {cls.__name__: cls for cls in (TensorRef, AdapterSite, LayerPlan)}
# Passes leave objects of their own on nodes.
PASSES = "tlora_fx.passes."
NodeOut = Callable[[fx.Node], Any]
NodeIn = Callable[[str, int], fx.Node]
# Key, the pass that made it, what the node called, indices of what it was made from.
OriginData = tuple[str, str, str, list[int]]


class Encoder:
    """Writes values; origins and fake modes are gathered for the whole document."""

    def __init__(self) -> None:
        self.modes = ModesOut()
        self.origins: list[OriginData] = []
        self._indices: dict[Origin, int] = {}

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
        """The index of an origin in the document; what it was made from comes before it."""
        stack = [origin]
        while stack:
            last = stack[-1]
            unknown = [source for source in last.sources if source not in self._indices]
            if unknown:
                stack.extend(unknown)
                continue
            stack.pop()
            if last not in self._indices:
                self._indices[last] = len(self.origins)
                sources = [self._indices[source] for source in last.sources]
                self.origins.append((last.key, last.made_by, last.target, sources))
        return self._indices[origin]

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

    def __init__(self, modes: list[dict[str, SizeData]], origins: list[OriginData]) -> None:
        self.modes = ModesIn(modes)
        self.origins: list[Origin] = []
        for key, made_by, target, sources in origins:
            made_from = tuple(self.origins[index] for index in sources)
            self.origins.append(Origin(key, made_by, target, made_from))

    def decode(self, data: Any, node: NodeIn) -> Any:
        """A value of its JSON.

        node      finds a node by the list that it is in, "node" or "erased", and its index
        raises    GraphFileNotReadable
        """
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, list):
            return [self.decode(item, node) for item in data]
        kind = next(iter(data))
        content = data[kind]
        if kind in ("node", "erased"):
            return node(kind, content)
        if kind == "tuple":
            return tuple(self.decode(item, node) for item in content)
        if kind == "dict":
            return {self.decode(k, node): self.decode(v, node) for k, v in content}
        if kind == "slice":
            return slice(*(self.decode(item, node) for item in content))
        return self._object(kind, data, node)

    def _object(self, kind: str, data: Any, node: NodeIn) -> Any:
        content = data[kind]
        if kind in CONSTANTS:
            constant = getattr(torch, content)
            return constant if isinstance(constant, CONSTANTS[kind]) else _unknown(data)
        if kind == "object":
            fields = {name: self.decode(item, node) for name, item in data["fields"].items()}
            return _class(content)(**fields)
        simple: dict[str, Callable[[], Any]] = {
            "float": lambda: float(content),
            "complex": lambda: complex(*(self.decode(part, node) for part in content)),
            "device": lambda: torch.device(content),
            "ellipsis": lambda: ...,
            "origin": lambda: self.origins[content],
            "value": lambda: self.modes.value(content),
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


@dataclass(frozen=True, slots=True)
class SizeData:
    """A symbol for a size: what it was while tracing, by which torch decides, and its bounds.

    Every trace has its own symbols, in a fake mode of its own; a file keeps which values belong to
    which.
    """

    hint: int
    lower: int
    upper: int | None


@dataclass(slots=True)
class ModesOut:
    """The fake modes that values belong to, as they are met."""

    met: list[Any] = field(default_factory=list)
    symbols: list[dict[str, SizeData]] = field(default_factory=list)

    def value(self, value: torch.Tensor | torch.SymInt) -> dict[str, Any]:
        """A tensor's shape and type, or a size, as data."""
        if isinstance(value, torch.SymInt):
            mode = self._index(value.node.shape_env)
            return {"size": self._expression(value, mode), "mode": mode}
        fake = value.fake_mode if isinstance(value, FakeTensor) else None
        owner = self._index(fake.shape_env or fake) if fake is not None else None
        return {
            "shape": [self._expression(size, owner) for size in value.shape],
            "stride": [self._expression(size, owner) for size in value.stride()],
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
            "requires_grad": value.requires_grad,
            "mode": owner,
        }

    def _index(self, owner: ShapeEnv | FakeTensorMode) -> int:
        """The number of what owns a value's symbols; a mode without symbols owns itself."""
        for index, known in enumerate(self.met):
            if known is owner:
                return index
        self.met.append(owner)
        self.symbols.append({})
        return len(self.met) - 1

    def _expression(self, size: int | torch.SymInt, mode: int | None) -> Any:
        if isinstance(size, int):
            return size
        assert mode is not None
        return self._tree(size.node.expr, mode)

    def _tree(self, expr: sympy.Basic, mode: int) -> Any:
        if isinstance(expr, sympy.Symbol):
            self._note(expr, mode)
            return expr.name
        if isinstance(expr, sympy.Integer):
            return int(expr)
        name = type(expr).__name__
        if isinstance(expr, sympy.Rational):
            return ["Rational", int(expr.p), int(expr.q)]
        if name not in FUNCTIONS:
            raise GraphNotStorable(
                "a size is computed in a way that a graph file cannot keep",
                found=expr,
                help="please report it, with the model",
            )
        return [name, *(self._tree(part, mode) for part in expr.args)]

    def _note(self, symbol: sympy.Symbol, mode: int) -> None:
        if symbol.name in self.symbols[mode]:
            return
        env = self.met[mode]
        hint = _hints(env).get(symbol)
        if hint is None:
            raise GraphNotStorable(
                "a size depends on values, which a graph file cannot keep",
                found=symbol,
                help="please report it, with the model",
            )
        span = env.var_to_range[symbol]
        upper = None if span.upper == int_oo else int(span.upper)
        self.symbols[mode][symbol.name] = SizeData(int(hint), int(span.lower), upper)


class ModesIn:
    """Fake modes made anew, with symbols of the same names."""

    def __init__(self, symbols: list[dict[str, SizeData]]) -> None:
        self.modes: list[FakeTensorMode] = []
        self.known: list[dict[str, Any]] = []
        # Making a fake tensor takes most of reading; nobody writes into one, so equal ones are one.
        self._floats: dict[str, torch.Tensor] = {}
        for wanted in symbols:
            env = _NamedSizes()
            known = {name: _symbol(env, name, size) for name, size in wanted.items()}
            self.modes.append(
                FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)
            )
            self.known.append(known)

    def value(self, data: dict[str, Any]) -> torch.Tensor | torch.SymInt | int:
        """The value of its data."""
        mode = data["mode"]
        if "size" in data:
            return self._size(data["size"], mode)
        kind = getattr(torch, data["dtype"])
        key = repr(data) if kind.is_floating_point else ""
        if key in self._floats:
            return self._floats[key]
        shape, stride = (
            tuple(self._size(size, mode) for size in data[name]) for name in ("shape", "stride")
        )
        options = {"dtype": kind, "device": data["device"]}
        if mode is None:
            tensor = torch.empty_strided(shape, stride, **options)
        else:
            with self.modes[mode]:
                tensor = torch.empty_strided(shape, stride, **options)
        tensor.requires_grad_(data["requires_grad"])
        if key:
            self._floats[key] = tensor
        return tensor

    def _size(self, tree: Any, mode: int | None) -> int | torch.SymInt:
        if isinstance(tree, int):
            return tree
        assert mode is not None
        env = self.modes[mode].shape_env
        assert env is not None
        return env.create_symintnode(self._expr(tree, self.known[mode]), hint=None)

    def _expr(self, tree: Any, known: dict[str, Any]) -> Any:
        if isinstance(tree, int):
            return sympy.Integer(tree)
        if isinstance(tree, str):
            return known[tree]
        name, *parts = tree
        return FUNCTIONS[name](*(self._expr(part, known) for part in parts))


class _NamedSizes(ShapeEnv):
    """Symbols get the numbers that they are asked for: torch derives its own from a hash."""

    number = 0

    def _generate_unique_id(self, source_name: str) -> int:
        self.unique_ids.add(self.number)
        return self.number


def _symbol(env: _NamedSizes, name: str, size: SizeData) -> Any:
    env.number = int(name[1:])
    span = ValueRanges(size.lower, int_oo if size.upper is None else size.upper)
    return env.create_symbol(
        size.hint,
        ConstantSource(f"row_{name}"),
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=StrictMinMaxConstraint(vr=span, warn_only=False),
        do_not_specialize_zero_one=True,
    )


def _hints(env: ShapeEnv) -> dict[sympy.Symbol, Any]:
    """What the symbols were while tracing; torch renamed the table in 2.13."""
    hints = getattr(env, "backed_var_to_val", None)
    return hints if hints is not None else env.var_to_val
