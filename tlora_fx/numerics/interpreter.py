"""Run graphs at any stage of the pipeline, on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from tlora_fx.errors import TloraError
from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    AdapterSite,
    Block,
    Form,
    GroupGraph,
    JobGraph,
    is_call,
    output_of,
    placeholders,
)
from tlora_fx.ir.shapes import FIRST_SEGMENT_SIZE
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.loss import ChunkedLoss
from tlora_fx.numerics.reading import GraphLocation, Reader
from tlora_fx.numerics.tensors import Seeded, Unchecked
from tlora_fx.ops import site_id

ATTENTION = torch.ops.tlora_fx.packed_attention.default
ATTENTION_SITE, ATTENTION_RATE = 8, 14
HALF = (torch.bfloat16, torch.float16)
ValueCallback = Callable[[fx.Node, GraphLocation, Any], None]


class CannotRun(Exception):
    """An operator raised; `refused` where it is one of ours, which refuses what it was given."""

    def __init__(self, node: fx.Node, place: GraphLocation, error: Exception) -> None:
        super().__init__(f"{node.target} raised {type(error).__name__}: {error}".splitlines()[0])
        self.node, self.place = node, place
        self.refused = isinstance(error, TloraError)


@contextmanager
def naming(node: fx.Node, place: GraphLocation) -> Iterator[None]:
    """Within this, an error becomes CannotRun of a node; those that say their own node pass."""
    try:
        yield
    except (Unchecked, CannotRun):
        raise
    except Exception as error:
        raise CannotRun(node, place, error) from error


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that graphs run with.

    layers    which layers run; others hand their input on
    watch     told every value, in order
    silent    no dropout drops, and there is no noise
    logits    the head runs on all tokens of the row, and logits are returned in place of losses
    wide      half precision runs as this dtype
    """

    row: PackedBatch
    names: list[str]
    layers: frozenset[str]
    watch: ValueCallback | None = None
    silent: bool = False
    logits: bool = False
    wide: torch.dtype | None = None


class Interpreter:
    """Runs the graphs of one job, or of a fused group."""

    def __init__(
        self,
        owner: JobGraph | GroupGraph,
        setting: Setting,
        tensors: Seeded,
        traced_with: Mapping[str, AdapterSite],
    ) -> None:
        self.owner, self.setting = owner, setting
        self.reader = Reader(owner, tensors, traced_with, silent=setting.silent)
        self.device = setting.row.input_ids.device
        self.dropouts = Dropouts(setting.row, setting.names, owner.form, self.reader)
        self._blocks = {layer: b for b in owner.blocks.values() for layer in b.instances}

    def run(self) -> Tensor:
        """Run the root, and return logits, or each job's loss sum; raises CannotRun, Unchecked."""
        row = self.setting.row
        given = [getattr(row, name) for name in placeholders(self.owner.root)]
        result: Tensor = self._graph(GraphLocation("", "", self.owner.root), given)
        return result

    def _graph(
        self, place: GraphLocation, given: list[Any], read: Mapping[fx.Node, Tensor] | None = None
    ) -> Any:
        """What a graph gives.

        read   its tensors, by their nodes, where a tracer runs it
        """
        values: dict[fx.Node, Any] = {}
        inputs = iter(given)
        for node in place.graph.nodes:
            if node.op == "output":
                return self._filled(node.args[0], values)
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = self._read(node, place) if read is None else read[node]
            elif node.op == "call_module":
                values[node] = self._module(node, values)
            else:
                values[node] = self._call(node, place, values)
            if self.setting.watch is not None and read is None:
                self.setting.watch(node, place, values[node])
        raise AssertionError("a graph without output")

    def _read(self, node: fx.Node, place: GraphLocation) -> Tensor:
        with naming(node, place):
            value = self.reader.tensor(node, place)
            if node.meta["tensor"].owner == "constant":
                return value.to(self.device, self._dtype(value.dtype))
            return value

    def _call(self, node: fx.Node, place: GraphLocation, values: dict[fx.Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = self._filled((node.args, node.kwargs), values)
        with naming(node, place):
            if is_dropout(node):
                return self.dropouts.drop(node, args, place)
            if is_call(node, ATTENTION):
                args = self.dropouts.with_site(node, args, place)
            if self.setting.silent and is_call(node, torch.ops.tlora_fx.embedding_noise.default):
                return args[0]
            if self.reader.scales(node):
                args = (args[0], self.reader.scaling(node, place), *args[2:])
            return target(*args, **kwargs)

    def _filled(self, given: Any, values: dict[fx.Node, Any]) -> Any:
        """Arguments with values in place of nodes, on the row's device and in its precision."""

        def fill(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return values[value]
            if isinstance(value, torch.dtype):
                return self._dtype(value)
            return self.device if isinstance(value, torch.device) else value

        return map_aggregate(given, fill)

    def _dtype(self, kind: torch.dtype) -> torch.dtype:
        return self.setting.wide if self.setting.wide and kind in HALF else kind

    def _module(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        path = str(node.target)
        given = [values[arg] for arg in node.args]  # type: ignore[index]
        if path == LOSS and HEAD in self.owner.blocks:
            return self._loss(self.owner.blocks[HEAD], given)
        block = self._blocks[path]
        if path in self.setting.layers:
            place = GraphLocation(path, block.instances[0], block.graph)
            run = partial(self._staged, block) if block.joint else self._graph
            return run(place, given)
        before = [
            value
            for arg, value in zip(node.args, given, strict=True)
            if isinstance(arg, fx.Node) and arg.op == "call_module"
        ]
        if len(before) != 1:
            raise Unchecked(f"{path} does not stand behind another layer")
        return before[0]

    def _staged(self, block: Block, place: GraphLocation, given: list[Any]) -> Any:
        """What a layer gives whose backward is of its joint graph, as that is rewritten."""
        from tlora_fx.pipeline.joint_stage import run_staged

        stored = [node for node in block.graph.nodes if node.op == "get_attr"]

        def forward(*values: Tensor) -> Any:
            inner = dict(zip(stored, values[len(given) :], strict=True))
            return self._graph(place, list(values[: len(given)]), inner)

        tensors = [self._read(node, place) for node in stored]
        with naming(output_of(block.graph), place):
            return run_staged(block, forward, *given, *tensors)

    def _loss(self, block: Block, given: list[Any]) -> Tensor:
        logits: Any = output_of(block.graph).args[0]
        head = _Head(self, block)
        tables = tuple(placeholders(block.graph))[1:]
        if self.setting.logits:
            every: Tensor = self.head(block, [given[0], *given[4:]])
            return every
        size = int(logits.meta["val"].shape[-1])
        loss = ChunkedLoss(head, size, tables, lines=self.owner.form == "batch")
        losses: Tensor = loss(*given)
        return losses

    def head(self, block: Block, given: list[Any]) -> Any:
        """Run the head on the rows of one chunk."""
        return self._graph(GraphLocation("", "", block.graph), given)


class _Head(nn.Module):
    """The head's graph as the module that the chunked loss takes."""

    def __init__(self, interpreter: Interpreter, block: Block) -> None:
        super().__init__()
        self.interpreter, self.block = interpreter, block

    def forward(self, *given: Tensor) -> Any:
        return self.interpreter.head(self.block, list(given))


def is_dropout(node: fx.Node) -> bool:
    """Whether a node drops by torch's own generator."""
    return is_call(node, torch.ops.aten.dropout.default)


class Dropouts:
    """Runs dropouts of the graphs of one row.

    Those that are not yet keyed to their jobs draw the masks that key-dropouts gives them, so that
    every state drops the same elements.
    """

    def __init__(self, row: PackedBatch, names: list[str], form: Form, reader: Reader) -> None:
        self.row, self.names, self.form, self.reader = row, names, form, reader
        self._numbers: dict[fx.Graph, dict[fx.Node, int]] = {}

    def drop(self, node: fx.Node, args: tuple[Any, ...], place: GraphLocation) -> Tensor:
        """Result of an aten.dropout node."""
        x: Tensor = args[0]
        rate = self.reader.rate(node, float(args[1]), place)
        dims = self._token_dims(node)
        if rate == 0.0 or not args[2] or dims is None:
            return x
        jobs: list[str] = list(node.meta.get("jobs") or ())
        alone = node.meta.get("role") == "adapter" and len(self.names) > 1
        segments, keys, index = self._tables(self.names.index(jobs[0]) if alone else None)
        rates = torch.full((len(keys),), rate, dtype=torch.float64)
        site = torch.tensor(self._site(node, place), dtype=torch.int64)
        dropped: Tensor = torch.ops.tlora_fx.keyed_dropout(
            x, rates, segments, keys, index, site, dims
        )
        return dropped

    def with_site(
        self, node: fx.Node, args: tuple[Any, ...], place: GraphLocation
    ) -> tuple[Any, ...]:
        """The arguments of an attention with dropout, its site among them."""
        if self.reader.silent and len(args) > ATTENTION_RATE:
            return (*args[:ATTENTION_RATE], 0.0, *args[ATTENTION_RATE + 1 :])
        if (
            len(args) <= ATTENTION_RATE
            or not args[ATTENTION_RATE]
            or args[ATTENTION_SITE] is not None
        ):
            return args
        site = torch.tensor(self._site(node, place), dtype=torch.int64)
        return (*args[:ATTENTION_SITE], site, *args[ATTENTION_SITE + 1 :])

    def _tables(self, job: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Segments, keys and token indices of the row, or of one job's segment of it."""
        row = self.row
        if job is None:
            return row.segments, row.keys, row.token_index
        start, stop = row.segments[job : job + 2].tolist()
        dim = 1 if self.form == "packed" else 0
        own = torch.tensor([0, stop - start], dtype=torch.int32)
        return own, row.keys[job : job + 1], row.token_index.narrow(dim, start, stop - start)

    def _token_dims(self, node: fx.Node) -> int | None:
        """How many leading dimensions enumerate tokens; None where no token owns the values."""
        shape = node.meta["val"].shape
        if self.form == "batch":
            return 2 if len(shape) > 1 else None
        for dim, size in enumerate(shape, 1):
            if not isinstance(size, int) or size >= FIRST_SEGMENT_SIZE:
                return dim
        return None

    def _site(self, node: fx.Node, place: GraphLocation) -> int:
        if place.graph not in self._numbers:
            self._numbers[place.graph] = _number_all(place.graph)
        number = self._numbers[place.graph].get(node, 0)
        path = place.path(str(node.meta.get("path", "")).removesuffix(".default"))
        return site_id(path + (f"#{number}" if number else ""))


def _number_all(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many dropouts of the same module and job come before each, as key-dropouts counts."""
    taken: dict[str, int] = {}
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        drops = (is_dropout(node) and node.args[1] and node.args[2]) or (
            is_call(node, ATTENTION) and node.args[ATTENTION_RATE]
        )
        if drops:
            job = node.meta.get("jobs") if node.meta.get("role") == "adapter" else ""
            key = f"{node.meta.get('path')} {job}"
            taken[key] = taken.get(key, -1) + 1
            numbers[node] = taken[key]
    return numbers
