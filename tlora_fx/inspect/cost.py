"""Cost of one node of a graph, in symbols of the row: for passes that weigh what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from tlora_fx.inspect.flops import Cost, FlopCounter, is_branch
from tlora_fx.ir.graph import Form, GroupGraph, JobGraph
from tlora_fx.ir.lora_sites import is_adapted
from tlora_fx.ir.shapes import FIRST_SEGMENT_SIZE, segment_size
from tlora_fx.model.source import size_names

#: Tokens of a row, and tokens of one sequence.
T, L = sympy.symbols("T L", positive=True, integer=True)


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of one forward of a node.

    flop       operations, in T tokens of the row, T0 of the first job, L tokens of a sequence; in
               batch form B lines of S tokens
    bytes      read and written, each tensor once; nothing for a view
    unknown    operators whose cost nobody knows: `flop` is then without them
    """

    flop: sympy.Expr
    bytes: sympy.Expr
    unknown: tuple[str, ...] = ()


def cost_of(node: fx.Node, graphs: GroupGraph | JobGraph | None = None) -> NodeCost:
    """Cost of a node.

    node      of a graph in any state, with its value
    graphs    whose node it is: names sizes as listings do; None: a size of the row is T, and a
              lowered site's adapters have the ranks of the branches that it was made of
    """
    form: Form = "packed" if graphs is None else graphs.form
    sizes = _plain_names(node) if graphs is None else size_names(graphs)
    counter = FlopCounter(form, sizes)
    tokens = _tokens(node, form)
    flop, unknown = _flop(counter.node(node), tokens)
    for job, rank in _ranks(node, graphs).items():
        own, more = _flop(counter.adapter(node, rank), _symbol(f"T{job}"))
        flop, unknown = flop + own, unknown + more
    return NodeCost(flop, _bytes(node, sizes), unknown)


def _flop(cost: Cost, tokens: sympy.Expr) -> tuple[sympy.Expr, tuple[str, ...]]:
    number = _number(cost.token) * tokens + _number(cost.length) * tokens * L + _number(cost.row)
    return number, cost.unknown


def _number(value: float) -> sympy.Expr:
    return sympy.Integer(int(value)) if value == int(value) else sympy.Float(value)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


def _tokens(node: fx.Node, form: Form) -> sympy.Expr:
    """How many tokens a node computes: a job's, where it runs on a segment, else the row's."""
    whole = T if form == "packed" else _symbol("B") * _symbol("S")
    if not is_branch(node):
        return whole
    shapes = [value.shape for value in _tensors([node, *node.all_input_nodes])]
    sizes = [size for shape in shapes for size in shape if isinstance(size, int)]
    jobs = [(size - FIRST_SEGMENT_SIZE) // 2 for size in sizes if _is_segment(size)]
    return _symbol(f"T{jobs[0]}") if jobs else whole


def _is_segment(size: int) -> bool:
    return size >= FIRST_SEGMENT_SIZE and segment_size((size - FIRST_SEGMENT_SIZE) // 2) == size


def _ranks(node: fx.Node, graphs: GroupGraph | JobGraph | None) -> dict[int | str, int]:
    """The ranks of a lowered site's adapters, by the job's place where it is known."""
    branches = node.meta.get("branches") or {} if is_adapted(node) else {}
    ranks = {job: branch.rank for job, branch in branches.items()}
    if not isinstance(graphs, GroupGraph):
        return {f"_{job}": rank for job, rank in ranks.items()}
    return {graphs.job_names.index(job): rank for job, rank in ranks.items()}


def _plain_names(node: fx.Node) -> dict[str, str]:
    """Every symbol is a size of the row, and every segment a job's."""
    names: dict[str, str] = {}
    for value in _tensors([node, *node.all_input_nodes]):
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                names.update((str(symbol), "T") for symbol in size.node.expr.free_symbols)
            elif _is_segment(size):
                names[str(size)] = f"T{(size - FIRST_SEGMENT_SIZE) // 2}"
    return names


def _tensors(nodes: list[fx.Node]) -> list[Tensor]:
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return [value for value in values if isinstance(value, Tensor)]


def _bytes(node: fx.Node, names: dict[str, str]) -> sympy.Expr:
    """What is read and written; an operator that hands on what it is given moves nothing."""
    schema: Any = getattr(node.target, "_schema", None)
    views = schema is not None and any(item.alias_info is not None for item in schema.returns)
    if node.op != "call_function" or views or schema is None:
        return sympy.Integer(0)
    return sum((_size_of(value, names) for value in _tensors([node, *node.all_input_nodes])),
               sympy.Integer(0))  # fmt: skip


def _size_of(value: Tensor, names: dict[str, str]) -> sympy.Expr:
    total = sympy.Integer(value.dtype.itemsize)
    for size in value.shape:
        if isinstance(size, torch.SymInt):
            symbols = size.node.expr.free_symbols
            known = {s: _symbol(names[str(s)]) for s in symbols if str(s) in names}
            total *= size.node.expr.xreplace(known)
        else:
            total *= _symbol(names[str(size)]) if str(size) in names else size
    return total
