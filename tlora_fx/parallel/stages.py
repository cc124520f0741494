"""Cut the root of a Shared Super-Model into the stages of a pipeline.

Between two stages one hidden value travels. Whatever else later layers read (rotary tables,
masks) depends on the row and on frozen tensors alone, and is computed in each stage again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from tlora_fx.cost.plan import Plan
from tlora_fx.errors import NoStage, PipelineBroken, TokensMismatch
from tlora_fx.ir.graph import output_of, placeholders
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel

HIDDEN = "hidden"
IDS = "input_ids"


def legal_cuts(model: SuperModel) -> tuple[int, ...]:
    """Legal beginnings of stages, as indices in `model.layer_order()`."""
    return _Root(model).legal()


def cut_stages(model: SuperModel, cuts: Sequence[int]) -> list[StageGraph]:
    """The stages that begin at these layers, and at the first.

    cuts      indices in `model.layer_order()`, growing
    raises    NoStage where more than one value crosses a cut
    """
    return _Root(model).stages(cuts)


def held_by(model: SuperModel, plan: Plan, pp_rank: int) -> frozenset[str]:
    """The modules and tensors that one process of a pipeline reads; weights are not needed.

    returns   paths in `model.net`, for `LocalShard.held`
    raises    NoStage
    """
    stages = cut_stages(model, plan.cuts)
    mine = [stage.held for stage in stages if stage.index % plan.mesh.pp == pp_rank]
    return frozenset().union(*mine)


@dataclass(frozen=True, slots=True)
class RowSize:
    """A size that a row tells: that of this dimension of its ids."""

    dimension: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """The value that travels from one stage to the next."""

    sizes: tuple[int | RowSize, ...]
    dtype: torch.dtype

    def shape(self, row: PackedBatch) -> tuple[int, ...]:
        """Shape of the hidden states of one row."""
        ids = row.input_ids.shape
        return tuple(
            ids[size.dimension] if isinstance(size, RowSize) else size for size in self.sizes
        )


@dataclass(frozen=True, slots=True)
class StageGraph:
    """One stage: a piece of the root.

    index        among all stages
    count        how many stages there are
    layers       paths of its layers
    nodes        what it computes, in order, inputs and tensors included
    source       the node of the root whose value travels in; None in the first stage
    result       the node whose value it hands on; in the last stage each job's loss sum
    takes        what travels in, None in the first stage
    hands        what travels out, None in the last stage
    held         paths of the modules and tensors that it reads
    needs_grad   whether what it is given needs a gradient
    learns       whether anything in it, or below it, is trained: it then has a backward
    """

    index: int
    count: int
    layers: tuple[str, ...]
    nodes: tuple[fx.Node, ...]
    source: fx.Node | None
    result: fx.Node
    takes: Hidden | None
    hands: Hidden | None
    held: frozenset[str]
    needs_grad: bool
    learns: bool

    @property
    def first(self) -> bool:
        """Whether it begins with the token ids."""
        return self.source is None

    @property
    def last(self) -> bool:
        """Whether it ends with the losses."""
        return self.hands is None


class StageModule(nn.Module):
    """A stage as a module; its layers are those of the model's own net.

    It is built once the model has its tensors, and again after they were loaded anew.
    """

    def __init__(self, model: SuperModel, graph: StageGraph) -> None:
        super().__init__()
        self.graph = graph
        code = _graph_of(graph)
        self.learns, self.needs_grad = graph.learns, graph.needs_grad
        self.inputs = tuple(name for name in placeholders(code) if name != HIDDEN)
        self.code = fx.GraphModule(model.net, code, f"StageModule{graph.index}")

    def forward(self, hidden: Tensor | None, row: PackedBatch) -> Tensor:
        """Run one micro-batch.

        hidden    what the stage below computed; None in the first stage
        row       on the stage's device
        returns   what the stage above takes; in the last stage each job's loss sum [J]
        raises    TokensMismatch when hidden is not of this row, PipelineBroken
        """
        takes, hands = self.graph.takes, self.graph.hands
        if takes is not None and (hidden is None or tuple(hidden.shape) != takes.shape(row)):
            raise TokensMismatch(
                f"stage {self.graph.index} was given hidden values of another micro-batch",
                expected=list(takes.shape(row)),
                found=None if hidden is None else list(hidden.shape),
                help="all processes must hold the same table of micro-batches",
            )
        values = [getattr(row, name) for name in self.inputs]
        out = self.code(*values) if takes is None else self.code(hidden, *values)
        if hands is not None and tuple(out.shape) != hands.shape(row):
            raise self._broken("shape", list(hands.shape(row)), list(out.shape))
        if torch.is_grad_enabled() and out.requires_grad != self.graph.learns:
            raise self._broken("need of a gradient", self.graph.learns, out.requires_grad)
        return cast(Tensor, out)

    def _broken(self, what: str, expected: object, found: object) -> PipelineBroken:
        return PipelineBroken(
            f"stage {self.graph.index} computes a value of another {what} than its graph says",
            layers=_range_of(self.graph.layers),
            value=self.graph.result.name,
            expected=expected,
            found=found,
            help="report it with the job file; plans without a pipeline are not concerned",
        )


class _Root:
    """What is known of every node of the root: what it rests on, and where it stands."""

    def __init__(self, model: SuperModel) -> None:
        self.model, self.graph = model, model.group.root
        self.layers = model.layer_order()
        self.nodes = list(self.graph.nodes)
        self.index = {node: index for index, node in enumerate(self.nodes)}
        self.begins = {
            str(node.target): index
            for index, node in enumerate(self.nodes)
            if node.op == "call_module" and node.target in set(self.layers)
        }
        self.running: set[fx.Node] = set()
        for node in self.nodes:
            if self._runs(node) or any(n in self.running for n in node.all_input_nodes):
                self.running.add(node)

    def legal(self) -> tuple[int, ...]:
        return tuple(cut for cut in range(1, len(self.layers)) if self._hidden(cut) is not None)

    def stages(self, cuts: Sequence[int]) -> list[StageGraph]:
        crossing = [self._crossing(cut) for cut in cuts]
        ends = [*crossing, cast(fx.Node, output_of(self.graph).args[0])]
        starts = [None, *crossing]
        bounds = [0, *cuts, len(self.layers)]
        stages: list[StageGraph] = []
        learns = False
        for index, (source, result) in enumerate(zip(starts, ends, strict=True)):
            nodes = self._slice(result, source)
            needs_grad, learns = learns, learns or any(map(self._trained, nodes))
            last = index == len(cuts)
            stage = StageGraph(
                index=index,
                count=len(cuts) + 1,
                layers=tuple(self.layers[bounds[index] : bounds[index + 1]]),
                nodes=nodes,
                source=source,
                result=result,
                takes=None if source is None else self._value(source),
                hands=None if last else self._value(result),
                held=frozenset(str(n.target) for n in nodes if n.op in ("get_attr", "call_module")),
                needs_grad=needs_grad,
                learns=learns,
            )
            stages.append(stage)
        return stages

    def _runs(self, node: fx.Node) -> bool:
        """Whether a value cannot be computed anywhere else: it has a layer or a trained tensor."""
        if node.op == "call_module":
            return True
        return node.op == "get_attr" and self._trained(node)

    def _trained(self, node: fx.Node) -> bool:
        """Whether a node reads what is trained."""
        return any(tensor.requires_grad for tensor in self._tensors(node))

    def _tensors(self, node: fx.Node) -> Iterator[Tensor]:
        net, path = self.model.net, str(node.target)
        if node.op == "call_module":
            yield from net.get_submodule(path).parameters()
        elif node.op == "get_attr":
            owner, _, name = path.rpartition(".")
            yield getattr(net.get_submodule(owner), name)

    def _crossings(self, cut: int) -> list[fx.Node]:
        """The values that only the stages below a cut can compute, and those above it read."""
        begin = self.begins[self.layers[cut]]

        def crosses(node: fx.Node) -> bool:
            sides = {self.index[user] >= begin for user in node.users}
            return sides == {True, False} if node.op == "get_attr" else True in sides

        below = (node for node in self.nodes[:begin] if node in self.running)
        return [node for node in below if crosses(node)]

    def _hidden(self, cut: int) -> fx.Node | None:
        """The one value that crosses a cut, None where a stage cannot begin there."""
        if self.layers[cut] not in self.begins:
            return None
        values = self._crossings(cut)
        return values[0] if len(values) == 1 and self._sizes(values[0]) is not None else None

    def _crossing(self, cut: int) -> fx.Node:
        legal = self.legal()
        value = self._hidden(cut) if cut in legal else None
        if value is None:
            many = self._crossings(cut) if 0 < cut < len(self.layers) else []
            raise NoStage(
                f"no stage can begin at layer {cut}",
                layer=self.layers[cut] if 0 <= cut < len(self.layers) else None,
                expected="one hidden value that crosses",
                found=", ".join(node.name for node in many) or f"{len(self.layers)} layers",
                help=f"cut at one of {', '.join(map(str, legal))}"
                if legal
                else "use a plan without a pipeline for this base",
            )
        return value

    def _sizes(self, node: fx.Node) -> tuple[int | RowSize, ...] | None:
        """The dimensions of a value that may travel; None where a row does not tell them."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            return None
        ids: Any = placeholders(self.graph)[IDS].meta["val"].shape
        names = {
            str(size): RowSize(dim) for dim, size in enumerate(ids) if not isinstance(size, int)
        }
        sizes = [size if isinstance(size, int) else names.get(str(size)) for size in value.shape]
        return None if None in sizes else tuple(size for size in sizes if size is not None)

    def _value(self, node: fx.Node) -> Hidden:
        sizes = self._sizes(node)
        assert sizes is not None, node
        return Hidden(sizes, node.meta["val"].dtype)

    def _slice(self, result: fx.Node, source: fx.Node | None) -> tuple[fx.Node, ...]:
        """All that a value is computed from, up to what the stage is given."""
        needed = {result}
        for node in reversed(self.nodes):
            if node in needed and node is not source:
                needed.update(node.all_input_nodes)
        return tuple(node for node in self.nodes if node in needed and node is not source)


def _graph_of(stage: StageGraph) -> fx.Graph:
    """A stage as a graph of its own: the hidden value first, then tables of the row by name."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    if stage.source is not None:
        copies[stage.source] = graph.placeholder(HIDDEN)
    inputs = [node for node in stage.nodes if node.op == "placeholder"]
    for node in inputs:
        copies[node] = graph.placeholder(str(node.target))
    # Constants of the traced graph lie on no device: they follow the first input.
    device = graph.call_function(getattr, (next(iter(copies.values())), "device"))
    for node in stage.nodes:
        if node.op != "placeholder":
            copy = graph.node_copy(node, copies.__getitem__)
            copy.args = _on_device(copy.args, device)
            copy.kwargs = _on_device(copy.kwargs, device)
            copies[node] = copy
    graph.output(copies[stage.result])
    if not device.users:
        graph.erase_node(device)
    graph.lint()
    return graph


def _on_device(value: Any, device: fx.Node) -> Any:
    """Arguments of a node, with the row's device in place of the traced one."""
    if isinstance(value, torch.device):
        return device
    if isinstance(value, (tuple, list)):
        return type(value)(_on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {name: _on_device(item, device) for name, item in value.items()}
    return value


def _range_of(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
