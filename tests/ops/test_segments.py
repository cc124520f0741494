"""Operators that take a row apart by jobs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.errors import SegmentError
from tlora_fx.ops import segment_read, segment_spread, segment_sum, segment_switch, segment_write

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


def bounds(*lengths):
    """Segments of jobs of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@given(lengths=LENGTHS, unit=st.integers(1, 3), dim=st.integers(0, 1))
def test_parts_read_are_the_parts_written(lengths, unit, dim):
    """Reading every job and writing it elsewhere rebuilds the row, in either dimension."""
    shape = [2, 3]
    shape[dim] = sum(lengths) * unit
    x, segments = torch.randn(shape), bounds(*lengths)
    parts = [segment_read(x, segments, job, dim) for job in range(len(lengths))]
    out = torch.zeros(shape)
    for job, part in enumerate(parts):
        out = segment_write(out, part, segments, job, dim)

    assert torch.equal(torch.cat(parts, dim), x)
    assert torch.equal(out, x)


def test_gradients_flow_through_the_part_alone():
    """gradcheck and gradgradcheck hold for read and write."""
    segments = bounds(2, 0, 3)
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def write(x, value):
        return segment_write(x, value, segments, 2, 1)

    def read(x):
        return segment_read(x, segments, 0, 1)

    assert torch.autograd.gradcheck(read, x)
    assert torch.autograd.gradgradcheck(read, x)
    assert torch.autograd.gradcheck(write, (x, value))
    assert torch.autograd.gradgradcheck(write, (x, value))


def test_results_share_no_memory_with_inputs():
    """A job that owns the whole row still gets copies."""
    x, segments = torch.randn(4, 3), bounds(4)
    part = segment_read(x, segments, 0, 0)
    whole = segment_write(x, part, segments, 0, 0)

    assert len({x.data_ptr(), part.data_ptr(), whole.data_ptr()}) == 3


def test_a_nan_stays_in_its_job():
    """Writing NaN for one job changes no bit of another's part, nor of its gradient."""
    x = torch.randn(5, 3, requires_grad=True)
    segments = bounds(2, 3)
    out = segment_write(x, torch.full((2, 3), float("nan")), segments, 0, 0)
    (dx,) = torch.autograd.grad(out[2:].sum(), x)

    assert torch.equal(out[2:], x[2:])
    assert torch.equal(dx, torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 3))


@pytest.mark.parametrize("gradient", [False, True])
def test_read_and_write_pass_opcheck(gradient):
    """Schema, fake with its unknown size, autograd and AOT dispatch hold."""
    segments = bounds(2, 3)
    x = torch.randn(5, 4, requires_grad=gradient).t()
    value = torch.randn(4, 3, requires_grad=gradient)
    torch.library.opcheck(segment_read, (x, segments, 1, 1))
    torch.library.opcheck(segment_write, (x, value, segments, 1, 1))


def test_a_switch_passes_opcheck():
    """Schema, fake and AOT dispatch hold for segment_switch."""
    table = torch.randn(1, 5, 2)
    torch.library.opcheck(
        segment_switch, (table, table + 1, torch.arange(5)[None], bounds(2, 3), 3)
    )


def test_a_long_job_switches_only_itself():
    """A job reads the long table when one of its sequences exceeds the threshold."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 0]])
    short, long = torch.zeros(1, 10, 2), torch.ones(1, 10, 2)
    out = segment_switch(short, long, positions, bounds(3, 0, 2, 5), 3)

    assert out[0, :, 0].tolist() == [0] * 5 + [1] * 5


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_other_segments_do_not_recompile(compiles):
    """One compilation of read, compute, write serves other cuts and lengths."""

    def run(x, segments):
        part = segment_read(x, segments, 1, 0)
        return segment_write(x, part.sin() * 2, segments, 1, 0)

    cuts = [(3, 4), (5, 2), (2, 7), (4, 0)]
    calls = [(torch.randn(sum(cut), 3), bounds(*cut)) for cut in cuts]

    assert compiles(run, calls) == 1


@pytest.mark.parametrize("segments", [bounds(2, 2), bounds(2, 3).float(), bounds(2, 3)[None]])
def test_segments_that_do_not_fit_are_named(segments):
    """Bounds that do not cover the row, or of another type or rank, are an error."""
    with pytest.raises(SegmentError, match="T0501"):
        segment_read(torch.randn(5, 2), segments, 0, 0)


def test_parts_that_do_not_fit_are_named():
    """A job beyond the row, a part of another size, and unequal tables are errors."""
    x, segments = torch.randn(5, 2), bounds(2, 3)
    with pytest.raises(SegmentError):
        segment_read(x, segments, 2, 0)
    with pytest.raises(SegmentError):
        segment_write(x, torch.randn(3, 2), segments, 0, 0)
    with pytest.raises(SegmentError):
        segment_switch(x, x, torch.arange(5)[None], segments, 3)


SEGMENTS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)


def test_each_job_gets_the_sum_of_its_run():
    """And a job without values gets 0."""
    assert segment_sum(torch.arange(7.0), SEGMENTS).tolist() == [3.0, 0.0, 18.0]


def test_each_row_gets_its_jobs_number():
    """Spreading is what summing is differentiated by."""
    spread = segment_spread(torch.tensor([1.0, 2.0, 3.0]), SEGMENTS, 7)

    assert spread.tolist() == [1, 1, 1, 3, 3, 3, 3]


def test_gradients_of_both():
    """gradcheck and gradgradcheck hold."""
    values = torch.randn(7, dtype=torch.float64, requires_grad=True)
    sums = torch.randn(3, dtype=torch.float64, requires_grad=True)

    for function, x in (
        (lambda v: segment_sum(v, SEGMENTS), values),
        (lambda s: segment_spread(s, SEGMENTS, 7), sums),
    ):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


def test_both_pass_torchs_own_checks():
    """Schema, fake and AOT dispatch hold."""
    torch.library.opcheck(segment_sum, (torch.randn(7, requires_grad=True), SEGMENTS))
    torch.library.opcheck(segment_spread, (torch.randn(3, requires_grad=True), SEGMENTS, 7))


def test_a_nan_stays_with_its_job():
    """The neighbours' sums are finite."""
    values = torch.arange(7.0)
    values[1] = torch.nan

    assert torch.isfinite(segment_sum(values, SEGMENTS)[1:]).all()


@pytest.mark.parametrize("rows", [6, 8, 14])
def test_segments_must_cover_the_rows(rows):
    """Twice as many rows are wrong as well: rows are no tokens of a unit."""
    with pytest.raises(SegmentError, match="cover"):
        segment_sum(torch.zeros(rows), SEGMENTS)


def test_no_values_at_all_sum_to_nothing():
    """A row without targets."""
    nothing = torch.zeros(3, dtype=torch.int32)

    assert segment_sum(torch.zeros(0), nothing).tolist() == [0.0, 0.0]
