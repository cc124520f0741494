"""Causal convolutions along a packed row, as one operator that keeps to each sequence.

A model puts as many zeros in front of its row as the kernel reaches back, by itself or through the
convolution, and takes as many results as the row has tokens. What is another convolution stays, and
the check of tokens refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import is_call, placeholders

aten = torch.ops.aten
#: What conv1d and slice take where a call says nothing, by the arguments' places.
CONVOLUTION: tuple[Any, ...] = (None, None, None, [1], [0], [1], 1)
SLICE: tuple[Any, ...] = (None, 0, None, None, 1)


def convolve_by_sequence(graph: fx.Graph) -> None:
    """Restart causal convolutions over the tokens of a packed row at each sequence.

    graph    a traced packed row
    """
    inputs = placeholders(graph)
    row = str(inputs["input_ids"].meta["val"].shape[1])
    for node in list(graph.nodes):
        if is_call(node, aten.conv1d.default):
            _replace(graph, node, row, inputs["cu_seqlens"])


def _replace(graph: fx.Graph, node: fx.Node, row: str, cu_seqlens: fx.Node) -> None:
    padded, weight, bias, stride, (padding,), (dilation,), groups = _filled(node, CONVOLUTION)
    x, zeros = _unpadded(padded)
    kernel = weight.meta["val"].shape[-1]
    known = all(isinstance(number, int) for number in (padding, zeros, dilation, kernel))
    causal = known and padding + zeros == dilation * (kernel - 1)
    if stride != [1] or not causal or _length(x) != row:
        return
    for result in list(_first(node, row)):
        arguments = (x, weight, bias, cu_seqlens, dilation, groups)
        with graph.inserting_before(result):
            made = graph.call_function(torch.ops.tlora_fx.sequence_conv1d.default, arguments)
        made.meta = {**node.meta, "val": result.meta["val"]}
        result.replace_all_uses_with(made)
        graph.erase_node(result)


def _unpadded(x: fx.Node) -> tuple[fx.Node, Any]:
    """What has zeros put around its last dimension, and how many in front; else x itself."""
    if is_call(x, aten.pad.default, aten.constant_pad_nd.default):
        arguments: Any = x.args
        source, sizes, *kind = arguments
        adds = all(isinstance(size, int) and size >= 0 for size in sizes)
        if len(sizes) == 2 and adds and all(word in ("constant", None, 0) for word in kind):
            return source, sizes[0]
    return x, 0


def _first(node: fx.Node, row: str) -> Iterator[fx.Node]:
    """What has the first results only, one a token: slices, or all that there are."""
    if _length(node) == row:
        yield node
        return
    for user in node.users:
        if is_call(user, aten.slice.Tensor) and _length(user) == row:
            _, dim, start, _, step = _filled(user, SLICE)
            if dim in (-1, user.meta["val"].dim() - 1) and not start and step == 1:
                yield user


def _filled(node: fx.Node, defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*node.args, *defaults[len(node.args) :])


def _length(value: fx.Node) -> str:
    return str(value.meta["val"].shape[-1])
