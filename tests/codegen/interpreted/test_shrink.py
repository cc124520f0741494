"""Kernel `shrink`: S, dropout's bits, and the rows of concat-K."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.codegen.problems import BOUNDS, error, nans
from tests.sampled import sampled
from tlora_fx.codegen.kernels import shrink
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.errors import KernelSpecError
from tlora_fx.ops.dropout import keep_rows

TILE = Tile(rows=16, columns=32, depth=32, warps=4, stages=2)


def spec_of(site, **changed):
    fields = site.spec_fields | {"bias": False, "weight_layout": "out_in", "tile": TILE} | changed
    return KernelSpec("shrink", **fields)


def shrunk(spec, sites, **extended):
    """S and bits of sites that share the first one's x and row."""
    one = sites[0]
    s = [nans(one.tokens, site.width, dtype=site.dtype) for site in sites]
    bits = [torch.full((one.tokens, one.inner // 8), 0xA5, dtype=torch.uint8) for _ in sites]
    load(spec).launch(
        extended.pop("x", one.x),
        [site.a_packed for site in sites],
        [site.flags for site in sites],
        one.segments,
        one.keys,
        one.token_index,
        [site.slots for site in sites],
        [site.scales for site in sites],
        [site.thresholds for site in sites],
        [site.site for site in sites],
        one.jobs,
        s,
        bits,
        **extended,
    )
    return s, bits


def rows_of(site, job):
    return slice(*site.segments[job : job + 2].tolist())


def sharing(problem, sites, **given):
    """Sites that read one x in one row, each with adapters and masks of its own."""
    made = [problem(**site, **given, site=100 + k, seed=k) for k, site in enumerate(sites)]
    for site in made:
        site.x = made[0].x
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_s_is_the_scaled_product(problem, dtype):
    """Jobs of one token, of none, without adapter, of a rank wider than a block: all S."""
    site = problem((1, 0, 37, 3, 20), (4, 8, 0, 20, 16), dtype=dtype, inner=64)

    (s,), _ = shrunk(spec_of(site), [site])

    assert error(s, site.s64) < BOUNDS[dtype]
    assert torch.all(s[rows_of(site, 0), 16:] == 0)
    assert torch.all(s[rows_of(site, 2)] == 0)


@pytest.mark.parametrize(("rows", "depth"), [(16, 32), (32, 64)])
def test_dropout_draws_the_masks_of_the_operators(problem, rows, depth):
    """Bits are those of `keep_rows`, and S is that of the dropped x; 80 is no multiple of 64."""
    site = problem((20, 5, 9), (4, 16, 3), (0.25, 0.0, 0.05), inner=80)
    tile = Tile(rows=rows, columns=32, depth=depth, warps=4, stages=2)

    (s,), (bits,) = shrunk(spec_of(site, tile=tile), [site])

    for job in (0, 2):
        assert torch.equal(bits[rows_of(site, job)], site.bits[rows_of(site, job)])
    assert error(s, site.s64) < BOUNDS[site.dtype]


def test_keys_use_all_32_bits(problem):
    """Seeds, steps and token indices above 2**31 draw what the operators draw."""
    site = problem((9,), (4,), (0.5,), inner=32)
    site.keys = torch.tensor([[-5, -(2**31)]], dtype=torch.int32)
    key = tuple(word & 0xFFFFFFFF for word in site.keys[0].tolist())
    expected = keep_bits(site, key)

    _, (bits,) = shrunk(spec_of(site), [site])

    assert torch.equal(bits, expected)


def test_a_piece_of_the_columns_draws_its_part_of_the_masks(problem):
    """The number of a site says in its upper bits with which eight columns x begins."""
    lengths, ranks, rates = (20, 5, 9), (4, 16, 3), (0.25, 0.0, 0.05)
    whole = problem(lengths, ranks, rates, inner=96)
    piece = problem(lengths, ranks, rates, inner=48, site=whole.site | 6 << 32)

    (s,), (bits,) = shrunk(spec_of(piece), [piece])

    for job in (0, 2):
        assert torch.equal(bits[rows_of(piece, job)], whole.bits[rows_of(piece, job)][:, 6:])
    assert error(s, piece.s64) < BOUNDS[piece.dtype]


def keep_bits(site, key):
    keep = keep_rows(site.token_index.long(), 32, int(site.thresholds[0]), key, site.site)
    return (keep.view(-1, 4, 8).int() << torch.arange(8)).sum(-1).to(torch.uint8)


@pytest.mark.parametrize("rank_block", [16, 64])
def test_ranks_beyond_one_panel(problem, rank_block):
    """Ranks of three panels read x again; each job stops at its own width."""
    ranks = (5 * rank_block - 3, 4, rank_block + 1)
    site = problem((18, 7, 5), ranks, (0.1, 0.0, 0.1), inner=32, rank_block=rank_block)
    tile = Tile(rows=16, columns=2 * rank_block, depth=32, warps=4, stages=2)

    (s,), (bits,) = shrunk(spec_of(site, tile=tile), [site])

    assert error(s, site.s64) < BOUNDS[site.dtype]
    assert torch.equal(bits[rows_of(site, 0)], site.bits[rows_of(site, 0)])


def test_several_sites_share_one_read(problem):
    """Three sites with their own ranks, widths, rates and masks."""
    sites = sharing(
        problem,
        [
            {"ranks": (4, 0, 16), "rates": (0.1, 0.0, 0.5)},
            {"ranks": (20, 3, 0), "rates": (0.2, 0.0, 0.5)},
            {"ranks": (0, 8, 2), "rates": (0.0, 0.0, 0.25)},
        ],
        lengths=(17, 5, 20),
        inner=32,
    )

    s, bits = shrunk(spec_of(sites[0], sites=3, dropout=True), sites)

    for k, site in enumerate(sites):
        assert error(s[k], site.s64) < BOUNDS[site.dtype]
        for job in (0, 2):
            assert torch.equal(bits[k][rows_of(site, job)], site.bits[rows_of(site, job)])


@pytest.mark.parametrize("extend", ["tail", "copy"])
def test_stacked_s_stands_behind_x(problem, extend):
    """Each job's S at its ranks, zeros in all other columns of the tail, x before it."""
    sites = sharing(
        problem,
        [{"ranks": (4, 0, 16)}, {"ranks": (20, 0, 0)}],
        lengths=(17, 5, 20),
        inner=48,
    )
    one = sites[0]
    extended = nans(one.tokens, 48 + 128, dtype=one.dtype)
    if extend == "tail":
        extended[:, :48] = one.x

    s, _ = shrunk(
        spec_of(one, sites=2, extend=extend),
        sites,
        x=extended[:, :48] if extend == "tail" else one.x,
        extended=extended,
        ranks=[site.ranks for site in sites],
        tail_offsets=[0, 64],
        tail_widths=[64, 64],
    )

    assert torch.equal(extended[:, :48], one.x)
    for k, site in enumerate(sites):
        stacked = torch.zeros(one.tokens, 64, dtype=one.dtype)
        for _, own, ranks, _ in site.parts():
            stacked[own, ranks] = s[k][own, : ranks.stop - ranks.start]
        assert torch.equal(extended[:, 48 + 64 * k :][:, :64], stacked)


def test_a_flagged_job_is_nan_and_no_other(problem):
    """A flag of a job's block makes its S NaN within its width, and nothing else."""
    site = problem((9, 20, 4), (4, 20, 8), inner=32)
    clean, _ = shrunk(spec_of(site), [site])
    site.flags[int(site.slots[1]) // 16 + 1, 1] = float("nan")

    (s,), _ = shrunk(spec_of(site), [site])

    own = rows_of(site, 1)
    assert torch.all(s[own].isnan())
    s[own] = clean[0][own]
    assert torch.equal(s, clean[0])


def test_a_job_is_bitwise_the_same_alone(problem):
    """NaN tokens of neighbours in the same rows' tiles change nothing, nor does their absence."""
    site = problem((21, 35, 2), (8, 20, 4), (0.1, 0.1, 0.1), inner=64)
    own, slots = rows_of(site, 1), site.slots[1:3]
    site.x[: own.start] = float("nan")
    site.x[own.stop :] = float("nan")
    (s,), (bits,) = shrunk(spec_of(site), [site])

    alone = problem((35,), (20,), (0.1,), inner=64)
    alone.x, alone.keys, alone.token_index = site.x[own], site.keys[1:2], site.token_index[own]
    alone.scales = site.scales[1:2]
    alone.a_packed = site.a_packed[slice(*slots.tolist())]
    (s_alone,), (bits_alone,) = shrunk(spec_of(site), [alone])

    assert torch.equal(s[own], s_alone)
    assert torch.equal(bits[own], bits_alone)


def test_rows_of_no_job_are_zero(problem):
    """Where segments end before the tokens do, S is still written."""
    site = problem((9, 40), (4, 8), inner=32)
    expected = site.s64.clone()
    expected[20:] = 0
    site.segments = torch.tensor([0, 9, 20], dtype=torch.int32)

    (s,), _ = shrunk(spec_of(site), [site])

    assert error(s, expected) < BOUNDS[site.dtype]
    assert torch.all(s[20:] == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("extend", ["", "tail", "copy"])
def test_shares_of_columns_add_up_to_s(problem, dtype, extend):
    """With `tile.slab` and `finish`: as one program would, masks, flags and tail included."""
    site = problem(
        (20, 5, 9, 0, 3), (4, 20, 3, 8, 0), (0.25, 0.0, 0.05, 0.1, 0.1), inner=80, dtype=dtype
    )
    spec = spec_of(site, extend=extend, tile=Tile(16, 16, 32, 4, 2, slab=32))
    shares = nans(3, site.tokens, site.width, dtype=torch.promote_types(dtype, torch.float32))
    bits = torch.full((site.tokens, 10), 0xA5, dtype=torch.uint8)
    extended = nans(site.tokens, 80 + 64, dtype=dtype)
    s = nans(site.tokens, site.width, dtype=dtype)
    site.flags[int(site.slots[2]) // 16, 0] = float("nan")

    load(spec).launch(
        site.x, [site.a_packed], [site.flags], site.segments, site.keys, site.token_index,
        [site.slots], [site.scales], [site.thresholds], [site.site], site.jobs, [shares], [bits],
        extended=extended,
    )  # fmt: skip
    load(shrink.finish(spec)).launch(
        [shares], [site.flags], site.segments, [site.slots], [site.scales], site.jobs, [s],
        [site.ranks], [extended], [80], [64],
    )  # fmt: skip

    others = [*range(25), *range(34, 37)]
    for job in (0, 2):
        assert torch.equal(bits[rows_of(site, job)], site.bits[rows_of(site, job)])
    assert error(s[others], site.s64[others]) < BOUNDS[dtype]
    assert s[25:34, :16].isnan().all()
    assert torch.equal(extended[:, :80], site.x) or extend != "copy"
    for _, own, ranks, _ in site.parts():
        stacked = torch.zeros(own.stop - own.start, 64, dtype=dtype)
        stacked[:, ranks] = s[own, : ranks.stop - ranks.start]
        assert extend == "" or torch.equal(extended[own, 80:].nan_to_num(7), stacked.nan_to_num(7))


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def gates(site, activation):
    """A gate and a value beside it, in rows that hold both and more; x is nowhere yet."""
    drawn = torch.randn(
        site.tokens, 2 * site.inner + 16, generator=torch.Generator().manual_seed(5)
    )
    both = drawn.to(site.dtype)
    gate, up = both[:, : site.inner], both[:, site.inner : 2 * site.inner]
    return gate, up, ACTIVATIONS[activation](gate.double()) * up.double()


@pytest.mark.parametrize("slab", [0, 32], ids=["whole", "shares"])
@pytest.mark.parametrize("extend", ["", "tail"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", sampled(ACTIVATIONS))
def test_a_gated_x_is_made_on_the_way(problem, activation, dtype, extend, slab):
    """For all jobs' rows, wide ranks and none, masks and flags; S is that of the x it wrote."""
    site = problem(
        (20, 5, 9, 0, 3), (40, 8, 3, 8, 0), (0.25, 0.0, 0.05, 0.1, 0.1), inner=80, dtype=dtype
    )
    gate, up, x64 = gates(site, activation)
    site.x = x64.to(dtype)  # its S and masks are the reference
    tile = Tile(16, 16, 32, 4, 2, slab=slab)
    spec = spec_of(site, extend=extend, gated=activation, tile=tile)
    extended = nans(site.tokens, 80 + 64, dtype=dtype)
    s = nans(site.tokens, site.width, dtype=dtype)
    shares = nans(3, site.tokens, site.width, dtype=torch.promote_types(dtype, torch.float32))
    bits = torch.full((site.tokens, 10), 0xA5, dtype=torch.uint8)
    behind = ([site.ranks], [0], [64])

    load(spec).launch(
        extended[:, :80], [site.a_packed], [site.flags], site.segments, site.keys, site.token_index,
        [site.slots], [site.scales], [site.thresholds], [site.site], site.jobs,
        [shares if slab else s], [bits], extended, *behind, gate=gate, up=up,
    )  # fmt: skip
    if slab:
        load(shrink.finish(spec)).launch(
            [shares], [site.flags], site.segments, [site.slots], [site.scales], site.jobs, [s],
            [site.ranks], [extended], [80], [64],
        )  # fmt: skip

    # A rounding of the compute type away, where sums round otherwise.
    assert error(extended[:, :80], x64) < BOUNDS[dtype]
    assert error(s, site.s64) < 2 * BOUNDS[dtype]
    for job in (0, 2, 3):
        assert torch.equal(bits[rows_of(site, job)], site.bits[rows_of(site, job)])
    for _, own, ranks, _ in site.parts():
        stacked = torch.zeros(own.stop - own.start, 64, dtype=dtype)
        stacked[:, ranks] = s[own, : ranks.stop - ranks.start]
        assert extend == "" or torch.equal(extended[own, 80:], stacked)


def test_a_gated_job_is_bitwise_the_same_alone(problem):
    """NaN in neighbours' gates changes nothing, nor does the neighbours' absence."""
    site = problem((21, 35, 2), (8, 20, 4), inner=64)
    own, slots = rows_of(site, 1), site.slots[1:3]
    gate, up, _ = gates(site, "silu")
    gate[: own.start] = float("nan")
    up[own.stop :] = float("nan")
    alone = problem((35,), (20,), inner=64)
    alone.scales, alone.a_packed = site.scales[1:2], site.a_packed[slice(*slots.tolist())]
    spec, made = spec_of(site, gated="silu"), []
    for one, rows in ((site, slice(None)), (alone, own)):
        one.x = nans(one.tokens, 64, dtype=one.dtype)
        (s,), _ = shrunk(spec, [one], gate=gate[rows], up=up[rows])
        made.append((one.x, s))

    for together, by_itself in zip(*made, strict=True):
        assert torch.equal(together[own], by_itself)


def test_its_rule_takes_slabs_of_a_wide_x():
    """What a program does with activations takes longer than a whole row may."""
    spec = KernelSpec("shrink", 14336, 4096, gated="silu", extend="tail")
    for tokens in (1, 160, 2048, 4800, 16384):
        assert 0 < shrink.tile_for(spec, tokens, 16).slab < spec.inner
    assert shrink.default_tile(spec) == shrink.tile_for(spec, 8192, 32)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"gated": "relu"}, "relu"),
        ({"gated": "silu", "sites": 2}, "silu"),
        ({"gated": "silu", "extend": "copy"}, "silu"),
        ({"gated": "silu", "kind": "expand"}, "silu"),
    ],
    ids=["activation", "sites", "copy", "kind"],
)
def test_what_cannot_be_gated_is_refused(changed, found):
    """Only x of one site that is made where it stands."""
    with pytest.raises(KernelSpecError, match=found):
        replace(KernelSpec("shrink", 32, 32), **changed)
