"""Find which matrices of a graph can be cut so that every piece of a value ends in a sum.

All linears are cut by columns at first, and the pieces are followed (shard_rules.py) to the linears
that take them by rows. Where an operator parts what is cut, the linears that it came from are cut
run by run; where it cannot take a piece, they stay whole; and the search begins again.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

import tlora_fx.passes.shard_rules_parts
import tlora_fx.passes.shard_rules_places  # noqa: F401  (registers its rules)
from tlora_fx.ir.graph import is_call, output_of
from tlora_fx.passes.shard_linears import Linears, linears
from tlora_fx.passes.tensor_parallel.rules import (
    CannotCarry,
    Cut,
    NeedsRuns,
    Operands,
    carried,
    ends_of,
)

COLUMNS, ROWS = 0, 1
# Linears, and which of their results.
Sources = frozenset[tuple[fx.Node, int]]
# For linears, and each of their results, the runs that it is cut by.
AllRuns = dict[fx.Node, dict[int, tuple[int, ...]]]


@dataclass(slots=True)
class Cuts:
    """How a graph is cut.

    by_columns, by_rows   linears
    whole                 why the other linears stay as they are
    values                how values are cut
    stored                how other frozen tensors are cut
    entries               operators that read pieces, and the whole values that they read beside
    """

    by_columns: list[Linears] = field(default_factory=list)
    by_rows: list[Linears] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    values: dict[fx.Node, Cut] = field(default_factory=dict)
    stored: dict[fx.Node, Cut] = field(default_factory=dict)
    entries: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)


class _StayWhole(Exception):
    """Linears that must stay whole; the text says why."""

    def __init__(self, sources: Sources, reason: str) -> None:
        super().__init__(reason)
        self.sources = sources


class _ByRuns(Exception):
    """Linears must be cut by other runs, which are written down."""


def search(graph: fx.Graph, pieces: int, *, open_end: bool = False) -> Cuts:
    """The largest set of linears that can be cut.

    open_end   whether the graph may return pieces, along its result's last dimension
    """
    kept: dict[fx.Node, str] = {}
    runs: AllRuns = defaultdict(dict)
    while True:
        walk = _Walk(pieces, kept, runs)
        try:
            walk.over(graph, open_end)
        except _StayWhole as refused:
            kept.update({node: str(refused) for node, _ in refused.sources})
        except _ByRuns:
            continue
        else:
            return walk.cuts


class _Walk:
    """One walk through a graph, until an operator cannot take a piece."""

    def __init__(self, pieces: int, kept: dict[fx.Node, str], runs: AllRuns) -> None:
        self.pieces, self.kept, self.runs = pieces, kept, runs
        self.cuts = Cuts()
        self.sources: dict[fx.Node, Sources] = {}

    def over(self, graph: fx.Graph, open_end: bool) -> None:
        """Follow pieces through a graph; raises _StayWhole, _ByRuns."""
        for node in graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                self._visit(node)
        end = output_of(graph)
        held = self._held(end.all_input_nodes)
        if held and not (open_end and self._ends_in_pieces(end)):
            raise _StayWhole(self._of(held), "its pieces are what the graph returns")

    def _ends_in_pieces(self, end: fx.Node) -> bool:
        (last, *others) = end.all_input_nodes
        cut = self.cuts.values.get(last)
        return not others and cut == len(last.meta["val"].shape) - 1

    def _visit(self, node: fx.Node) -> None:
        found, held = linears(node), self._held(node.all_input_nodes)
        if found is not None and not held:
            self._by_columns(found)
        elif found is not None:
            self._by_rows(found, held)
        elif held:
            self._carry(node, held)

    def _by_columns(self, found: Linears) -> None:
        found = found.in_runs(self.runs[found.node])
        reason = self.kept.get(found.node) or found.misfit(COLUMNS, self.pieces)
        if reason:
            self.cuts.whole[found.told] = reason
            return
        value = found.node.meta["val"]
        several = isinstance(value, (list, tuple))
        results = zip(found.matrices, value if several else [value], strict=True)
        cuts = tuple(matrix.cut(one.dim() - 1) for matrix, one in results)
        self.cuts.by_columns.append(found)
        self.cuts.values[found.node] = cuts if several else cuts[0]
        self.sources[found.node] = frozenset((found.node, place) for place in range(len(cuts)))

    def _by_rows(self, found: Linears, held: list[fx.Node]) -> None:
        last = found.x.meta["val"].dim() - 1
        if held != [found.x] or self.cuts.values[found.x] != last:
            raise _StayWhole(self._of(held), f"{found.told} takes no such pieces")
        reason = found.misfit(ROWS, self.pieces)
        if reason:
            raise _StayWhole(self._of(held), f"{found.told} cannot take pieces: {reason}")
        self.cuts.by_rows.append(found)

    def _carry(self, node: fx.Node, held: list[fx.Node]) -> None:
        operands = Operands(node, self.pieces, self.cuts.values)
        try:
            cut = carried(operands)
        except CannotCarry as reason:
            if isinstance(reason, NeedsRuns) and self._take_runs(self._of(held), reason):
                raise _ByRuns from None
            where = node.meta.get("path") or "the root"
            told = f"its pieces reach no sum: at {where}, {node.name}: {reason}"
            raise _StayWhole(self._of(held), told) from None
        self.cuts.stored.update(operands.stored)
        if cut is None:
            return
        self.cuts.values[node] = cut
        self.sources[node] = self._of(held)
        if is_call(node, operator.getitem) and all(one is held[0] for one, _ in self._of(held)):
            self.sources[node] = frozenset({(held[0], int(node.args[1]))})  # type: ignore[arg-type]
        for beside in node.all_input_nodes:
            if beside not in held and beside.op != "get_attr" and _is_float(beside):
                self.cuts.entries.append((node, beside))

    def _take_runs(self, sources: Sources, asked: NeedsRuns) -> bool:
        """Let linears be cut by the runs that an operator asks for; False where they cannot."""
        matrices = {found.node: found.matrices for found in self.cuts.by_columns}
        changed = False
        for node, place in sources:
            size = matrices[node][place].size(COLUMNS)
            if size % asked.size:
                return False
            ends = {end * (size // asked.size) for end in asked.ends} | {0, size}
            ends |= ends_of(self.runs[node].get(place, ()))
            runs = tuple(stop - start for start, stop in pairwise(sorted(ends)))
            changed |= self.runs[node].get(place, (size,)) != runs
            self.runs[node][place] = runs
        return changed

    def _held(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if self.cuts.values.get(node) is not None]

    def _of(self, nodes: list[fx.Node]) -> Sources:
        """The linears that pieces came from."""
        return frozenset().union(*(self.sources[node] for node in nodes))


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point
