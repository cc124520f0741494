"""Check that what jobs will share works on each token, or line, by itself.

Reads   the base's graph.
Writes  axis: the dimension along which a value holds the row, None where it does not.
Keeps   the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import tlora_fx.passes.token_parallel.rules  # noqa: F401  (registers its rules)
from tlora_fx.errors import NotTokenParallel
from tlora_fx.ir.graph import Block, Form, GroupGraph, is_call, output_of, placeholders
from tlora_fx.passes.lower_loss import head_of
from tlora_fx.passes.token_parallel.rules import MixesTokens, find_rule
from tlora_fx.passes.token_parallel.sizes import RowSizes, SizeIsValue
from tlora_fx.pipeline import GroupPass, Numerics, register

aten = torch.ops.aten
# Without the row among their inputs these make the same value for every token.
UNIFORM = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}
UNIFORM |= {"expand", "broadcast_to", "expand_as"}
TOKEN_INPUTS = ("input_ids", "position_ids", "token_index")
ADVICE: dict[Form, str] = {
    "packed": "set base.attention: batch",
    "batch": "this base cannot be shared by jobs",
}


@register
@dataclass(frozen=True, slots=True)
class CheckTokenParallel(GroupPass):
    """Refuse to share operators that mix the tokens of a row."""

    name: ClassVar[str] = "check-token-parallel"
    provides: ClassVar[frozenset[str]] = frozenset({"token-parallel"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, group: GroupGraph) -> None:
        base = group.base
        dim = 1 if base.form == "packed" else 0
        shapes = [placeholders(base.root)[name].meta["val"].shape for name in TOKEN_INPUTS]
        sizes = RowSizes(shapes, group.constants)
        checker = _Checker(base.form, str(shapes[0][dim]), base.blocks, sizes)
        start = {
            node: dim if name in TOKEN_INPUTS else None
            for name, node in placeholders(base.root).items()
        }
        axis = checker.walk(base.root, start)
        logits = output_of(base.root).args[0]
        if axis != dim:
            raise NotTokenParallel(
                "the logits do not hold the row where the ids do",
                node=logits,
                expected=f"dimension {dim}",
                found=f"dimension {axis}",
                help=ADVICE[base.form],
            )
        if base.form == "batch":
            _check_head(base.root)


def _check_head(root: fx.Graph) -> None:
    """The head runs on single tokens, so in batch form it must not mix the tokens of a line."""
    hidden, members = head_of(root)
    checker = _Checker("batch", str(hidden.meta["val"].shape[1]), {})
    kept = {node: node.meta["axis"] for node in root.nodes if "axis" in node.meta}
    for node in kept:
        node.meta["axis"] = None
    hidden.meta["axis"] = 1
    for node in members:
        checker.visit(node)
    for node, axis in kept.items():
        node.meta["axis"] = axis


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws from torch's generator: dropout has keyed masks instead."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if is_call(node, aten.dropout.default):
        return False
    if is_call(node, aten.scaled_dot_product_attention.default):
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate != 0.0)
    return True


def _name(target: Any) -> str:
    return str(getattr(target, "overloadpacket", target)).removeprefix("aten.")


class _Checker:
    """Walks graphs with the row's symbol in hand; each block is walked once for each input."""

    def __init__(
        self, form: Form, row: str, blocks: dict[str, Block], sizes: RowSizes | None = None
    ) -> None:
        self.form, self.row, self.sizes = form, row, sizes
        self.by_layer = {layer: b for b in blocks.values() for layer in b.instances}
        self.known: dict[tuple[Any, ...], Any] = {}

    def walk(self, graph: fx.Graph, start: dict[fx.Node, Any]) -> Any:
        """Carry the axis through a graph; returns the axis of its output."""
        for node in graph.nodes:
            if node.op == "output":
                return node.args[0].meta["axis"]
            if node.op == "placeholder":
                node.meta["axis"] = start[node]
            else:
                self.visit(node)
        return None

    def visit(self, node: fx.Node) -> None:
        """Carry the axis through one node."""
        if self.sizes is not None:
            try:
                self.sizes.visit(node)
            except SizeIsValue as reason:
                self._refuse(node, str(reason))
        if node.op == "get_attr":
            node.meta["axis"] = None
        elif node.op == "call_module":
            node.meta["axis"] = self._call(node)
        else:
            node.meta["axis"] = self._carry(node)

    def _call(self, node: fx.Node) -> Any:
        block = self.by_layer[str(node.target)]
        axes = tuple(arg.meta["axis"] for arg in node.args)  # type: ignore[union-attr]
        values = [self.sizes.values.get(arg) if self.sizes else None for arg in node.args]  # type: ignore[arg-type]
        key = (block.name, axes, tuple(map(id, values)))
        if key not in self.known:
            inputs = placeholders(block.graph).values()
            if self.sizes is not None:
                self.sizes.values.update(zip(inputs, values, strict=True))
            self.known[key] = self.walk(block.graph, dict(zip(inputs, axes, strict=True)))
        return self.known[key]

    def _carry(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if is_random(node):
            self._refuse(node, "it draws random numbers that belong to no job")
        held = any(source.meta["axis"] is not None for source in node.all_input_nodes)
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return self._number(node, held)
        function = find_rule(node.target)
        if not held and (function is None or not self._has_row(value)):
            if self._has_row(value):
                self._refuse(node, "it makes values from places in the row")
            return None
        if not held and _name(node.target) not in UNIFORM:
            self._refuse(node, "it takes values by their place in the row")
        if function is None:
            return self._refuse(node, None)
        try:
            axis = function(
                node, lambda arg: arg.meta["axis"] if isinstance(arg, fx.Node) else None
            )
        except MixesTokens as reason:
            self._refuse(node, str(reason))
        return self._by_shape(value) if axis is None and self._has_row(value) else axis

    def _number(self, node: fx.Node, held: bool) -> None:
        """Sizes are the same for all jobs; a number read out of the row's values is not."""
        if held and "sym_size" not in str(node.target):
            self._refuse(node, "it reads a number out of the row's values")

    def _has_row(self, value: Any) -> bool:
        return self._by_shape(value) is not None

    def _by_shape(self, value: Any) -> int | None:
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        return next((d for d, size in enumerate(shape) if str(size) == self.row), None)

    def _refuse(self, node: fx.Node, reason: str | None) -> Any:
        raise NotTokenParallel(
            "the base has an operator that mixes tokens of different jobs"
            if reason
            else "the base has an operator without a token rule",
            operator=node.target,
            module=node.meta.get("path") or None,
            source=node.meta.get("source") or None,
            found=reason,
            help=f"{ADVICE[self.form]}; where the operator is safe register a rule with "
            "tlora_fx.passes.token_parallel.rules.rule",
        )
