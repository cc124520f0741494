"""Run graphs at any stage of the pipeline, on real tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from tlora_fx.errors import TloraError
from tlora_fx.ir.graph import (
    AdapterSite,
    Block,
    GroupGraph,
    JobGraph,
    is_call,
    output_of,
    placeholders,
)
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.loss import ChunkedLoss
from tlora_fx.numerics.dropouts import ATTENTION, Dropouts, is_dropout
from tlora_fx.numerics.reading import Place, Reader
from tlora_fx.numerics.tensors import Seeded, Unchecked
from tlora_fx.passes.lower_loss import HEAD, LOSS

Watch = Callable[[fx.Node, Place, Any], None]


class CannotRun(Exception):
    """An operator raised.

    refused    whether it is one of ours, which refuses what it was given
    """

    def __init__(self, node: fx.Node, place: Place, error: Exception) -> None:
        super().__init__(f"{node.target} raised {type(error).__name__}: {error}".splitlines()[0])
        self.node, self.place = node, place
        self.refused = isinstance(error, TloraError)


@dataclass(frozen=True, slots=True)
class Setting:
    """What graphs run with.

    row       tables of a row
    names     its jobs
    layers    which layers run; others hand their input on
    watch     told every value, in order
    """

    row: PackedBatch
    names: list[str]
    layers: frozenset[str]
    watch: Watch | None = None


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
        self.reader = Reader(owner, tensors, traced_with)
        self.dropouts = Dropouts(setting.row, setting.names, owner.form, self.reader)
        self._blocks = {layer: b for b in owner.blocks.values() for layer in b.instances}

    def run(self) -> Tensor:
        """What the root returns: logits, or each job's loss sum.

        raises    CannotRun, Unchecked
        """
        row = self.setting.row
        given = [getattr(row, name) for name in placeholders(self.owner.root)]
        found: Tensor = self._graph(Place("", "", self.owner.root), given)
        return found

    def _graph(self, place: Place, given: list[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        inputs = iter(given)
        for node in place.graph.nodes:
            if node.op == "output":
                return _filled(node.args[0], values)
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = self._read(node, place)
            elif node.op == "call_module":
                values[node] = self._module(node, values)
            else:
                values[node] = self._call(node, place, values)
            if self.setting.watch is not None:
                self.setting.watch(node, place, values[node])
        raise AssertionError("a graph without output")

    def _read(self, node: fx.Node, place: Place) -> Tensor:
        try:
            return self.reader.tensor(node, place)
        except Unchecked:
            raise
        except Exception as error:
            raise CannotRun(node, place, error) from error

    def _call(self, node: fx.Node, place: Place, values: dict[fx.Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = _filled((node.args, node.kwargs), values)
        try:
            if is_dropout(node):
                return self.dropouts.drop(node, args, place)
            if is_call(node, ATTENTION):
                args = self.dropouts.with_site(node, args, place)
            if node.meta.get("part") == "scale" and not isinstance(node.args[1], fx.Node):
                args = (args[0], self.reader.scaling(node, place), *args[2:])
            return target(*args, **kwargs)
        except (Unchecked, CannotRun):
            raise
        except Exception as error:
            raise CannotRun(node, place, error) from error

    def _module(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        path = str(node.target)
        given = [values[arg] for arg in node.args]  # type: ignore[index]
        if path == LOSS and HEAD in self.owner.blocks:
            return self._loss(self.owner.blocks[HEAD], given)
        block = self._blocks[path]
        if path in self.setting.layers:
            return self._graph(Place(path, block.instances[0], block.graph), given)
        before = [v for arg, v in zip(node.args, given, strict=True) if _is_layer(arg)]
        if len(before) != 1:
            raise Unchecked(f"{path} does not stand behind another layer")
        return before[0]

    def _loss(self, block: Block, given: list[Any]) -> Tensor:
        logits: Any = output_of(block.graph).args[0]
        head = _Head(self, block)
        tables = tuple(placeholders(block.graph))[1:]
        size = int(logits.meta["val"].shape[-1])
        loss = ChunkedLoss(head, size, tables, lines=self.owner.form == "batch")
        found: Tensor = loss(*given)
        return found

    def head(self, block: Block, given: list[Any]) -> Any:
        """Run the head on the rows of one chunk."""
        return self._graph(Place("", "", block.graph), given)


class _Head(nn.Module):
    """The head's graph as the module that the chunked loss takes."""

    def __init__(self, interpreter: Interpreter, block: Block) -> None:
        super().__init__()
        self.interpreter, self.block = interpreter, block

    def forward(self, *given: Tensor) -> Any:
        """Logits of a chunk's rows."""
        return self.interpreter.head(self.block, list(given))


def _is_layer(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and arg.op == "call_module"


def _filled(given: Any, values: dict[fx.Node, Any]) -> Any:
    """Arguments with values in place of nodes; all of a row lies on the CPU."""

    def fill(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return map_aggregate(given, fill)
