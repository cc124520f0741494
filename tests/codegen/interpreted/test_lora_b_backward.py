"""`lora_b_backward`: shares of dS and db in one read of dy, by chunk of tokens and slab."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.problems import BOUNDS, error, nans
from tlora_fx.codegen.kernels import settled
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile

CHUNK, SLAB = 32, 32
SMALL = Tile(rows=16, columns=SLAB, depth=0, warps=4, stages=2, chunk=CHUNK, slab=SLAB)
DTYPES = (torch.float16, torch.float32, torch.float64)


def passed(site, dy=None, extended=None, tile=SMALL):
    """Shares of dS and of db of a site, poisoned before."""
    fields = {**site.spec_fields, "dropout": False, "bias": False}
    extend = "" if extended is None else "copy"
    module = load(KernelSpec("lora_b_backward", **fields, extend=extend, tile=tile))
    wide = torch.float64 if site.dtype == torch.float64 else torch.float32
    slabs = -(-site.outer // tile.slab)
    chunks = -(-site.tokens // tile.chunk) + site.jobs
    ds = nans(slabs, site.tokens, site.width, dtype=wide)
    db = nans(chunks, site.width, site.outer, dtype=wide)
    given = site.dy if dy is None else dy
    tables = site.segments, [site.slots], site.jobs
    module.launch([given], [site.s], [site.b_packed], *tables, [ds], [db], [extended])
    return ds, db


def added(site, before, extended=None, tile=SMALL):
    """Shares of dS, poisoned before, and what db was added to."""
    fields = {**site.spec_fields, "dropout": False, "bias": False}
    extend = "" if extended is None else "copy"
    spec = KernelSpec("lora_b_backward", **fields, extend=extend, accumulate=True, tile=tile)
    wide = torch.float64 if site.dtype == torch.float64 else torch.float32
    ds = nans(-(-site.outer // tile.slab), site.tokens, site.width, dtype=wide)
    db, tables = before.clone(), (site.segments, [site.slots], site.jobs)
    load(spec).launch(
        [site.dy], [site.s], [site.b_packed], *tables, [ds], [site.ranks], [db], [extended]
    )
    return ds, db


def summed(site, ds, db, chunk=CHUNK):
    """dS [M, W], not scaled, and db [R, O], from the shares that are a job's."""
    low = torch.zeros(site.tokens, site.width, dtype=torch.float64)
    high = torch.zeros(len(site.b), site.outer, dtype=torch.float64)
    first = 0
    for _, own, ranks, slots in site.parts():
        chunks = -(-(own.stop - own.start) // chunk)
        width = slots.stop - slots.start
        if width:
            low[own, :width] = ds[:, own, :width].double().sum(0)
            rank = ranks.stop - ranks.start
            high[ranks] = db[first : first + chunks, :rank].double().sum(0)
        first += chunks
    return low, high


def unscaled(site):
    """Float64 dS before its scale."""
    result = torch.zeros(site.tokens, site.width, dtype=torch.float64)
    for _, own, _, slots in site.parts():
        product = site.dy[own].double() @ site.b_packed[slots].double().t()
        result[own, : product.shape[1]] = product
    return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_sum_up_to_both_products(problem, dtype):
    """Segments of no, one, a chunk's and more tokens; a job without an adapter; ragged columns."""
    site = problem(lengths=(1, 0, 70, 32, 9), ranks=(4, 8, 16, 0, 3), outer=72, dtype=dtype)
    low, high = summed(site, *passed(site))

    assert error(low, unscaled(site)) < BOUNDS[dtype]
    assert error(high, site.db64) < BOUNDS[dtype]


def test_ranks_beyond_a_block_are_passed_too(problem):
    """Ranks of three blocks beside ranks of one."""
    site = problem(lengths=(20, 33), ranks=(40, 5), outer=64)
    low, high = summed(site, *passed(site))

    assert error(low, unscaled(site)) < BOUNDS[site.dtype]
    assert error(high, site.db64) < BOUNDS[site.dtype]


@pytest.mark.parametrize("rank_block", [16, 64])
def test_the_usual_tile_gives_the_same_products(problem, rank_block):
    """The rule's tile: dS leaves in halves at 16 ranks and whole at 64."""
    site = problem(lengths=(70, 3), ranks=(16, 7), outer=80, rank_block=rank_block)
    tile = settled(KernelSpec("lora_b_backward", inner=32, outer=80, rank_block=rank_block)).cut
    low, high = summed(site, *passed(site, tile=tile), chunk=tile.chunk)

    assert error(low, unscaled(site)) < BOUNDS[site.dtype]
    assert error(high, site.db64) < BOUNDS[site.dtype]


def test_a_copy_holds_every_row_of_dy(problem):
    """Also rows of jobs without an adapter; nothing is written behind them; strides are obeyed."""
    site = problem(lengths=(5, 40, 18), ranks=(4, 0, 20), outer=48)
    extended = nans(site.tokens, 48 + 64, dtype=site.dtype)
    wide = torch.cat([site.dy, nans(site.tokens, 16, dtype=site.dtype)], 1)
    ds, db = passed(site, dy=wide[:, :48], extended=extended)
    low, high = summed(site, ds, db)

    assert torch.equal(extended[:, :48], site.dy)
    assert ds[:, 5:45].isnan().all()
    assert db[1:3].isnan().all()
    assert extended[:, 48:].isnan().all()
    assert error(low, unscaled(site)) < BOUNDS[site.dtype]
    assert error(high, site.db64) < BOUNDS[site.dtype]


def test_nothing_is_written_for_jobs_without_an_adapter(problem):
    """Their chunks and rows keep the poison."""
    site = problem(lengths=(20, 40), ranks=(4, 0), outer=32)
    ds, db = passed(site)

    assert ds[:, 20:].isnan().all()
    assert db[1:].isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_job_is_blind_to_its_neighbours(problem, value):
    """What is not finite in one job's dy leaves the others' bits as they were."""
    site = problem(lengths=(7, 40, 11), ranks=(4, 8, 16), outer=32)
    before = summed(site, *passed(site))
    dy = site.dy.clone()
    dy[7:47] = value
    after = summed(site, *passed(site, dy=dy))
    others = torch.cat([torch.arange(7), torch.arange(47, 58)])

    assert torch.equal(before[0][others], after[0][others])
    for own in (slice(0, 4), slice(12, 28)):
        assert torch.equal(before[1][own], after[1][own])
    assert not after[1][4:12].isfinite().any()


def test_a_job_alone_has_the_bits_that_it_has_in_company(problem):
    """Chunks and steps are counted from the segment's start."""
    lengths, ranks = (7, 45, 11), (4, 8, 16)
    site = problem(lengths=lengths, ranks=ranks, outer=32)
    low, high = summed(site, *passed(site))
    for job, own, rows, _ in site.parts():
        alone = problem(lengths=(lengths[job],), ranks=(ranks[job],), outer=32)
        alone.dy, alone.b = site.dy[own], site.b[rows]
        alone.__dict__["s"] = site.s[own]
        own_low, own_high = summed(alone, *passed(alone))

        assert torch.equal(own_low, low[own])
        assert torch.equal(own_high, high[rows])


@pytest.mark.parametrize("copies", [False, True], ids=["", "copy"])
@pytest.mark.parametrize("outer", [64, 72])
@pytest.mark.parametrize("ranks", [(4, 8, 16, 0, 3), (20, 3, 0, 1, 40)], ids=["block", "blocks"])
def test_whole_gradients_are_added_as_a_sum_behind_them_adds_them(problem, ranks, outer, copies):
    """To the bits of PyTorch; rows of jobs without tokens and of nobody stay, NaN or not."""
    site = problem(lengths=(1, 0, 32, 9, 2), ranks=ranks, outer=outer, spare_rows=37)
    before = torch.randn_like(site.b)
    before[ranks[0] : sum(ranks[:2])] = before[-37:] = float("nan")
    extended = nans(site.tokens, outer + 64, dtype=site.dtype) if copies else None
    ds, db = passed(site)
    expected, chunk = before.clone(), 0
    for _, own, rows, _ in site.parts():
        if own.start < own.stop:
            expected[rows] += db[chunk, : rows.stop - rows.start]
            chunk += 1
    found, gradient = added(site, before, extended)

    torch.testing.assert_close(gradient, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found, ds, rtol=0, atol=0, equal_nan=True)


def test_what_is_added_is_rounded_to_the_type_of_adapters_first(problem):
    """As autograd gives a gradient of this type, and adds it to the one that there is."""
    site = problem(lengths=(30, 7), ranks=(16, 5), adapter_dtype=torch.float16, outer=64)
    before = torch.randn(site.b.shape, dtype=torch.float32).to(site.b.dtype)
    _, db = passed(site)
    expected = before.clone()
    for chunk, (_, _, rows, _) in enumerate(site.parts()):
        expected[rows] += db[chunk, : rows.stop - rows.start].to(before.dtype)

    assert torch.equal(added(site, before)[1], expected)
