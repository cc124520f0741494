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

import tlora_fx.passes.token_rules_places  # noqa: F401  (registers its rules)
from tlora_fx.errors import NotTokenParallel
from tlora_fx.graph import Block, Form, GroupGraph, output_of, placeholders
from tlora_fx.pipeline import GroupPass, register
from tlora_fx.passes.token_rules import MixesTokens, find_rule

TOKEN_INPUTS = {"input_ids", "position_ids", "token_index"}


@register
@dataclass(frozen=True, slots=True)
class CheckTokenParallel(GroupPass):
    """Refuse to share operators that mix the tokens of a row."""

    name: ClassVar[str] = "check-token-parallel"
    provides: ClassVar[frozenset[str]] = frozenset({"token-parallel"})

    def run(self, group: GroupGraph) -> None:
        base = group.base
        dim = 1 if base.form == "packed" else 0
        row = placeholders(base.root)["input_ids"].meta["val"].shape[dim]
        checker = _Checker(base.form, str(row), base.blocks)
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
                help="set base.attention: batch",
            )


class _Checker:
    """Walks graphs with the row's symbol in hand; each block is walked once for each input."""

    def __init__(self, form: Form, row: str, blocks: dict[str, Block]) -> None:
        self.form, self.row = form, row
        self.by_layer = {layer: b for b in blocks.values() for layer in b.instances}
        self.known: dict[tuple[str, tuple[Any, ...]], Any] = {}

    def walk(self, graph: fx.Graph, start: dict[fx.Node, Any]) -> Any:
        """Carry the axis through a graph; returns the axis of its output."""
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["axis"] = start[node]
            elif node.op == "get_attr":
                node.meta["axis"] = None
            elif node.op == "output":
                return node.args[0].meta["axis"]
            elif node.op == "call_module":
                node.meta["axis"] = self._call(node)
            else:
                node.meta["axis"] = self._carry(node)
        return None

    def _call(self, node: fx.Node) -> Any:
        block = self.by_layer[str(node.target)]
        axes = tuple(arg.meta["axis"] for arg in node.args)  # type: ignore[union-attr]
        key = (block.name, axes)
        if key not in self.known:
            inputs = placeholders(block.graph).values()
            self.known[key] = self.walk(block.graph, dict(zip(inputs, axes, strict=True)))
        return self.known[key]

    def _carry(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        held = any(source.meta["axis"] is not None for source in node.all_input_nodes)
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return self._number(node, held)
        found = find_rule(node.target)
        if not held and (found is None or not self._has_row(value)):
            if self._has_row(value):
                self._refuse(node, "it makes values from places in the row")
            return None
        if found is None:
            self._refuse(node, None)
        try:
            axis = found(node, lambda arg: arg.meta["axis"] if isinstance(arg, fx.Node) else None)
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
            help="set base.attention: batch, or where the operator is safe register a rule with "
            "tlora_fx.passes.token_rules.rule"
            if self.form == "packed"
            else "this base cannot be shared by jobs; where the operator is safe register a rule "
            "with tlora_fx.passes.token_rules.rule",
        )
