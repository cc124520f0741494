"""da = dSᵀ (mask of x) of every job, and of every site that reads x, in one read of x.

A program takes one chunk of a segment's tokens and a strip of columns, and walks down the chunk in
steps of rows. Without dropout each tile of x goes from device memory into shared memory and from
there, lying, into the tensor cores, once a site, never through registers; with dropout it passes
through registers, where `bits` decide what becomes 0. da of the strip stays in registers until the
chunk ends, and leaves as the chunk's share. Chunks are counted from the segment's start, so what
`sum_gradients` adds up depends on nothing but the job. Bits of jobs that drop nothing are ignored.

Ranks above the rank block are programs of their own, side by side, so that they find x in the L2
cache. The shares cost, for 2-byte types, 2 W sites / chunk of the bytes of x, whatever the strip's
width; so strips are narrow (128 columns: 512 programs at 8192 x 4096 with chunks of 512), and
the pipeline deep: each SM has three programs with three tiles of 16 KiB in flight.

With `whole` no job has more than one chunk. Then there is nothing to add up: da leaves as it is,
programs beside write db out of its shares, and rows of nobody are zero. With `accumulate` da is
added to what is there, rows of nobody stay as they are, and db is left to `lora_b_backward`.
"""

from __future__ import annotations

from itertools import accumulate

from tlora_fx.codegen.kernels.lora_b_backward import ROUNDED_SUM, chunk_of
from tlora_fx.codegen.spec import KernelSpec, Tile, shared_bytes
from tlora_fx.codegen.template import (
    common_values,
    constants_of,
    fill,
    module,
    of_sites,
    short,
    size,
)

_BODY = '''
#? whole and not accumulate [
@triton.jit
def write_rows(parts, gradient, first, count, strip, there, WIDTH: tl.constexpr):
    """Some columns of `count` rows of a gradient, which are one chunk's share, or zero."""
    ranks = tl.arange(0, RANK_BLOCK)
    columns = strip * COLUMNS + tl.arange(0, COLUMNS)
    own = (ranks < count)[:, None] & (columns < WIDTH)[None, :]
    share = parts + ranks[:, None] * WIDTH + columns[None, :]
    value = tl.load(share, mask=own & there, other=0.0)
    to = gradient + (first + ranks).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(to, value.to(tl.$adapter_dtype), mask=own)


#]
@triton.jit(
    do_not_specialize=["jobs"],  #? not whole
    #? whole [
    do_not_specialize=[
        "jobs",
        #* sites [
        "rows_$k",
        #]
    ],
    #]
    do_not_specialize_on_alignment=[
        "segments",
        #* sites [
        "slots_$k",  #? not whole
        "ranks_$k",  #? whole
        "thresholds_$k",  #? dropout
        #]
    ],
)
def kernel(
    x,  # [tokens, x_stride]
    x_stride,
    segments,  # [jobs + 1]
    jobs,
    #* sites [
    ds_$k,  # [tokens, width]
    width_$k,
    slots_$k,  # [jobs + 1]  #? not whole
    #? dropout [
    thresholds_$k,  # [jobs]
    bits_$k,  # [tokens, BYTES]
    #]
    da_parts_$k,  # [chunks, width, INNER]  #? not whole
    #? whole [
    ranks_$k,  # [jobs + 1]
    rows_$k,
    out_a_$k,  # [rows, INNER]
    #]
    #? whole and not accumulate [
    db_parts_$k,  # [chunks, width, OUTER]
    out_b_$k,  # [rows, OUTER]
    #]
    #]
):
    start_next(OVERLAP)  #? overlap
    block = tl.program_id(0)
    strip = tl.program_id(1)
    chunk = tl.program_id(2)
    #? not whole [
    job, place = segment_tile(chunk, segments, jobs, CHUNK, JOBS)
    there = job < jobs
    start = tl.load(segments + job) + place * CHUNK
    count = tl.minimum(tl.load(segments + job + 1, mask=there, other=0) - start, CHUNK)
    rank = block * RANK_BLOCK
    #]
    #? whole [
    # Programs behind the last job's write zeros into rows of nobody, or nothing.
    job = tl.minimum(chunk, jobs)
    there = chunk < jobs
    start = tl.load(segments + job)
    count = tl.maximum(tl.load(segments + job + 1, mask=there, other=0) - start, 0)
    rank = (tl.maximum(chunk - jobs, 0) * tl.num_programs(0) + block) * RANK_BLOCK
    before, chunks = chunks_of(job, segments, jobs, CHUNK, JOBS)  #? not accumulate
    #]
    #* sites [
    first_$k = tl.load(slots_$k + job)  #? not whole
    owned_$k = rank < tl.load(slots_$k + job + 1, mask=there, other=0) - first_$k  #? not whole
    #? whole [
    first_$k = tl.load(ranks_$k + job) + rank
    end_$k = tl.load(ranks_$k + job + 1, mask=there, other=0)
    own_rows_$k = tl.where(there, end_$k, rows_$k) - first_$k  #? not accumulate
    own_rows_$k = end_$k - first_$k  #? accumulate
    owned_$k = own_rows_$k > 0
    #]
    # Jobs that drop nothing have no bits to read: all of theirs count as set.
    threshold_$k = tl.load(thresholds_$k + job, mask=there, other=0)  #? dropout
    every_$k = tl.where(threshold_$k > 0, 0, 255).to(tl.uint8)  #? dropout
    #]
    await_previous(OVERLAP)  #? overlap
    if $nobody:
        return
    #? whole and not accumulate [
    if strip >= A_STRIPS:
        share = before.to(tl.int64)
        #* sites [
        if (strip >= FIRST_$k) & (strip < END_$k):
            write_rows(
                db_parts_$k + (share * width_$k + rank) * OUTER_$k,
                out_b_$k,
                first_$k,
                own_rows_$k,
                strip - FIRST_$k,
                chunks > 0,
                OUTER_$k,
            )
        #]
        return
    #]
    ranks = tl.arange(0, RANK_BLOCK)
    columns = strip * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < INNER  #? ragged
    #? dropout [
    bytes = strip * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    byte_inside = bytes < BYTES  #? ragged
    #]

    # What follows counts rows from the chunk's start: 32 bits are enough.
    x += start.to(tl.int64) * x_stride
    #* sites [
    ds_$k += start.to(tl.int64) * width_$k + rank
    bits_$k += start.to(tl.int64) * BYTES  #? dropout
    da_$k = tl.zeros((COLUMNS, RANK_BLOCK), $wide)
    #]
    for step in range(0, count, ROWS):
        rows = step + tl.arange(0, ROWS)
        own = (rows < count)[:, None]
        here = own  #? not ragged
        here = own & inside[None, :]  #? ragged
        tile = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=here, other=0.0)
        #* sites [
        mine = own  #? not several
        mine = own & owned_$k  #? several
        low = tl.load(ds_$k + rows[:, None] * width_$k + ranks[None, :], mask=mine, other=0.0)
        #? dropout [
        read = own  #? not ragged
        read = own & byte_inside[None, :]  #? ragged
        bits = tl.load(bits_$k + rows[:, None] * BYTES + bytes[None, :], mask=read, other=0)
        kept = tl.where(expand_bits(bits | every_$k, ROWS, COLUMNS // 8), tile, 0.0)
        da_$k = tl.dot(tl.trans(kept), low, da_$k$precision)  # [COLUMNS, RANK_BLOCK]
        #]
        da_$k = tl.dot(tl.trans(tile), low, da_$k$precision)  #? not dropout
        #]
    #? not whole [
    #* sites [
    to = (chunk.to(tl.int64) * width_$k + rank + ranks)[:, None] * INNER + columns[None, :]
    stored = inside[None, :]  #? ragged
    stored = owned_$k  #? not ragged
    stored &= owned_$k  #? ragged and several
    tl.store(da_parts_$k + to, tl.trans(da_$k), mask=stored)
    #]
    #]
    #? whole [
    #* sites [
    to = (first_$k + ranks).to(tl.int64)[:, None] * INNER + columns[None, :]
    stored = (ranks < own_rows_$k)[:, None]
    stored &= inside[None, :]  #? ragged
    tl.store(out_a_$k + to, tl.trans(da_$k).to(tl.$adapter_dtype), mask=stored)  #? not accumulate
    #? accumulate [
    before_$k = tl.load(out_a_$k + to, mask=stored, other=0.0)
    tl.store(out_a_$k + to, rounded_sum(before_$k, tl.trans(da_$k)), mask=stored)
    #]
    #]
    #]


def launch(x, ds, bits, segments, slots, thresholds, jobs, da_parts):  #? not whole
#? whole [
def launch(x, ds, bits, segments, slots, thresholds, jobs, ranks, da, db_parts=None, db=None):
#]
    """$fills of $count$stays.

    x            [M, $inner] in $dtype, rows contiguous
    ds           per site [M, W] in $dtype, contiguous
    bits         per site uint8 [M, $bytes]$unread
    segments     int32 [jobs + 1]
    slots        per site int32 [jobs + 1]$or_ranks
    thresholds   per site int32 [jobs]$unread
    #? not whole [
    da_parts     per site $part [C, W, $inner], chunks of $chunk tokens; written where a job has a
                 rank
    #]
    #? whole [
    ranks        per site int32 [jobs + 1]
    #]
    #? whole and not accumulate [
    da, db       per site [R, $inner], [R, $outers] in $adapter_dtype, contiguous, written whole
    db_parts     per site $part [C, W, $outers], of which each job has one chunk at most
    #]
    #? accumulate [
    da           per site [R, $inner] in $adapter_dtype, contiguous, added to
    db_parts     not read, nor is db: `lora_b_backward` has added to db
    #]
    """
    tokens = x.shape[0]
    #? not whole [
    chunks = (tokens + jobs * ($chunk - 1)) // $chunk
    blocks = max(part.shape[1] for part in da_parts) // $rank_block
    #]
    #? whole [
    blocks = max(low.shape[1] for low in ds) // $rank_block
    #]
    #? whole and not accumulate [
    chunks = jobs + triton.cdiv(max(rows.shape[0] for rows in da), blocks * $rank_block)
    #]
    chunks = jobs  #? accumulate
    if tokens > 0:
        kernel[blocks, $strips, chunks](
            x,
            x.stride(0),
            segments,
            jobs,
            #* sites [
            ds[$k],
            ds[$k].shape[1],
            slots[$k],  #? not whole
            #? dropout [
            thresholds[$k],
            bits[$k],
            #]
            da_parts[$k],  #? not whole
            #? whole [
            ranks[$k],
            da[$k].shape[0],
            da[$k],
            #]
            #? whole and not accumulate [
            db_parts[$k],
            db[$k],
            #]
            #]
            **META,
        )
'''


def default_tile(spec: KernelSpec) -> Tile:
    """Narrow strips and as many tiles in flight as fit thrice into an SM, twice, or once."""
    chunk = chunk_of(spec)
    if size(spec.dtype) > 2:  # Types of tests, which the tensor cores of a warp group do not take.
        warps = 4 if spec.rank_block * spec.sites <= 32 else 8
        return _tile(spec, rows=32, columns=64, warps=warps, stages=2, chunk=chunk)
    # Masks of several sites at once take registers.
    crowded = spec.rank_block * spec.sites > 64 or (spec.dropout and spec.sites > 1)
    warps = 8 if crowded else 4
    # Before Hopper tiles pass through registers, as masked tiles do everywhere.
    narrow = (spec.arch < 90 and crowded) or (spec.dropout and spec.sites > 3)
    columns = 64 if narrow else 128
    columns = 32 if spec.arch < 90 and spec.rank_block * spec.sites > 128 else columns
    most = shared_bytes(spec.arch)
    if (
        spec.arch == 90
        and spec.dropout
        and not crowded
        and spec.rank_block <= 32
        and spec.inner >= 1024
    ):
        # Masks of a wider strip cost less a column (H200, 8,192 x 4,096: 23.1 against 26.0 us).
        return _tile(spec, rows=64, columns=256, warps=warps, stages=3, chunk=chunk)
    for programs, depths in ((3, (4, 3)), (2, (4, 3)), (1, (4, 3, 2))):
        for stages in depths:
            tile = _tile(spec, rows=64, columns=columns, warps=warps, stages=stages, chunk=chunk)
            if _shared(spec, tile) <= most // programs - 1024:
                return tile
    return _tile(spec, rows=32, columns=64, warps=warps, stages=2, chunk=chunk)


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """Tiles of other depths, strips and warps; the chunk is that of `lora_b_backward`."""
    usual = default_tile(spec)
    if size(spec.dtype) > 2:
        return (usual,)
    tried = [
        _tile(spec, rows=rows, columns=columns, warps=warps, stages=stages, chunk=usual.chunk)
        for rows, columns, warps, stages in (
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (64, 128, 8, 4),
            (128, 128, 4, 3),
            (64, 64, 4, 3),
            (64, 64, 4, 4),
            (128, 64, 4, 4),
            (64, 256, 4, 3),
            (64, 256, 8, 3),
            *(((32, 128, 4, 3), (32, 256, 4, 3)) if spec.dropout else ()),
        )
    ]
    fitting = (tile for tile in tried if _shared(spec, tile) <= shared_bytes(spec.arch))
    return tuple(dict.fromkeys([usual, *fitting]))


def _tile(spec: KernelSpec, rows: int, columns: int, warps: int, stages: int, chunk: int) -> Tile:
    """A tile whose strip is no wider than the matrix needs."""
    columns = min(columns, max(16, 1 << (spec.inner - 1).bit_length()))
    return Tile(rows=rows, columns=columns, depth=0, warps=warps, stages=stages, chunk=chunk)


def _shared(spec: KernelSpec, tile: Tile) -> int:
    """Bytes of shared memory: tiles of x, dS and bits in flight, and what moves in between."""
    element = size(spec.dtype)
    low = tile.stages * spec.sites * element * spec.rank_block
    # A tile that passes through registers is free again before the next one is asked for.
    tiles = (tile.stages - spec.dropout) * element * tile.columns
    bits = spec.sites * (tile.stages - 1) * tile.columns // 8 if spec.dropout else 0
    # Where Blackwell's tensor cores take masked tiles from, each site has its own.
    quarters = 1 if spec.arch < 100 else 4 * spec.sites
    masked = quarters * element * tile.columns // 4 if spec.dropout else 0
    return tile.rows * (low + tiles + bits + masked)


def source(spec: KernelSpec) -> str:
    """The module's text."""
    names = "INNER RANK_BLOCK ROWS COLUMNS CHUNK JOBS" + " BYTES" * spec.dropout
    own: dict[str, object] = {}
    if spec.whole and not spec.accumulate:
        ends = _ends(spec)
        own = of_sites(OUTER=spec.outers, FIRST=ends[:-1], END=ends[1:]) | {"A_STRIPS": ends[0]}
    tables = ["chunks_of"] * (not spec.accumulate) if spec.whole else ["segment_tile"]
    adapters = f"*{short(spec.adapter_dtype)}"
    return module(
        spec,
        constants=constants_of(spec, " ".join([names, *own]), BYTES=_bytes(spec), **own),
        functions=[*tables, *(["expand_bits"] if spec.dropout else [])],
        body=fill(ROUNDED_SUM * spec.accumulate + _BODY, _values(spec)),
        types={"out_a": adapters, "out_b": adapters} if spec.whole else {},
    )


def _ends(spec: KernelSpec) -> list[int]:
    """Behind which strip of the launch da's last one stands, then db's of each site."""
    columns = (spec.inner, *spec.outers)
    return [*accumulate(-(-each // spec.cut.columns) for each in columns)]


def _values(spec: KernelSpec) -> dict[str, object]:
    sites = range(spec.sites)
    ragged = spec.inner % spec.cut.columns != 0
    several = spec.sites > 1
    somebody = " | ".join(f"owned_{k}" for k in sites)
    return common_values(spec) | {
        "bytes": _bytes(spec),
        "strips": _ends(spec)[-1 if spec.whole and not spec.accumulate else 0],
        "count": f"{spec.sites} sites" if several else "one site",
        "unread": "" if spec.dropout else ", not read",
        "ragged": ragged,
        "nobody": f"not ({somebody})" if several else "not owned_0",
        "fills": _fills(spec),
        "stays": "" if spec.whole else "; what no job owns stays as it is",
        "or_ranks": ", not read" if spec.whole else "",
    }


def _fills(spec: KernelSpec) -> str:
    if not spec.whole:
        return "Fill the shares of da"
    return "Add to da" if spec.accumulate else "Fill da and db"


def _bytes(spec: KernelSpec) -> int:
    return -(-spec.inner // 8)
