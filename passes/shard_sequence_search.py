"""Find which values of a graph processes may hold cut along the row's tokens.

Pieces begin where sums of rows-cut linears end (tp_reduce), and with layers' inputs; they are
followed by the rules of shard_rules.py until an operator needs the whole row. A job's own operators
follow its part of the piece (segment_read), to where that is written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import tlora_fx.passes.shard_rules_parts
import tlora_fx.passes.shard_rules_places  # noqa: F401  (registers its rules)
from tlora_fx.graph import is_call
from tlora_fx.passes.shard_rules import SIZES, CannotCarry, Cut, Operands, carried
from tlora_fx.passes.token_rules import dim_of

aten = torch.ops.aten
ops = torch.ops.tlora_fx
READ, WRITE = ops.segment_read.default, ops.segment_write.default
DROPOUT, COPY, SUM = ops.keyed_dropout.default, ops.tp_copy.default, ops.tp_reduce.default
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# Tokens of a row lie in one dimension behind the row's own.
TOKEN_DIMS = 2


@dataclass(slots=True)
class TokenCuts:
    """How a graph's values are cut along tokens.

    values    dimensions along which values are cut; a job's part of the row counts as cut too
    splits    for readers of pieces the whole values of which they read a piece, with dimensions
    told      operators that read the whole row of what is cut, and why
    """

    values: dict[fx.Node, Cut] = field(default_factory=dict)
    splits: dict[fx.Node, dict[fx.Node, int]] = field(default_factory=dict)
    told: dict[fx.Node, str] = field(default_factory=dict)

    def dim(self, node: fx.Node) -> int | None:
        """Where one value is cut; None where it is whole."""
        cut = self.values.get(node)
        return cut if isinstance(cut, int) else None


class _ReadWhole(Exception):
    """Parts of jobs that must be read from whole rows."""

    def __init__(self, reads: frozenset[fx.Node]) -> None:
        super().__init__()
        self.reads = reads


def search_tokens(
    graph: fx.Graph, row: str, pieces: int, start: Mapping[fx.Node, int]
) -> TokenCuts:
    """The values that can be cut.

    row      how many tokens a row has, as shapes name it
    start    inputs, and results of layers, that are cut, with their dimensions
    """
    kept: set[fx.Node] = set()
    while True:
        walk = _Walk(row, pieces, kept)
        try:
            walk.over(graph, start)
        except _ReadWhole as refused:
            kept |= refused.reads
        else:
            walk.leave_useless_sums(graph)
            return walk.cuts


def row_dim(value: Any, row: str) -> int | None:
    """The one dimension of a value that is as long as the row."""
    if not isinstance(value, torch.Tensor):
        return None
    found = [dim for dim, size in enumerate(value.shape) if str(size) == row]
    return found[0] if len(found) == 1 else None


class _Walk:
    """One walk through a graph.

    reads   for values cut along a job's part: where that was read
    """

    def __init__(self, row: str, pieces: int, kept: set[fx.Node]) -> None:
        self.row, self.pieces, self.kept = row, pieces, kept
        self.cuts = TokenCuts()
        self.reads: dict[fx.Node, frozenset[fx.Node]] = {}

    def over(self, graph: fx.Graph, start: Mapping[fx.Node, int]) -> None:
        self.cuts.values.update(start)
        for node in graph.nodes:
            if node in start or node.op in ("placeholder", "get_attr", "output", "call_module"):
                continue
            if is_call(node, SUM):
                self.cuts.values[node] = row_dim(node.meta["val"], self.row)
            elif not is_call(node, COPY):
                self._visit(node)

    def leave_useless_sums(self, graph: fx.Graph) -> None:
        """A sum that is read whole at once is made whole at once."""
        values = self.cuts.values
        for node in graph.nodes:
            used = any(user.op == "output" or user in values for user in node.users)
            if is_call(node, SUM) and not used:
                values.pop(node, None)
                for user in node.users:
                    self.cuts.told.pop(user, None)

    def _visit(self, node: fx.Node) -> None:
        held = [n for n in node.all_input_nodes if self.cuts.values.get(n) is not None]
        reads = frozenset[fx.Node]().union(*(self.reads.get(n, ()) for n in held))
        asks = bool(held) and is_call(node, aten.sym_size.int)
        if not held or (asks and not (reads and asks_tokens(node, self.cuts.dim(held[0])))):
            return
        try:
            cut, splits = self._carry(node)
        except CannotCarry as reason:
            if reads:
                raise _ReadWhole(reads) from None
            self.cuts.told[node] = str(reason)
            return
        self.cuts.values[node] = cut
        if splits:
            self.cuts.splits[node] = splits
        if is_call(node, READ):
            reads = frozenset({node})
        self.reads[node] = frozenset() if is_call(node, WRITE) else reads

    def _carry(self, node: fx.Node) -> tuple[Cut, dict[fx.Node, int]]:
        """The cut of a result, and the whole values of which the operator reads pieces."""
        if is_call(node, READ):
            return self._read(node)
        if is_call(node, WRITE):
            return self._write(node)
        if is_call(node, DROPOUT):
            return self._drop(node)
        if is_call(node, *VIEWS):
            return self._view(node), {}
        splits = self._splits(node, node.all_input_nodes)
        operands = Operands(node, self.pieces, {**self.cuts.values, **splits})
        cut = carried(operands)
        if operands.stored:
            raise CannotCarry("a stored tensor has numbers of its own for each token")
        if cut is None:
            raise CannotCarry("its result belongs to the whole row")
        return cut, splits

    def _splits(self, node: fx.Node, values: list[fx.Node]) -> dict[fx.Node, int]:
        """The whole values among these that have tokens."""
        found = {}
        for value in values:
            if self.cuts.values.get(value) is None:
                dim = row_dim(value.meta.get("val"), self.row)
                if dim is not None:
                    found[value] = dim
                elif self.row in _sizes(value):
                    raise CannotCarry(f"it reads the whole of '{value.name}'")
        return found

    def _read(self, node: fx.Node) -> tuple[Cut, dict[fx.Node, int]]:
        source, _, _, dim = node.args
        if node in self.kept:
            raise CannotCarry("what follows needs all of a job's tokens")
        if self.cuts.dim(source) != dim:  # type: ignore[arg-type]
            raise CannotCarry("it reads a job's part of something else than tokens")
        return dim, {}

    def _write(self, node: fx.Node) -> tuple[Cut, dict[fx.Node, int]]:
        """A job's part goes back into the piece that it was read from."""
        into, value, _, _, dim = node.args
        if self.cuts.dim(value) != dim:  # type: ignore[arg-type]
            raise CannotCarry("it writes a job's part of the whole row")
        splits = self._splits(node, [into])  # type: ignore[list-item]
        if {self.cuts.dim(into), splits.get(into)} != {None, dim}:  # type: ignore[arg-type]
            raise CannotCarry("it writes into something else than tokens")
        return dim, splits

    def _drop(self, node: fx.Node) -> tuple[Cut, dict[fx.Node, int]]:
        """Masks are keyed by each token's own index, which is cut with it."""
        x, index = node.args[0], node.args[4]
        place = None if self.reads.get(x) else self.cuts.dim(x)  # type: ignore[arg-type]
        if place != TOKEN_DIMS - 1 or node.args[6] != TOKEN_DIMS:
            raise CannotCarry("its tokens do not lie where their indices do")
        return TOKEN_DIMS - 1, {index: TOKEN_DIMS - 1}  # type: ignore[dict-item]

    def _view(self, node: fx.Node) -> Cut:
        """The dimension of the tokens stays one of its own, with what lies outside as it was."""
        source: Any = node.args[0]
        cut, before, after = self.cuts.dim(source), source.meta["val"], node.meta["val"]
        if cut is None:
            raise CannotCarry("it folds the tokens into another dimension")
        if self.reads.get(source):
            return _kept_dim(before, after, cut, str(before.shape[cut]))
        return _kept_dim(before, after, cut, self.row)


def _kept_dim(before: torch.Tensor, after: torch.Tensor, cut: int, size: str) -> int:
    place = row_dim(after, size)
    if place is None or before.shape[:cut].numel() != after.shape[:place].numel():
        raise CannotCarry("it folds the tokens into another dimension")
    return place


def names_size(node: fx.Node) -> bool:
    """Whether a call names its result's sizes."""
    return getattr(node.target, "overloadpacket", None) in SIZES


def asks_tokens(node: fx.Node, cut: int | None) -> bool:
    """Whether a call reads how many tokens an argument has that is cut so."""
    if cut is None or not is_call(node, aten.sym_size.int):
        return False
    source: Any = node.args[0]
    return dim_of(int(node.args[1]), source.meta["val"].dim()) == cut  # type: ignore[arg-type]


def _sizes(value: fx.Node) -> list[str]:
    return [str(size) for size in getattr(value.meta.get("val"), "shape", ())]
