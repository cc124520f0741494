"""A graph small enough to read: y = linear(x, W) + 2.0 * linear(cast(x), A), then relu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tlora_fx.ir.graph import TensorRef, record
from tlora_fx.ir.shapes import fake_like, propagate

aten = torch.ops.aten


@dataclass
class Small:
    """The graph and its nodes by name."""

    graph: fx.Graph

    def __getitem__(self, name: str) -> fx.Node:
        return next(node for node in self.graph.nodes if node.name == name)

    def targets(self) -> list[str]:
        """What is called, in order."""
        return [
            str(node.target).removeprefix("aten.").partition(".")[0]
            for node in self.graph.nodes
            if node.op in ("call_function", "call_module")
        ]


@pytest.fixture
def small() -> Small:
    """Five tokens of width eight; W belongs to the base, A to a job."""
    graph, mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())

    def call(name: str, target: Any, *args: Any, path: str) -> fx.Node:
        made = graph.create_node("call_function", target, args, name=name)
        made.meta.update(path=path, source=f"model.py:{len(graph.nodes)}", role="shared", jobs=())
        return made

    def stored(name: str, owner: Any) -> fx.Node:
        made = graph.create_node("get_attr", name, name=name.rpartition(".")[0].replace(".", "_"))
        made.meta.update(
            tensor=TensorRef(owner, name, (8, 8), torch.float32),
            val=fake_like(mode, (8, 8), torch.float32),
            role="shared", jobs=(),
        )  # fmt: skip
        return made

    x = graph.placeholder("x")
    x.meta.update(val=fake_like(mode, (5, 8), torch.float32), role="shared", jobs=(), path="")
    w, a = stored("mlp.up.weight", "base"), stored("mlp.a.weight", "job")
    frozen = call("frozen", aten.linear.default, x, w, None, path="mlp.up")
    cast = call("cast", aten.to.dtype, x, torch.float32, path="mlp")
    down = call("down", aten.linear.default, cast, a, path="mlp.a")
    scaled = call("scaled", aten.mul.Tensor, down, 2.0, path="mlp")
    total = call("total", aten.add.Tensor, frozen, scaled, path="mlp")
    result = call("result", aten.relu.default, total, path="act")
    graph.output(result)
    propagate(graph)
    record([("", graph)], "trace", "base")
    return Small(graph)
