"""Small graphs and passes for tests of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tlora_fx.ir.graph import JobGraph
from tlora_fx.ir.shapes import fake_like
from tlora_fx.pipeline import JobPass, Numerics

aten = torch.ops.aten


def small_graph(with_ids: bool = False) -> JobGraph:
    """relu(x) as a job's graph, with ids as every model has them where it is to be printed."""
    graph = fx.Graph()
    mode = FakeTensorMode()
    if with_ids:
        ids = graph.placeholder("input_ids")
        ids.meta["val"] = fake_like(mode, (1, 5), torch.int64)
    x = graph.placeholder("x")
    x.meta["val"] = fake_like(mode, (2, 3), torch.float32)
    made = graph.call_function(aten.relu.default, (x,))
    made.meta["val"] = x.meta["val"]
    graph.output(made)
    return JobGraph("one", graph, "packed")


def relu_of(graph: JobGraph) -> fx.Node:
    """The node that calls relu."""
    return next(node for node in graph.root.nodes if node.op == "call_function")


@dataclass(frozen=True, slots=True)
class Does(JobPass):
    """Runs a function on the graph; what it returns is the pass's claim."""

    name: ClassVar[str] = "does"
    preserves_numerics: ClassVar[Numerics] = "bound"

    what: Callable[[JobGraph], bool | None] = lambda graph: None

    def __str__(self) -> str:
        """A function has no text form."""
        return self.name

    def run(self, graph: JobGraph) -> bool | None:
        """Run it."""
        return self.what(graph)


def add_relu(graph: JobGraph) -> None:
    """relu(relu(x))."""
    relu = relu_of(graph)
    with graph.root.inserting_after(relu):
        made = graph.root.call_function(aten.relu.default, (relu,))
    made.meta = {key: value for key, value in relu.meta.items() if key != "run"}
    relu.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
