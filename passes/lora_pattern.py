"""Recognise a plain LoRA branch in a fused graph, or say why a branch is none.

A branch stands between two segment operators: it reads the job's segment of the site's input and
of the frozen linear's result, and writes the job's segment of that result:

    write(y, cast(add(cast(read(y)), scale * B(A(dropout(cast(read(x))))))))

The casts are PEFT's, which multiplies adapters in their own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.graph import is_call

aten = torch.ops.aten
READ = torch.ops.tlora_fx.segment_read.default
TRANSPOSES = (
    aten.t.default, aten.numpy_T.default, aten.mT.default, aten.transpose.int, aten.permute.default,
)  # fmt: skip
WRITE = torch.ops.tlora_fx.segment_write.default


class NoMatch(Exception):
    """Why a branch is no plain LoRA branch, for the report."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen linear: y = x W^T + bias.

    transposed   the weight is stored [in, out] (GPT-2's Conv1D)
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class LoraBranch:
    """A plain LoRA branch of one job: its captures."""

    job: int
    a: fx.Node
    b: fx.Node
    scaling: float
    dropout: float


def match_frozen(anchor: Any) -> Frozen:
    """The frozen linear whose result a branch replaces.

    raises    NoMatch
    """
    if is_call(anchor, aten.linear.default):
        x, weight, *bias = anchor.args
        return _frozen(x, weight, bias[0] if bias else None, False)
    if is_call(anchor, aten.view.default, aten.reshape.default):
        inner: Any = anchor.args[0]
        if (
            is_call(inner, aten.addmm.default)
            and not inner.kwargs
            and is_call(inner.args[1], aten.view.default, aten.reshape.default)
        ):
            bias, flat, weight = inner.args
            return _frozen(flat.args[0], weight, bias, True)
    product, bias = anchor, None
    if is_call(anchor, aten.add.Tensor) and len(anchor.args) == 2:
        product, bias = anchor.args
    if is_call(product, aten.matmul.default) and _is_transposed(product.args[1]):
        return _frozen(product.args[0], product.args[1].args[0], bias, False)
    raise NoMatch(f"its module is no linear ({anchor.target})")


def _is_transposed(node: Any) -> bool:
    """Whether a node is a stored matrix, transposed."""
    stored = is_call(node, *TRANSPOSES) and node.args[0].op == "get_attr"
    return bool(stored and node.meta["val"].dim() == 2)


def _frozen(x: Any, weight: Any, bias: Any, transposed: bool) -> Frozen:
    if any(node is not None and node.op != "get_attr" for node in (weight, bias)):
        raise NoMatch("the linear's weight is computed, not stored")
    return Frozen(x, weight, bias, transposed)


def match_branch(write: fx.Node, anchor: fx.Node, x: fx.Node) -> LoraBranch:
    """The plain LoRA branch behind a segment write.

    write     the node that writes the job's segment
    anchor    the frozen linear's result
    x         the frozen linear's input
    raises    NoMatch naming the first condition that fails
    """
    job: Any = write.args[3]
    total = _uncast(write.args[1])
    _demand(is_call(total, aten.add.Tensor), f"its last operator is {_named(total)}, not add")
    _demand(not total.kwargs, "its sum is scaled")
    frozen, scaled = (_uncast(arg) for arg in total.args[:2])
    _demand(_reads(frozen, anchor, job), "what it adds to is not the frozen linear's result")
    _demand(is_call(scaled, aten.mul.Tensor), f"its branch ends in {_named(scaled)}, not a scale")
    product, scaling = scaled.args[:2]
    _demand(isinstance(scaling, (int, float)), "its scaling is computed")
    up = _uncast(product)
    _demand(is_call(up, aten.linear.default), f"B is applied by {_named(up)}, not linear")
    _demand(len(up.args) == 2, "its B has a bias")
    down = _uncast(up.args[0])
    _demand(is_call(down, aten.linear.default), f"A is applied by {_named(down)}, not linear")
    _demand(len(down.args) == 2, "its A has a bias")
    source, rate = _uncast(down.args[0]), 0.0
    if is_call(source, aten.dropout.default):
        rate = float(source.args[1])
        source = _uncast(source.args[0])
    _demand(_reads(source, x, job), "it does not read the frozen linear's input")
    a, b = down.args[1], up.args[1]
    _demand(a.op == b.op == "get_attr", "its A or B is computed")
    return LoraBranch(int(job), a, b, float(scaling), rate)


def _uncast(node: Any) -> Any:
    while is_call(node, aten.to.dtype, aten._to_copy.default):
        node = node.args[0]
    return node


def _reads(node: Any, whole: fx.Node, job: Any) -> bool:
    return is_call(node, READ) and node.args[0] is whole and node.args[2] == job


def _demand(holds: bool, why: str) -> None:
    if not holds:
        raise NoMatch(why)


def _named(node: Any) -> str:
    return str(getattr(node, "target", node))
