"""The last hidden state of a root graph, and the head: all from there to the logits."""

from __future__ import annotations

import networkx as nx
import torch
from torch import fx

from tlora_fx.errors import BaseRefused, GraphInvalid
from tlora_fx.ir.graph import digraph, is_call, output_of, placeholders, shape_of
from tlora_fx.ir.lora_sites import lowered_site

ROW = ("input_ids", "position_ids")
HEAD_TABLES = ("segments", "token_index", "keys")
PRODUCTS = (
    *(getattr(torch.ops.aten, name).default for name in ("linear", "addmm", "mm", "matmul", "bmm")),
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.einsum.default,
)


def head_of(root: fx.Graph) -> tuple[fx.Node, list[fx.Node]]:
    """The last hidden state, and all nodes from there to the logits.

    That is the last value [1, T, H] (batch form [B, S, H]) which every way from the row to the
    logits takes and behind which a matrix product follows.

    raises    BaseRefused when there is none
    """
    logits = output_of(root).args[0]
    if not isinstance(logits, fx.Node):
        raise GraphInvalid(
            "the graph returns something else than its logits",
            expected="one value",
            found=str(logits)[:100],
            help="a pass before lower-loss changed what the graph returns",
        )
    ways = digraph(root)
    before = {logits, *nx.ancestors(ways, logits)}
    hidden = _narrowest(root, ways, before)
    if hidden is None:
        raise _several_values(logits)
    after = nx.descendants(ways, hidden) & before
    members = _with_given(root, after)
    if any(node.op == "call_module" for node in members):
        raise _several_values(logits)
    return hidden, [node for node in root.nodes if node in members]


def _several_values(logits: fx.Node) -> BaseRefused:
    return BaseRefused(
        "the base computes its logits from several values, so its head cannot run in chunks",
        node=logits.format_node(),
        source=logits.meta.get("source"),
        help="this base is not supported yet",
    )


def _with_given(root: fx.Graph, members: set[fx.Node]) -> set[fx.Node]:
    """Nodes, and what computes for them alone on weights or on tables that the head gets.

    Of weights such are DoRA's norms; of tables the part of a job whose own copy has a dropout.
    """
    given: set[fx.Node] = set()
    for node in root.nodes:
        is_table = node.op == "placeholder" and node.target in HEAD_TABLES
        computed = node.op == "call_function" and all(n in given for n in node.all_input_nodes)
        if node.op == "get_attr" or is_table or computed:
            given.add(node)
    nodes = set(members)
    for node in reversed(root.nodes):
        alone = node.op != "placeholder" and all(user in nodes for user in node.users)
        if node in given and node.users and alone:
            nodes.add(node)
    return nodes


def _narrowest(root: fx.Graph, ways: nx.DiGraph, before: set[fx.Node]) -> fx.Node | None:
    """The last node that alone carries the row on, with a matrix product behind it."""
    inputs = placeholders(root)
    given = [inputs[name] for name in ROW if name in inputs]
    from_row = set().union(*(nx.descendants(ways, node) for node in given)) & before
    order = {node: index for index, node in enumerate(root.nodes)}
    carrying = [n for n in root.nodes if n in from_row and _holds_tensors(n)]
    products = [order[n] for n in carrying if is_call(n, *PRODUCTS) or lowered_site(n) is not None]
    row = str(list(inputs[ROW[0]].meta["val"].shape))
    members = set(carrying)
    narrowest: fx.Node | None = None
    last_use = -1
    for node in [*given, *carrying]:
        shape = list(shape_of(node) or ())
        holds_row = len(shape) == 3 and str(shape[:2]) == row
        if holds_row and last_use <= order[node] and products and products[-1] > order[node]:
            narrowest = node
        last_use = max([last_use, *(order[user] for user in node.users if user in members)])
    return narrowest


def _holds_tensors(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or several."""
    value = node.meta.get("val")
    several = isinstance(value, (list, tuple)) and bool(value)
    return isinstance(value[0] if several else value, torch.Tensor)  # type: ignore[index]
