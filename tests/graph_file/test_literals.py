"""Arguments and tags survive the text form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.pipeline.graphs import relu_of, small_graph
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.ir.graph import AdapterSite, TensorRef
from tlora_fx.passes.lower_adapters import LoraBranch

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.text(max_size=5),
    st.complex_numbers(),
    st.sampled_from(
        [
            torch.bfloat16,
            torch.int64,
            torch.strided,
            torch.channels_last,
            torch.contiguous_format,
            torch.device("cpu"),
            torch.device("cuda", 1),
            ...,
            slice(None, 3, None),
            TensorRef("base", "a.weight", (2, 3), torch.float16),
            AdapterSite("a.b", 4, 0.5, 0.1),
        ]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def there_and_back(value, graph=None):
    """As a tag of a graph's node."""
    graph = graph or small_graph()
    relu_of(graph).meta["it"] = value
    return relu_of(graphs_of_text(graph_text(graph))).meta["it"]


@given(VALUES)
def test_any_argument_is_read_as_it_was(value):
    """Types too: a tuple stays one, 1.0 is no 1, NaN is NaN."""
    assert repr(there_and_back(value)) == repr(value)


def test_nodes_inside_arguments_stay_nodes():
    """At any depth, in tags and in what passes leave on nodes."""
    graph = small_graph()
    x = relu_of(graph).args[0]
    relu_of(graph).meta["it"] = (x, [{"x": x}], LoraBranch(0, x, x, 2.0, 0.1))

    read = relu_of(graphs_of_text(graph_text(graph)))

    (own,) = read.args
    assert read.meta["it"] == (own, [{"x": own}], LoraBranch(0, own, own, 2.0, 0.1))


def test_a_node_that_a_pass_erased_is_still_told_of():
    """With its tags, among which it may stand itself."""
    graph = small_graph()
    relu = relu_of(graph)
    with graph.root.inserting_before(relu):
        gone = graph.root.call_function(torch.ops.aten.sin.default, (relu.args[0],))
    gone.meta.update(role="backbone", jobs=(), me=gone)
    graph.root.erase_node(gone)
    relu.meta["was"] = [gone, gone]

    text = graph_text(graph)
    one, two = relu_of(graphs_of_text(text)).meta["was"]

    assert one is two
    assert (one.name, one.target, one.meta["me"]) == (gone.name, gone.target, one)
    assert graph_text(graphs_of_text(text)) == text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fake_tensor_keeps_its_device(device):
    """Model code makes scalars on the CPU while it is traced."""
    with FakeTensorMode():
        value = torch.full((), 2.0, dtype=torch.float64, device=device)

    read = there_and_back(value)

    assert isinstance(read, FakeTensor)
    assert (read.device, read.dtype, read.shape) == (value.device, value.dtype, value.shape)
