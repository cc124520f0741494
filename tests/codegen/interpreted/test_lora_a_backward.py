"""`lora_a_backward`: shares of da of all sites that read x, in one read of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.problems import BOUNDS, error, nans
from tlora_fx.codegen.kernels import settled
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile

CHUNK = 32
SMALL = Tile(rows=16, columns=32, depth=0, warps=4, stages=2, chunk=CHUNK)
DTYPES = (torch.float16, torch.float32, torch.float64)


def passed(sites, x=None, bits=None, tile=SMALL):
    """Shares of da of each site, poisoned before; the first site's x and row tables serve all."""
    first = sites[0]
    fields = {**first.spec_fields, "bias": False, "dropout": any(any(s.rates) for s in sites)}
    module = load(KernelSpec("lora_a_backward", **fields, sites=len(sites), tile=tile))
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    chunks = -(-first.tokens // tile.chunk) + first.jobs
    parts = [nans(chunks, site.width, site.inner, dtype=wide) for site in sites]
    module.launch(
        first.x if x is None else x,
        [site.ds for site in sites],
        bits or [site.bits for site in sites],
        first.segments,
        [site.slots for site in sites],
        [site.thresholds for site in sites],
        first.jobs,
        parts,
    )
    return parts


def summed(site, da, chunk=CHUNK):
    """da [R, I] from the shares that are a job's."""
    total = torch.zeros(len(site.a), site.inner, dtype=torch.float64)
    first = 0
    for _, own, ranks, _ in site.parts():
        chunks = -(-(own.stop - own.start) // chunk)
        rank = ranks.stop - ranks.start
        if rank:
            total[ranks] = da[first : first + chunks, :rank].double().sum(0)
        first += chunks
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_shares_sum_up_to_the_gradient(problem, dtype, rate):
    """Segments of no, one and several chunks; a job without an adapter; ragged columns."""
    rates = (rate, 0.0, rate, 0.0, 0.9 * rate)
    site = problem(
        lengths=(1, 0, 70, 32, 9), ranks=(4, 8, 16, 0, 3), rates=rates, inner=44, dtype=dtype
    )
    assert error(summed(site, *passed([site])), site.da64) < BOUNDS[dtype]


def test_bits_of_jobs_that_drop_nothing_are_ignored(problem):
    """The kernel that draws them need not write them."""
    site = problem(lengths=(20, 33), ranks=(4, 5), rates=(0.5, 0.0), inner=32)
    bits = site.bits.clone()
    bits[20:] = 0

    assert error(summed(site, *passed([site], bits=[bits])), site.da64) < BOUNDS[site.dtype]


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_sites_share_one_read_of_x(problem, rate):
    """Each with its own ranks, masks, widths and jobs without an adapter; x has a stride."""
    rates = (rate, 0.0, rate)
    sites = [
        problem(lengths=(9, 40, 3), ranks=ranks, rates=rates, inner=40, site=number)
        for number, ranks in enumerate([(4, 0, 40), (16, 5, 0), (0, 0, 7)])
    ]
    for site in sites:
        site.x = sites[0].x
    wide = torch.cat([sites[0].x, nans(52, 24, dtype=torch.float16)], 1)

    for site, da in zip(sites, passed(sites, x=wide[:, :40]), strict=True):
        assert error(summed(site, da), site.da64) < BOUNDS[site.dtype]
        if 0 in site.ranks_of[:1]:
            assert da[0].isnan().all()


@pytest.mark.parametrize("rank_block", [16, 64])
def test_the_usual_tile_gives_the_same_gradient(problem, rank_block):
    """The rule's tile, with dropout."""
    site = problem(lengths=(70, 3), ranks=(16, 7), rates=(0.1, 0.1), rank_block=rank_block)
    tile = settled(KernelSpec("lora_a_backward", inner=32, outer=48, rank_block=rank_block)).cut
    da = summed(site, *passed([site], tile=tile), chunk=tile.chunk)

    assert error(da, site.da64) < BOUNDS[site.dtype]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_job_is_blind_to_its_neighbours(problem, value):
    """What is not finite in one job's x leaves the others' bits as they were."""
    site = problem(lengths=(7, 40, 11), ranks=(4, 8, 16), rates=(0.2, 0.2, 0.0))
    before = summed(site, *passed([site]))
    x = site.x.clone()
    x[7:47] = value
    after = summed(site, *passed([site], x=x))

    for own in (slice(0, 4), slice(12, 28)):
        assert torch.equal(before[own], after[own])
    assert not after[4:12].isfinite().any()


def test_what_dropout_drops_may_be_anything(problem):
    """A dropped NaN is no NaN in the gradient: it is masked, not multiplied away."""
    site = problem(lengths=(20,), ranks=(4,), rates=(0.5,))
    poisoned = torch.where(site.keep, site.x, float("nan"))

    assert torch.equal(*(summed(site, *passed([site], x=x)) for x in (site.x, poisoned)))


def test_a_job_alone_has_the_bits_that_it_has_in_company(problem):
    """Chunks and steps are counted from the segment's start."""
    lengths, ranks = (7, 45, 11), (4, 8, 16)
    site = problem(lengths=lengths, ranks=ranks)
    together = summed(site, *passed([site]))
    for job, own, rows, _ in site.parts():
        alone = problem(lengths=(lengths[job],), ranks=(ranks[job],))
        alone.x = site.x[own]
        alone.__dict__["ds"] = site.ds[own]

        assert torch.equal(summed(alone, *passed([alone])), together[rows])


def whole(sites, chunk=CHUNK, before=None):
    """da and db of each site, poisoned before; its shares of db are drawn.

    before   what each site's da is added to; db is left to `lora_b_backward` then
    """
    first = sites[0]
    beside = tuple(site.outer for site in sites[1:])
    fields = {**first.spec_fields, "bias": False, "dropout": any(any(s.rates) for s in sites)}
    tile = replace(SMALL, chunk=chunk)
    spec = KernelSpec(
        "lora_a_backward", **fields, sites=len(sites), beside=beside, whole=True, tile=tile,
        accumulate=before is not None,
    )  # fmt: skip
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    drawn = torch.Generator().manual_seed(1)
    shares = [
        torch.randn(first.jobs + 1, site.width, site.outer, generator=drawn).to(wide)
        for site in sites
    ]
    da, db = (
        [nans(*own.shape, dtype=own.dtype) for own in each]
        for each in ([site.a for site in sites], [site.b for site in sites])
    )
    written = [shares, db]
    if before is not None:
        da, written = [own.clone() for own in before], []
    load(spec).launch(
        first.x, [site.ds for site in sites], [site.bits for site in sites], first.segments,
        None, [site.thresholds for site in sites], first.jobs, [site.ranks for site in sites],
        da, *written,
    )  # fmt: skip
    return list(zip(da, db, shares, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_gradients_of_jobs_of_one_chunk_leave_whole(problem, dtype, rate):
    """Jobs without tokens, or without a rank, and rows of nobody; db is each job's one share."""
    ranks = ((4, 8, 16, 0, 3), (20, 3, 0, 1, 5))
    sites = [
        problem(
            lengths=(1, 0, 32, 9, 2), ranks=own, rates=(rate, 0.0, rate, 0.0, rate), inner=44,
            outer=outer, dtype=dtype, adapter_dtype=dtype, spare_rows=37, seed=seed,
        )
        for seed, (own, outer) in enumerate(zip(ranks, (48, 16), strict=True))
    ]  # fmt: skip
    sites[1].x, sites[1].site = sites[0].x, sites[0].site + 1

    for site, (da, db, shares) in zip(sites, whole(sites), strict=True):
        expected, chunk = torch.zeros_like(site.b), 0
        for _, own, rows, _ in site.parts():
            if own.start < own.stop:
                expected[rows] = shares[chunk, : rows.stop - rows.start].to(db.dtype)
                chunk += 1
        assert error(da, site.da64) < BOUNDS[dtype]
        assert torch.equal(db, expected)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_whole_gradients_are_added_as_a_sum_behind_them_adds_them(problem, rate):
    """To the bits of PyTorch; rows of jobs without tokens and of nobody stay, NaN or not."""
    ranks = ((4, 8, 16, 0, 3), (20, 3, 0, 1, 5))
    sites = [
        problem(
            lengths=(1, 0, 32, 9, 2), ranks=own, rates=(rate, 0.0, rate, 0.0, rate), inner=44,
            outer=outer, spare_rows=37, seed=seed,
        )
        for seed, (own, outer) in enumerate(zip(ranks, (48, 16), strict=True))
    ]  # fmt: skip
    sites[1].x, sites[1].site = sites[0].x, sites[0].site + 1
    before = [torch.randn_like(site.a) for site in sites]
    for gradient, (first, empty, *_) in zip(before, ranks, strict=True):
        gradient[first : first + empty] = gradient[-37:] = float("nan")
    alone, added = whole(sites), whole(sites, before=before)

    for own, (one, _, _), (two, db, _) in zip(before, alone, added, strict=True):
        torch.testing.assert_close(two, own + one, rtol=0, atol=0, equal_nan=True)
        assert db.isnan().all()


def test_a_whole_gradient_has_the_bits_of_its_shares(problem):
    """A row of few tokens trains a job as a longer one does."""
    site = problem(lengths=(30, 7), ranks=(16, 5), inner=64)
    (da, _, _), (shares,) = whole([site])[0], passed([site])

    for chunk, (_, _, rows, _) in enumerate(site.parts()):
        assert torch.equal(da[rows], shares[chunk, : rows.stop - rows.start])
