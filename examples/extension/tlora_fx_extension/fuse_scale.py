"""Fuse the scale of a LoRA branch into its B: s · (h Bᵀ) is h (s · B)ᵀ.

Reads   the branches that fuse-backbone wrote.
Writes  one product on B [out, r] in place of one on the branch's result [T, out], which is larger
        wherever a job has more tokens than its rank.
Keeps   every number up to rounding. `lower-adapters` does not know the new form: what this pass
        rewrote runs as it is, and `tlora-fx explain` says so.

Layers that share code differ in their scales. Raising `NotFoldable` asks the compiler for graphs
in which each branch carries its own number; `group.exact` says that they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tlora_fx.errors import NotFoldable
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.pipeline import GroupPass, Numerics, register
from tlora_fx.rewriting import (
    Maker,
    Match,
    Pattern,
    Rewriter,
    anything,
    call,
    constant,
    mul,
    stored,
)

aten = torch.ops.aten
LINEAR = aten.linear.default

SCALED: Pattern = mul(
    call(LINEAR, anything("h"), stored("B", owner="job"), name="branch"), constant("scale")
)


@register
@dataclass(frozen=True, slots=True)
class FuseScale(GroupPass):
    """Fuse the scale of LoRA branches into B.

    except_one   leave a branch alone whose scale is 1: there is nothing to fuse
    """

    name: ClassVar[str] = "fuse-scale"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "bound"

    except_one: bool = True

    def run(self, group: GroupGraph) -> None:
        """Rewrite all graphs of the group."""
        if not group.exact:
            raise NotFoldable("each branch's own scale is needed", help="raised to get it")
        for graph in group.graphs():
            rewriter = Rewriter(graph)
            for found in rewriter.find(SCALED):
                if not (self.except_one and found["scale"] == 1):
                    rewriter.replace(found, fused(found))


def fused(found: Match) -> Callable[[Maker], fx.Node]:
    """What stands in place of a scaled branch."""

    def build(make: Maker) -> fx.Node:
        return make(LINEAR, found["h"], make(aten.mul.Tensor, found["B"], found["scale"]))

    return build
