"""Drop what torch.export leaves and nothing computes.

Reads   operators and values.
Writes  nothing but the nodes it drops: metadata assertions, casts to the dtype that is there,
        slices of a whole dimension, dead code. Operators that work in place return new tensors.
Keeps   every number. `detach` is never noise: it keeps gradients out of no-grad regions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import JobGraph, is_call
from tlora_fx.passes.in_place import functionalise
from tlora_fx.pipeline import JobPass, Numerics, register
from tlora_fx.rewriting import Rewriter

aten = torch.ops.aten
END = 2**63 - 1
ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)


@register
@dataclass(frozen=True, slots=True)
class DropExportNoise(JobPass):
    """Drop metadata assertions, casts and slices that do nothing, and dead code."""

    name: ClassVar[str] = "drop-export-noise"
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, graph: JobGraph) -> None:
        functionalise(graph.root, graph.name)
        rewriter = Rewriter(graph.root)
        for node in list(graph.root.nodes):
            if is_call(node, *ASSERTIONS):
                graph.root.erase_node(node)
                continue
            if is_call(node, aten.to.device):
                _forget_device(node)
            if is_call(node, aten.view.default, aten.reshape.default):
                _spell_out(node)
            if _does_nothing(node):
                rewriter.bypass(node, node.args[0])
        rewriter.erase_dead()


def _does_nothing(node: fx.Node) -> bool:
    if is_call(node, aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout):
        return _same_type(node)
    if is_call(node, aten.slice.Tensor):
        start = node.args[2] if len(node.args) > 2 else None
        stop = node.args[3] if len(node.args) > 3 else None
        step = node.args[4] if len(node.args) > 4 else 1
        return bool(start in (0, None) and stop in (END, None) and step == 1)
    return is_call(node, aten.alias.default, aten.lift_fresh_copy.default)


def _spell_out(node: fx.Node) -> None:
    """Replace -1 in a shape by the size that it stands for: an empty segment cannot tell it."""
    value, shape = node.meta["val"], list(node.args[1])  # type: ignore[arg-type]
    for place, size in enumerate(shape):
        if isinstance(size, int) and size == -1 and isinstance(value.shape[place], int):
            shape[place] = value.shape[place]
    node.update_arg(1, shape)


def _forget_device(node: fx.Node) -> None:
    """All of a row lives on one device, so what is left of `to(device, dtype)` is the dtype."""
    node.target = aten.to.dtype
    node.args = (node.args[0], node.args[2])
    node.kwargs = {}


def _same_type(node: fx.Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(before.dtype == after.dtype and before.layout == after.layout)
