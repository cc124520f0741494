"""Drop what torch.export leaves and nothing computes.

Reads   operators and values.
Writes  nothing but the nodes it drops: metadata assertions, casts to the dtype that is there,
        moves to another device, slices of a whole dimension, dead code. Operators that work in
        place return new tensors. What was made on the CPU is made where the row is. A linear over
        folded lines of a padded row takes the lines.
Keeps   every number. `detach` is never noise: it keeps gradients out of no-grad regions.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from tlora_fx.errors import BaseNotTraceable
from tlora_fx.ir.graph import JobGraph, is_call, is_writing
from tlora_fx.passes.operator_facts import symbols_of
from tlora_fx.pipeline import JobPass, Numerics, register
from tlora_fx.rewriting import Maker, Rewriter, call, read_by

aten = torch.ops.aten


@register
@dataclass(frozen=True, slots=True)
class DropExportNoise(JobPass):
    """Drop metadata assertions, casts and slices that do nothing, and dead code."""

    name: ClassVar[str] = "drop-export-noise"
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, graph: JobGraph) -> None:
        functionalise(graph.root, graph.name)
        rewriter = Rewriter(graph.root)
        for node in list(graph.root.nodes):
            if is_call(node, *ASSERTIONS):
                graph.root.erase_node(node)
                continue
            if node.kwargs.get("device") == torch.device("cpu"):
                node.update_kwarg("device", torch.device("meta"))
            if is_call(node, aten.to.device):
                # All of a row lies on one device, so only the dtype of `to(device, dtype)` counts.
                node.target = aten.to.dtype
                node.args = (node.args[0], node.args[2])
                node.kwargs = {}
            if is_call(node, aten.view.default, aten.reshape.default):
                _spell_out(node)
            if _does_nothing(node):
                rewriter.bypass(node, node.args[0])
        if graph.form == "batch":
            _unfold_lines(graph, rewriter)
        rewriter.erase_dead()


def _does_nothing(node: fx.Node) -> bool:
    if is_call(node, aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout):
        return _same_type(node)
    if is_call(node, aten.slice.Tensor):
        start = node.args[2] if len(node.args) > 2 else None
        stop = node.args[3] if len(node.args) > 3 else None
        step = node.args[4] if len(node.args) > 4 else 1
        return bool(start in (0, None) and stop in (END, None) and step == 1)
    return is_call(node, aten.alias.default, aten.lift_fresh_copy.default)


def _unfold_lines(graph: JobGraph, rewriter: Rewriter) -> None:
    """Write a linear over [S * B, F], whose result becomes [S, B, F'], as one over [S, B, F].

    nn.MultiheadAttention folds the lines B of a padded row into another dimension, where no token
    rule follows them, for its last linear alone.
    """
    ids = next(iter(graph.root.find_nodes(op="placeholder")))
    lines = symbols_of(ids.meta["val"].shape[0])
    for found in rewriter.find(FOLDED):
        flat, product, result = (found[name] for name in ("flat", "product", "result"))
        outer, *inner = (symbols_of(size) for size in result.meta["val"].shape[:-1])
        folded = not outer & lines and any(lines & symbols for symbols in inner)
        if folded and product.meta["val"].shape[-1] == result.meta["val"].shape[-1]:
            rewriter.replace(found, partial(_over_lines, flat, product, result))


def _over_lines(flat: fx.Node, product: fx.Node, result: fx.Node, make: Maker) -> fx.Node:
    """The linear of lines that are not folded."""
    sizes: Any = result.args[1]
    x = make(aten.reshape.default, flat.args[0], [*sizes[:-1], flat.meta["val"].shape[-1]])
    return make(aten.linear.default, x, *product.args[1:])


def _spell_out(node: fx.Node) -> None:
    """Replace -1 in a shape by the size that it stands for: an empty segment cannot tell it."""
    value, shape = node.meta["val"], list(node.args[1])  # type: ignore[arg-type]
    for dimension, size in enumerate(shape):
        if isinstance(size, int) and size == -1 and isinstance(value.shape[dimension], int):
            shape[dimension] = value.shape[dimension]
    node.update_arg(1, shape)


def _same_type(node: fx.Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(before.dtype == after.dtype and before.layout == after.layout)


# Operators that work in place, as operators that return a new tensor.
#
# That is the same only where nobody looks at the old memory again: the tensor was made by the
# model itself, and neither it nor a view of it is read after the write, but through the write's
# result. A write into a part of it (`x[..., :8].copy_(y)`) makes a new whole, which later readers
# get. Every other write is refused, for a shared graph cannot repeat it.


def functionalise(graph: fx.Graph, job: str) -> None:
    """Replace every operator that writes into an argument.

    job       whose graph it is, "" for the base
    raises    BaseNotTraceable, naming the operator and its source line
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(filter(is_writing, graph.nodes)):
        _replace(graph, node, order, job)


def _replace(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int], job: str) -> None:
    twin = _pure(node.target)
    written: Any = node.args[0] if node.args else None
    if twin is None or not isinstance(written, fx.Node):
        _refuse(node, job, "it has no form that returns a new tensor")
    owner = _memory(written)
    if owner.op != "call_function":
        _refuse(node, job, f"it writes into {owner.op} {owner.target}")
    index = order[node]
    parts = _parts(written, owner)
    for alias in _aliases(owner):
        old = alias is not written and alias not in parts and order[alias] < index
        if old and any(order[user] > index for user in alias.users):
            _refuse(node, job, f"the memory that it writes is read again as {alias.name}")
    with graph.inserting_before(node):
        pure = _copied(graph, node, order) or _returned(graph, node, twin, order)
        pure.meta = dict(node.meta)
        order[pure] = index
        wholes = {written: pure}
        for whole, part in reversed(list(zip(parts, (*parts[1:], written), strict=False))):
            wholes[whole] = _whole(graph, whole, part, wholes[part])
            order[wholes[whole]] = index
        # A part that is read or written again is cut anew: a second write reaches the whole too.
        for whole, part in zip(parts, (*parts[1:], written), strict=False):
            wholes[part] = _cut(graph, wholes[whole], part)
            order[wholes[part]] = index
    for old_value, new_value in wholes.items():
        old_value.replace_all_uses_with(new_value, lambda user: order[user] > index)
    node.replace_all_uses_with(wholes[written])
    for part in (written, *reversed(parts[1:])):
        if not wholes[part].users and wholes[part] is not pure:
            graph.erase_node(wholes[part])
    graph.erase_node(node)


def _copied(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    """What a copy leaves behind, by operators that have gradients; None for another write."""
    if not is_call(node, aten.copy_.default):
        return None
    written, source = node.args[:2]
    assert isinstance(written, fx.Node)
    if isinstance(source, fx.Node) and source.meta["val"].dtype != node.meta["val"].dtype:
        cast = graph.call_function(aten.to.dtype, (source, node.meta["val"].dtype))
        cast.meta = {**source.meta, "val": source.meta["val"].to(node.meta["val"].dtype)}
        order[cast] = order[node]
        source = cast
    return graph.call_function(aten.expand_as.default, (source, written))


def _returned(graph: fx.Graph, node: fx.Node, twin: Any, order: dict[fx.Node, int]) -> fx.Node:
    """What is written, by the operator that returns it, in the dtype of the memory."""
    pure = graph.call_function(twin, node.args, node.kwargs)
    kept = node.meta["val"]
    if not isinstance(kept, Tensor):
        return pure
    values = [each.meta.get("val") for each in node.all_input_nodes]
    wider = kept.dtype
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            wider = torch.promote_types(wider, value.dtype)
    if wider == kept.dtype:
        return pure
    pure.meta = {**node.meta, "val": kept.to(wider)}
    order[pure] = order[node]
    return graph.call_function(aten.to.dtype, (pure, kept.dtype))


def _parts(written: fx.Node, owner: fx.Node) -> list[fx.Node]:
    """What a written part was cut of, the whole first; nothing where it is no part."""
    chain: list[fx.Node] = []
    while written is not owner and (is_call(written, *SCATTERS) or _is_same(written)):
        written = written.all_input_nodes[0]
        chain.insert(0, written)
    return chain if written is owner else []


def _is_same(node: fx.Node) -> bool:
    """Whether a view shows all of what it was given; a conversion told to copy is none."""
    kinds = (aten.to.dtype, aten.to.dtype_layout, aten.slice.Tensor)
    told = any(value is True for value in (*node.args, *node.kwargs.values()))
    return is_call(node, *kinds) and _does_nothing(node) and not told


def _whole(graph: fx.Graph, whole: fx.Node, part: fx.Node, written: fx.Node) -> fx.Node:
    """A value in which the part that was cut out of it is another's."""
    if _is_same(part):
        return written
    given = (whole, written, *part.args[1:])
    scattered = graph.call_function(SCATTERS[part.target], given, part.kwargs)
    scattered.meta = {**written.meta, "val": whole.meta["val"]}
    return scattered


def _cut(graph: fx.Graph, whole: fx.Node, part: fx.Node) -> fx.Node:
    """The same part of another whole."""
    if _is_same(part):
        return whole
    cut = graph.call_function(part.target, (whole, *part.args[1:]), part.kwargs)  # type: ignore[arg-type]
    cut.meta = dict(part.meta)
    return cut


def _pure(target: Any) -> Any:
    """The operator that returns what this one writes: add_.Tensor is add.Tensor."""
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin = getattr(packet, schema.overload_name or "default", None)
    if not name.endswith("_") or twin is None or twin._schema.is_mutable:
        return None
    names = [argument.name for argument in schema.arguments]
    return twin if [argument.name for argument in twin._schema.arguments] == names else None


def _memory(node: fx.Node) -> fx.Node:
    """The node that made the memory which this one may be a view of."""
    while _may_alias(node):
        node = node.all_input_nodes[0]
    return node


def _aliases(owner: fx.Node) -> set[fx.Node]:
    """A node and all that may be views of it."""
    aliases, stack = {owner}, [owner]
    while stack:
        for user in stack.pop().users:
            if user not in aliases and _may_alias(user) and user.all_input_nodes[0] in aliases:
                aliases.add(user)
                stack.append(user)
    return aliases


def _may_alias(node: fx.Node) -> bool:
    """Whether a node's result may share memory with its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if is_call(node, operator.getitem):
        results = getattr(getattr(node.args[0], "target", None), "_schema", None)
        if results is not None and len(results.returns) > 1:
            return bool(results.returns[node.args[1]].alias_info is not None)
    if schema is None or is_call(node, aten.dropout.default):
        return True  # getitem of a split; a dropout of rate 0 hands its input on
    return any(result.alias_info is not None for result in schema.returns)


def _refuse(node: fx.Node, job: str, found: str) -> Any:
    raise BaseNotTraceable(
        "the model writes into a tensor in place, which a shared graph cannot repeat",
        job=job or None,
        operator=node.target,
        module=node.meta.get("path") or None,
        source=node.meta.get("source"),
        found=found,
        help="write this line of the model without an in-place operator",
    )


END = 2**63 - 1
VIEWS = (aten.view.default, aten.reshape.default)
#: A linear between two views; its rows are read by it alone.
FOLDED = call(
    VIEWS,
    read_by(
        call(aten.linear.default, read_by(call(VIEWS, ..., name="flat"), 1), ..., name="product"), 1
    ),
    ...,
    name="result",
)
#: What cuts a part out of a tensor, and what puts another there.
SCATTERS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
