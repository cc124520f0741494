"""`pack`: casts, pads by job, sets non-finite values aside, fills the tail of concat-K."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.problems import nans
from tlora_fx.codegen.kernels.pack import STRIP
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec

DTYPES = (torch.float16, torch.float32, torch.float64)


def packed(site, tail=None, **options):
    """a_packed, b_packed and flags of a site, poisoned before."""
    fields = {**site.spec_fields, "dropout": False, "bias": False}
    module = load(KernelSpec("pack", **fields, **options))
    a = nans(site.packed_rows, site.inner, dtype=site.dtype)
    b = nans(site.packed_rows, site.outer, dtype=site.dtype)
    flags = nans(*site.flags.shape, dtype=torch.float32)
    given = [[site.a], [site.b], [site.ranks], [site.slots], site.jobs]
    places = [] if tail is None else [[tail], *([n] for n in site.weight.shape), [64]]
    module.launch(*given, [a], [b], [flags], *places)
    return a, b, flags


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_job_is_packed_at_its_slots(problem, dtype):
    """Rows behind a job's rank, and behind the last job, are zero; flags too."""
    site = problem(ranks=(4, 0, 33), dtype=dtype, inner=40, spare_rows=3)
    a, b, flags = packed(site)

    assert torch.equal(a, site.a_packed)
    assert torch.equal(b, site.b_packed)
    assert torch.equal(flags, torch.zeros_like(flags))


def test_columns_beyond_a_strip_are_packed(problem):
    """The strips of columns that share a flag meet without a seam."""
    site = problem(ranks=(4, 8, 16), inner=STRIP + 16, outer=32)
    site.a[5, STRIP + 2] = float("inf")
    a, b, flags = packed(site)

    assert torch.equal(b, site.b_packed)
    assert torch.equal(
        torch.where(a == 0, 0, a), torch.where(site.a_packed.isinf(), 0, site.a_packed)
    )
    assert flags.isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_becomes_zero_and_a_flag(problem, value):
    """Also what overflows in the cast: only the block of that job's rows is marked."""
    site = problem(ranks=(4, 8, 16))
    site.b[6, 3] = value
    a, b, flags = packed(site)
    expected = site.b_packed.clone()
    expected[16 + 2, 3] = 0

    assert torch.equal(a, site.a_packed)
    assert torch.equal(b, expected)
    assert flags.isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("rank_block", [16, 64])
def test_the_tail_of_a_weight_holds_the_adapters_as_they_stand(problem, layout, rank_block):
    """Bᵀ beside W, A below it, zeros behind the last job's rows; W itself is left alone."""
    site = problem(ranks=(4, 0, 35), spare_rows=2, weight_layout=layout, rank_block=rank_block)
    site.a[3, 1] = float("nan")
    rows, columns = site.weight.shape
    whole = nans(rows + 64, columns + 64, dtype=site.dtype)
    packed(site, tail=whole, extend="tail")
    own = torch.arange(64)[:, None] < 39
    a = torch.where(own, torch.nn.functional.pad(site.a, (0, 0, 0, 64))[:64], 0).nan_to_num(0)
    b = torch.where(own, torch.nn.functional.pad(site.b, (0, 0, 0, 64))[:64], 0)
    below, beside = (a, b) if layout == "out_in" else (b, a)

    assert torch.equal(whole[rows:, :columns], below.to(site.dtype))
    assert torch.equal(whole[:rows, columns:], beside.to(site.dtype).t())
    assert whole[:rows, :columns].isnan().all()
