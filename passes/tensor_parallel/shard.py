"""Cut matrices into pieces, one for each process of a tensor-parallel group.

Reads   frozen linears, lowered sites, and what lies between them.
Writes  shard on the stored tensors that are cut, sizes of pieces where calls name sizes; tp_copy
        where whole values meet pieces, tp_reduce behind linears that are cut by rows, and an add of
        their bias behind that.
Keeps   losses and gradients, summed over the group; alone no process computes them, so the numbers
        of one process's graph are others. A replicated half of an adapter has a part of its
        gradient in each process (`SuperModel.partial_sums`).

Where a matrix holds several, one after the other, such as q, k and v, a process's piece has its
heads of each. What cannot be cut stays whole, the same in every process, and is noted with the
reason: branches that run as they are, dropout of the base on pieces. Values between layers are
whole.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.errors import PipelineError
from tlora_fx.ir.graph import HEAD, LOSS, GroupGraph, is_call, output_of, placeholders
from tlora_fx.ir.lora_sites import LISTED, ONE, SCALE, SEVERAL, lowered_arguments
from tlora_fx.ir.shapes import fake_like, fake_mode_of, propagate
from tlora_fx.ir.verifier import named_graphs
from tlora_fx.ops.parallel import GROUP
from tlora_fx.passes.tensor_parallel.rules import (
    CannotCarry,
    Cut,
    NeedsRuns,
    Operands,
    Runs,
    carried,
    dim_of_cut,
    ends_of,
    resize_parts,
    resized,
)
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed
from tlora_fx.rewriting import Maker, Rewriter, arguments_of

aten = torch.ops.aten
ops = torch.ops.tlora_fx
PLAIN = (aten.linear.default, aten.addmm.default, aten.mm.default)
TURNED = aten.t.default
# Columns that one draw of a dropout mask decides.
OCTET = 8
COLUMNS, ROWS = 0, 1
# Linears, and which of their results.
Sources = frozenset[tuple[fx.Node, int]]
# For linears, and each of their results, the runs that it is cut by.
AllRuns = dict[fx.Node, dict[int, tuple[int, ...]]]


@register
@dataclass(frozen=True, slots=True)
class ShardTensor(GroupPass):
    """Cut matrices over the processes of a tensor-parallel group.

    size   number of pieces to cut each matrix into, that of the group's processes; 1 changes
           nothing
    head   also cut the output vocabulary; the loss is then summed over the group
    """

    name: ClassVar[str] = "shard-tensor"
    requires: ClassVar[frozenset[str]] = frozenset({"lower-adapters", "key-dropouts"})
    preserves_numerics: ClassVar[Numerics] = "no"

    size: int
    head: bool = True

    def run(self, group: GroupGraph) -> None:
        if self.size < 1:
            raise PipelineError(
                "matrices are cut into one piece at least", found=f"shard-tensor size={self.size}"
            )
        if self.size == 1:
            return
        learned = learning(group)
        for where, graph in named_graphs(group):
            if where == HEAD and not self.head:
                continue
            cuts = search(graph, self.size, open_end=where == HEAD)
            group.notes.extend((self.name, note) for note in _whole_notes(where, cuts))
            if cuts.by_columns and rewrite_allowed(f"pieces in {where or 'the root'}"):
                _cut(graph, cuts, self.size)
                _join(group, graph, cuts, learned, open_end=where == HEAD)
                if where == HEAD:
                    _copy_hidden(group)


def nothing_cut(group: GroupGraph, size: int) -> list[str]:
    """Reasons why no matrix of any layer can be cut into so many pieces; [] where one can."""
    notes: list[str] = []
    for where, graph in named_graphs(group):
        cuts = search(graph, size) if where != HEAD else Cuts()
        if cuts.by_columns:
            return []
        notes.extend(_whole_notes(where, cuts))
    return notes or ["the model has no linear of the frozen base"]


def _whole_notes(where: str, cuts: Cuts) -> list[str]:
    pairs = cuts.whole.items()
    return [f"{f'{where}.{modules}'.strip('.')} stays whole: {reason}" for modules, reason in pairs]


def _cut(graph: fx.Graph, cuts: Cuts, pieces: int) -> None:
    linears = [(linear, COLUMNS) for linear in cuts.by_columns] + [
        (linear, ROWS) for linear in cuts.by_rows
    ]
    stored = dict(cuts.stored)
    for linear, way in linears:
        for matrix in linear.matrices:
            stored.update(matrix.cuts(way))
    mode = fake_mode_of(graph)
    for node, cut in stored.items():
        ref, dim = node.meta["tensor"], dim_of_cut(cut)
        runs = cut.sizes if isinstance(cut, Runs) else ()
        shape = tuple(n // pieces if index == dim else n for index, n in enumerate(ref.shape))
        node.meta["tensor"] = replace(ref, shape=shape, shard=(dim, pieces, runs))
        node.meta["val"] = fake_like(mode, shape, ref.dtype)
    for node, cut in cuts.values.items():
        if isinstance(cut, (int, Runs)):
            resized(node, cut, pieces)
        resize_parts(node, cuts.values, pieces)
    propagate(graph)


def _join(
    group: GroupGraph, graph: fx.Graph, cuts: Cuts, learning: set[fx.Node], *, open_end: bool
) -> None:
    whole: dict[fx.Node, dict[fx.Node, None]] = {}
    if not open_end:
        for linear in cuts.by_columns:
            whole.setdefault(linear.x, {})[linear.node] = None
        for reader, value in cuts.entries:
            if value in learning:
                whole.setdefault(value, {})[reader] = None
    for value, readers in whole.items():
        first = next(node for node in graph.nodes if node in readers)
        copied = _maker(group, graph, first)(ops.tp_copy.default, value, GROUP)
        _keep_axis(copied, value)
        for reader in readers:
            reader.replace_input_with(value, copied)
    for linear in cuts.by_rows:
        _sum(group, graph, linear)


def _sum(group: GroupGraph, graph: fx.Graph, linear: Linears) -> None:
    """Sum the parts that processes compute of a linear, then add its bias, once."""
    node, (matrix,) = linear.node, linear.matrices
    readers = list(node.users)
    if matrix.bias is not None:
        node = _without_bias(graph, linear)
    make = _maker(group, graph, node.next, path=node.meta.get("path") or "")
    result = make(ops.tp_reduce.default, node, GROUP)
    if matrix.bias is not None:
        result = make(aten.add.Tensor, result, matrix.bias)
    for added in make.made:
        _keep_axis(added, node)
    for reader in readers:
        reader.replace_input_with(linear.node, result)
    if node is not linear.node:
        graph.erase_node(linear.node)


def _without_bias(graph: fx.Graph, linear: Linears) -> fx.Node:
    node = linear.node
    if is_call(node, aten.addmm.default):
        given = arguments_of(node)
        plain = Rewriter(graph).at(node)(aten.mm.default, given["mat1"], given["mat2"])
        _keep_axis(plain, node)
        return plain
    index = list(arguments_of(node)).index("bias")
    if len(node.args) > index:
        node.update_arg(index, None)
    else:
        node.update_kwarg("bias", None)
    return node


def _copy_hidden(group: GroupGraph) -> None:
    """Let the last hidden state's gradient be summed before it leaves the loss."""
    call = next(n for n in group.root.nodes if n.op == "call_module" and n.target == LOSS)
    hidden: Any = call.args[0]
    copied = _maker(group, group.root, call)(ops.tp_copy.default, hidden, GROUP)
    _keep_axis(copied, hidden)
    call.replace_input_with(hidden, copied)


def _maker(group: GroupGraph, graph: fx.Graph, before: fx.Node, **tags: str) -> Maker:
    jobs = tuple(group.job_names)
    return Rewriter(graph).at(before, {"role": "shared", "jobs": jobs, "site": "", **tags})


def _keep_axis(node: fx.Node, like: fx.Node) -> None:
    if "axis" in like.meta:
        node.meta["axis"] = like.meta["axis"]


def learning(group: GroupGraph) -> set[fx.Node]:
    """The values of all graphs that depend on what jobs train."""
    reached = set(_reached(group.root, set()))
    for block in group.blocks.values():
        inputs = list(placeholders(block.graph).values())
        calls = [
            n for n in group.root.nodes if n.op == "call_module" and n.target in block.instances
        ]
        start = {
            inputs[index]
            for call in calls
            for index, given in enumerate(call.args)
            if given in reached
        }
        reached |= set(_reached(block.graph, start))
    return reached


def _reached(graph: fx.Graph, start: set[fx.Node]) -> Iterator[fx.Node]:
    """The values that depend on some inputs, or on trained tensors; layers' results do."""
    reached = set(start)
    for node in graph.nodes:
        ref = node.meta.get("tensor") if node.op == "get_attr" else None
        trained = ref is not None and (
            ref.owner == "job" or ref.name.endswith((".lora.a", ".lora.b"))
        )
        given = node.op == "call_module" or reached.intersection(node.all_input_nodes)
        if (trained or given) and not is_call(node, aten.detach.default):
            reached.add(node)
    yield from reached


@dataclass(slots=True)
class Cuts:
    """The cut of each value of a graph.

    whole                 why the other linears stay as they are
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

    All linears are cut by columns at first, and the pieces are followed by the rules to the linears
    that take them by rows. Where an operator parts what is cut, the linears that it came from are
    cut run by run; where it cannot take a piece, they stay whole; and the search begins again.

    open_end   whether the graph may return pieces, along its result's last dimension
    """
    kept: dict[fx.Node, str] = {}
    runs: AllRuns = defaultdict(dict)
    while True:
        walk = _ShardWalk(pieces, kept, runs)
        try:
            walk.over(graph, open_end)
        except _StayWhole as refused:
            kept.update({node: str(refused) for node, _ in refused.sources})
        except _ByRuns:
            continue
        else:
            return walk.cuts


class _ShardWalk:
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
        linear, held = linears(node), self._held(node.all_input_nodes)
        if linear is not None and not held:
            self._by_columns(linear)
        elif linear is not None:
            self._by_rows(linear, held)
        elif held:
            self._carry(node, held)

    def _by_columns(self, linear: Linears) -> None:
        linear = linear.in_runs(self.runs[linear.node])
        reason = self.kept.get(linear.node) or linear.misfit(COLUMNS, self.pieces)
        if reason:
            self.cuts.whole[linear.modules] = reason
            return
        value = linear.node.meta["val"]
        several = isinstance(value, (list, tuple))
        results = zip(linear.matrices, value if several else [value], strict=True)
        cuts = tuple(matrix.cut(result.dim() - 1) for matrix, result in results)
        self.cuts.by_columns.append(linear)
        self.cuts.values[linear.node] = cuts if several else cuts[0]
        self.sources[linear.node] = frozenset((linear.node, index) for index in range(len(cuts)))

    def _by_rows(self, linear: Linears, held: list[fx.Node]) -> None:
        last = linear.x.meta["val"].dim() - 1
        if held != [linear.x] or self.cuts.values[linear.x] != last:
            raise _StayWhole(self._of(held), f"{linear.modules} takes no such pieces")
        reason = linear.misfit(ROWS, self.pieces)
        if reason:
            raise _StayWhole(self._of(held), f"{linear.modules} cannot take pieces: {reason}")
        self.cuts.by_rows.append(linear)

    def _carry(self, node: fx.Node, held: list[fx.Node]) -> None:
        operands = Operands(node, self.pieces, self.cuts.values)
        try:
            cut = carried(operands)
        except CannotCarry as reason:
            if isinstance(reason, NeedsRuns) and self._take_runs(self._of(held), reason):
                raise _ByRuns from None
            where = node.meta.get("path") or "the root"
            why = f"its pieces reach no sum: at {where}, {node.name}: {reason}"
            raise _StayWhole(self._of(held), why) from None
        self.cuts.stored.update(operands.stored)
        if cut is None:
            return
        self.cuts.values[node] = cut
        self.sources[node] = self._of(held)
        if is_call(node, operator.getitem) and all(one is held[0] for one, _ in self._of(held)):
            self.sources[node] = frozenset({(held[0], int(node.args[1]))})  # type: ignore[arg-type]
        for beside in node.all_input_nodes:
            value = beside.meta.get("val")
            floats = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
            if beside not in held and beside.op != "get_attr" and floats:
                self.cuts.entries.append((node, beside))

    def _take_runs(self, sources: Sources, asked: NeedsRuns) -> bool:
        """Let linears be cut by the runs that an operator asks for; False where they cannot."""
        matrices = {linear.node: linear.matrices for linear in self.cuts.by_columns}
        changed = False
        for node, index in sources:
            size = matrices[node][index].size(COLUMNS)
            if size % asked.size:
                return False
            ends = {end * (size // asked.size) for end in asked.ends} | {0, size}
            ends |= ends_of(self.runs[node].get(index, ()))
            runs = tuple(stop - start for start, stop in pairwise(sorted(ends)))
            changed |= self.runs[node].get(index, (size,)) != runs
            self.runs[node][index] = runs
        return changed

    def _held(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if self.cuts.values.get(node) is not None]

    def _of(self, nodes: list[fx.Node]) -> Sources:
        return frozenset().union(*(self.sources[node] for node in nodes))


@dataclass(frozen=True, slots=True)
class Matrix:
    """A frozen matrix, its bias and its adapters.

    stored    the node that reads it, None where it is computed
    outer     the dimension of the stored tensor along which results lie
    a, b      the nodes of the bank, None without adapters
    runs      sizes of what lies one after the other along results, each cut by itself; () for one
    """

    stored: fx.Node | None
    outer: int
    bias: Any
    a: fx.Node | None = None
    b: fx.Node | None = None
    runs: tuple[int, ...] = ()

    def size(self, dim: int) -> int:
        """Number of columns of the results (dim 0), or of the inputs (1)."""
        assert self.stored is not None
        return int(self.stored.meta["val"].shape[dim if self.outer == 0 else 1 - dim])

    def cut(self, dim: int) -> Cut:
        """The cut of a value that has results along a dimension."""
        return Runs(dim, self.runs) if self.runs else dim

    def cuts(self, dim: int) -> Iterator[tuple[fx.Node, Cut]]:
        """Stored tensors that are cut, each with its cut by columns (0) or rows (1)."""
        assert self.stored is not None
        if dim == 1:
            yield self.stored, 1 - self.outer
            if self.a is not None:
                yield self.a, 1
            return
        yield self.stored, self.cut(self.outer)
        if self.bias is not None:
            yield self.bias, self.cut(0)
        if self.b is not None:
            yield self.b, self.cut(1)


@dataclass(frozen=True, slots=True)
class Linears:
    """One operator that multiplies with frozen matrices, all reading one input.

    By columns each process computes a piece of the result: of an adapter A stays whole and B is
    cut. By rows each process reads a piece of the input and computes a part of a sum: A is cut, B
    stays whole. A matrix that holds several, such as q, k and v, is cut by columns run by run.

    drops   whether jobs may drop columns of the input
    """

    node: fx.Node
    x: fx.Node
    matrices: tuple[Matrix, ...]
    drops: bool = False

    @property
    def modules(self) -> str:
        """The modules that it stands for."""
        users = [user.meta.get("site") for user in self.node.users]
        named = users if is_call(self.node, SEVERAL) else [self.node.meta.get("site")]
        own = [str(name) for name in named if name]
        return ", ".join(own) or str(self.node.meta.get("path")) or self.node.name

    def in_runs(self, runs: Mapping[int, tuple[int, ...]]) -> Linears:
        """The same, with the runs of matrices by their index."""
        cut = (
            replace(matrix, runs=runs.get(index, ())) for index, matrix in enumerate(self.matrices)
        )
        return replace(self, matrices=tuple(cut))

    def misfit(self, dim: int, pieces: int) -> str:
        """Reason why it cannot be cut by columns (0) or rows (1); "" where it can."""
        if dim == 1 and is_call(self.node, SEVERAL):
            return "several matrices multiply one piece of a value"
        for matrix in self.matrices:
            reason = self._fixed(matrix) or _divides(matrix, dim, pieces)
            if reason:
                return reason
        if dim == 1 and self.drops and self.matrices[0].size(1) // pieces % OCTET:
            wide = self.matrices[0].size(1)
            return f"dropout draws {OCTET} columns at once, and {wide} / {pieces} is no multiple"
        return ""

    def _fixed(self, matrix: Matrix) -> str:
        """Why a matrix stays whole whatever the number of pieces."""
        read = [matrix.stored] if matrix.bias is None else [matrix.stored, matrix.bias]
        for node in read:
            ref = node.meta.get("tensor") if node is not None else None
            if node is None or ref is None or ref.owner != "base":
                return "its matrix or its bias is none of the frozen base's"
            if ref.originals:
                return f"its matrix is stored as {ref.form}"
            others = sorted(_readers(node) - {self.node}, key=str)
            if others:
                reader = others[0]
                name = reader.name
                if is_call(reader, SCALE):
                    name = "the norm of a DoRA job's rows"
                elif reader.meta.get("role") == "adapter":
                    name = f"a branch of job '{reader.meta['jobs'][0]}' that runs as it is"
                return f"{name} reads its matrix or its bias too"
        return ""


def linears(node: fx.Node) -> Linears | None:
    """The frozen linears of a node.

    returns   None where it is none, multiplies with what is computed, or is a part of one job's
              branch that runs as it is
    """
    if is_call(node, ONE):
        given = lowered_arguments(node)
        return Linears(node, given["x"], (_matrix(given),), bool(given["drops"]))
    if is_call(node, SEVERAL):
        given = lowered_arguments(node)
        count = len(given["weight"])
        own = [{name: given[name][index] for name in LISTED} for index in range(count)]
        return Linears(node, given["x"], tuple(map(_matrix, own)), bool(given["drops"]))
    if not is_call(node, *PLAIN) or node.meta.get("role") == "adapter":
        return None
    given = arguments_of(node)
    if is_call(node, aten.linear.default):
        linear = Linears(node, given["input"], (_stored(given["weight"], 0, given["bias"]),))
    elif is_call(node, aten.addmm.default):
        plain = (given["beta"], given["alpha"]) == (1, 1)
        matrix = _stored(given["mat2"], 1, given["self"]) if plain else Matrix(None, 0, None)
        linear = Linears(node, given["mat1"], (matrix,))
    else:
        linear = Linears(node, given["self"], (_stored(given["mat2"], 1, None),))
    return linear if linear.matrices[0].stored is not None else None


def _matrix(given: dict[str, Any]) -> Matrix:
    plain = _stored(given["weight"], 0, given["bias"])
    return Matrix(plain.stored, plain.outer, plain.bias, given["a"], given["b"])


def _stored(weight: fx.Node, outer: int, bias: Any) -> Matrix:
    """A matrix by what it is read from; `outer` is where results lie in what is multiplied."""
    if is_call(weight, TURNED):
        weight, outer = weight.args[0], 1 - outer  # type: ignore[assignment]
    return Matrix(weight if weight.op == "get_attr" else None, outer, bias)


def _readers(stored: fx.Node) -> set[fx.Node]:
    """Who reads a stored tensor, turned or not, by this node or another one."""
    same = [n for n in stored.graph.nodes if n.op == "get_attr" and n.target == stored.target]
    users = [user for node in same for user in node.users]
    turned = [reader for user in users if is_call(user, TURNED) for reader in user.users]
    return {user for user in users if not is_call(user, TURNED)} | set(turned)


def _divides(matrix: Matrix, dim: int, pieces: int) -> str:
    sizes = (dim == 0 and matrix.runs) or (matrix.size(dim),)
    named = f"{', '.join(map(str, sizes))} {('outputs', 'inputs')[dim]}"
    return f"its {named} do not divide by {pieces}" * any(size % pieces for size in sizes)
