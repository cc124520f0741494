"""Follow the row through graphs: what holds it, what belongs to one job, what only says where.

A value is, to a walk,

None       the same whoever is in the row: weights, constants, sizes that only carry shapes
`Row`      tokens of all jobs (lines, in batch form), side by side along a dimension
`Own`      of one job: what it reads of its own segment or trains, and what is made of that
`Table`    where jobs, sequences and nano-batches begin and what keys they have
`Bank`     the adapters of all jobs at a site

Jobs are apart while no operator mixes what stands along a `Row`, and none but the operators that
take the row's tables join values of different kinds. So a `Row` is read by one job through a
segment read alone, and written by it through a write to the same job's segment. In a base's own
graph there is no `Own` yet; otherwise the same rules hold there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    Block,
    Form,
    TensorRef,
    arguments_of,
    is_call,
    is_writing,
    placeholders,
)
from tlora_fx.ir.lora_sites import ADD, EXPERTS, ONE, SCALE, SEVERAL, lowered_arguments
from tlora_fx.ops.job_operator import JobOperator, find_operator
from tlora_fx.passes.token_parallel.rules import MixesTokens, find_rule, rank_of
from tlora_fx.passes.token_parallel.sizes import RowSizes, SizeIsValue

aten = torch.ops.aten
ops = torch.ops.tlora_fx
# Without the row among their inputs these make the same value for every token.
UNIFORM = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}
UNIFORM |= {"expand", "broadcast_to", "expand_as", "repeat"}
#: What has a place for each token.
TOKEN_INPUTS = ("input_ids", "position_ids", "token_index")
#: What a lowered site's bank stores, by the end of its name.
BANKS = (".lora.a", ".lora.b")


@dataclass(frozen=True, slots=True)
class Row:
    """A value that holds the row.

    axis    the dimension whose outermost factor is the row
    part    which run of the row, "" for all of it
    """

    axis: int
    part: str = ""


@dataclass(frozen=True, slots=True)
class Own:
    """A value of one job, by its index."""

    job: int


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the row, or of a run of it, as it came; name "" for what is made of tables."""

    name: str
    part: str = ""


@dataclass(frozen=True, slots=True)
class Bank:
    """Adapters of all jobs."""


#: None, one of the above, or a tuple of them for operators with several results.
State = Any


class Mixed(Exception):
    """A node at which jobs are no longer apart; no reason where the operator has no rule."""

    def __init__(self, node: fx.Node, reason: str | None) -> None:
        super().__init__(reason or f"{node.target} has no token rule")
        self.node, self.reason = node, reason


class RowWalk:
    """Walks graphs; each block is walked once for each kind of input.

    states    what each node was found to be
    """

    def __init__(
        self,
        form: Form,
        row: str,
        blocks: Mapping[str, Block],
        jobs: Sequence[str] = (),
        sizes: RowSizes | None = None,
    ) -> None:
        """Walk with the row's symbol in hand.

        row      the size of the row as text
        jobs     whose segments lie in the row, in order; none in the base's graph
        sizes    follows sizes of the row that become values; None: nobody does
        """
        self.form, self.jobs, self.sizes = form, list(jobs), sizes
        self.rows = {row}
        self.by_layer = {layer: b for b in blocks.values() for layer in b.instances}
        self.known: dict[tuple[Any, ...], State] = {}
        self.states: dict[fx.Node, State] = {}

    @property
    def dim(self) -> int:
        """Dimension of the ids that is the row."""
        return 1 if self.form == "packed" else 0

    def inputs(self, graph: fx.Graph) -> dict[fx.Node, State]:
        """State of each input of a root graph."""
        return {
            node: Row(self.dim) if name in TOKEN_INPUTS else Table(name)
            for name, node in placeholders(graph).items()
        }

    def walk(self, graph: fx.Graph, start: Mapping[fx.Node, State]) -> State:
        """Follow the row through a graph; returns what its output is.

        raises    Mixed
        """
        for node in graph.nodes:
            if node.op == "output":
                return self._state(node.args[0])
            if node.op == "placeholder":
                self.states[node] = start[node]
            else:
                self.visit(node)
        return None

    def visit(self, node: fx.Node) -> None:
        """Follow the row through one node; raises Mixed."""
        if self.sizes is not None and node.op in ("get_attr", "call_function"):
            self._sizes(node)
        if node.op == "get_attr":
            self.states[node] = self._stored(node)
        elif node.op == "call_module" and node.target == LOSS:
            self.states[node] = self._loss(node)
        elif node.op == "call_module":
            self.states[node] = self._layer(node)
        elif node.op == "call_function":
            try:
                self.states[node] = self._call(node)
            except MixesTokens as reason:
                raise Mixed(node, str(reason)) from None
        else:
            raise Mixed(node, None)

    def _sizes(self, node: fx.Node) -> None:
        """Follow sizes where all jobs share what is computed; a job may know its own."""
        assert self.sizes is not None
        if any(isinstance(self.states[source], Own) for source in node.all_input_nodes):
            return
        try:
            self.sizes.visit(node)
        except SizeIsValue as reason:
            raise Mixed(node, str(reason)) from None

    def _state(self, value: Any) -> State:
        if isinstance(value, fx.Node):
            return self.states[value]
        if isinstance(value, (list, tuple)):
            return tuple(self._state(item) for item in value)
        return None

    def _stored(self, node: fx.Node) -> State:
        ref: TensorRef | None = node.meta.get("tensor")
        if ref is not None and ref.owner == "job":
            jobs = tuple(node.meta.get("jobs") or ())
            # A job's own graph, or Dynamo's, tells no jobs apart: there is one.
            return Own(self.jobs.index(jobs[0])) if len(jobs) == 1 and self.jobs else Own(0)
        return Bank() if ref is not None and ref.name.endswith(BANKS) else None

    def _layer(self, node: fx.Node) -> State:
        block = self.by_layer.get(str(node.target))
        if block is None:
            raise Mixed(node, "it calls a layer whose code is not there")
        states = tuple(self._state(arg) for arg in node.args)
        values = [self.sizes.values.get(arg) if self.sizes else None for arg in node.args]  # type: ignore[arg-type]
        key = (block.name, states, tuple(map(id, values)))
        if key not in self.known:
            inputs = placeholders(block.graph).values()
            if self.sizes is not None:
                self.sizes.values.update(zip(inputs, values, strict=True))
            self.known[key] = self.walk(block.graph, dict(zip(inputs, states, strict=True)))
        return self.known[key]

    def _loss(self, node: fx.Node) -> State:
        """Each job's loss, from the rows that its own targets name."""
        head = self.by_layer[f"{LOSS}.{HEAD}"].graph
        names = list(placeholders(head))[1:]
        wanted: list[State] = [Row(self.dim)]
        wanted += [Table(name) for name in ("target_rows", "targets", "target_segments")]
        wanted += [Row(self.dim) if name in TOKEN_INPUTS else Table(name) for name in names]
        if [self._state(arg) for arg in node.args] != wanted:
            raise Mixed(node, "the loss reads others than the last hidden state and its tables")
        # It runs on rows with a target: tokens side by side, or lines of one token each.
        hidden, *tables = placeholders(head).values()
        shape = hidden.meta["val"].shape
        sizes = None if self.sizes is None else RowSizes([shape], self.sizes.constants)
        inner = RowWalk(self.form, str(shape[self.dim]), {}, self.jobs, sizes)
        start = {hidden: Row(self.dim), **dict(zip(tables, wanted[4:], strict=True))}
        if inner.walk(head, start) != Row(self.dim):
            raise Mixed(node, "the logits do not hold the row where the hidden state does")
        return Table(LOSS)

    def _call(self, node: fx.Node) -> State:
        if is_random(node):
            raise MixesTokens("it draws random numbers that belong to no job")
        if is_writing(node):
            raise MixesTokens("it writes into what it reads")
        return self._item(node) if is_call(node, operator.getitem) else self._by_inputs(node)

    def _by_inputs(self, node: fx.Node) -> State:
        flat = list(_flat(self.states[source] for source in node.all_input_nodes))
        own = {state for state in flat if isinstance(state, Own)}
        ours = _CONTRACTS.get(node.target)
        contract = ours or find_operator(node.target)
        joins = is_call(node, ops.segment_write.default)
        if own and not joins and not (contract and contract.per_job):
            return self._by_one_job(node, own, flat)
        if contract is not None and (ours or any(state is not None for state in flat)):
            return _apart(_Call(self, node), contract)
        special = _SPECIAL.get(node.target)
        if special is not None:
            return special(_Call(self, node))
        if "sym_size" in str(node.target):
            return None
        if any(isinstance(state, Bank) for state in flat):
            raise MixesTokens("it reads the adapters of all jobs")
        tables = [state for state in flat if isinstance(state, Table)]
        rows = [state for state in flat if isinstance(state, Row)]
        if tables and rows:
            raise MixesTokens("it computes with a table of the whole row")
        return Table("") if tables else self._shared(node, rows)

    def _item(self, node: fx.Node) -> State:
        index: Any = node.args[1]
        state = self._state(node.args[0])
        return state[index] if isinstance(state, tuple) else state

    def _by_one_job(self, node: fx.Node, own: set[Own], states: Iterable[State]) -> State:
        """A job computes with its own values, and what is the same for all."""
        if len(own) > 1:
            raise MixesTokens(f"it joins values of jobs {self._names(own)}")
        for state in states:
            if isinstance(state, Row):
                raise MixesTokens(
                    f"it joins a value of job {self._names(own)} with the whole row's, "
                    "not with the job's segment of it"
                )
            if isinstance(state, Bank):
                raise MixesTokens("it reads the adapters of all jobs")
            if isinstance(state, Table) and getattr(node.target, "namespace", "") != "tlora_fx":
                raise MixesTokens("it computes with a table of the row")
        return own.pop()

    def _names(self, own: Iterable[Own]) -> str:
        known = [self.jobs[item.job] if item.job < len(self.jobs) else item.job for item in own]
        return " and ".join(sorted(f"'{name}'" for name in known))

    def _shared(self, node: fx.Node, rows: list[Row]) -> State:
        """What all jobs share: by the operator's token rule."""
        value = node.meta.get("val")
        part = one_part(rows)
        if not isinstance(value, (torch.Tensor, tuple, list)):
            if rows:
                raise MixesTokens("it reads a number out of the row's values")
            return None
        function = find_rule(node.target)
        if not rows and (function is None or self._by_shape(value) is None):
            if self._by_shape(value) is not None:
                raise MixesTokens("it makes values from places in the row")
            return None
        if not rows and name_of(node.target) not in UNIFORM:
            raise MixesTokens("it takes values by their place in the row")
        if function is None:
            raise Mixed(node, None)
        axis = function(node, self._axis_of)
        if axis is None:
            axis = self._by_shape(value)
        if isinstance(axis, tuple):
            return tuple(None if one is None else Row(one, part) for one in axis)
        return None if axis is None else Row(axis, part)

    def _axis_of(self, value: Any) -> Any:
        """What rules ask for: the axis of a value, a tuple of them, or None."""
        return axis_of(self._state(value)) if isinstance(value, fx.Node) else None

    def _by_shape(self, value: Any) -> int | None:
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        return next((d for d, size in enumerate(shape) if str(size) in self.rows), None)


class LineWalk(RowWalk):
    """Follows the tokens of a padded row's lines, through a head of the base or of jobs.

    What a job reads of its own lines still holds tokens side by side, as the row does.
    """

    def __init__(self, hidden: fx.Node) -> None:
        """Start at the last hidden state, [B, S, H]."""
        super().__init__("batch", str(hidden.meta["val"].shape[1]), {})
        root = hidden.graph
        self.states = {n: Row(1) if n.target == "token_index" else None for n in root.nodes}
        for name, node in placeholders(root).items():
            if name not in TOKEN_INPUTS:
                self.states[node] = Table(name)
        self.states[hidden] = Row(1)

    def _by_inputs(self, node: fx.Node) -> State:
        states = list(_flat(self.states[source] for source in node.all_input_nodes))
        rows = [state for state in states if isinstance(state, Row)]
        if not rows:
            return super()._by_inputs(node)
        call = _Call(self, node)
        if is_call(node, ops.segment_read.default, ops.segment_write.default):
            return _of_lines(call, rows)
        if is_call(node, ops.keyed_dropout.default, ops.tp_copy.default, ops.tp_reduce.default):
            return call.state("x")
        contract = _CONTRACTS.get(node.target) or find_operator(node.target)
        if contract is not None:
            return _result(_common_row(call, contract), contract)
        if find_rule(node.target) is None and node.meta.get("role") == "adapter":
            # Adapters of PEFT have operators that no base may have; none of them mixes tokens.
            axis = self._by_shape(node.meta["val"])
            return None if axis is None else Row(axis)
        return self._shared(node, rows)


def axis_of(state: State) -> Any:
    """The dimension that holds the row, a tuple of them for several results, or None."""
    if isinstance(state, tuple):
        return tuple(map(axis_of, state))
    return state.axis if isinstance(state, Row) else None


def _flat(states: Iterable[State]) -> Iterable[State]:
    for state in states:
        if isinstance(state, tuple):
            yield from _flat(state)
        else:
            yield state


def one_part(rows: Iterable[Row]) -> str:
    """The run of the row that values are of; raises MixesTokens where they are of several."""
    parts = {row.part for row in rows}
    if len(parts) > 1:
        raise MixesTokens("it joins different runs of the row")
    return parts.pop() if parts else ""


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


def name_of(target: Any) -> str:
    """An operator's name without its overload."""
    return str(getattr(target, "overloadpacket", target)).removeprefix("aten.")


# The operators that take the row's tables, and those that only plans write.


class _Call:
    """One call, with what it is given by the names of its schema."""

    def __init__(self, walk: RowWalk, node: fx.Node) -> None:
        self.walk, self.node = walk, node
        lowered = is_call(node, ONE, SEVERAL, ADD)
        self.given = lowered_arguments(node) if lowered else arguments_of(node)

    def state(self, name: str) -> State:
        """State of an argument."""
        return self.walk._state(self.given.get(name))

    def row(self, name: str) -> Row:
        """An argument that must hold the row."""
        state = self.state(name)
        if not isinstance(state, Row):
            raise MixesTokens(f"its {name} does not hold the row")
        return state

    def plain(self, *names: str) -> None:
        """Arguments that must be the same whoever is in the row."""
        for name in names:
            if any(state is not None for state in _flat([self.state(name)])):
                raise MixesTokens(f"its {name} depends on who is in the row")

    def tables(self, part: str, *names: str) -> None:
        """Arguments that must be the row's own tables, untouched."""
        for name in names:
            state = self.state(name)
            if name == "token_index":
                good = isinstance(state, Row) and state.part == part
            else:
                good = state == Table(name, "" if name == "keys" else part)
            if self.given.get(name) is not None and not good:
                raise MixesTokens(f"its {name} is not the row's own table")


def _read(call: _Call) -> State:
    x, job = call.row("x"), call.given["job"]
    call.tables(x.part, "segments")
    if call.given["dim"] != x.axis:
        raise MixesTokens("it reads along a dimension that does not hold the row")
    if not 0 <= job < len(call.walk.jobs):
        raise MixesTokens(f"there is no job {job} in the row")
    return Own(job)


def _write(call: _Call) -> State:
    x, job, value = call.row("x"), call.given["job"], call.state("value")
    call.tables(x.part, "segments")
    if call.given["dim"] != x.axis:
        raise MixesTokens("it writes along a dimension that does not hold the row")
    if value is not None and value != Own(job):
        owner = call.walk._names([value]) if isinstance(value, Own) else "all jobs"
        into = call.walk._names([Own(job)])
        raise MixesTokens(f"it writes a value of {owner} into the segment of {into}")
    return x


def _switch(call: _Call) -> State:
    positions = call.row("position_ids")
    call.tables(positions.part, "segments")
    for name in ("short", "long"):
        if call.state(name) not in (None, positions):
            raise MixesTokens(f"its {name} holds the row elsewhere than position_ids")
    return positions


def _of_lines(call: _Call, rows: list[Row]) -> State:
    """A job's lines, read or written: the tokens of each line stay where they are."""
    if len(set(rows)) > 1 or call.given["dim"] == rows[0].axis:
        raise MixesTokens("it takes some tokens of a line by their place")
    return rows[0]


def _sequence_cumsum(call: _Call) -> State:
    x = call.row("x")
    call.tables(x.part, "cu_seqlens")
    if call.given["dim"] != x.axis:
        raise MixesTokens("it sums along a dimension that does not hold the row")
    return x


def _sequence_conv1d(call: _Call) -> State:
    x = call.row("x")
    call.tables(x.part, "cu_seqlens")
    call.plain("weight", "bias")
    if x.axis != rank_of(call.given["x"]) - 1:
        raise MixesTokens("it convolves along a dimension that does not hold the row")
    return x


def _keyed_dropout(call: _Call) -> State:
    x = call.row("x")
    call.tables(x.part, "segments", "keys", "token_index")
    call.plain("rates", "site")
    if x.axis >= call.given["token_dims"]:
        raise MixesTokens("its token dimensions do not hold the row")
    return x


def _alike(call: _Call) -> State:
    """What another process has at the same place: the same row."""
    return call.state("x")


def _nano_tables(call: _Call) -> State:
    call.tables("", "cu_seqlens", "segments")
    parts = [f"part {index}" for index in range(call.given["count"])]
    cut = ("cu_seqlens", "max_seqlen", "segments")
    return (Table("cuts"), *(Table(name, part) for part in parts for name in cut))


def _nano_split(call: _Call) -> State:
    x, pieces = call.row("x"), call.node.meta["val"]
    if call.state("cuts") != Table("cuts") or x.part or call.given["dim"] != x.axis:
        raise MixesTokens("it does not cut the row where its tables do")
    call.walk.rows.update(str(piece.shape[x.axis]) for piece in pieces)
    return tuple(Row(x.axis, f"part {index}") for index in range(len(pieces)))


def _nano_join(call: _Call) -> State:
    dim = call.given["dim"]
    parts = tuple(Row(dim, f"part {index}") for index in range(len(call.given["parts"])))
    if call.state("parts") != parts or call.state("cuts") != Table("cuts"):
        raise MixesTokens("it does not join the runs of the row in their order")
    return Row(dim)


def _apart(call: _Call, operator: type[JobOperator]) -> State:
    """An operator over all jobs, by its contract: of each job it reads what is that job's."""
    row = _common_row(call, operator)
    call.tables(row.part, *operator.tables)
    for name in operator.banks:
        if any(not isinstance(state, Bank) for state in _flat([call.state(name)])):
            raise MixesTokens(f"its {name} is no bank of adapters")
    for name in operator.per_job:
        if list(_flat([call.state(name)])) != [Own(job) for job in call.given["jobs"]]:
            raise MixesTokens(f"its {name} are not those of its jobs")
    others = {*operator.rows, *operator.tables, *operator.banks, *operator.per_job}
    call.plain(*(name for name in call.given if name not in others))
    if reason := operator.mixes(call.given):
        raise MixesTokens(reason)
    return _result(row, operator)


def _result(row: Row, operator: type[JobOperator]) -> State:
    """Where the results of an operator hold the row."""
    axes = operator.result_axis(row.axis)
    if isinstance(axes, tuple):
        return tuple(Row(axis, row.part) for axis in axes)
    return Row(axes, row.part)


def _common_row(call: _Call, operator: type[JobOperator]) -> Row:
    """Where all of an operator's rows are, along none of which it mixes."""
    rows = {name: call.row(name) for name in operator.rows if call.given.get(name) is not None}
    if not rows:
        raise MixesTokens("none of its arguments holds the row")
    first, row = next(iter(rows.items()))
    for name, other in rows.items():
        if other != row:
            raise MixesTokens(f"its {name} holds the row elsewhere than its {first}")
        if row.axis >= rank_of(call.given[name]) - operator.rows[name]:
            raise MixesTokens(f"it mixes what stands along dimension {row.axis} of its {name}")
    return row


def _contract(rows: Mapping[str, int], **more: Any) -> type[JobOperator]:
    return type("Contract", (JobOperator,), {"rows": rows, **more})


_TABLES = ("segments", "keys", "token_index")
_ADAPTED = _contract({"x": 1}, tables=_TABLES, banks=("a", "b"))
#: Contracts of our own operators, as other packages register theirs.
_CONTRACTS: Mapping[Any, type[JobOperator]] = {
    ONE: _ADAPTED,
    SEVERAL: _ADAPTED,
    ADD: _contract({"x": 1, "y": 0}, tables=_TABLES, banks=("a", "b")),
    EXPERTS: _contract({"x": 1, "index": 1}, tables=("segments",), per_job=("a", "b")),
    SCALE: _contract(
        {"y": 1}, tables=("segments", "keys"), banks=("a", "b"), per_job=("magnitudes",)
    ),
    ops.embedding_noise.default: _contract({"x": 0}, tables=(*_TABLES, "cu_seqlens")),
    ops.packed_attention.default: _contract(
        {"q": 2, "k": 2, "v": 2},
        tables=(*_TABLES, "cu_seqlens", "max_seqlen"),
        result_axis=staticmethod(lambda axis: (axis, axis + 1)),
    ),
    ops.quantized_linear.default: _contract({"x": 1}),
    ops.float8_rows.default: _contract({"x": 1}),
    ops.float8_linear.default: _contract({"x": 1, "codes": 1, "scale": 1}),
}
#: Operators whose arguments are no contract's: parts of the row, and what only plans write.
_SPECIAL: Mapping[Any, Callable[[_Call], State]] = {
    ops.segment_read.default: _read,
    ops.segment_write.default: _write,
    ops.segment_switch.default: _switch,
    ops.sequence_cumsum.default: _sequence_cumsum,
    ops.sequence_conv1d.default: _sequence_conv1d,
    ops.keyed_dropout.default: _keyed_dropout,
    ops.tp_copy.default: _alike,
    ops.tp_reduce.default: _alike,
    ops.nano_tables.default: _nano_tables,
    ops.nano_split.default: _nano_split,
    ops.nano_join.default: _nano_join,
}
