"""Several sites in one launch: each gets the bits that it gets alone."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.problems import nans
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile

CUT = Tile(rows=16, columns=64, depth=0, warps=4, stages=2, chunk=32, slab=32)
LENGTHS = (5, 0, 40)
#: Narrower, wider and with other ranks than the first; one has no ranks of a job.
SITES = (
    {"outer": 48, "ranks": (4, 8, 16)},
    {"outer": 16, "ranks": (20, 0, 3)},
    {"outer": 80, "ranks": (1, 2, 40)},
)
TAIL, WIDE = 64, torch.float32


def sites_of(problem):
    """Three linears on one row, drawn apart."""
    return [problem(lengths=LENGTHS, seed=seed, **own) for seed, own in enumerate(SITES)]


def launched(kind, sites, calls, extend=""):
    """Start a kernel of these sites once; `calls` are each site's arguments and the row's."""
    fields = {**sites[0].spec_fields, "dropout": False, "bias": False}
    beside = tuple(site.outer for site in sites[1:])
    tile = None if kind == "pack" else CUT
    spec = KernelSpec(kind, **fields, sites=len(sites), beside=beside, extend=extend, tile=tile)
    load(spec).launch(**calls)


def shares(site, *shape):
    """Random float32 of a site."""
    drawn = torch.Generator().manual_seed(site.outer)
    return torch.randn(*shape, generator=drawn)


def packed(sites):
    """What `pack` writes, weights' tails included."""
    a = [nans(site.packed_rows, site.inner, dtype=site.dtype) for site in sites]
    b = [nans(site.packed_rows, site.outer, dtype=site.dtype) for site in sites]
    flags = [nans(*site.flags.shape, dtype=torch.float32) for site in sites]
    tails = [nans(site.outer + TAIL, site.inner + TAIL, dtype=site.dtype) for site in sites]
    launched("pack", sites, {
        "a": [site.a for site in sites], "b": [site.b for site in sites],
        "ranks": [site.ranks for site in sites], "slots": [site.slots for site in sites],
        "jobs": sites[0].jobs, "a_packed": a, "b_packed": b, "flags": flags, "tail": tails,
        "below": [site.outer for site in sites], "beside": [site.inner for site in sites],
        "width": [TAIL] * len(sites),
    }, "tail")  # fmt: skip
    return list(zip(a, b, flags, tails, strict=True))


def passed(sites):
    """What `lora_b_backward` writes."""
    first = sites[0]
    ds = [nans(-(-site.outer // CUT.slab), site.tokens, site.width, dtype=WIDE) for site in sites]
    db = [nans(6, site.width, site.outer, dtype=WIDE) for site in sites]
    launched("lora_b_backward", sites, {
        "dy": [site.dy for site in sites], "s": [site.s for site in sites],
        "b_packed": [site.b_packed for site in sites], "segments": first.segments,
        "slots": [site.slots for site in sites], "jobs": first.jobs, "ds_parts": ds,
        "db_parts": db,
    })  # fmt: skip
    return list(zip(ds, db, strict=True))


def summed_ds(sites):
    """What `sum_ds` writes, rows behind dy included."""
    first = sites[0]
    slabs = [-(-site.outer // CUT.slab) for site in sites]
    parts = [shares(site, n, site.tokens, site.width) for site, n in zip(sites, slabs, strict=True)]
    ds = [nans(site.tokens, site.width, dtype=site.dtype) for site in sites]
    extended = [nans(site.tokens, site.outer + TAIL, dtype=site.dtype) for site in sites]
    launched("sum_ds", sites, {
        "ds_parts": parts, "flags": [site.flags for site in sites], "segments": first.segments,
        "slots": [site.slots for site in sites], "scales": [site.scales for site in sites],
        "jobs": first.jobs, "ds": ds, "ranks": [site.ranks for site in sites],
        "extended": extended, "tail_offsets": [site.outer for site in sites],
        "tail_widths": [TAIL] * len(sites),
    }, "tail")  # fmt: skip
    return list(zip(ds, extended, strict=True))


def summed_gradients(sites):
    """What `sum_gradients` writes."""
    first = sites[0]
    da, db = (
        [nans(*own.shape, dtype=WIDE) for own in each]
        for each in ([s.a for s in sites], [s.b for s in sites])
    )
    launched("sum_gradients", sites, {
        "da_parts": [shares(site, 6, site.width, site.inner) for site in sites],
        "db_parts": [shares(site, 6, site.width, site.outer) for site in sites],
        "segments": first.segments, "ranks": [site.ranks for site in sites],
        "slots": [site.slots for site in sites], "jobs": first.jobs, "da": da, "db": db,
    })  # fmt: skip
    return list(zip(da, db, strict=True))


@pytest.mark.parametrize("results", [packed, passed, summed_ds, summed_gradients])
def test_each_site_gets_what_it_gets_alone(problem, results):
    """Whatever the others' widths and ranks; what nobody writes stays as it was."""
    sites = sites_of(problem)
    together = results(sites)
    alone = [results([site])[0] for site in sites]

    for own, others in zip(together, alone, strict=True):
        for one, other in zip(own, others, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(0), other.nan_to_num(0))
            assert not one.isnan().all()
