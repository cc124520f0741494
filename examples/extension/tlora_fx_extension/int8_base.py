"""Keep the frozen base in int8, a scale for each row of a matrix.

Reads   frozen matrices that linears and lowered adapters multiply with.
Writes  in their place an int8 matrix, its scales, and their product in the dtype of the base.
Keeps   shapes and dtypes, not numbers: weights are rounded to 8 bits, so losses are others.

The matrices take half the bytes of bfloat16 between steps. A step still computes in the base's
dtype, and its backward holds the products until it has passed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, fx

from tlora_fx.ir.graph import GroupGraph, is_call
from tlora_fx.ir.storage import stored_as
from tlora_fx.pipeline import GroupPass, Numerics, register
from tlora_fx.rewriting import Maker, Rewriter

aten = torch.ops.aten
WEIGHT_AT_1 = (aten.linear.default, torch.ops.tlora_fx.multi_lora_linear.default)
LARGEST = 127


@register
@dataclass(frozen=True, slots=True)
class Int8Base(GroupPass):
    """Keep frozen matrices in int8, weight-only.

    at_least   smallest matrix to quantise, in elements; smaller ones stay as they are
    """

    name: ClassVar[str] = "int8-base"
    requires: ClassVar[frozenset[str]] = frozenset({"lower-adapters"})
    preserves_numerics: ClassVar[Numerics] = "no"

    at_least: int = 1024

    def run(self, group: GroupGraph) -> None:
        """Rewrite the graphs of layers, and the root."""
        for graph in group.graphs():
            rewriter = Rewriter(graph)
            for node in list(graph.nodes):
                if self._fits(node):
                    rewriter.replace(node, partial(dequantised, node))

    def _fits(self, node: fx.Node) -> bool:
        """Whether a node reads a frozen matrix that is only multiplied with."""
        ref = node.meta.get("tensor")
        if node.op != "get_attr" or ref is None or ref.owner != "base" or ref.originals:
            return False
        large = len(ref.shape) == 2 and ref.shape[0] * ref.shape[1] >= self.at_least
        used = all(is_call(user, *WEIGHT_AT_1) and user.args[1] is node for user in node.users)
        return large and used and ref.dtype.is_floating_point


def dequantised(node: fx.Node, make: Maker) -> fx.Node:
    """The matrix, as a product of what is stored."""
    ref = node.meta["tensor"]
    whole = make.tensor(stored_as(ref, int8_values), f"{node.target}_int8")
    scales = make.tensor(stored_as(ref, int8_scales), f"{node.target}_scales")
    return make(aten.mul.Tensor, make(aten.to.dtype, whole, ref.dtype), scales)


def int8_scales(weight: Tensor) -> Tensor:
    """What one step of a row is worth.

    weight    [out, in]
    returns   [out, 1], of the weight's dtype; 1 for a row of zeros
    """
    largest = weight.abs().amax(dim=1, keepdim=True)
    return torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))


def int8_values(weight: Tensor) -> Tensor:
    """The steps of every number.

    weight    [out, in]
    returns   [out, in] int8, in -127..127
    """
    return (weight / int8_scales(weight)).round().clamp(-LARGEST, LARGEST).to(torch.int8)
