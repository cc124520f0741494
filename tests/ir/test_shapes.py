"""Shape propagation: what runs again, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tlora_fx.ops  # noqa: F401  (registers the operators)
from tlora_fx.errors import GraphInvalid
from tlora_fx.ir import shapes
from tlora_fx.ir.shapes import fake_like, give_value, propagate, segment_size

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


#: Operators on rows [1, T, 8], or on two of them; each with arguments behind them.
OPERATORS = {
    "linear": lambda x, y, n: (aten.linear.default, (x, fake_like(x.fake_mode, (n, 8), x.dtype))),
    "scale": lambda x, y, n: (aten.mul.Tensor, (x, 0.5 * n)),
    "add": lambda x, y, n: (aten.add.Tensor, (x, y)),
    "dropout": lambda x, y, n: (aten.dropout.default, (x, 1 / (n + 1), True)),
    "cast": lambda x, y, n: (aten.to.dtype, (x, (torch.float32, torch.float64)[n % 2])),
    "view": lambda x, y, n: (aten.view.default, (x, [x.shape[1], 8])),
    "turn": lambda x, y, n: (aten.transpose.int, (x, 1, 2)),
    "join": lambda x, y, n: (aten.cat.default, ([x] * (n + 1), 1)),
    "cut": lambda x, y, n: (aten.slice.Tensor, (x, 1, 0, x.shape[1] - n)),
    "mean": lambda x, y, n: (aten.mean.dim, (x, [n % 3], bool(n % 2))),
    "pick": lambda x, y, n: (aten.select.int, (x, 2, n)),
    "line": lambda x, y, n: (aten.full.default, ([x.shape[1], n], 0.25 * n)),
}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(OPERATORS)),
            st.sampled_from([torch.float32, torch.bfloat16]),
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_known_of_an_operator_is_what_it_gives(calls):
    """Shape, strides, dtype and device, of one job's rows, of other sizes, and of two jobs."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    for name, dtype, jobs, number in calls:
        x, y = (fake_like(mode, (1, segment_size(job), 8), dtype) for job in jobs)
        target, args = OPERATORS[name](x, y, number)
        graph = fx.Graph()
        node = graph.call_function(target, args)
        try:
            with mode:
                expected = target(*args)
        except (RuntimeError, ValueError):  # sizes of two jobs, or one that does not divide
            with pytest.raises(GraphInvalid):
                give_value(node, mode)
            continue
        give_value(node, mode)

        value = node.meta["val"]
        assert value.fake_mode is mode
        assert (value.shape, value.stride()) == (expected.shape, expected.stride())
        assert (value.dtype, value.device) == (expected.dtype, expected.device)


def test_branches_that_are_alike_are_run_once(monkeypatch):
    """Of eight jobs with one rank, the first alone is dispatched."""
    ran = []
    dispatch = shapes._dispatch
    monkeypatch.setattr(shapes, "_RESULTS", {})
    monkeypatch.setattr(shapes, "_dispatch", lambda *call: ran.append(call[0]) or dispatch(*call))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    for job in range(8):
        x = graph.placeholder(f"x{job}")
        x.meta["val"] = fake_like(mode, (1, segment_size(job), 64), torch.bfloat16)
        a, b = (graph.placeholder(f"{name}{job}") for name in "ab")
        a.meta["val"] = fake_like(mode, (4, 64), torch.bfloat16)
        b.meta["val"] = fake_like(mode, (32, 4), torch.bfloat16)
        down = graph.call_function(aten.linear.default, (x, a))
        up = graph.call_function(aten.linear.default, (down, b))
        graph.call_function(aten.mul.Tensor, (up, 1.0 + job))

    propagate(graph)

    assert ran == [aten.linear.default, aten.linear.default, aten.mul.Tensor]
    assert node(graph, aten.mul.Tensor).meta["val"].shape == (1, segment_size(0), 32)
    assert [*graph.nodes][-1].meta["val"].shape == (1, segment_size(7), 32)


def test_sizes_that_follow_from_values_are_others_each_time():
    """Of two tensors of one form each has as many places as its values say."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
    x = graph.placeholder("x")
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    x.meta["val"] = mode.from_tensor(
        torch.ones(6), symbolic_context=dynamic, source=ConstantSource("x")
    )
    others = [graph.call_function(op, (x,)) for op in (aten.neg.default, aten.neg.default)]
    found = [graph.call_function(aten.nonzero.default, (each,)) for each in (x, *others)]
    graph.output(tuple(found))
    propagate(graph)

    sizes = {each.meta["val"].shape[0].node.expr for each in found}
    assert len(sizes) == 3
    assert len({each.meta["val"].shape[0].node.expr for each in (x, *others)}) == 1
