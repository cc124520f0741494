"""Arguments survive JSON."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tlora_fx.graph_file.codec import Decoder, Encoder
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


def there_and_back(value, places=()):
    """Through JSON, with these nodes known."""
    encoder = Encoder()
    data = encoder.encode(value, lambda node: {"node": places.index(node)})
    text = json.dumps(data, allow_nan=False)
    decoder = Decoder(encoder.modes.symbols, encoder.origins)
    return decoder.decode(json.loads(text), lambda kind, place: places[place])


@given(VALUES)
def test_any_argument_is_read_as_it_was(value):
    """Types too: a tuple stays one, 1.0 is no 1, NaN is NaN."""
    assert repr(there_and_back(value)) == repr(value)


def test_nodes_inside_arguments_stay_nodes():
    """At any depth, and in what passes leave on nodes."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    branch = LoraBranch(0, a, b, 2.0, 0.1)

    read = there_and_back((a, [{"x": b}], branch), [a, b])

    assert read[0] is a
    assert read[1][0]["x"] is b
    assert read[2] == branch


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fake_tensor_keeps_its_device(device):
    """Model code makes scalars on the CPU while it is traced."""
    with FakeTensorMode():
        value = torch.full((), 2.0, dtype=torch.float64, device=device)

    read = there_and_back(value)

    assert isinstance(read, FakeTensor)
    assert (read.device, read.dtype, read.shape) == (value.device, value.dtype, value.shape)
