"""Rewrite a graph so that its values are cut along the row's tokens where a search said so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.graph import GroupGraph, is_call, output_of
from tlora_fx.ops.sequence_parallel import piece_size
from tlora_fx.ops.tensor_groups import GROUP
from tlora_fx.passes.shard_sequence_search import (
    COPY,
    DROPOUT,
    READ,
    SUM,
    WRITE,
    TokenCuts,
    asks_tokens,
    names_size,
)
from tlora_fx.rewriting import Maker, Rewriter
from tlora_fx.shapes import fake_like, fake_mode_of, propagate

aten = torch.ops.aten
ops = torch.ops.tlora_fx
OWN = ops.tp_segments.default
# Where operators take the table of jobs' segments.
SEGMENTS: dict[Any, int] = {READ: 1, WRITE: 2, DROPOUT: 2}


@dataclass(slots=True)
class CutGraph:
    """A root or a layer, and how it is cut.

    start    inputs and results of layers that are cut, with their dimensions
    tokens   an input that has the whole row, and where; None where nothing is cut
    calls    of layers, and the inputs in which they take pieces
    """

    graph: fx.Graph
    start: dict[fx.Node, int]
    tokens: tuple[fx.Node, int] | None
    cuts: TokenCuts
    calls: dict[fx.Node, set[int]]

    @property
    def result(self) -> int | None:
        """Where what the graph returns is cut."""
        found: Any = output_of(self.graph).args[0]
        return self.cuts.dim(found) if isinstance(found, fx.Node) else None


def cut_graph(group: GroupGraph, cut: CutGraph, pieces: int, learns: set[fx.Node]) -> None:
    """Put operators where pieces and whole values meet.

    learns   values that depend on what jobs train
    """
    if any(dim is not None for dim in cut.cuts.values.values()):
        _Cutting(group, cut, pieces, learns).rewrite()


class _Cutting:
    """Rewrites one graph.

    made    what was put behind values, by value and kind
    whole   who reads all of values that are cut
    """

    def __init__(self, group: GroupGraph, cut: CutGraph, pieces: int, learns: set[fx.Node]) -> None:
        assert cut.tokens is not None
        self.graph, self.cut, self.cuts = cut.graph, cut, cut.cuts
        self.pieces, self.learns = pieces, learns
        self.tags = {"role": "shared", "jobs": tuple(group.job_names), "site": ""}
        self.made: dict[tuple[fx.Node, Any], fx.Node] = {}
        self.whole: dict[fx.Node, list[fx.Node]] = {}
        self.nodes = [n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr")]
        source, dim = cut.tokens
        self.tokens = self._maker(self.nodes[0])(aten.sym_size.int, source, dim)
        self.tokens.meta["axis"] = None

    def rewrite(self) -> None:
        for slot, dim in self.cut.start.items():
            if slot.op == "placeholder":
                slot.meta["val"] = self._piece(slot.meta["val"], dim)
        for node in self.nodes:
            self._rewrite(node)
        self._gather()
        if not self.tokens.users:
            self.graph.erase_node(self.tokens)
        if not self.cut.calls:
            propagate(self.graph)

    def _rewrite(self, node: fx.Node) -> None:
        if is_call(node, aten.sym_size.int):
            self._size(node)
        elif node in self.cut.calls:
            self._call(node)
        elif is_call(node, SUM) and node in self.cuts.values:
            self._scatter(node)
        elif self.cuts.values.get(node) is not None:
            self._take_pieces(node)
        elif node.op != "output" or self.cut.calls:
            self._take_whole(node)

    def _scatter(self, node: fx.Node) -> None:
        dim = self.cuts.dim(node)
        made = Rewriter(self.graph).at(node)(
            ops.tp_scatter.default, node.args[0], dim, self.pieces, GROUP
        )
        made.meta["axis"] = dim
        self.cuts.values[made] = dim
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def _piece(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """A piece of a fake value."""
        size = piece_size(value.shape[dim], self.pieces)
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        return fake_like(fake_mode_of(self.graph), shape, value.dtype)

    def _size(self, node: fx.Node) -> None:
        """Whoever asks a piece for the number of tokens means those of the row."""
        if asks_tokens(node, self.cuts.dim(node.args[0])):  # type: ignore[arg-type]
            node.replace_all_uses_with(self.tokens)
            self.graph.erase_node(node)

    def _call(self, call: fx.Node) -> None:
        splits = self.cuts.splits.get(call, {})
        for place, given in enumerate(call.args):
            if place in self.cut.calls[call]:
                if given in splits:
                    call.update_arg(place, self._split(call, given, splits[given]))  # type: ignore[arg-type, index]
            elif self.cuts.values.get(given) is not None:  # type: ignore[arg-type]
                self.whole.setdefault(given, []).append(call)  # type: ignore[arg-type]

    def _take_whole(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            if self.cuts.values.get(value) is not None:
                self.whole.setdefault(value, []).append(node)

    def _take_pieces(self, node: fx.Node) -> None:
        """Let an operator run on pieces."""
        splits = self.cuts.splits.get(node, {})
        for value in node.all_input_nodes:
            if value in splits:
                node.replace_input_with(value, self._split(node, value, splits[value]))
            elif self.cuts.values.get(value) is None and value in self.learns:
                # What a job trains is read by its own nodes only.
                copied = Rewriter(self.graph).at(node)(COPY, value, GROUP)
                copied.meta["axis"] = None
                node.replace_input_with(value, copied)
        place = SEGMENTS.get(node.target)
        if place is not None:
            table: Any = node.args[place]
            given = (table, self.tokens, self.pieces, GROUP)
            node.update_arg(place, self._once(node, (table, OWN), OWN, *given))
        dim = self.cuts.dim(node)
        if names_size(node) and dim is not None:
            sizes: Any = list(node.args[1])  # type: ignore[arg-type]
            sizes[dim] = -1
            node.update_arg(1, sizes)

    def _split(self, reader: fx.Node, value: fx.Node, dim: int) -> fx.Node:
        given = (value, dim, self.pieces, GROUP)
        return self._once(reader, (value, dim), ops.tp_split.default, *given, axis=dim)

    def _gather(self) -> None:
        """Make values whole for their readers; where all are copies, in place of these."""
        for value, readers in self.whole.items():
            dim = self.cuts.dim(value)
            assert dim is not None
            partial = all(is_call(reader, COPY) for reader in readers)
            make = self._maker(readers[0])
            given = (value, self.tokens, dim, self.pieces, partial, GROUP)
            whole = make(ops.tp_gather.default, *given)
            whole.meta["axis"] = dim
            for reader in readers:
                if partial:
                    reader.replace_all_uses_with(whole)
                    self.graph.erase_node(reader)
                else:
                    reader.replace_input_with(value, whole)

    def _once(
        self, reader: fx.Node, key: Any, target: Any, *args: Any, axis: Any = None
    ) -> fx.Node:
        """A node before the first of its readers, made once."""
        if key not in self.made:
            self.made[key] = self._maker(reader)(target, *args)
            self.made[key].meta["axis"] = axis
        return self.made[key]

    def _maker(self, before: fx.Node) -> Maker:
        return Rewriter(self.graph).at(before, self.tags)
