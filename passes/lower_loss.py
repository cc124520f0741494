"""Take the loss from the last hidden state, in chunks, on rows with a target only.

Reads   the root from the head's linear on.
Writes  block "head" (everything token-parallel from lm_head to the logits), and in its place one
        call that returns each job's sum of token losses.
Keeps   each job's loss; logits never exist for the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tlora_fx.errors import BaseRefused
from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    Block,
    GroupGraph,
    derive,
    is_call,
    output_of,
    placeholders,
)
from tlora_fx.ir.shapes import fake_like, fake_mode_of
from tlora_fx.passes.token_parallel.head import HEAD_TABLES, head_of
from tlora_fx.passes.token_parallel.walk import LineWalk, Mixed
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed
from tlora_fx.rewriting import outline

TARGETS = ("target_rows", "targets", "target_segments")


@register
@dataclass(frozen=True, slots=True)
class LowerLoss(GroupPass):
    """Replace the logits by each job's loss sum."""

    name: ClassVar[str] = "lower-loss"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone", "key-dropouts"})
    preserves_numerics: ClassVar[Numerics] = "bound"

    def run(self, group: GroupGraph) -> None:
        root = group.root
        if HEAD in group.blocks:
            return
        if not rewrite_allowed("the loss in place of the logits"):
            return
        hidden, members = head_of(root)
        if group.form == "batch":
            _require_single_tokens(hidden, members)
        head = _outline(hidden, members, group.job_names)
        group.blocks[HEAD] = Block(HEAD, head, (f"{LOSS}.{HEAD}",))
        result = output_of(root)
        first = next(node for node in root.nodes if node.op != "placeholder")
        mode = fake_mode_of(root)
        tables = placeholders(root)
        with root.inserting_before(first):
            for name in TARGETS:
                tables[name] = root.placeholder(name)
                kind = torch.int32 if name == "target_segments" else torch.int64
                tables[name].meta.update(val=fake_like(mode, (7,), kind), role="table", jobs=())
                tables[name].meta["path"] = ""
        names = list(placeholders(group.blocks[HEAD].graph))[1:]
        args = (
            hidden,
            *(tables[name] for name in TARGETS),
            *(tables[name] for name in names if name in tables),
        )
        with root.inserting_before(result):
            loss = root.call_module(LOSS, args)
        dtype = torch.promote_types(torch.float32, hidden.meta["val"].dtype)
        loss.meta.update(
            val=fake_like(mode, (len(group.jobs),), dtype),
            role="loss",
            path=LOSS,
            source="",
            jobs=tuple(group.job_names),
        )
        derive(loss, members[-1])
        result.args = (loss,)
        for node in reversed(members):
            root.erase_node(node)


def _require_single_tokens(hidden: fx.Node, members: list[fx.Node]) -> None:
    """Refuse a head that mixes the tokens of a line: it runs on lines of one token each.

    Such a head begins far too early: a job computes anew what lies behind the last hidden state,
    from several values that only the row's first ones make.
    """
    walk = LineWalk(hidden)
    try:
        for node in members:
            walk.visit(node)
    except Mixed as found:
        node = found.node
        raise BaseRefused(
            "the logits depend on several values behind which tokens are mixed, so the head "
            "cannot run in chunks",
            jobs=", ".join(_computing_anew(members, node)) or None,
            node=node.format_node(),
            module=node.meta.get("path") or None,
            source=node.meta.get("source") or None,
            found=found.reason or f"operator {node.target} has no token rule",
            help="a job trains a tensor that another module than its own reads: leave it out of "
            "bias, modules_to_save and target_modules",
        ) from None


def _computing_anew(members: list[fx.Node], mixing: fx.Node) -> list[str]:
    """Jobs that read, behind the node that mixes tokens, their part of a value before it."""
    order = {node: index for index, node in enumerate(mixing.graph.nodes)}
    reads = [node for node in members if is_call(node, torch.ops.tlora_fx.segment_read.default)]
    late = [read for read in reads if order[read.all_input_nodes[0]] < order[mixing] < order[read]]
    return list(dict.fromkeys(name for read in late for name in read.meta["jobs"]))


def _outline(hidden: fx.Node, members: list[fx.Node], jobs: list[str]) -> fx.Graph:
    """The head as a graph of its own: hidden state and tables in, logits out."""
    piece = outline(members, first={hidden: "hidden_states"}, jobs=jobs)
    for source in piece.inputs[1:]:
        if source.op != "placeholder" or source.target not in HEAD_TABLES:
            raise BaseRefused(
                "the head reads more than the last hidden state",
                node=source.format_node(),
                help="the base computes its logits from several values; this is not supported yet",
            )
    return piece.graph
