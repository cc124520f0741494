"""Keep what attention computed for its backward, however little memory a budget leaves.

Reads   the joint graph of each block of layers.
Writes  what is to become of attention's results.
Keeps   every number: a value that is kept is the one that would be computed again.

Attention costs few operations for its bytes, and more time than they tell: a budget, which goes by
operations, computes it again first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tlora_fx.ir.joint import JointGraph
from tlora_fx.pipeline import JointPass, Numerics, register

ATTENTION = torch.ops.tlora_fx.packed_attention.default


@register
@dataclass(frozen=True, slots=True)
class KeepAttention(JointPass):
    """Keep results of attention from the forward to the backward."""

    name: ClassVar[str] = "keep-attention"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    def rewrite(self, joint: JointGraph) -> None:
        """Mark every attention."""
        for node in joint.calls(ATTENTION):
            joint.keep(node)
