"""Values of nodes as text, written and read back: fake tensors, and sizes made of symbols."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from tlora_fx.errors import GraphNotStorable
from tlora_fx.graph_file.words import called, keywords, quoted, strange
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.ir.shapes import fake_tensor, segment_size, size_text

FUNCTIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in ("Add", "Mul", "Pow", "Rational")},
    **{
        name: getattr(functions, name)
        for name in ("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing",
                     "Max", "Min")
        if hasattr(functions, name)
    },
}  # fmt: skip
SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8",
}  # fmt: skip
LONG = {short: name for name, short in SHORT.items()}


def contiguous(shape: Sequence[Any]) -> list[Any]:
    """The strides of a tensor without gaps, of numbers or expressions."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (1 if size == 0 else size)
    return strides[::-1]


def owner_of(value: FakeTensor) -> Any:
    """Owner of a value's symbols: its mode's environment, or a mode without symbols itself."""
    return value.fake_mode.shape_env or value.fake_mode


class ValuePrinter:
    """Writes values; what owns their symbols, a trace's fake mode, has a number."""

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.symbols: list[dict[str, str]] = []
        self._known: dict[tuple[int, int | None], tuple[Any, str]] = {}

    def usual(self, graphs: JobGraph | GroupGraph) -> int | None:
        """The number of the owner of most values of graphs, None where no value has one."""
        owners = (
            owner_of(value)
            for graph in graphs.graphs()
            for node in graph.nodes
            if isinstance(value := node.meta.get("val"), FakeTensor)
        )
        counts = Counter(map(self.number, owners))
        return counts.most_common(1)[0][0] if counts else None

    def number(self, owner: Any) -> int:
        """The number of an owner; one without symbols has a number too."""
        for index, known in enumerate(self.owners):
            if known is owner:
                return index
        self.owners.append(owner)
        self.symbols.append({})
        return len(self.owners) - 1

    def lines(self) -> Iterator[str]:
        """The table of symbols."""
        for number, symbols in enumerate(self.symbols):
            yield f"mode({number}{keywords(symbols)})"

    def value(self, value: torch.Tensor | torch.SymInt, usual: int | None) -> str:
        """A tensor's type and shape, or a size; what is unusual stands behind."""
        key = (id(value), usual)
        if key not in self._known:
            shown = self._tensor if isinstance(value, torch.Tensor) else self._size
            self._known[key] = value, shown(value, usual)
        return self._known[key][1]

    def _size(self, value: Any, usual: int | None) -> str:
        mode = self.number(value.node.shape_env)
        return f"size({self._expression(value, mode)}{_mode(mode, usual)})"

    def _tensor(self, value: Any, usual: int | None) -> str:
        mode = self.number(owner_of(value)) if isinstance(value, FakeTensor) else None
        shape = [self._expression(size, mode) for size in value.shape]
        sizes, steps = (
            [size.node.expr if isinstance(size, torch.SymInt) else size for size in part]
            for part in (value.shape, value.stride())
        )
        kind = str(value.dtype).removeprefix("torch.")
        text = f"{SHORT.get(kind, kind)}[{', '.join(shape) or '()'}]"
        facts: dict[str, str | None] = {
            "strides": None,
            "device": None if value.device.type == "meta" else quoted(str(value.device)),
            "grad": "True" if value.requires_grad else None,
        }
        if steps != contiguous(sizes):
            facts["strides"] = f"[{', '.join(self._expression(s, mode) for s in value.stride())}]"
        more = keywords(facts) + _mode(mode, usual)
        return f"tensor({text}{more})" if more else text

    def _expression(self, size: int | torch.SymInt, mode: int | None) -> str:
        if isinstance(size, int):
            return size_text(size)
        assert mode is not None
        return self._tree(size.node.expr, mode)

    def _tree(self, expr: sympy.Basic, mode: int) -> str:
        if isinstance(expr, sympy.Symbol):
            self._note(expr, mode)
            return str(expr.name)
        if isinstance(expr, sympy.Integer):
            return str(int(expr))
        name = type(expr).__name__
        if isinstance(expr, sympy.Rational):
            return f"Rational({int(expr.p)}, {int(expr.q)})"
        if name not in FUNCTIONS:
            raise GraphNotStorable(
                "a size is computed in a way that a graph file cannot keep",
                found=expr,
                help="please report it, with the model",
            )
        parts = [self._tree(part, mode) for part in expr.args]
        plain = all(isinstance(part, (sympy.Symbol, sympy.Integer)) for part in expr.args)
        if name in ("Mul", "Add") and plain:
            return ("*" if name == "Mul" else " + ").join(parts)
        return f"{name}({', '.join(parts)})"

    def _note(self, symbol: sympy.Symbol, mode: int) -> None:
        if symbol.name in self.symbols[mode]:
            return
        env: ShapeEnv = self.owners[mode]
        hint = _hints(env).get(symbol)
        if hint is None:
            raise GraphNotStorable(
                "a size depends on values, which a graph file cannot keep",
                found=symbol,
                help="please report it, with the model",
            )
        span = env.var_to_range[symbol]
        upper = "" if span.upper == int_oo else f", {int(span.upper)}"
        self.symbols[mode][symbol.name] = f"({int(hint)}, {int(span.lower)}{upper})"


def _mode(mode: int | None, usual: int | None) -> str:
    return "" if mode == usual else f", mode={mode}"


def _hints(env: ShapeEnv) -> dict[sympy.Symbol, Any]:
    """What the symbols were while tracing; torch renamed the table in 2.13."""
    hints = getattr(env, "backed_var_to_val", None)
    return hints if hints is not None else env.var_to_val


class ValueReader:
    """Reads values; fake modes are made anew, with symbols of the same names."""

    def __init__(self) -> None:
        self.modes: dict[int, FakeTensorMode] = {}
        self._symbols: dict[int, dict[str, Any]] = {}
        # Making a fake tensor takes most of reading; nobody writes into one, so equal ones are one.
        self._floats: dict[tuple[Any, ...], torch.Tensor] = {}

    def add(self, number: int, sizes: dict[str, tuple[int, ...]]) -> None:
        """A mode with its symbols: what each was while tracing, and its bounds."""
        env = _NamedSizes()
        self._symbols[number] = {name: _symbol(env, name, *size) for name, size in sizes.items()}
        self.modes[number] = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)

    def read(self, note: ast.expr, mode: int | None) -> torch.Tensor | torch.SymInt | int:
        """A value: `bf16[1, s70]`, `tensor(bf16[1, s70], strides=[...])`, `size(2*s70)`."""
        facts: dict[str, ast.expr] = {}
        if isinstance(note, ast.Call):
            facts = {str(word.arg): word.value for word in note.keywords}
            mode = ast.literal_eval(facts.pop("mode")) if "mode" in facts else mode
            if called(note) == "size":
                return self._int(self._expression(note.args[0], mode), mode)
            note = note.args[0]
        if not isinstance(note, ast.Subscript) or not isinstance(note.value, ast.Name):
            raise strange(note)
        name = note.value.id
        dtype = getattr(torch, LONG.get(name, name), None)
        if not isinstance(dtype, torch.dtype):
            raise strange(note)
        words = note.slice.elts if isinstance(note.slice, ast.Tuple) else [note.slice]
        shape = [self._expression(word, mode) for word in words]
        strides = contiguous(shape)
        if "strides" in facts:
            assert isinstance(facts["strides"], ast.List)
            strides = [self._expression(word, mode) for word in facts["strides"].elts]
        device = ast.literal_eval(facts["device"]) if "device" in facts else "meta"
        key = (mode, dtype, device, "grad" in facts, *shape, None, *strides)
        if key not in self._floats or not dtype.is_floating_point:
            tensor = self._tensor(shape, strides, dtype, device, mode)
            self._floats[key] = tensor.requires_grad_("grad" in facts)
        return self._floats[key]

    def _tensor(
        self,
        shape: list[Any],
        strides: list[Any],
        dtype: torch.dtype,
        device: str,
        mode: int | None,
    ) -> torch.Tensor:
        sizes, steps = (tuple(self._int(size, mode) for size in part) for part in (shape, strides))
        if mode is None:
            # A tensor that is not fake must not take memory.
            assert device == "meta", f"a tensor on {device} without a mode"
            return torch.empty_strided(sizes, steps, dtype=dtype, device=device)
        return fake_tensor(self.modes[mode], sizes, steps, dtype, device)

    def _int(self, size: Any, mode: int | None) -> int | torch.SymInt:
        if isinstance(size, int):
            return size
        if size.is_Integer:
            return int(size)
        env = None if mode is None else self.modes[mode].shape_env
        assert env is not None
        return env.create_symintnode(size, hint=None)

    def _expression(self, item: ast.expr, mode: int | None) -> Any:
        """A size: a number, or sympy's expression of symbols."""
        if isinstance(item, ast.Constant) and type(item.value) is int:
            return item.value
        if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub):
            return -self._expression(item.operand, mode)
        if isinstance(item, ast.Name) and (segment := re.fullmatch(r"T(\d+)", item.id)):
            return segment_size(int(segment[1]))
        if isinstance(item, ast.Name) and mode is not None:
            return self._symbols[mode][item.id]
        if isinstance(item, ast.BinOp) and isinstance(item.op, (ast.Mult, ast.Add)):
            function = operator.mul if isinstance(item.op, ast.Mult) else operator.add
            left, right = (self._expression(part, mode) for part in (item.left, item.right))
            return function(sympy.sympify(left), right)
        if isinstance(item, ast.Call) and called(item) in FUNCTIONS:
            parts = (sympy.sympify(self._expression(part, mode)) for part in item.args)
            return FUNCTIONS[called(item)](*parts)
        raise strange(item)


class _NamedSizes(ShapeEnv):
    """Symbols get the numbers that they are asked for: torch derives its own from a hash."""

    number = 0

    def _generate_unique_id(self, source_name: str) -> int:
        self.unique_ids.add(self.number)
        return self.number


def _symbol(env: _NamedSizes, name: str, hint: int, lower: int, upper: int | None = None) -> Any:
    env.number = int(name[1:])
    span = ValueRanges(lower, int_oo if upper is None else upper)
    return env.create_symbol(
        hint,
        ConstantSource(f"row_{name}"),
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=StrictMinMaxConstraint(vr=span, warn_only=False),
        do_not_specialize_zero_one=True,
    )
