"""Parts of dS = dy Bᵀ and of db = Sᵀ dy of every job in one read of dy.

A program takes one chunk of a segment's tokens and one slab of columns. It walks down the chunk in
steps of rows: each tile of dy goes from device memory into shared memory once and from there twice
into the tensor cores, upright for dS and lying for db, never through registers. db of the slab
stays in registers until the chunk ends; dS of each step leaves at once, as the slab's share.
Chunks are counted from the segment's start and slabs have a fixed width, so in strict mode what
`sum_ds` and `sum_gradients` add up depends on nothing but the job. Ranks above the rank block are
programs of their own, side by side, so that they find dy in the L2 cache. Slabs of several sites
stand side by side too, each with its site's dy: narrow sites alone would leave most of the GPU
idle.

Shares cost memory: a token's row of dS is written once a slab, a column of db once a chunk, in
float32. Against reading dy that is 2 W (1 / slab + 1 / chunk) for 2-byte types, while
M O / (slab chunk) programs are what keeps all SMs reading. The rule takes slabs of 256 and chunks
of 512 at 16 ranks (19%; 256 programs at 8192 x 4096, all resident at once), and chunks of 1024
from 64 ranks on. Steps are of 64 rows, what a warp group multiplies, with as many in flight as
leave room for two programs an SM, so that one loads tables while the other streams.

With `extend` = "copy" dy also goes, row by row, to where concat-K wants it.

With `accumulate` no job has more than one chunk, so that there is nothing to add up: db is added to
the gradient that there is.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from tlora_fx.codegen.spec import Dtype, KernelSpec, Tile, shared_bytes
from tlora_fx.codegen.template import (
    common_values,
    constants_of,
    either,
    fill,
    module,
    of_sites,
    short,
    size,
)

# Of kernels that add to gradients: what a module needs for it.
ROUNDED_SUM = '''
@triton.jit
def rounded_sum(before, value):
    """before + value, which is rounded before it is added, as a sum of whole gradients is."""
    value = value.to(tl.$adapter_dtype).to($adapter_wide)
    return (before.to($adapter_wide) + value).to(tl.$adapter_dtype)


'''

# Widths for which a Hopper has programs enough with slabs of 512 (H200, 8,192 x 4,096: 23.1 against
# 23.9 microseconds, and half the shares for `sum_ds`; 8,192 x 14,336 is faster with 256).
_MIDDLE = range(4096, 8193)
# Up to here slabs of 256 are too few programs; above here those of 512 are enough.
_NARROW, _WIDE = 1024, 3072

_BODY = '''
@triton.jit
def pass_slab(
    dy,  # [tokens, dy_stride]
    dy_stride,
    tokens,
    s,  # [tokens, width]
    width,
    b_packed,  # [P, OUTER]
    segments,  # [jobs + 1]
    slots,  # [jobs + 1]
    jobs,
    ds_parts,  # [SLABS, tokens, width]
    db_parts,  # [chunks, width, OUTER]  #? not accumulate
    #? accumulate [
    bounds,  # [jobs + 1]
    out_b,  # [rows, OUTER]
    #]
    #? copy [
    extended,  # [tokens, extended_stride]
    extended_stride,
    #]
    slab,
    OUTER: tl.constexpr,
):
    """One chunk and one slab of a site, and one block of ranks; waits for the kernel before."""
    block = tl.program_id(0)
    chunk = tl.program_id(2)
    job, place = segment_tile(chunk, segments, jobs, CHUNK, JOBS)
    there = job < jobs
    start = tl.load(segments + job) + place * CHUNK
    count = tl.minimum(tl.load(segments + job + 1, mask=there, other=0) - start, CHUNK)
    slot = tl.load(slots + job) + block * RANK_BLOCK
    owned = slot < tl.load(slots + job + 1, mask=there, other=0)
    #? accumulate [
    first = tl.load(bounds + job) + block * RANK_BLOCK
    own_rows = tl.load(bounds + job + 1, mask=there, other=0) - first
    #]
    await_previous(OVERLAP)  #? overlap
    busy = owned  #? not copy
    # The first programs of a chunk copy, also for a job without an adapter.
    busy = there & (owned | (block == 0))  #? copy
    if busy:
        ranks = tl.arange(0, RANK_BLOCK)
        columns = slab * SLAB + tl.arange(0, SLAB)
        inside = columns < OUTER  #? ragged
        place_b = (slot + ranks).to(tl.int64)[:, None] * OUTER + columns[None, :]
        b = tl.load(b_packed + place_b$b_mask)

        # What follows counts rows from the chunk's start: 32 bits are enough.
        dy += start.to(tl.int64) * dy_stride
        s += start.to(tl.int64) * width + block * RANK_BLOCK
        ds_parts += (slab.to(tl.int64) * tokens + start) * width + block * RANK_BLOCK
        extended += start.to(tl.int64) * extended_stride  #? copy
        db = tl.zeros((SLAB, RANK_BLOCK), $wide)
        for step in range(0, count, ROWS):
            rows = step + tl.arange(0, ROWS)
            own = (rows < count)[:, None]
            here = own  #? not ragged
            here = own & inside[None, :]  #? ragged
            tile = tl.load(dy + rows[:, None] * dy_stride + columns[None, :], mask=here, other=0.0)
            low = tl.load(s + rows[:, None] * width + ranks[None, :], mask=own, other=0.0)
            #? copy [
            if block == 0:
                to = extended + rows[:, None] * extended_stride + columns[None, :]
                tl.store(to, tile, mask=here)
            #]
            db = tl.dot(tl.trans(tile), low, db$precision)  # [SLAB, RANK_BLOCK]
            ds = tl.dot(tile, tl.trans(b)$precision)  # [ROWS, RANK_BLOCK]
            stored = own  #? not copy
            stored = own & owned  #? copy
            #? halves [
            # Each half leaves from the registers where the tensor cores put it: the whole would be
            # put in order through shared memory, which costs a barrier a step, and room.
            left, right = column_halves(ds, ROWS, RANK_BLOCK)
            to = ds_parts + rows[:, None] * width + tl.arange(0, HALF)[None, :]
            tl.store(to, left, mask=stored)
            tl.store(to + HALF, right, mask=stored)
            #]
            #? not halves [
            tl.store(ds_parts + rows[:, None] * width + ranks[None, :], ds, mask=stored)
            #]
        #? not accumulate [
        place_db = (chunk.to(tl.int64) * width + block * RANK_BLOCK + ranks)[:, None] * OUTER
        tl.store(db_parts + place_db + columns[None, :], tl.trans(db)$db_mask)
        #]
        #? accumulate [
        to_db = out_b + (first + ranks).to(tl.int64)[:, None] * OUTER + columns[None, :]
        added = (ranks < own_rows)[:, None]
        added &= inside[None, :]  #? ragged
        before = tl.load(to_db, mask=added, other=0.0)
        tl.store(to_db, rounded_sum(before, tl.trans(db)), mask=added)
        #]


@triton.jit(
    do_not_specialize=["tokens", "jobs"],
    do_not_specialize_on_alignment=[
        "segments",
        #* sites [
        "slots_$k",
        "ranks_$k",  #? accumulate
        #]
    ],
)
def kernel(
    tokens,
    segments,  # [jobs + 1]
    jobs,
    #* sites [
    dy_$k,  # [tokens, dy_stride]
    dy_stride_$k,
    s_$k,  # [tokens, width]
    width_$k,
    b_packed_$k,  # [P, OUTER]
    slots_$k,  # [jobs + 1]
    ds_parts_$k,  # [SLABS, tokens, width]
    db_parts_$k,  # [chunks, width, OUTER]  #? not accumulate
    #? accumulate [
    ranks_$k,  # [jobs + 1]
    out_b_$k,  # [rows, OUTER]
    #]
    #? copy [
    extended_$k,  # [tokens, extended_stride]
    extended_stride_$k,
    #]
    #]
):
    start_next(OVERLAP)  #? overlap
    slab = tl.program_id(1)
    #* sites [
    if (slab >= FIRST_$k) & (slab < END_$k):
        pass_slab(
            dy_$k,
            dy_stride_$k,
            tokens,
            s_$k,
            width_$k,
            b_packed_$k,
            segments,
            slots_$k,
            jobs,
            ds_parts_$k,
            db_parts_$k,  #? not accumulate
            #? accumulate [
            ranks_$k,
            out_b_$k,
            #]
            #? copy [
            extended_$k,
            extended_stride_$k,
            #]
            slab - FIRST_$k,
            OUTER_$k,
        )
    #]


#? not accumulate [
def launch(dy, s, b_packed, segments, slots, jobs, ds_parts, db_parts, extended=None):
    """Fill the shares of dS and db$and_copy of $count; what no job owns stays as it is.
#]
#? accumulate [
def launch(dy, s, b_packed, segments, slots, jobs, ds_parts, ranks, db, extended=None):
    """Fill the shares of dS, and add to db$and_copy, of $count; what no job owns stays as it is.
#]

    dy         per site [M, $outers] in $dtype, rows contiguous
    s          per site [M, W] in $dtype, contiguous
    b_packed   per site [P, $outers] in $dtype
    segments   int32 [jobs + 1]
    slots      per site int32 [jobs + 1]
    ds_parts   per site $part [$slabs, M, W], not yet scaled; written where a job has a rank
    #? not accumulate [
    db_parts   per site $part [C, W, $outers], chunks of $chunk tokens; written where a job has a
               rank
    #]
    #? accumulate [
    ranks      per site int32 [jobs + 1]
    db         per site [R, $outers] in $adapter_dtype, contiguous, added to
    #]
    extended   $extended_doc
    """
    tokens = s[0].shape[0]
    chunks = (tokens + jobs * ($chunk - 1)) // $chunk
    grid = (max(low.shape[1] for low in s) // $rank_block, $all_slabs, chunks)
    if tokens > 0:
        kernel[grid](
            tokens,
            segments,
            jobs,
            #* sites [
            dy[$k],
            dy[$k].stride(0),
            s[$k],
            s[$k].shape[1],
            b_packed[$k],
            slots[$k],
            ds_parts[$k],
            db_parts[$k],  #? not accumulate
            #? accumulate [
            ranks[$k],
            db[$k],
            #]
            #? copy [
            extended[$k],
            extended[$k].stride(0),
            #]
            #]
            **META,
        )
'''


def default_tile(spec: KernelSpec) -> Tile:
    """Two programs an SM with three steps in flight where they fit; see the module's docstring."""
    tile = _default_tile(spec)
    return adding(tile, spec.rank_block, spec.adapter_dtype) if spec.accumulate else tile


def _default_tile(spec: KernelSpec) -> Tile:
    chunk = chunk_of(spec)
    if size(spec.dtype) > 2:  # Types of tests, which the tensor cores of a warp group do not take.
        warps = 4 if spec.rank_block <= 32 else 8
        return _tile(spec, rows=32, slab=64, warps=warps, stages=2, chunk=chunk)
    warps = 4 if spec.rank_block <= 32 else 8
    # Before Hopper tiles pass through registers, and a copied one stays there.
    narrow = spec.arch < 90 and spec.extend == "copy" and spec.rank_block > 16
    slab = 128 if narrow or spec.rank_block > 64 else 256
    most = shared_bytes(spec.arch)
    if spec.arch == 90 and not spec.extend and (fields := _measured(spec)) is not None:
        slab, warps, stages = fields
        return _tile(spec, rows=64, slab=slab, warps=warps, stages=stages, chunk=chunk)
    # A copied tile needs one stage more for as many in flight. 1 KiB of a program is the system's.
    deep = (4, 3) if spec.extend == "copy" else (3, 2)
    for free_bytes, depths in ((most // 2 - 1024, deep), (most, (*deep, 2))):
        for stages in depths:
            tile = _tile(spec, rows=64, slab=slab, warps=warps, stages=stages, chunk=chunk)
            if _shared(spec, tile) <= free_bytes:
                return tile
    return _tile(spec, rows=32, slab=slab // 2, warps=warps, stages=2, chunk=chunk)


def _measured(spec: KernelSpec) -> tuple[int, int, int] | None:
    """Slab, warps and stages that were the fastest on an H200, None where others are as fast.

    Measured were the linears of 1B to 14B models at 1,280 and 4,800 tokens, and of an 8B model at
    1,024 to 8,192. Three steps in flight of one program an SM are ahead of two of two programs.
    """
    widest = max(spec.outers)
    if widest <= _NARROW and spec.rank_block <= 32:
        return 128, 4, 3
    if spec.rank_block == 16 and spec.outer in _MIDDLE:
        return 512, 8, 3
    if spec.rank_block == 32 and widest > _WIDE:
        return 512, 8, 2
    return (256, 4, 3) if spec.rank_block in (32, 64) else None


def adding(tile: Tile, rank_block: int, adapter_dtype: Dtype) -> Tile:
    """A tile of a kernel that adds db: what there is takes registers, too.

    With four warps and blocks of 64 ranks it spilled up to 96 of them (compiled for an H200).
    """
    crowded = rank_block >= 64 and size(adapter_dtype) > 2 and tile.slab > 128
    return replace(tile, warps=max(tile.warps, 8)) if crowded else tile


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """Tiles of other depths, slabs and warps; the chunk is that of `lora_a_backward`.

    `sum_ds` must be given the slab that wins.
    """
    usual = default_tile(spec)
    if size(spec.dtype) > 2:
        return (usual,)
    tried = [
        _tile(spec, rows=rows, slab=slab, warps=warps, stages=stages, chunk=usual.chunk)
        for rows, slab, warps, stages in (
            (64, 256, 4, 3),
            (64, 256, 4, 2),
            (64, 256, 8, 3),
            (128, 256, 8, 2),
            (64, 512, 8, 2),
            (64, 512, 8, 3),
            (128, 128, 4, 3),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
        )
    ]
    fitting = (tile for tile in tried if _shared(spec, tile) <= shared_bytes(spec.arch))
    return tuple(dict.fromkeys([usual, *fitting]))


def chunk_of(spec: KernelSpec) -> int:
    """Tokens of a chunk: one rule for the kernels that write and read shares of da and db."""
    return 512 if spec.rank_block < 64 else 1024


def slabs_of(spec: KernelSpec, outer: int) -> int:
    """Number of slabs of a site in the settled spec of `lora_b_backward` or `sum_ds`."""
    return -(-outer // spec.cut.slab)


def _tile(spec: KernelSpec, rows: int, slab: int, warps: int, stages: int, chunk: int) -> Tile:
    """A tile whose slab is no wider than the widest matrix needs."""
    slab = min(slab, max(16, 1 << (max(spec.outers) - 1).bit_length()))
    return Tile(
        rows=rows, columns=slab, depth=0, warps=warps, stages=stages, chunk=chunk, slab=slab
    )


def _shared(spec: KernelSpec, tile: Tile) -> int:
    """Bytes of shared memory: steps in flight, the slab of B, and dS on its way out."""
    # A tile that is copied passes through registers, free again before the next one is asked for.
    tiles = tile.stages - (spec.extend == "copy")
    steps = tile.rows * (tiles * tile.slab + tile.stages * spec.rank_block)
    leaving = 0 if _halves(spec) else 4 * tile.rows * spec.rank_block
    return size(spec.dtype) * (steps + spec.rank_block * tile.slab) + leaving


def _halves(spec: KernelSpec) -> bool:
    return spec.rank_block == 16 and size(spec.dtype) == 2


def source(spec: KernelSpec) -> str:
    """The module's text."""
    ends = [*accumulate(slabs_of(spec, outer) for outer in spec.outers)]
    own = of_sites(OUTER=spec.outers, FIRST=[0, *ends[:-1]], END=ends)
    names = "RANK_BLOCK ROWS SLAB CHUNK JOBS" + " HALF" * _halves(spec)
    return module(
        spec,
        constants=constants_of(spec, f"{names} {' '.join(own)}", HALF=spec.rank_block // 2, **own),
        functions=["segment_tile", *(["column_halves"] if _halves(spec) else [])],
        body=fill(ROUNDED_SUM * spec.accumulate + _BODY, _values(spec)),
        types={"out_b": f"*{short(spec.adapter_dtype)}"} if spec.accumulate else {},
    )


def _values(spec: KernelSpec) -> dict[str, object]:
    ragged = any(outer % spec.cut.slab for outer in spec.outers)
    slabs = [slabs_of(spec, outer) for outer in spec.outers]
    copy = spec.extend == "copy"
    mask = " & ".join(["inside[None, :]"] * ragged + ["owned"] * copy)
    return common_values(spec) | {
        "slabs": either(slabs),
        "all_slabs": sum(slabs),
        "ragged": ragged,
        "halves": _halves(spec),
        "b_mask": f", mask={mask}, other=0.0" if mask else "",
        "db_mask": f", mask={mask}" if mask else "",
        "and_copy": ", and copy dy" if copy else "",
        "extended_doc": f"per site [M, {either(spec.outers)} + T] in {spec.dtype}, gets dy in its "
        "first columns"
        if copy
        else "not read",
    }
