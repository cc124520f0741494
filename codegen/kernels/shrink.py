"""S = scale * drop(x) Aᵀ of every job in one read of x, and dropout's bits.

A program takes one tile of rows of one segment and all columns of x, in a fixed order, so a token's
row of S depends on nothing but its job. For few tokens, or where masks take time, those are few
programs that each wait long: with `tile.slab` a program takes so many columns of x and leaves a
share of S, which the `sum_s` of `finish` adds up, scales and rounds. Tiles are counted from the
segment's start; jobs without adapters only write zeros. Ranks up to `tile.columns` share one read
of x, each further `tile.columns` read it again.

Decisions are drawn here once for every (token, eight columns), applied to x in registers and
stored as one bit each. Bits of jobs that drop nothing are not written, and readers branch on the
threshold as this kernel does.

Several sites share one read of x, each with its own adapters, masks and S. With `extend` the rows
of S also go behind x, job j's columns at ranks[j], for the GEMM of concat-K.

With `gated` x is not there yet: it is made here, activation(gate) * up, rounded and stored, also
for jobs without adapters. Made by a kernel of its own, x would be read back at once. Such programs
always take a slab of columns: activations keep a program busy, so a GPU wants many.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from itertools import starmap
from textwrap import indent
from typing import NamedTuple

from tlora_fx.codegen.kernels import sums
from tlora_fx.codegen.spec import Extend, KernelSpec, Tile, shared_bytes
from tlora_fx.codegen.template import common_values, constants_of, fill, module, part_type, size
from tlora_fx.errors import KernelSpecError

# Tokens up to which tiles of all columns are too few for an H200; drawing masks takes longer.
_FEW, _FEW_MASKED = 4096, 6144
# Above it tiles of 64 rows are programs enough.
_VERY_FEW = 768
# Columns of the shares that programs with masks leave of more tokens than that.
_LARGE_SHARE = 2048
# Rows, warps and stages of a tile that tuning tries.
_TRIED = ((16, 4, 4), (16, 4, 6), (32, 4, 4), (32, 4, 6), (32, 8, 4), (64, 4, 3), (64, 8, 3))


_BODY = '''
@triton.jit
def project(
    x,
    x_stride,
    #? gated [
    gate,
    gate_stride,
    up,
    up_stride,
    #]
    row,  # int64 [ROWS]
    inside,  # [ROWS], of the job's rows
    begin,  # first rank of this panel
    share,  # first column of x  #? split
    # Of the following, an entry a site.
    a,
    first,
    width,
    scale,  #? not split
    faults,  #? not split
    s,
    s_stride,
    #? dropout [
    threshold,
    site,
    octet,
    bits,
    # For all sites again.
    token,  # uint32 [ROWS]
    seed,
    step,
    #]
    #? copy [
    extended,
    extended_stride,
    #]
    DROPS: tl.constexpr,  #? dropout
):
    """Ranks begin:begin + PANEL of S of each site for one tile of rows."""
    ranks = begin + tl.arange(0, PANEL)
    sums = ()
    for _ in tl.static_range(SITES):
        sums = sums + (tl.zeros((ROWS, PANEL), $wide),)
    for column in range(0, INNER, DEPTH):  #? not split
    for place in range(0, SLAB, DEPTH):  #? split
        column = share + place  #? split
        columns = column + tl.arange(0, DEPTH)
        here = inside[:, None]  #? not ragged
        here = inside[:, None] & (columns < INNER)[None, :]  #? ragged
        at_x = x + row[:, None] * x_stride + columns[None, :]
        tile = tl.load(at_x, mask=here, other=0.0)  #? not gated
        #? gated [
        at_gate = gate + row[:, None] * gate_stride + columns[None, :]
        at_up = up + row[:, None] * up_stride + columns[None, :]
        g = tl.load(at_gate, mask=here, other=0.0).to($wide)
        u = tl.load(at_up, mask=here, other=0.0).to($wide)
        exponent = -g  #? silu
        exponent = -1.5957691216057308 * (g + 0.044715 * g * g * g)  #? not silu
        tile = (g / (1 + tl.exp(exponent)) * u).to(tl.$dtype)
        tile = computed_once(tile, COMPILED)  #? short
        tl.store(at_x, tile, mask=here & (begin == 0))
        #]
        #? copy [
        to = extended + row[:, None] * extended_stride + columns[None, :]
        tl.store(to, tile, mask=here & (begin == 0))
        #]
        longer = ()
        for k in tl.static_range(SITES):
            where = (first[k] + ranks).to(tl.int64)[:, None] * INNER + columns[None, :]
            owned = (ranks < width[k])[:, None]  #? not ragged
            owned = (ranks < width[k])[:, None] & (columns < INNER)[None, :]  #? ragged
            a_tile = tl.load(a[k] + where, mask=owned, other=0.0)
            kept = tile
            #? dropout [
            if DROPS:
                byte = column // 8 + tl.arange(0, DEPTH // 8)
                counter = (octet[k] + byte).to(tl.uint32)[None, :]
                number = site[k].to(tl.uint32)
                drawn = draw_bits(token[:, None], counter, number, seed, step, threshold[k])
                fresh = inside[:, None] & (begin == 0)  #? not ragged
                fresh = inside[:, None] & (byte < BYTES)[None, :] & (begin == 0)  #? ragged
                to = bits[k] + row[:, None] * BYTES + byte[None, :]
                tl.store(to, drawn.to(tl.uint8), mask=fresh)
                kept = tl.where(spread_bits(drawn, ROWS, DEPTH // 8), tile, 0.0)
            #]
            longer = longer + (tl.dot(kept, tl.trans(a_tile), sums[k]$precision),)
        sums = longer
    for k in tl.static_range(SITES):
        #? split [
        written = inside[:, None] & (ranks < width[k])[None, :]
        tl.store(s[k] + row[:, None] * s_stride[k] + ranks[None, :], sums[k], mask=written)
        #]
        #? not split [
        # Ranks that this job has not are zero, whatever its neighbours hold.
        value = tl.where((ranks < width[k])[None, :], sums[k] * scale[k] + tl.sum(faults[k]), 0.0)
        value = value.to(tl.$dtype)
        written = inside[:, None] & (ranks < s_stride[k])[None, :]
        tl.store(s[k] + row[:, None] * s_stride[k] + ranks[None, :], value, mask=written)
        #]


#? tails [
@triton.jit
def extend(target, stride, width, s, s_stride, row, inside, before, rank):
    """The tile's rows of S as columns before:before + rank of a tail of `width`, zeros beside."""
    for column in range(0, width, 32):
        columns = column + tl.arange(0, 32)
        own = columns - before
        mine = inside[:, None] & ((own >= 0) & (own < rank))[None, :]
        value = tl.load(s + row[:, None] * s_stride + own[None, :], mask=mine, other=0.0)
        within = inside[:, None] & (columns < width)[None, :]
        tl.store(target + row[:, None] * stride + columns[None, :], value, mask=within)


#]
@triton.jit(
    do_not_specialize=[
        "tokens",
        "jobs",
        "strips_$k",  #* whole_sites
        "site_$k",  #* dropout_sites
        "octet_$k",  #* dropout_sites
    ],
    do_not_specialize_on_alignment=[
        "segments",
        #* sites [
        "slots_$k",
        "scales_$k",  #? not split
        "thresholds_$k",  #? dropout
        "ranks_$k",  #? tails
        #]
        "keys",  #? dropout
        "token_index",  #? dropout
    ],
)
def kernel(
    x,  # [tokens, INNER]
    x_stride,
    #? gated [
    gate,  # [tokens, INNER]
    gate_stride,
    up,  # [tokens, INNER]
    up_stride,
    #]
    tokens,
    segments,  # [jobs + 1]
    jobs,
    #* sites [
    a_$k,  # [P, INNER]
    flags_$k,  # [P / RANK_BLOCK, strips]  #? not split
    strips_$k,  #? not split
    slots_$k,  # [jobs + 1]
    scales_$k,  # [jobs]  #? not split
    s_$k,  # [tokens, s_stride]  #? not split
    s_$k,  # [shares, tokens, s_stride]  #? split
    s_stride_$k,
    #? dropout [
    thresholds_$k,  # [jobs]
    site_$k,
    octet_$k,  # where column 0 stands in the site's own input, in eights
    bits_$k,  # [tokens, BYTES]
    #]
    #? tails [
    ranks_$k,  # [jobs + 1]
    tail_$k,  # first column of this site's tail in `extended`
    tail_width_$k,
    #]
    #]
    #? dropout [
    keys,  # [jobs, 2]
    token_index,  # [tokens]
    #]
    #? extended [
    extended,  # [tokens, extended_stride]
    extended_stride,
    #]
):
    start_next(OVERLAP)  #? overlap
    a = $each_a
    slots = $each_slots
    s = $each_s
    s_stride = $each_s_stride
    #? not split [
    flags = $each_flags
    strips = $each_strips
    scales = $each_scales
    #]
    #? dropout [
    thresholds = $each_thresholds
    site = $each_site
    octet = $each_octet
    bits = $each_bits
    #]
    #? tails [
    bounds = $each_ranks
    tail = $each_tail
    tail_width = $each_tail_width
    #]
    job, place = segment_tile(tl.program_id(0), segments, jobs, ROWS, JOBS)
    owned = job < jobs
    # Rows behind the last segment count as a job without adapters.
    start = tl.load(segments + job) + place * ROWS
    end = tl.load(segments + job + 1, mask=owned, other=tokens)
    first, width = (), ()
    scale = ()  #? not split
    threshold = ()  #? dropout
    before, rank = (), ()  #? tails
    for k in tl.static_range(SITES):
        least = tl.load(slots[k] + job, mask=owned, other=0)
        first = first + (least,)
        width = width + (tl.load(slots[k] + job + 1, mask=owned, other=0) - least,)
        scale = scale + (tl.load(scales[k] + job, mask=owned, other=0.0),)  #? not split
        #? dropout [
        threshold = threshold + (tl.load(thresholds[k] + job, mask=owned, other=0),)
        #]
        #? tails [
        least = tl.load(bounds[k] + job, mask=owned, other=0)
        before = before + (least,)
        rank = rank + (tl.load(bounds[k] + job + 1, mask=owned, other=0) - least,)
        #]
    #? dropout [
    seed = tl.load(keys + 2 * job, mask=owned, other=0).to(tl.uint32)
    step = tl.load(keys + 2 * job + 1, mask=owned, other=0).to(tl.uint32)
    #]
    await_previous(OVERLAP)  #? overlap
    if start >= end:
        return
    rows = start + tl.arange(0, ROWS)
    inside = rows < end
    row = rows.to(tl.int64)
    #? split [
    share = tl.program_id(1)
    shares = ()
    for k in tl.static_range(SITES):
        shares = shares + (s[k] + share.to(tl.int64) * tokens * s_stride[k],)
    s = shares
    share *= SLAB
    #]
    #? not split [
    faults = ()
    for k in tl.static_range(SITES):
        behind = first[k] + width[k]
        faults = faults + (fault_flags(flags[k], first[k], behind, strips[k], RANK_BLOCK),)
    #]
    widest = width[0]
    drops = threshold[0] > 0  #? dropout
    for k in tl.static_range(1, SITES):
        widest = tl.maximum(widest, width[k])
        drops = drops | (threshold[k] > 0)  #? dropout
    token = tl.load(token_index + rows, mask=inside, other=0).to(tl.uint32)  #? dropout
$dispatch
    #? not split [
    done = tl.cdiv($least, PANEL) * PANEL
    for k in tl.static_range(SITES):
        for column in range(done, s_stride[k], RANK_BLOCK):
            to = s[k] + row[:, None] * s_stride[k] + column + tl.arange(0, RANK_BLOCK)[None, :]
            tl.store(to, tl.zeros((ROWS, RANK_BLOCK), tl.$dtype), mask=inside[:, None])
    #]
    #? tails [
    # S is read back by other threads than wrote it: a job's first column may lie anywhere, and a
    # 16-byte store may not.
    tl.debug_barrier()
    for k in tl.static_range(SITES):
        extend(
            extended + tail[k],
            extended_stride,
            tail_width[k],
            s[k],
            s_stride[k],
            row,
            inside,
            before[k],
            rank[k],
        )
    #]


def launch(
    x,
    a_packed,
    flags,
    segments,
    keys,
    token_index,
    slots,
    scales,
    thresholds,
    sites,
    jobs,
    s,
    bits,
    extended=None,
    ranks=None,
    tail_offsets=None,
    tail_widths=None,
    gate=None,
    up=None,
):
    """Fill $s_name$and_bits$and_tail of $count.

    x             [M, $inner] in $dtype, elements of a row contiguous$made
    a_packed      per site [P, $inner] in $dtype
    flags         $flags_doc
    segments      int32 [jobs + 1]
    keys          int32 [jobs, 2]$unread
    token_index   int32 [M]$unread
    slots         per site int32 [jobs + 1]
    scales        per site float32 [jobs]$unscaled
    thresholds    per site int32 [jobs]$unread
    sites         per site its number; bits from 32 on count the eights of columns before x's first
                  where x is a piece of the site's input$unread
    s             $s_doc
    bits          $bits_doc
    extended      $extended_doc
    ranks         per site int32 [jobs + 1]$untailed
    tail_offsets  per site its tail's first column, counted from column $inner; multiples of 16
                  spare a compilation$untailed
    tail_widths   per site its tail's columns, written whole; alike$untailed
    gate, up      $gate_doc
    """
    tokens = x.shape[0]
    grid = (triton.cdiv(tokens, $rows) + jobs, $slabs)
    if tokens > 0:
        kernel[grid](
            x,
            x.stride(0),
            #? gated [
            gate,
            gate.stride(0),
            up,
            up.stride(0),
            #]
            tokens,
            segments,
            jobs,
            #* sites [
            a_packed[$k],
            flags[$k],  #? not split
            flags[$k].shape[1],  #? not split
            slots[$k],
            scales[$k],  #? not split
            s[$k],
            s[$k].shape[-1],
            #? dropout [
            thresholds[$k],
            sites[$k] & 0x7FFFFFFF,
            sites[$k] >> 32,
            bits[$k],
            #]
            #? tails [
            ranks[$k],
            $inner + tail_offsets[$k],
            tail_widths[$k],
            #]
            #]
            #? dropout [
            keys,
            token_index,
            #]
            #? extended [
            extended,
            extended.stride(0),
            #]
            **META,
        )
'''

# Runs for the dropout of the tile's job, or without any.
_CALL = """
for begin in range(0, $least, PANEL):
    project(
        x,
        x_stride,
        #? gated [
        gate,
        gate_stride,
        up,
        up_stride,
        #]
        row,
        inside,
        begin,
        share,  #? split
        a,
        first,
        width,
        scale,  #? not split
        faults,  #? not split
        s,
        s_stride,
        #? dropout [
        threshold,
        site,
        octet,
        bits,
        token,
        seed,
        step,
        #]
        #? copy [
        extended,
        extended_stride,
        #]
        drawn,  #? dropout
    )
"""

# Arguments of the kernel that each site has; Triton takes them one by one.
_OF_SITES = (
    "a slots s s_stride flags strips scales thresholds site octet bits ranks tail tail_width"
)


class _Rule(NamedTuple):
    """A line of the table of tiles: the specs that it fits, and their tile.

    wide     whether ranks come in blocks of more than 16
    below    architectures before this one
    blocks   rank blocks of a panel
    """

    wide: Collection[bool]
    dropout: Collection[bool]
    sites: Collection[int]
    extend: Collection[str]
    below: int
    rows: int
    blocks: int
    depth: int
    warps: int
    stages: int

    def fits(self, spec: KernelSpec) -> bool:
        return (
            (spec.rank_block > 16) in self.wide
            and spec.dropout in self.dropout
            and spec.sites in self.sites
            and spec.extend in self.extend
            and spec.arch < self.below
        )


_YES, _NO, _BOTH = (True,), (False,), (False, True)
_PLAIN, _COPY, _EACH = ("", "tail"), ("copy",), ("", "tail", "copy")
_HOPPER, _BLACKWELL, _ALL = 90, 100, sys.maxsize
# The first that fits a spec. Four wide sites fit into Hopper's registers only; newer ones take them
# without masks too. Compiled for sm_100, four warps that draw masks spill, if only two registers.
_RULES = tuple(starmap(_Rule, (
    # wide, dropout, sites, extend, below; rows, blocks, depth, warps, stages
    (_NO, _NO, (1,), _PLAIN, _ALL, 64, 2, 128, 4, 4),
    (_NO, _NO, (1,), _COPY, _ALL, 32, 2, 64, 4, 4),
    (_NO, _NO, (2, 3, 4), _PLAIN, _HOPPER, 32, 2, 64, 4, 4),
    (_NO, _NO, (2, 3, 4), _PLAIN, _ALL, 64, 2, 64, 4, 4),
    (_NO, _NO, (2, 3, 4), _COPY, _ALL, 32, 2, 64, 8, 4),
    (_NO, _YES, (1,), _PLAIN, _BLACKWELL, 32, 2, 64, 4, 6),
    (_NO, _YES, (1,), _PLAIN, _ALL, 32, 2, 64, 8, 6),
    (_NO, _YES, (1,), _COPY, _BLACKWELL, 32, 2, 64, 4, 4),
    (_NO, _YES, (1,), _COPY, _ALL, 32, 2, 64, 8, 4),
    (_NO, _YES, (2,), ("",), _HOPPER, 32, 2, 64, 8, 4),
    (_NO, _YES, (2,), ("",), _ALL, 64, 2, 64, 8, 4),
    (_NO, _YES, (2, 3, 4), _EACH, _ALL, 64, 2, 32, 8, 6),
    (_YES, _NO, (1,), _PLAIN, _ALL, 64, 2, 64, 4, 4),
    (_YES, _YES, (1,), _PLAIN, _ALL, 64, 2, 64, 8, 4),
    (_YES, _BOTH, (1,), _COPY, _ALL, 32, 2, 64, 8, 4),
    (_YES, _NO, (2, 3), _PLAIN, _HOPPER, 32, 2, 64, 8, 3),
    (_YES, _NO, (4,), _PLAIN, _HOPPER, 16, 2, 64, 8, 3),
    (_YES, _NO, (2, 3, 4), _PLAIN, _ALL, 64, 2, 64, 8, 3),
    (_YES, _NO, (2,), _COPY, _ALL, 32, 2, 64, 8, 3),
    (_YES, _YES, (2,), ("",), _ALL, 32, 2, 64, 8, 3),
    (_YES, _YES, (2,), ("tail", "copy"), _ALL, 64, 2, 32, 8, 6),
    (_YES, _BOTH, (3,), _EACH, _ALL, 64, 1, 32, 8, 6),
    (_YES, _BOTH, (4,), _EACH, _HOPPER, 16, 1, 32, 8, 6),
    (_YES, _BOTH, (4,), _EACH, _BLACKWELL, 64, 1, 32, 8, 6),
    (_YES, _NO, (4,), _EACH, _ALL, 64, 1, 32, 8, 6),
    (_YES, _YES, (4,), _EACH, _ALL, 16, 1, 32, 8, 6),
)))  # fmt: skip


def default_tile(spec: KernelSpec) -> Tile:
    """Tiles of 64 rows: one or two programs an SM at 8,192 tokens, and whole warp groups.

    Who draws masks for one site waits less in tiles of 32 (H200: 41 against 46 microseconds).

    A panel (`columns`) of two rank blocks lets most jobs' ranks share one read of x. What keeps
    more values at once gets more warps or fewer rows, so that all stays in registers: masks, sums
    of several sites, wide panels, the copy of x.
    """
    if spec.gated and _is_short(spec):
        return _gated_tile(spec, 2 * spec.rank_block, 2 * _FEW)
    rule = next(rule for rule in _RULES if rule.fits(spec))
    columns = rule.blocks * spec.rank_block
    return Tile(rule.rows, columns, rule.depth, rule.warps, rule.stages)


def tile_for(spec: KernelSpec, tokens: int, width: int) -> Tile:
    """Tile for so many tokens and columns of S.

    Where whole rows of x would be too few programs, each takes a slab of columns and leaves a share
    of S.
    """
    rule = default_tile(spec)
    columns = spec.rank_block if width <= spec.rank_block else rule.columns
    if spec.gated and _is_short(spec):
        return _gated_tile(spec, columns, tokens)
    if tokens > few_tokens(spec) or size(spec.dtype) > 2:
        is_narrow = columns == spec.rank_block and spec.extend != "copy"
        streamed = _streamed(spec) if is_narrow else ()
        return streamed[0] if streamed else replace(rule, columns=columns)
    if _draws_narrow(spec) and tokens > _FEW_MASKED:
        return _split(spec, replace(rule, columns=columns), 32, _LARGE_SHARE)
    if not spec.dropout and spec.extend != "copy" and spec.arch >= _HOPPER and tokens > _VERY_FEW:
        # Taller programs read A less often: of three sites and 1,280 tokens they take a fifth less
        # time with blocks of 32, and a third with blocks of 16 (H200).
        slab = 2048 if tokens >= 2048 * (1 + (spec.sites > 1)) else 1024
        return _split(spec, replace(rule, columns=columns), rule.rows, slab)
    small = _draws_narrow(spec) and spec.sites > 2
    slab = 512 if small or tokens <= 1024 else 1024
    return _split(spec, replace(rule, columns=columns), 16 if small else min(rule.rows, 32), slab)


def _gated_tile(spec: KernelSpec, columns: int, tokens: int) -> Tile:
    """Slabs at any number of tokens, and many small programs: each waits for its activations.

    Of 16, 32 and 64 rows the fewest were the fastest on an H200, with masks and without, at 160 to
    8,192 tokens.
    """
    depth = 128 if tokens > 2048 and not spec.dropout else 64
    slab = 2048 if tokens > 1024 else 512
    return Tile(rows=16, columns=columns, depth=depth, warps=4, stages=4, slab=slab)


def few_tokens(spec: KernelSpec) -> int:
    """Up to how many tokens a tile may leave shares of S; of float32 and float64 none does.

    With masks of narrow ranks and several large shares any number may: among products of 8,192
    tokens such tiles take an eighth to a quarter less than whole ones (H200).
    """
    if size(spec.dtype) > 2:
        return 0
    if not _draws_narrow(spec):
        return _FEW
    # Elsewhere the steps of large shares spill registers.
    large = spec.arch == 90 and spec.sites < 4 and spec.inner > _LARGE_SHARE
    return sys.maxsize if large else _FEW_MASKED


def _draws_narrow(spec: KernelSpec) -> bool:
    return spec.dropout and spec.rank_block <= 16


def _streamed(spec: KernelSpec) -> tuple[Tile, ...]:
    """So deep that memory stays busy where products hold the card at its limit of power.

    There loads take longer than those of a kernel that is timed after itself: in rounds of 8,192
    tokens (H200) the three kernels of a layer took 27 microseconds each, of one to three sites,
    where tiles that such times chose took 45.

    returns   the deepest first; none where masks take time too, or shared memory is too small
    """
    if spec.dropout or spec.rank_block > 16 or not _is_short(spec) or spec.arch < 90:
        return ()
    rows, columns, depth = 64 if spec.sites < 4 else 32, spec.rank_block, 128
    step = size(spec.dtype) * depth * (rows + spec.sites * columns)
    return tuple(
        Tile(rows=rows, columns=columns, depth=depth, warps=4, stages=stages)
        for stages in (6, 4)
        # The output takes shared memory too.
        if (stages + 1) * step <= shared_bytes(spec.arch)
    )


def _split(spec: KernelSpec, rule: Tile, rows: int, slab: int) -> Tile:
    """A tile of shares, with as many loads in flight as a share has, up to seven.

    Masks take longer than loads: a few in flight suffice, and leave room for more programs (H200,
    4,096 tokens, 4,096 columns, best tiles: two sites 38 microseconds instead of 42, three 50
    instead of 56).
    """
    if _draws_narrow(spec):
        depth, warps, stages = (32, 2, 3) if spec.sites > 2 else (64, 4, 4)
        if slab == _LARGE_SHARE and spec.sites == 2:
            # Deeper steps of wider panels would spill registers.
            depth, warps, stages = 64 if rule.columns == spec.rank_block else 32, 2, 3
        return replace(rule, rows=rows, depth=depth, warps=warps, stages=stages, slab=slab)
    most = 4 if spec.rank_block > 16 or spec.sites > 1 else 8
    return replace(rule, rows=rows, slab=slab, stages=min(slab // rule.depth + 1, most))


def split_candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """Tiles with shares that tuning tries; the caller allocates the shares and starts `finish`."""
    if not few_tokens(spec):
        return ()
    rule = default_tile(spec)
    tiles = [
        _split(spec, replace(rule, columns=columns), rows, slab)
        for rows in (16, 32, 64)
        for slab in (512, 1024, 2048)
        for columns in (spec.rank_block, rule.columns)
        if slab < spec.inner and rows <= rule.rows
    ]
    if _draws_narrow(spec):  # Deeper steps of three sites spill registers, and can pay still.
        deeper = [replace(tile, depth=2 * tile.depth) for tile in tiles]
        thin = [
            replace(tile, depth=depth, warps=2, stages=3) for tile in tiles for depth in (32, 64)
        ]
        tiles += [*deeper, *(thin if spec.sites > 1 else ())]
    return tuple(dict.fromkeys(tiles))


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """Fewer rows for fewer tokens, more loads in flight."""
    rule = default_tile(spec)
    tiles = [rule]
    for rows, warps, stages in _TRIED:
        more = rows * spec.sites * rule.columns > 128 * 32 * warps
        tile = replace(rule, rows=rows, warps=warps, stages=stages)
        tiles += [tile] if tile not in tiles and not more else []
    # Where no job has more ranks than one block, its narrower panel leaves room.
    tiles += [replace(tile, columns=spec.rank_block) for tile in tiles]
    tiles += _streamed(spec)
    return tuple(dict.fromkeys(tiles))


def source(spec: KernelSpec) -> str:
    """The module's text; raises KernelSpecError for a tile that it cannot have."""
    tile = spec.cut
    if tile.columns % spec.rank_block or tile.depth < 16 or tile.slab % tile.depth:
        raise KernelSpecError(
            "shrink takes whole rank blocks at a time, and 16 columns of x or more",
            expected=f"tile.columns a multiple of {spec.rank_block}, tile.depth >= 16, tile.slab a "
            "multiple of tile.depth",
            found=tile,
        )
    names = "INNER BYTES ROWS DEPTH RANK_BLOCK PANEL JOBS SITES" + " SLAB" * (tile.slab > 0)
    shared = ["segment_tile"] + ["fault_flags"] * (not tile.slab)
    shared += ["draw_bits", "spread_bits"] * spec.dropout
    shared += ["computed_once"] * (bool(spec.gated) and _is_short(spec))
    values = _values(spec)
    return module(
        spec,
        constants=constants_of(
            spec, names, BYTES=_bytes(spec), PANEL=tile.columns, SITES=spec.sites
        ),
        functions=shared,
        body=fill(_BODY, values | {"dispatch": _dispatch(spec, fill(_CALL, values))}),
        types={"s": part_type(spec)} if tile.slab else {},
    )


def _is_short(spec: KernelSpec) -> bool:
    return size(spec.dtype) == 2


def _values(spec: KernelSpec) -> dict[str, object]:
    copy, split = spec.extend == "copy", bool(spec.cut.slab)
    tails = spec.extend != "" and not split
    flags = "per site float32 [P / {}, strips]; sites may differ in their outputs"
    whole = f"per site [M, W] in {spec.dtype}, contiguous, written whole"
    shares = (
        f"per site {{}} [{slabs_of(spec)}, M, W], shares of S, not yet scaled; written where a "
    )
    shares += "job\n                  has a rank"
    bits = f"per site uint8 [M, {_bytes(spec)}]; undefined where a job has no adapter or no dropout"
    extended = f"[M, {spec.inner} + T or wider]: "
    gets = " and ".join(["x"] * copy + ["S"] * tails) if copy else "x is its view; S"
    common = common_values(spec)
    return common | {
        "dropout_sites": spec.sites * spec.dropout,
        "split": split,
        "slabs": slabs_of(spec),
        "whole_sites": spec.sites * (not split),
        "s_name": "the shares of s" if split else "s",
        "s_doc": shares.format(common["part"]) if split else whole,
        "flags_doc": "not read" if split else flags.format(spec.rank_block),
        "unscaled": "; not read" if split else "",
        "tails": tails,
        "extended": copy or tails,
        "ragged": spec.inner % (spec.cut.slab or spec.cut.depth),
        **{f"each_{name}": _each(name, spec.sites) for name in _OF_SITES.split()},
        # Rows of jobs without adapters are copied, or made, too.
        "least": "tl.maximum(widest, 1)" if copy or spec.gated else "widest",
        "silu": spec.gated == "silu",
        "short": _is_short(spec),
        "made": "; written" if spec.gated else "",
        "gate_doc": f"as x: x is {spec.gated} of the gate, times up" if spec.gated else "not read",
        "count": "one site" if spec.sites == 1 else f"{spec.sites} sites that read x",
        "and_bits": " and bits" if spec.dropout else "",
        "and_tail": ", and the rows of `extended`," if copy or tails else "",
        "bits_doc": bits if spec.dropout else "not written",
        "extended_doc": extended + gets if copy or tails else "not written",
        "unread": "" if spec.dropout else "; not read",
        "untailed": "" if tails else "; not read",
    }


def slabs_of(spec: KernelSpec) -> int:
    """Into how many shares of x's columns a settled spec cuts the sum; 1: it writes S itself."""
    return -(-spec.inner // spec.cut.slab) if spec.cut.slab else 1


def finish(spec: KernelSpec) -> KernelSpec:
    """The `sum_s` that makes S out of the shares that a settled spec leaves."""
    extend: Extend = "tail" if spec.extend else ""
    plain = replace(spec, kind="sum_s", dropout=False, tile=None, extend=extend, gated="")
    return replace(plain, tile=sums.sum_s.tile(plain, spec.cut.slab))


def _dispatch(spec: KernelSpec, call: str) -> str:
    """The loop over panels, once; with dropout in two forms, of which the tile's job runs one."""
    if not spec.dropout:
        return indent(call, "    ").rstrip()
    comment = "# A job that drops nothing draws nothing: both forms stand in the code, one runs."
    forms = f"{comment}\nfor drawn in tl.static_range(2):\n    if drops == drawn:\n"
    return indent(forms + indent(call, " " * 8), "    ").rstrip()


def _each(name: str, sites: int) -> str:
    """A tuple of one argument of all sites."""
    names = [f"{name}_{k}" for k in range(sites)]
    return f"({', '.join(names)})" if sites > 1 else f"({names[0]},)"


def _bytes(spec: KernelSpec) -> int:
    return -(-spec.inner // 8)
