"""Run the layers on nano-batches of the row, so that one's communication hides another's compute.

Reads   the root's calls of layers, and `axis` of what they are given.
Writes  behind what comes before the layers one cut of the row into runs of whole sequences; each
        layer's call once for each nano-batch; before what comes behind them one join.
Keeps   each token's numbers: nothing in a layer looks beyond a sequence but tables, which are cut
        with it. Sums over tokens, which gradients of adapters are, add up in another order.

Layers share tensors between clones, and gradients add up. Nothing overlaps by this pass alone; the
schedule of the compiled layers does that (tlora_fx/parallel/nano_batches.py).
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.errors import NotNanoBatchable
from tlora_fx.ir.graph import LOSS, GroupGraph, derive, placeholders, shape_of
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed
from tlora_fx.rewriting import Maker, Rewriter

ops = torch.ops.tlora_fx
# The tables of a nano-batch, in the order in which nano_tables gives them.
SEGMENTS = "segments"
CUT_TABLES = ("cu_seqlens", "max_seqlen", SEGMENTS)
TOKENS = 1
# A dense layer multiplies each token with about 12 H^2 weights, and attends with H numbers.
WEIGHTS_PER_WIDTH = 12


@register
@dataclass(frozen=True, slots=True)
class NanoBatch(GroupPass):
    """Cut the row into nano-batches for the layers.

    count    number of nano-batches to cut a row into; 1 leaves the graph as it is
    """

    name: ClassVar[str] = "nano-batch"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone", "token-parallel"})
    preserves_numerics: ClassVar[Numerics] = "bound"

    count: int = 2

    def run(self, group: GroupGraph) -> None:
        if self.count < 1:
            raise _refused("a row is cut into at least one nano-batch", found=self.count)
        if self.count > 1 and rewrite_allowed(f"{self.count} nano-batches"):
            calls = layer_calls(group)
            cut = _Cut(group, calls, self.count)
            results = _clone_calls(group, calls, cut.parts, self.count)
            _join(group, cut, calls, results)


def layer_calls(group: GroupGraph) -> list[fx.Node]:
    """The root's calls of layers, in order.

    raises    NotNanoBatchable unless rows are packed and each layer takes the one before it
    """
    if group.form != "packed":
        raise _refused("padded rows are not cut into nano-batches", expected="packed rows")
    calls = [n for n in group.root.nodes if n.op == "call_module" and n.target != LOSS]
    if not calls:
        raise _refused("the model has no layers that are called", expected="folded layers")
    for before, call in itertools.pairwise(calls):
        if list(before.users) != [call]:
            raise _refused(
                "a layer's result is read by more than the next layer",
                node=before.format_node(),
                found=", ".join(map(str, before.users)),
            )
    return calls


class _Cut:
    """Cuts everything that layers read.

    parts    for each node that layers read its nano-batches; N times the node itself where it
             belongs to the whole row
    """

    def __init__(self, group: GroupGraph, calls: list[fx.Node], count: int) -> None:
        self.count, self.tables = count, placeholders(group.root)
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.make = Rewriter(group.root).at(calls[0], {**_kept(calls[0]), "role": "table"})
        width = int((shape_of(calls[0]) or (1,))[-1])
        given = [self.tables[name] for name in ("cu_seqlens", "segments")]
        made = self.make(ops.nano_tables.default, *given, count, WEIGHTS_PER_WIDTH * width)
        derive(made, *given)
        self.cuts = _item(self.make, made, 0)
        for place, name in enumerate(CUT_TABLES):
            items = (1 + len(CUT_TABLES) * part + place for part in range(count))
            self.parts[self.tables[name]] = [_item(self.make, made, item) for item in items]
        for call in calls:
            for source in call.all_input_nodes:
                if source not in self.parts and source not in calls:
                    self.parts[source] = self._of(source)

    def _of(self, source: fx.Node) -> list[fx.Node]:
        axis = self._axis(source)
        if axis is None:
            return [source] * self.count
        make = self.make.tagged(role=source.meta["role"], jobs=source.meta["jobs"])
        made = derive(make(ops.nano_split.default, source, self.cuts, axis), source)
        made.meta["axis"] = None
        found = [_item(make, made, part) for part in range(self.count)]
        for part in found:
            part.meta["axis"] = axis
        return found

    def _axis(self, source: fx.Node) -> int | None:
        """Where a value holds the tokens; None where it belongs to the whole row.

        raises    NotNanoBatchable where nobody can say
        """
        sizes = [str(size) for size in shape_of(source) or ()]
        row = str(self.tables["input_ids"].meta["val"].shape[TOKENS])
        if "axis" in source.meta and shape_of(source) is not None:
            axis: int | None = source.meta["axis"]
            if axis == TOKENS or (axis is None and row not in sizes):
                return axis
        elif sizes.count(row) == 1 and sizes.index(row) == TOKENS:
            return TOKENS
        elif sizes and all(size.isdigit() for size in sizes):
            return None
        raise _refused(
            "a layer reads a value of which nobody can say where its tokens are",
            node=source.format_node(),
            found=f"[{', '.join(sizes)}], axis {source.meta.get('axis', 'unknown')}",
        )


def _clone_calls(
    group: GroupGraph, calls: list[fx.Node], parts: dict[fx.Node, list[fx.Node]], count: int
) -> list[fx.Node]:
    """Call each layer once for each nano-batch; returns the last layer's results."""
    for call in calls:
        parts[call] = []
        for part in range(count):
            args = _picked(call.args, parts, part)
            with group.root.inserting_before(call):
                clone = group.root.call_module(str(call.target), args)
            clone.meta.update(_kept(call))
            parts[call].append(derive(clone, call))
    return parts[calls[-1]]


def _join(group: GroupGraph, cut: _Cut, calls: list[fx.Node], results: list[fx.Node]) -> None:
    """Put the last layer's results together and drop the calls that were cloned."""
    last = calls[-1]
    make = Rewriter(group.root).at(last, _kept(last))
    joined = make(ops.nano_join.default, results, cut.cuts, cut.tables["input_ids"], TOKENS)
    joined.meta["axis"] = TOKENS
    derive(joined, last)
    last.replace_all_uses_with(joined)
    for call in reversed(calls):
        group.root.erase_node(call)


def _picked(args: Any, parts: dict[fx.Node, list[fx.Node]], part: int) -> Any:
    return fx.map_arg(args, lambda node: parts[node][part])


def _kept(call: fx.Node) -> dict[str, Any]:
    """What a call's clones are known by, as the call is."""
    names = ("val", "path", "source", "role", "jobs", "axis")
    return {name: call.meta[name] for name in names if name in call.meta}


def _item(make: Maker, source: fx.Node, index: int) -> fx.Node:
    item = make(operator.getitem, source, index)
    item.meta["axis"] = None
    return item


def _refused(what: str, **facts: Any) -> NotNanoBatchable:
    return NotNanoBatchable(what, **{"help": "leave nano-batches out of the plan", **facts})
