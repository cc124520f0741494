"""`sum_ds` and `sum_gradients`: shares added up in a fixed order."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.problems import BOUNDS, error, nans
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile

SLAB, CHUNK = 16, 32
DTYPES = (torch.float16, torch.float32, torch.float64)


def wide(site):
    """The type of shares."""
    return torch.float64 if site.dtype == torch.float64 else torch.float32


def shares_of_ds(site):
    """Random shares [slabs, M, W] of what is a job's, NaN elsewhere, and their sum, scaled."""
    slabs = -(-site.outer // SLAB)
    parts = nans(slabs, site.tokens, site.width, dtype=wide(site))
    total = torch.zeros(site.tokens, site.width, dtype=torch.float64)
    for job, own, _, slots in site.parts():
        columns = slice(0, slots.stop - slots.start)
        drawn = torch.randn(slabs, *total[own, columns].shape, dtype=torch.float64)
        parts[:, own, columns] = drawn.to(parts.dtype)
        total[own, columns] = drawn.sum(0) * site.scales[job].double()
    return parts, total


def summed_ds(site, parts, flags=None, extended=None):
    """dS of a site, poisoned before."""
    fields = {**site.spec_fields, "dropout": False, "bias": False}
    tile = Tile(rows=8, columns=site.rank_block, depth=0, warps=4, stages=1, slab=SLAB)
    extend = "" if extended is None else "tail"
    module = load(KernelSpec("sum_ds", **fields, extend=extend, tile=tile))
    ds = nans(site.tokens, site.width, dtype=site.dtype)
    tables = site.segments, [site.slots], [site.scales], site.jobs
    given = site.flags if flags is None else flags
    module.launch([parts], [given], *tables, [ds], [site.ranks], [extended], [32], [64])
    return ds


@pytest.mark.parametrize("dtype", DTYPES)
def test_ds_is_the_scaled_sum_of_its_slabs(problem, dtype):
    """With zeros behind a job's ranks and in rows of jobs without an adapter."""
    site = problem(lengths=(5, 0, 21, 9, 1), ranks=(4, 8, 40, 0, 3), outer=72, dtype=dtype)
    parts, total = shares_of_ds(site)
    ds = summed_ds(site, parts)

    assert error(ds, total) < BOUNDS[dtype]
    assert not ds[total == 0].any()


def test_rows_of_no_job_are_zero(problem):
    """Segments that end before the rows do."""
    site = problem(lengths=(5, 9), ranks=(4, 8))
    parts, total = shares_of_ds(site)
    site.segments[2] = 11
    ds = summed_ds(site, parts)

    assert error(ds[:11], total[:11]) < BOUNDS[site.dtype]
    assert not ds[11:].any()


def test_a_flag_spoils_all_of_its_job(problem):
    """Whatever block and strip it is of; neighbours keep their bits."""
    site = problem(lengths=(5, 20, 4), ranks=(4, 40, 3), inner=2064)
    parts, _ = shares_of_ds(site)
    good = summed_ds(site, parts)
    flags = site.flags.clone()
    flags[3, 1] = float("nan")  # The job's third block, A's second strip.
    ds = summed_ds(site, parts, flags)
    others = torch.cat([torch.arange(5), torch.arange(25, 29)])

    assert ds[5:25, :48].isnan().all()
    assert torch.equal(ds[others], good[others])


def test_the_tail_of_dy_holds_each_job_at_its_ranks(problem):
    """And zeros in all of the others' columns; dy stays as it is."""
    site = problem(lengths=(5, 20, 4, 3), ranks=(4, 40, 0, 3), outer=32, spare_rows=2)
    parts, _ = shares_of_ds(site)
    extended = nans(site.tokens, 32 + 64, dtype=site.dtype)
    ds = summed_ds(site, parts, extended=extended)
    expected = torch.zeros(site.tokens, 64, dtype=site.dtype)
    for _, own, ranks, _ in site.parts():
        expected[own, ranks] = ds[own, : ranks.stop - ranks.start]

    assert torch.equal(extended[:, 32:], expected)
    assert extended[:, :32].isnan().all()
    assert torch.equal(ds, summed_ds(site, parts))


def summed_gradients(site, da_parts, db_parts, before=None):
    """Da and db of a site, poisoned before, or added to what is given."""
    fields = {**site.spec_fields, "dropout": False, "bias": False}
    tile = Tile(rows=4, columns=64, depth=0, warps=4, stages=1, chunk=CHUNK)
    adds = before is not None
    module = load(KernelSpec("sum_gradients", **fields, accumulate=adds, tile=tile))
    da, db = (nans(*like.shape, dtype=like.dtype) for like in (site.a, site.b))
    if adds:
        da, db = (given.clone() for given in before)
    tables = site.segments, [site.ranks], [site.slots], site.jobs
    module.launch([da_parts], [db_parts], *tables, [da], [db])
    return da, db


def shares_of_gradients(site, columns):
    """Random shares [C, W, columns] of what is a job's, NaN elsewhere, and their sum."""
    drawn = torch.Generator().manual_seed(columns)
    chunks = -(-site.tokens // CHUNK) + site.jobs
    parts = nans(chunks, site.width, columns, dtype=wide(site))
    total = torch.zeros(len(site.a), columns, dtype=torch.float64)
    first = 0
    for _, own, ranks, _ in site.parts():
        end = first - (own.start - own.stop) // CHUNK
        rank = ranks.stop - ranks.start
        if rank:
            own_parts = torch.randn(end - first, rank, columns, generator=drawn).double()
            parts[first:end, :rank] = own_parts.to(parts.dtype)
            total[ranks] = own_parts.sum(0)
        first = end
    return parts, total


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
    ],
)
def test_gradients_are_the_sums_of_their_chunks(problem, dtype, adapter_dtype):
    """With zeros in rows of jobs without tokens and of nobody."""
    site = problem(
        lengths=(1, 0, 300, 32, 33),
        ranks=(2, 3, 17, 0, 1),
        inner=72,
        outer=24,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        spare_rows=2,
    )
    (da_parts, da), (db_parts, db) = (shares_of_gradients(site, n) for n in (72, 24))
    found = summed_gradients(site, da_parts, db_parts)
    bound = max(BOUNDS[dtype], BOUNDS[adapter_dtype])

    assert error(found[0], da) < bound
    assert error(found[1], db) < bound
    for rows in (slice(2, 5), slice(23, 25)):
        assert not found[0][rows].any()
        assert not found[1][rows].any()


@pytest.mark.parametrize("adapter_dtype", [torch.float16, torch.float32, torch.float64])
def test_gradients_are_added_as_a_sum_behind_them_adds_them(problem, adapter_dtype):
    """To the bits of PyTorch; rows of jobs without tokens and of nobody stay, NaN or not."""
    site = problem(
        lengths=(1, 0, 300, 32, 33),
        ranks=(2, 3, 17, 0, 1),
        inner=72,
        outer=24,
        dtype=torch.float32,
        adapter_dtype=adapter_dtype,
        spare_rows=2,
    )
    parts = [shares_of_gradients(site, columns)[0] for columns in (72, 24)]
    before = [torch.randn(like.shape).to(like.dtype) for like in (site.a, site.b)]
    for own in before:
        own[2:5] = own[23:] = float("nan")
    found = summed_gradients(site, *parts, before=before)

    for one, own, alone in zip(found, before, summed_gradients(site, *parts), strict=True):
        torch.testing.assert_close(one, own + alone, rtol=0, atol=0, equal_nan=True)


def test_a_jobs_sum_does_not_depend_on_where_it_stands(problem):
    """The first job of a row and the last of another have equal bits."""
    front = problem(lengths=(300, 40), ranks=(5, 3), inner=32, outer=32)
    back = problem(lengths=(40, 300), ranks=(3, 5), inner=32, outer=32)
    parts = torch.randn(10, 16, 32)
    others = torch.zeros(2, 16, 32)
    spare = torch.zeros(1, 16, 32)
    first = summed_gradients(front, *[torch.cat([parts, others, spare])] * 2)
    last = summed_gradients(back, *[torch.cat([others, parts, spare])] * 2)

    assert torch.equal(first[0][:5], last[0][3:])
    assert torch.equal(first[1][:5], last[1][3:])
