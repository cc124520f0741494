"""Lowered sites in operators of torch, where no generated kernel serves them: on a CPU.

Inductor does not look into an operator of ours, and calls its Python three times for each site and
step. What it is made of, Inductor compiles with the rest of the model. The masks of dropout stay
an operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tlora_fx.backend.sites import regions_of, value_of
from tlora_fx.host.environment import kernel_mode
from tlora_fx.ir.lora_sites import lowered_arguments

ops = torch.ops.tlora_fx


def decompose_sites(root: fx.GraphModule) -> int:
    """Write out each site that no kernel serves, in place; returns how many.

    root   as `lower_graph` leaves it, with the regions in it
    """
    if kernel_mode() == "interpret":
        return 0
    decomposed = 0
    for module in (region.module for region in regions_of(root)):
        sites = list(_sites(module))
        for node, given in sites:
            _write_out(module, node, given)
        if sites:
            module.graph.lint()
            module.recompile()
        decomposed += len(sites)
    return decomposed


def _sites(module: fx.GraphModule) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """The sites on a CPU of which one job owns all tokens and ranks, and their arguments."""
    for node in module.graph.find_nodes(
        op="call_function", target=ops.multi_lora_linear.default, sort=True
    ):
        given = lowered_arguments(node)
        x, a = value_of(given["x"]), value_of(given["a"])
        whole = {"segments": [0, 1], "ranks": [0, a.shape[0]]}
        held = {name: _table(module, given[name]) for name in whole}
        if x.device.type == "cpu" and held == whole:
            yield node, given


def _table(module: fx.GraphModule, node: fx.Node) -> list[int] | None:
    """What a table holds that is a buffer of the module."""
    if node.op != "get_attr":
        return None
    numbers: list[int] = getattr(module, str(node.target)).tolist()
    return numbers


def _write_out(module: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> None:
    graph, compute = module.graph, given["compute_dtype"]
    with graph.inserting_before(node):
        call = _Caller(graph)
        y = call(F.linear, given["x"], given["weight"], given["bias"])
        x, a, b = (call.cast(given[name], compute) for name in ("x", "a", "b"))
        if given["drops"]:
            tables = [given[name] for name in ("rates", "segments", "keys", "token_index", "site")]
            token_dims = value_of(x).dim() - 1
            x = call.like(x, ops.keyed_dropout.default, x, *tables, token_dims)
        low = call(F.linear, x, a)
        # On the few columns of the rank, so that no gradient of y is scaled as a whole. A number
        # of no dimension leaves the dtype as it is.
        scale = call.like(torch.ones((), dtype=torch.float64), torch.select, given["scales"], 0, 0)
        low = call.like(low, torch.mul, low, scale)
        branch = call(torch.matmul, low, b)
        total = call.cast(call(torch.add, y, branch), value_of(y).dtype)
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    read = node.all_input_nodes
    graph.erase_node(node)
    for source in read:
        if source.op == "get_attr" and not source.users:
            graph.erase_node(source)
            delattr(module, str(source.target))


class _Caller:
    """Adds calls to a graph, each with the value that Dynamo would keep of it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        return self._node(target, args, target(*fx.map_arg(args, value_of)))

    def like(self, source: fx.Node | Tensor, target: Any, *args: Any) -> fx.Node:
        """A call whose value is like another one."""
        return self._node(target, args, value_of(source) if isinstance(source, fx.Node) else source)

    def cast(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A value in a dtype."""
        value: Tensor = value_of(source)
        return (
            source if value.dtype == dtype else self._node("to", (source, dtype), value.to(dtype))
        )

    def _node(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args)
        node.meta["example_value"] = value
        return node
