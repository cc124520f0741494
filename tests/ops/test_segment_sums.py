"""Numbers a job from values a row, and back."""

import pytest
import torch

from tlora_fx.errors import SegmentError
from tlora_fx.ops import segment_spread, segment_sum

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
