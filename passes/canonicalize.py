"""Canonicalise graphs: drop operators that give what they read, and write others in one way.

Reads   calls of all graphs.
Writes  the value itself in place of what changes nothing: a product with 1, a cast to its own type,
        a view or an expansion to its own shape, dropout of rate 0, a transposition of a
        transposition; one cast in place of two of the same type.
Keeps   every number, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import GroupGraph, shape_of
from tlora_fx.pipeline import GroupPass, Numerics, count, register
from tlora_fx.rewriting import (
    Match,
    Pattern,
    Rewriter,
    RewriteRule,
    anything,
    call,
    either,
    mul,
    rewrite_greedily,
    where,
)

aten = torch.ops.aten
SHAPED = (aten.view.default, aten.reshape.default, aten.expand.default)


def _unchanged(found: Mapping[str, Any]) -> bool:
    """Whether a call gives a value of the type and shape that it reads."""
    x, y = found["x"], found["y"]
    if not isinstance(x, fx.Node) or shape_of(x) is None or shape_of(y) is None:
        return False
    same = [str(size) for size in x.meta["val"].shape] == [str(s) for s in y.meta["val"].shape]
    return same and x.meta["val"].dtype == y.meta["val"].dtype


def _nothing(pattern: Pattern, name: str) -> RewriteRule:
    """A call, captured as y, that hands on its x."""
    rule = where("it changes neither shape nor type", _unchanged, pattern)
    return RewriteRule(rule, lambda found: lambda make: found["x"], name=name)


def _turned_back(found: Match) -> Any:
    return lambda make: found["x"]


RULES = (
    _nothing(mul(anything("x"), either(1, 1.0), name="y"), "a product with 1"),
    _nothing(call(aten.to.dtype, anything("x"), ..., name="y"), "a cast to its own type"),
    _nothing(call(SHAPED, anything("x"), ..., name="y"), "a view of its own shape"),
    _nothing(call(aten.dropout.default, anything("x"), either(0, 0.0), ..., name="y"), "dropout 0"),
    RewriteRule(
        call(
            aten.transpose.int,
            call(aten.transpose.int, anything("x"), anything("a"), anything("b")),
            anything("a"),
            anything("b"),
        ),
        _turned_back,
        benefit=2,
        name="a transposition back",
    ),
    RewriteRule(
        call(aten.t.default, call(aten.t.default, anything("x"))),
        _turned_back,
        benefit=2,
        name="a transposition back",
    ),
)


@register
@dataclass(frozen=True, slots=True)
class Canonicalize(GroupPass):
    """Remove operators that change nothing."""

    name: ClassVar[str] = "canonicalize"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves: ClassVar[frozenset[str]] = frozenset({"token-parallel"})
    statistics: ClassVar[Mapping[str, str]] = {"dropped": "calls that changed nothing"}
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, group: GroupGraph) -> None:
        for graph in group.graphs():
            count("dropped", rewrite_greedily(graph, RULES))
            Rewriter(graph).erase_dead()
