"""The patterns of a frozen linear and of a plain LoRA branch in a fused graph.

A branch stands between two segment operators: it reads the job's segment of the site's input and
of the frozen linear's result, and writes the job's segment of that result:

    write(y, cast(add(cast(read(y)), scale * B(A(dropout(cast(read(x))))))))

The casts are PEFT's, which multiplies adapters in their own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tlora_fx.ir.graph import shape_of
from tlora_fx.rewriting import (
    Match,
    Miss,
    Pattern,
    add,
    anything,
    call,
    constant,
    either,
    match,
    mul,
    nearest_match,
    stored,
    uncast,
    where,
)

aten = torch.ops.aten
READ = torch.ops.tlora_fx.segment_read.default
VIEWS = (aten.view.default, aten.reshape.default)
WRITE = torch.ops.tlora_fx.segment_write.default
LINEAR = aten.linear.default
INPUT, RESULT = "frozen linear's input", "frozen linear's result"


_WEIGHT = stored("weight")
_SWAPPED = either(
    call((aten.t.default, aten.numpy_T.default, aten.mT.default), _WEIGHT),
    call(aten.transpose.int, _WEIGHT, either(0, -2), either(1, -1)),
    call(aten.transpose.int, _WEIGHT, either(1, -1), either(0, -2)),
    call(aten.permute.default, _WEIGHT, either([1, 0], [-1, -2])),
)
_PRODUCT = where(
    "its weight is a matrix",
    lambda found: len(shape_of(found["weight"]) or ()) == 2,
    call(aten.matmul.default, anything("x"), _SWAPPED, name="product"),
)
# How models write y = x W^T + bias: torch's linear, GPT-2's Conv1D, a product by hand.
FROZEN: Mapping[str, Pattern] = {
    "linear": call(LINEAR, anything("x"), stored("weight"), either(None, stored("bias"))),
    "Conv1D": call(
        VIEWS,
        call(
            aten.addmm.default,
            stored("bias"),
            call(VIEWS, anything("x"), ..., name="flattened input"),
            stored("weight"),
            name="product",
        ),
        ...,
    ),
    "matmul": _PRODUCT,
    "matmul with a bias": add(_PRODUCT, stored("bias")),
}


def _reads(whole: str, name: str) -> Pattern:
    """A read of the job's segment of a value."""
    return uncast(call(READ, anything(whole), anything(), anything("job"), anything(), name=name))


_INPUT = _reads(INPUT, "input")
_A = call(
    LINEAR,
    either(
        _INPUT,
        uncast(call(aten.dropout.default, _INPUT, constant("rate"), True, name="dropout")),
    ),
    stored("A's weight"),
    name="A",
)
BRANCH: Pattern = call(
    WRITE,
    anything(),
    uncast(
        add(
            _reads(RESULT, "first summand"),
            uncast(
                mul(
                    uncast(call(LINEAR, uncast(_A), stored("B's weight"), name="B")),
                    constant("scaling"),
                    name="scaled branch",
                )
            ),
            name="sum",
        )
    ),
    anything(),
    anything("job"),
    anything(),
)


class NoMatch(Exception):
    """Why a branch is no plain LoRA branch, for the report; `miss` says it in full."""

    def __init__(self, why: str, miss: Miss) -> None:
        super().__init__(why)
        self.miss = miss


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
class Other:
    """A frozen operator that is no linear; its plain branches can be added to what it gives.

    x     the value that they read, None where no branch is plain
    why   it is no linear
    """

    x: fx.Node | None
    why: str


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
    found = nearest_match(list(FROZEN.values()), anchor)
    if isinstance(found, Miss):
        why = found.why if found.held else f"its module is no linear ({anchor.target})"
        raise NoMatch(why, found)
    transposed = found.pattern is FROZEN["Conv1D"]
    return Frozen(found["x"], found["weight"], found.captures.get("bias"), transposed)


def match_operator(anchor: Any, writes: Sequence[fx.Node]) -> Frozen | Other:
    """What a site's branches stand behind.

    anchor    its result
    writes    the nodes that write jobs' segments of it
    """
    try:
        return match_frozen(anchor)
    except NoMatch as reason:
        plain = (match(BRANCH, write, {RESULT: anchor}) for write in writes)
        inputs = (found[INPUT] for found in plain if isinstance(found, Match))
        return Other(next((x for x in inputs if _is_made_of(anchor, x)), None), str(reason))


def _is_made_of(anchor: fx.Node, x: fx.Node) -> bool:
    """Whether each token of x gave one of the anchor's, in x's dtype."""
    result, given = anchor.meta["val"], x.meta["val"]
    tokens, others = given.shape[:-1], result.shape[:-1]
    return (
        given.dtype == result.dtype
        and len(tokens) == len(others)
        and all(statically_known_true(n == m) for n, m in zip(tokens, others, strict=True))
    )


def match_branch(write: fx.Node, anchor: fx.Node, x: fx.Node) -> LoraBranch:
    """The plain LoRA branch behind a segment write.

    write     the node that writes the job's segment
    anchor    the frozen operator's result
    x         the frozen operator's input
    raises    NoMatch naming the first condition that fails
    """
    found = match_nodes(write, anchor, x)
    if isinstance(found, Miss):
        raise NoMatch(found.why, found)
    return LoraBranch(
        int(found["job"]),
        found["A's weight"],
        found["B's weight"],
        float(found["scaling"]),
        float(found.captures.get("rate", 0.0)),
    )


def match_nodes(write: fx.Node, anchor: fx.Node, x: fx.Node) -> Match | Miss:
    """The pattern's match behind a segment write, or how near it came."""
    return match(BRANCH, write, {RESULT: anchor, INPUT: x})
