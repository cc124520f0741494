"""Check that what jobs share works on each token, or line, by itself.

Reads   the base's graph; of a fused group all graphs.
Writes  axis: the dimension along which a value of the base's graph holds the row, None where it
        does not.
Keeps   the graph.

The fact that it provides is checked again after every later pass (`recheck`): in the base's graph
until it is fused, then in the fused graph, where each job reads and writes its own segment only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import ClassVar

import torch
from torch import Tensor, fx

import tlora_fx.passes.token_parallel.rules  # noqa: F401  (registers its rules)
from tlora_fx.errors import NotIsolated, NotTokenParallel
from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    TRACE,
    Form,
    GroupGraph,
    JobGraph,
    is_call,
    origin_of,
    output_of,
    placeholders,
)
from tlora_fx.ops.job_operator import find_operator
from tlora_fx.passes.token_parallel.head import head_of
from tlora_fx.passes.token_parallel.sizes import RowSizes
from tlora_fx.passes.token_parallel.walk import (
    TOKEN_INPUTS,
    LineWalk,
    Mixed,
    Row,
    RowWalk,
    State,
    Table,
    axis_of,
    is_random,
)
from tlora_fx.pipeline import GroupPass, Numerics, register

ADVICE: dict[Form, str] = {
    "packed": "set base.attention: batch",
    "batch": "this base cannot be shared by jobs",
}
DROPOUT = (
    "attention dropout must be 0: give nn.MultiheadAttention and nn.TransformerEncoderLayer "
    "dropout=0.0, which by default is 0.1 of the latter"
)
RULE = "tlora_fx.passes.token_parallel.rules.rule, if it works on each token by itself"
CONTRACT = "tlora_fx.ops.register_operator, if it takes tables of the row or adapters of all jobs"


@register
@dataclass(frozen=True, slots=True)
class CheckTokenParallel(GroupPass):
    """Refuse to share operators that mix the tokens of a row."""

    name: ClassVar[str] = "check-token-parallel"
    provides: ClassVar[frozenset[str]] = frozenset({"token-parallel"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, group: GroupGraph) -> None:
        try:
            _check_base(group)
        except Mixed as found:
            raise _refused(found, group.form) from None

    def recheck(self, graphs: JobGraph | GroupGraph, by: str) -> bool:
        """Whether jobs are still apart; raises NotIsolated, which names the pass `by`."""
        if isinstance(graphs, JobGraph):
            return False
        try:
            if graphs.fused:
                check_isolation(graphs)
            else:
                _check_base(graphs)
        except Mixed as found:
            raise _not_isolated(found, by) from None
        return True


def check_isolation(group: GroupGraph) -> None:
    """Follow the row through a fused graph: no job may see another.

    raises    Mixed, naming the first node at which one does
    """
    walk, result = _walked(group, group.constants, group.job_names)
    wanted: State = Table(LOSS) if HEAD in group.blocks else Row(walk.dim)
    if result != wanted:
        said = "the losses" if HEAD in group.blocks else "the logits, by the row of the ids"
        raise Mixed(output_of(group.root), f"it does not return {said}")


def _check_base(group: GroupGraph) -> None:
    base = group.base
    walk, result = _walked(base, group.constants)
    for node, state in walk.states.items():
        node.meta["axis"] = axis_of(state)
    if result != Row(walk.dim):
        raise Mixed(
            output_of(base.root).all_input_nodes[0],
            f"the logits hold the row at dimension {axis_of(result)}, the ids at {walk.dim}",
        )
    if base.form == "batch":
        _check_head(base.root)


def _walked(
    graphs: JobGraph | GroupGraph, constants: Mapping[str, Tensor], jobs: Sequence[str] = ()
) -> tuple[RowWalk, State]:
    """A walk through the graphs of the base, or of a fused group, and what the root returns."""
    inputs = placeholders(graphs.root)
    shapes = [inputs[name].meta["val"].shape for name in TOKEN_INPUTS]
    row = str(shapes[0][1 if graphs.form == "packed" else 0])
    walk = RowWalk(graphs.form, row, graphs.blocks, jobs, RowSizes(shapes, constants))
    return walk, walk.walk(graphs.root, walk.inputs(graphs.root))


def _check_head(root: fx.Graph) -> None:
    """The head runs on single tokens, so in batch form it must not mix the tokens of a line."""
    hidden, members = head_of(root)
    walk = LineWalk(hidden)
    for node in members:
        walk.visit(node)


def _refused(found: Mixed, form: Form) -> NotTokenParallel:
    node, reason = found.node, found.reason
    origin = origin_of(node)
    return NotTokenParallel(
        "the base has an operator that mixes tokens of different jobs"
        if reason
        else "the base has an operator without a token rule",
        operator=node.target,
        module=node.meta.get("path") or None,
        source=node.meta.get("source") or None,
        expected="an operator that computes each token by itself"
        if form == "packed"
        else "an operator that computes each line by itself",
        found=reason or "nobody has said how it treats the tokens of a row",
        help=DROPOUT if _drops_attention(node) else f"{ADVICE[form]}{_register(node)}",
        **{"made by": origin.made_by if origin and origin.made_by != TRACE else None},
    )


def _drops_attention(node: fx.Node) -> bool:
    return is_call(node, torch.ops.aten.scaled_dot_product_attention.default) and is_random(node)


def _register(node: fx.Node) -> str:
    """How to say that an operator of another package is safe; "" of torch's and ours."""
    if isinstance(node.target, FunctionType):
        return "; or call an operator, such as torch.ops.aten.silu.default, and no Python function"
    if not isinstance(node.target, torch._ops.OpOverload) or find_operator(node.target):
        return ""
    if node.target.namespace in ("aten", "tlora_fx"):
        return ""
    return f"; or register the operator: with {RULE}; with {CONTRACT}"


def _not_isolated(found: Mixed, by: str) -> NotIsolated:
    node, origin = found.node, origin_of(found.node)
    return NotIsolated(
        f"pass '{by}' lets jobs see each other",
        node=node.format_node(),
        module=node.meta.get("path") or None,
        source=node.meta.get("source") or None,
        jobs=", ".join(node.meta.get("jobs") or ()) or None,
        found=found.reason or f"operator {node.target} has no token rule",
        help=f"this is a defect of the pass{_register(node)}",
        **{"made by": origin.made_by if origin else None},
    )
