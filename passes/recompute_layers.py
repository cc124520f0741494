"""Compute layers again in the backward instead of keeping what they computed in the forward.

As a whole, or by a budget the values that cost the least for their bytes (`JointStage`).

Reads   the blocks that layers share.
Writes  `recompute` or `budget` of the blocks.
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
    budget   share of their bytes that is kept, between 0 and 1; 0: their inputs alone
    """

    name: ClassVar[str] = "recompute-layers"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    blocks: tuple[str, ...] = ()
    budget: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.budget < 1:
            raise ValueError("a budget is a share from 0 up to, not including, 1")

    def run(self, group: GroupGraph) -> None:
        for name, block in group.blocks.items():
            wanted = not self.blocks or name in self.blocks
            # The loss computes its chunks again by itself.
            if wanted and name != HEAD and rewrite_allowed(f"recompute {name}"):
                block.recompute, block.budget = self.budget == 0, self.budget or 1.0
                if self.budget:
                    text = f"keeps {self.budget:g} of the bytes that {name} kept for the backward"
                    group.notes.append((self.name, text))
