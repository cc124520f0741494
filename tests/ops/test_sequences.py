"""Operators that count and convolve along a packed row."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.ops import sequence_conv1d, sequence_cumsum

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


def starts(lengths):
    """Where sequences of these lengths begin."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


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


WIDTHS = st.integers(1, 4)


def drawn(*shape, seed=0, dtype=torch.float64):
    """Numbers that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def convolved_alone(x, weight, bias, dilation, groups):
    """What a model does with a sequence alone: padding on both sides, and the rest cut off."""
    reach = dilation * (weight.shape[-1] - 1)
    out = F.conv1d(x, weight, bias, padding=reach, dilation=dilation, groups=groups)
    return out[..., : x.shape[-1]]


@st.composite
def convolutions(draw):
    """Lengths of sequences, and a kernel with its bias, dilation and groups."""
    kernel, dilation, groups = draw(WIDTHS), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    inside, outside = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    lengths = st.lists(st.integers(0, kernel + 3), min_size=1, max_size=6).filter(any)
    weight = drawn(groups * outside, inside, kernel, seed=1)
    bias = drawn(groups * outside, seed=2) if draw(st.booleans()) else None
    return draw(lengths), weight, bias, dilation, groups


@given(convolutions(), st.booleans())
def test_a_row_is_convolved_as_each_sequence_alone(convolution, batched):
    """Results and all gradients, whatever the sequences' lengths."""
    lengths, weight, bias, *numbers = convolution
    channels = weight.shape[1] * numbers[1]
    x = drawn(*([1] if batched else []), channels, sum(lengths))
    learning = [value for value in (x, weight, bias) if value is not None]
    parts = [part for part in x.split(lengths, -1) if part.shape[-1]]
    alone = torch.cat([convolved_alone(part, weight, bias, *numbers) for part in parts], -1)
    row = sequence_conv1d(x, weight, bias, starts(lengths), *numbers)
    pull = drawn(*alone.shape, seed=3).detach()

    torch.testing.assert_close(row, alone, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(row, learning, pull),
        torch.autograd.grad(alone, learning, pull),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_neighbour_without_numbers_is_not_seen():
    """NaN and infinity stay in their sequence, forward and backward."""
    x, weight = drawn(1, 2, 6), drawn(2, 1, 3, seed=1).detach()
    with torch.no_grad():
        x[..., :3] = torch.tensor([torch.nan, torch.inf, torch.nan])
    row = sequence_conv1d(x, weight, None, starts([3, 3]), 1, 2)
    (gradient,) = torch.autograd.grad(row[..., 3:].sum() + row[..., :3].sum() * torch.nan, x)

    assert row[..., 3:].isfinite().all()
    assert gradient[..., 3:].isfinite().all()


def test_halves_are_rounded_once():
    """As near to the exact result as bfloat16 can say, whatever the kernel."""
    x, weight, bias = drawn(1, 4, 50), drawn(4, 1, 4, seed=1), drawn(4, seed=2)
    halves = [value.bfloat16() for value in (x, weight, bias)]
    wide = [value.double() for value in halves]
    exact = sequence_conv1d(*wide, starts([20, 30]), 1, 4)

    half = sequence_conv1d(*halves, starts([20, 30]), 1, 4)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_passes_opcheck(groups):
    """Schema, fake and AOT dispatch hold."""
    weight = drawn(4, 4 // groups, 3, seed=1)
    arguments = (drawn(1, 4, 5), weight, drawn(4, seed=2), starts([2, 3]), 1, groups)
    torch.library.opcheck(torch.ops.tlora_fx.sequence_conv1d.default, arguments)
