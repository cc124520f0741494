"""Operators that count along a packed row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_fx.ops import sequence_cumsum

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


def starts(lengths):
    """Where sequences of these lengths begin."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@settings(deadline=None, max_examples=60)
@given(
    lengths=LENGTHS,
    dim=st.integers(0, 2),
    kind=st.sampled_from([torch.int64, torch.int32, torch.bool]),
)
def test_a_row_is_counted_as_each_sequence_alone(lengths, dim, kind):
    """In any dimension; sequences of no tokens, which fill rows up, count nothing."""
    shape = [2, 3, 2]
    shape[dim] = sum(lengths)
    high = 2 if kind is torch.bool else 1 << 30
    x = torch.randint(-high, high, shape).to(kind)
    alone = [part.cumsum(dim) for part in x.split(lengths, dim)]

    assert torch.equal(sequence_cumsum(x, starts(lengths), dim), torch.cat(alone, dim))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_it_passes_opcheck(kind):
    """Schema, fake and AOT dispatch hold, for a transposed value too."""
    x = torch.randint(0, 2, (5, 4)).to(kind).t()
    torch.library.opcheck(sequence_cumsum, (x, starts([2, 3]), 1))
