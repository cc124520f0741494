"""Kernel `expand`: the adapters' part of an output, alone."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.problems import BOUNDS, error, nans
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile

TILE = Tile(rows=16, columns=32, depth=0, warps=4, stages=1, slab=64)


def spec_of(site, outer, **changed):
    fields = site.spec_fields | {"outer": outer, "bias": False, "dropout": False, "tile": TILE}
    return KernelSpec("expand", **(fields | changed))


def test_y_is_s_times_b_and_bias(problem):
    """Jobs of one token, of none, without adapter, of two rank blocks; 80 columns in two slabs."""
    site = problem((1, 0, 37, 3, 20), (4, 8, 0, 20, 16), outer=80, bias=True)
    y = nans(site.tokens, 80, dtype=site.dtype)

    load(spec_of(site, 80, bias=True)).launch(
        site.s, site.b_packed, site.bias, site.segments, site.slots, None, None, site.jobs, y
    )

    assert error(y, site.expand(site.s, site.b_packed) + site.bias.double()) < BOUNDS[site.dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("inner", [64, 96, 72], ids=["words", "ragged words", "bytes"])
def test_dx_is_masked_by_the_bits(problem, dtype, accumulate, inner):
    """Bits count where the job drops; bytes of other jobs' rows are not looked at."""
    site = problem((20, 5, 9), (4, 20, 0), (0.25, 0.0, 0.05), inner=inner, dtype=dtype)
    bits = site.bits.clone()
    bits[20:25] = 0xA5
    before = torch.randn(site.tokens, inner, dtype=torch.float64).to(dtype)
    dx = before.clone() if accumulate else nans(site.tokens, inner, dtype=dtype)

    load(spec_of(site, inner, dropout=True, accumulate=accumulate)).launch(
        site.ds,
        site.a_packed,
        None,
        site.segments,
        site.slots,
        site.thresholds,
        bits,
        site.jobs,
        dx,
    )

    expected = torch.where(site.keep, site.expand(site.ds, site.a_packed), 0.0)
    assert error(dx, expected + before.double() * accumulate) < BOUNDS[dtype]
    if accumulate:
        assert torch.equal(dx[25:], before[25:])


def test_the_parts_of_several_sites_are_summed(problem):
    """Each site's part is masked by its own bits before the sum."""
    row = {"lengths": (18, 3, 9), "inner": 32}
    sites = [
        problem(ranks=(4, 0, 16), rates=(0.5, 0.0, 0.0), site=1, seed=1, **row),
        problem(ranks=(20, 2, 0), rates=(0.25, 0.0, 0.5), site=2, seed=2, **row),
    ]
    one = sites[0]
    dx = nans(one.tokens, 32, dtype=one.dtype)

    load(spec_of(one, 32, dropout=True, sites=2)).launch(
        [site.ds for site in sites],
        [site.a_packed for site in sites],
        None,
        one.segments,
        [site.slots for site in sites],
        [site.thresholds for site in sites],
        [site.bits for site in sites],
        one.jobs,
        dx,
    )

    expected = sum(
        torch.where(site.keep, site.expand(site.ds, site.a_packed), 0.0) for site in sites
    )
    assert error(dx, expected) < BOUNDS[one.dtype]


def test_nan_stays_in_its_job(problem):
    """A job's NaN rows of S leave the neighbours in its tile bitwise alone."""
    site = problem((9, 20, 4), (4, 20, 8), outer=32)
    found = []
    for poison in (False, True):
        s, y = site.s.clone(), nans(site.tokens, 32, dtype=site.dtype)
        s[9:29] = float("nan") if poison else s[9:29]
        load(spec_of(site, 32)).launch(
            s, site.b_packed, None, site.segments, site.slots, None, None, site.jobs, y
        )
        found.append(y)

    clean, poisoned = found
    assert torch.all(poisoned[9:29].isnan())
    poisoned[9:29] = clean[9:29]
    assert torch.equal(poisoned, clean)


def test_rows_of_no_job_are_zero(problem):
    """Where segments end before the tokens do, y is still written."""
    site = problem((9, 40), (4, 8), outer=32)
    y = nans(site.tokens, 32, dtype=site.dtype)
    segments = torch.tensor([0, 9, 20], dtype=torch.int32)

    load(spec_of(site, 32)).launch(
        site.s, site.b_packed, None, segments, site.slots, None, None, site.jobs, y
    )

    assert error(y[:20], site.expand(site.s, site.b_packed)[:20]) < BOUNDS[site.dtype]
    assert torch.all(y[20:] == 0)
