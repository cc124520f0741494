"""`forward`: y = x Wᵀ + bias + S B, tile by tile, with the rank block of every job in a tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.problems import BOUNDS, error, nans
from tlora_fx.codegen.kernels import build, emitter
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.errors import KernelSpecError

SMALL = Tile(rows=32, columns=32, depth=16, warps=4, stages=2)
QUARTERS = Tile(rows=32, columns=64, depth=64, warps=4, stages=24)  # stages leave little space


def output(site, tile=SMALL, y=None, **options):
    """Y of a site, poisoned before. S is poisoned where nobody should read it."""
    module = load(KernelSpec("forward", **site.spec_fields, tile=tile, **options))
    y = nans(site.tokens, site.outer, dtype=site.dtype) if y is None else y
    s = site.s.clone()
    for _, own, _, slots in site.parts():
        s[own, slots.stop - slots.start :] = float("nan")
    module.launch(
        site.x, site.weight, site.bias, s, site.b_packed, site.segments, site.slots, site.jobs, y
    )
    return y


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_jobs_of_all_sizes_share_tiles(problem, dtype):
    """Empty jobs, jobs without an adapter, one token, several tiles, several jobs a tile."""
    site = problem(lengths=(1, 0, 70, 3, 9, 14), ranks=(4, 8, 16, 0, 33, 17), dtype=dtype)

    assert error(output(site), site.y64) < BOUNDS[dtype]


@pytest.mark.parametrize("rank_block", [16, 64, 128])
def test_a_rank_block_of_many_steps_is_summed(problem, rank_block):
    """Ranks of more packed rows than one step of the rank block takes."""
    site = problem(lengths=(20, 30), ranks=(100, 70), rank_block=rank_block)

    assert error(output(site), site.y64) < BOUNDS[site.dtype]


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize(("tile", "arch"), [(SMALL, 90), (QUARTERS, 90), (SMALL, 80)])
def test_edges_are_cut(problem, layout, tile, arch):
    """Sizes that no tile divides, both weight layouts, a bias, with bulk copies and without."""
    site = problem(
        lengths=(40, 5), ranks=(4, 16), inner=40, outer=72, bias=True, weight_layout=layout
    )

    assert error(output(site, tile, arch=arch), site.y64) < BOUNDS[site.dtype]


def test_the_parts_of_an_output_fit_shared_memory():
    """The tile that the test above takes for four parts is stored in four."""
    spec = KernelSpec("forward", 40, 72, dtype="float16", tile=QUARTERS)

    assert "PART = tl.constexpr(16)" in build(spec).text


def test_dropout_is_in_s_already(problem):
    """A spec that drops gives the same kernel but for its header."""
    site = problem(rates=(0.5, 0.0, 0.1))

    assert error(output(site), site.y64) < BOUNDS[site.dtype]


@pytest.mark.parametrize("arch", [80, 90])
def test_it_adds_to_what_is_there(problem, arch):
    """`accumulate` sums before it rounds."""
    site = problem()
    before = torch.randn(site.tokens, site.outer).to(site.dtype)
    y = output(site, y=before.clone(), accumulate=True, arch=arch)

    assert error(y, site.y64 + before.double()) < BOUNDS[site.dtype]


def test_rows_of_nobody_get_the_frozen_output(problem):
    """Rows behind the last segment, whatever stands in their S."""
    site = problem(lengths=(20, 25), ranks=(4, 16))
    site.segments[2] = 40
    y = output(site)

    assert error(y[:40], site.y64[:40]) < BOUNDS[site.dtype]
    assert error(y[40:], site.x[40:].double() @ site.weight64.t()) < BOUNDS[site.dtype]


def test_a_job_does_not_feel_its_neighbours(problem):
    """Bitwise: alone, moved, and beside a neighbour whose x and S hold NaN.

    The interpreter's matrix products round as they like, so sums here are exact.
    """
    alone = problem(lengths=(25,), ranks=(20,))
    pair = problem(lengths=(37, 25), ranks=(5, 20))
    for name in ("x", "weight", "s", "b_packed"):
        setattr(alone, name, (getattr(alone, name) * 4).round() / 4)
    pair.weight = alone.weight
    pair.x[37:], pair.s[37:] = alone.x, 0
    pair.x[:37], pair.s[:37] = float("nan"), float("nan")
    pair.s[37:, : alone.width] = alone.s
    pair.b_packed[pair.slots[1] : pair.slots[2]] = alone.b_packed[: alone.slots[1]]
    y = output(pair)

    assert y[:37].isnan().all()
    assert torch.equal(y[37:], output(alone))


def test_no_tokens_and_strided_rows_are_fine(problem):
    """Nothing is launched for no token; x may be a view of wider rows."""
    site = problem()
    wide = nans(site.tokens, site.inner + 16, dtype=site.dtype)
    wide[:, : site.inner] = site.x
    site.x = wide[:, : site.inner]

    assert error(output(site), site.y64) < BOUNDS[site.dtype]
    assert output(problem(lengths=(0, 0), ranks=(4, 4))).shape == (0, 48)


@pytest.mark.parametrize("kind", ["forward", "input_gradient"])
@pytest.mark.parametrize("sizes", [(4096, 14336), (1024, 1024)])
def test_all_tiles_of_a_spec_have_one_depth(kind, sizes):
    """Strict mode: the order of a sum must not depend on which tile was measured fastest."""
    spec = KernelSpec(kind, *sizes)
    tiles = emitter(kind).candidates(spec)

    assert len({tile.depth for tile in tiles}) == 1
    assert all(build(replace(spec, tile=tile)).text for tile in tiles)


def test_rows_that_bulk_copies_cannot_reach_are_refused():
    """The operators then take another plan."""
    with pytest.raises(KernelSpecError, match="multiple of 16 bytes: outer"):
        build(KernelSpec("forward", 64, 100))
