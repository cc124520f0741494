"""`input_gradient`: dx = dy W + mask ∘ (dS A), the rank block masked before W's part."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.problems import BOUNDS, error, nans
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile

SMALL = Tile(rows=32, columns=32, depth=16, warps=4, stages=2)
RATES = (0.5, 0.0, 0.1, 0.9)
JOBS = {"lengths": (40, 9, 1, 20), "ranks": (4, 16, 33, 8)}


def gradient(site, dx=None, **options):
    """Dx of a site, poisoned before. Bits and dS are poisoned where nobody should read them."""
    module = load(KernelSpec("input_gradient", **site.spec_fields, tile=SMALL, **options))
    dx = nans(site.tokens, site.inner, dtype=site.dtype) if dx is None else dx
    ds, bits = site.ds.clone(), site.bits.clone()
    for job, own, _, slots in site.parts():
        ds[own, slots.stop - slots.start :] = float("nan")
        if not site.thresholds[job]:
            bits[own] = 0
    tables = (site.segments, site.slots, site.thresholds, bits, site.jobs)
    module.launch(site.dy, site.weight, ds, site.a_packed, *tables, dx)
    return dx


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rates", [None, RATES])
def test_branches_are_masked_and_the_frozen_part_is_not(problem, dtype, rates):
    """Jobs that drop and jobs that do not share tiles."""
    site = problem(**JOBS, rates=rates, dtype=dtype)

    assert error(gradient(site), site.dx64) < BOUNDS[dtype]


@pytest.mark.parametrize("inner", [64, 72])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("arch", [80, 90])
def test_masks_of_whole_and_of_broken_words_are_read(problem, inner, layout, arch):
    """Rows of bits that are whole int32 words, and rows that are only whole bytes."""
    site = problem(**JOBS, rates=RATES, inner=inner, outer=40, weight_layout=layout)

    assert error(gradient(site, arch=arch), site.dx64) < BOUNDS[site.dtype]


def test_the_bias_has_no_part_in_it(problem):
    """A spec with a bias gives the same kernel but for its header."""
    site = problem(**JOBS, bias=True, rank_block=64)

    assert error(gradient(site), site.dx64) < BOUNDS[site.dtype]


def test_it_adds_to_what_is_there(problem):
    """What is there is neither masked nor rounded before it is added."""
    site = problem(**JOBS, rates=RATES)
    before = torch.randn(site.tokens, site.inner).to(site.dtype)
    dx = gradient(site, dx=before.clone(), accumulate=True)

    assert error(dx, site.dx64 + before.double()) < BOUNDS[site.dtype]


def test_a_nan_stays_with_its_job(problem):
    """Bitwise: a job of NaN leaves the others in its tile as they are."""
    site = problem(**JOBS, rates=RATES)
    clean = gradient(site)
    site.dy[40:49], site.ds[40:49] = float("nan"), float("nan")
    dx = gradient(site)

    assert dx[40:49].isnan().all()
    assert torch.equal(dx[:40], clean[:40])
    assert torch.equal(dx[49:], clean[49:])
