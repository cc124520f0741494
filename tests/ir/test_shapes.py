"""Shape propagation: what runs again, and what it refuses."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tlora_fx.ops  # noqa: F401  (registers the operators)
from tlora_fx.errors import GraphInvalid
from tlora_fx.ir.shapes import fake_like, propagate, segment_size

aten = torch.ops.aten
ops = torch.ops.tlora_fx


@pytest.fixture
def graph():
    """relu(x) + x for x [2, 3], propagated."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = fake_like(mode, (2, 3), torch.float32)
    relu = graph.call_function(aten.relu.default, (x,))
    graph.output(graph.call_function(aten.add.Tensor, (relu, x)))
    propagate(graph)
    return graph


def node(graph, target):
    """The node with this target."""
    return next(node for node in graph.nodes if node.target == target)


def test_an_operator_that_is_given_the_same_values_keeps_its_value(graph):
    """A second propagation of an unchanged graph makes no new values."""
    before = [node.meta.get("val") for node in graph.nodes]

    propagate(graph)

    assert all(a is b.meta.get("val") for a, b in zip(before, graph.nodes, strict=True))


def test_an_operator_that_is_given_another_value_runs_again(graph):
    """A new input changes everything behind it."""
    x = node(graph, "x")
    x.meta["val"] = fake_like(x.meta["val"].fake_mode, (5, 7), torch.float32)

    propagate(graph)

    assert node(graph, aten.add.Tensor).meta["val"].shape == (5, 7)


def test_an_operator_with_another_argument_runs_again(graph):
    """Changed numbers count as much as changed values."""
    relu = node(graph, aten.relu.default)
    relu.target = aten.sum.dim_IntList
    relu.args = (relu.args[0], [0], True)
    propagate(graph)
    relu.args = (relu.args[0], [1], True)

    propagate(graph)

    assert relu.meta["val"].shape == (2, 1)


def test_a_value_that_somebody_else_wrote_is_made_anew(graph):
    """A pass cannot put a value of its own on an operator."""
    relu = node(graph, aten.relu.default)
    relu.meta["val"] = fake_like(relu.meta["val"].fake_mode, (1,), torch.int32)

    propagate(graph)

    assert relu.meta["val"].shape == (2, 3)


@pytest.fixture
def segments():
    """A graph that reads job 0's segment of x [1, 9, 4], and what belongs to it."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    x, table = graph.placeholder("x"), graph.placeholder("segments")
    x.meta["val"] = fake_like(mode, (1, 9, 4), torch.float32)
    table.meta["val"] = fake_like(mode, (3,), torch.int32)
    read = graph.call_function(ops.segment_read.default, (x, table, 0, 1))
    return graph, x, table, read


def test_each_job_has_a_segment_size_of_its_own(segments):
    """The segment's dimension has the job's size, the others stay."""
    graph, _, _, read = segments
    graph.output(read)

    propagate(graph)

    assert read.meta["val"].shape == (1, segment_size(0), 4)


def test_a_segment_of_another_job_cannot_be_written(segments):
    """What was read as job 0 is refused where job 1 is written."""
    graph, x, table, read = segments
    graph.output(graph.call_function(ops.segment_write.default, (x, read, table, 1, 1)))

    with pytest.raises(GraphInvalid, match="does not take the values"):
        propagate(graph)


def test_segments_of_two_jobs_do_not_add(segments):
    """Values of two jobs never meet in one operator."""
    graph, x, table, read = segments
    other = graph.call_function(ops.segment_read.default, (x, table, 1, 1))
    graph.output(graph.call_function(aten.add.Tensor, (read, other)))

    with pytest.raises(GraphInvalid):
        propagate(graph)
