"""From the operators that Dynamo records to those that tracing yields.

Dynamo records what model code calls: `torch.nn.functional.linear`, `x.to(dtype)`, `a * b`. The
patterns know overloads of aten. Only what stands in PEFT's LoRA layers has an entry here; every
other call keeps its name, so that a pattern can say what it met.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

aten = torch.ops.aten
Args = tuple[Any, ...]
Rule = Callable[..., "OpCall | None"]
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call in the vocabulary of tracing.

    target   an overload, or None where the call returns its first argument
    """

    target: Any
    args: Args


def translate(node: fx.Node) -> OpCall | None:
    """What a recorded call is in the vocabulary of tracing, or None where it has no entry."""
    if isinstance(node.target, torch._ops.OpOverload):
        return OpCall(node.target, node.args) if not node.kwargs else None
    rule = RULES.get(node.target)
    if rule is None:
        return None
    try:
        return rule(*node.args, **node.kwargs)
    except TypeError:
        return None


def _linear(x: Any, weight: Any, bias: Any = None) -> OpCall:
    given = (x, weight) if bias is None else (x, weight, bias)
    return OpCall(aten.linear.default, given)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> OpCall | None:
    if inplace:
        return None
    return OpCall(aten.dropout.default, (x, p, True)) if training and p else OpCall(None, (x,))


def _add(x: Any, other: Any) -> OpCall:
    return OpCall(aten.add.Tensor, (x, other))


def _mul(x: Any, other: Any) -> OpCall:
    given = (x, other) if isinstance(x, fx.Node) else (other, x)
    return OpCall(aten.mul.Tensor, given)


def _matmul(x: Any, other: Any) -> OpCall:
    return OpCall(aten.matmul.default, (x, other))


def _addmm(x: Any, mat1: Any, mat2: Any) -> OpCall:
    return OpCall(aten.addmm.default, (x, mat1, mat2))


def _view(x: Any, *shape: Any) -> OpCall:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    return OpCall(aten.view.default, (x, list(sizes)))


def _t(x: Any) -> OpCall:
    return OpCall(aten.t.default, (x,))


def _transpose(x: Any, dim0: int, dim1: int) -> OpCall:
    return OpCall(aten.transpose.int, (x, dim0, dim1))


def _to(x: Any, first: Any = None, *, dtype: Any = None) -> OpCall | None:
    """`to` with a dtype alone: what moves a tensor to a device is no cast."""
    dtype = first if dtype is None else dtype
    return OpCall(aten.to.dtype, (x, dtype)) if isinstance(dtype, torch.dtype) else None


def _cast(dtype: torch.dtype) -> Rule:
    return lambda x: OpCall(aten.to.dtype, (x, dtype))


RULES: dict[Any, Rule] = {
    F.linear: _linear,
    F.dropout: _dropout,
    torch.add: _add,
    operator.add: _add,
    "add": _add,
    torch.mul: _mul,
    operator.mul: _mul,
    "mul": _mul,
    torch.matmul: _matmul,
    operator.matmul: _matmul,
    "matmul": _matmul,
    torch.addmm: _addmm,
    torch.reshape: _view,
    "view": _view,
    "reshape": _view,
    torch.t: _t,
    "t": _t,
    torch.transpose: _transpose,
    "transpose": _transpose,
    "to": _to,
    **{name: _cast(dtype) for name, dtype in CASTS.items()},
}
