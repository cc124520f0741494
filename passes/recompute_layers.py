"""Compute layers again in the backward instead of keeping what they computed in the forward.

Reads   the blocks that layers share.
Writes  `recompute` of the blocks.
Keeps   every number: dropout masks are keyed, so what is computed again is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tlora_fx.ir.graph import HEAD, GroupGraph
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed


@register
@dataclass(frozen=True, slots=True)
class RecomputeLayers(GroupPass):
    """Recompute layers in the backward instead of keeping their activations.

    blocks   names of the blocks of layers to recompute; all if none is named
    """

    name: ClassVar[str] = "recompute-layers"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    blocks: tuple[str, ...] = ()

    def run(self, group: GroupGraph) -> None:
        for name, block in group.blocks.items():
            wanted = not self.blocks or name in self.blocks
            # The loss computes its chunks again by itself.
            if wanted and name != HEAD and rewrite_allowed(f"recompute {name}"):
                block.recompute = True
