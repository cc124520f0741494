"""One frozen linear for q, k and v, whose weights are stored as one matrix."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from tlora_fx.ir.graph import GroupGraph
from tlora_fx.ir.storage import stored_as
from tlora_fx.pipeline import GroupPass, Numerics, count, register
from tlora_fx.rewriting import Rewriter, anything, call, stored

aten = torch.ops.aten
FROZEN = call(aten.linear.default, anything("x"), stored("W", owner="base"))


def concatenated(*weights: torch.Tensor) -> torch.Tensor:
    """[q + k + v, in]."""
    return torch.cat(weights)


@register
@dataclass(frozen=True, slots=True)
class FuseQkv(GroupPass):
    """Multiply with q, k and v at once."""

    name: ClassVar[str] = "fuse-qkv"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "bound"
    statistics: ClassVar = {"fused": "groups of linears that read one input"}

    def run(self, group: GroupGraph) -> None:
        for graph in group.graphs():
            rewriter, readers = Rewriter(graph), {}
            for found in rewriter.find(FROZEN):
                readers.setdefault(found["x"], []).append(found)
            for x, members in readers.items():
                if len(members) == 3:
                    self.fuse(rewriter, x, members)

    def fuse(self, rewriter, x, members):
        refs = [found["W"].meta["tensor"] for found in members]
        ends = [0]
        for ref in refs:
            ends.append(ends[-1] + ref.shape[0])

        def build(make):
            whole = make.tensor(stored_as(refs, concatenated), f"{members[0]['W'].target}_qkv")
            y = make(aten.linear.default, x, whole)
            return [make(aten.slice.Tensor, y, 2, a, b) for a, b in pairwise(ends)]

        if rewriter.replace_several(members, build, what="q, k, v"):
            count("fused")
