"""dS out of the shares that `lora_b_backward` left: summed, scaled and rounded.

A program takes some rows of a segment and one rank block of columns, adds the slabs' shares in
their order, and multiplies by the job's scale. Flags of adapters that are not finite turn the whole
dS of their job into NaN. All columns of dS are written: zeros behind a job's ranks and in rows of
jobs without an adapter, whose shares are never read.

With `extend` the rows also go behind dy, job j's columns at ranks[j], for the GEMM of concat-K.

It is short: 4.2 MB of shares at 8192 x 4096 and 16 ranks, mostly in the L2 cache. Each thread has
16 bytes of every slab's share to load, all at once, and the tile is so small that all SMs have
several programs.

It also finishes S where `shrink` leaves shares of it: the spec's `outer` is x's width then.
"""

from __future__ import annotations

from tlora_fx.codegen.emit import lora_b_backward
from tlora_fx.codegen.emit.lora_b_backward import padded_rank_rows, slabs_of
from tlora_fx.codegen.emit.pack import STRIP
from tlora_fx.codegen.source import accumulator, fill, module, overlaps, short, size
from tlora_fx.codegen.spec import KernelSpec, Tile

_ELEMENTS = 512  # of a program: 16 bytes of float32 for each of 128 threads
_BATCH = 16  # slabs that a thread loads before it adds them

_BODY = '''
@triton.jit(
    do_not_specialize=["tokens", "jobs"],
    do_not_specialize_on_alignment=$tables,
)
def kernel(
    ds_parts,  # [SLABS, tokens, width]
    tokens,
    flags,  # [P / RANK_BLOCK, STRIPS]
    segments,  # [jobs + 1]
    slots,  # [jobs + 1]
    scales,  # [jobs]
    jobs,
    ds,  # [tokens, width]
    width,
    #? extend [
    ranks,  # [jobs + 1]
    extended,  # [tokens, extended_stride]
    extended_stride,
    #]
):
    start_next(OVERLAP)  #? overlap
    block = tl.program_id(0)
    job, place = segment_tile(tl.program_id(1), segments, jobs, ROWS, JOBS)
    owned = job < jobs
    # Rows behind the last segment count as a job without adapters.
    start = tl.load(segments + job) + place * ROWS
    end = tl.load(segments + job + 1, mask=owned, other=tokens)
    slot = tl.load(slots + job, mask=owned, other=0)
    rank = tl.load(slots + job + 1, mask=owned, other=0) - slot
    scale = tl.load(scales + job, mask=owned, other=0.0)
    #? extend [
    before = tl.load(ranks + job, mask=owned, other=0)
    after = tl.load(ranks + job + 1, mask=owned, other=0)
    #]
    await_previous(OVERLAP)  #? overlap
    if start >= end:
        return
    # All flags of the job, not just this block's: one bad column spoils the whole adapter.
    faults = fault_flags(flags, slot, slot + rank, STRIPS, RANK_BLOCK)
    rows = tl.arange(0, ROWS)
    inside = (rows < end - start)[:, None]
    columns = block * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    # Ranks are whole blocks here, so a job has all columns of this one or none.
    own = block * RANK_BLOCK < rank
    # Rows count from the program's first: 32 bits are enough.
    near = rows[:, None] * width + columns[None, :]
    slabs = tl.arange(0, BATCH)
    slab_size = tokens.to(tl.int64) * width
    ds_parts += start.to(tl.int64) * width
    total = tl.zeros((ROWS, RANK_BLOCK), $wide)
    # A batch is loaded as one tile, so that its loads are under way together.
    for done in tl.static_range(0, SLABS, BATCH):
        slab = (done + slabs).to(tl.int64)[:, None, None]
        read = (inside & own)[None, :, :]  #? not ragged
        read = (inside & own)[None, :, :] & (slab < SLABS)  #? ragged
        batch = tl.load(ds_parts + slab * slab_size + near[None, :, :], mask=read, other=0.0)
        total += tl.sum(batch, axis=0)
    value = tl.where(own, total * scale + tl.sum(faults), 0.0).to(tl.$dtype)
    tl.store(ds + start.to(tl.int64) * width + near, value, mask=inside)
    #? extend [

    row = extended + (start + rows).to(tl.int64)[:, None] * extended_stride + OUTER
    to = before + columns[None, :]
    tl.store(row + to, value, mask=inside & (to < after))
    if block == 0:
        for step in range(0, extended_stride - OUTER, TAIL_STEP):
            tail = (step + tl.arange(0, TAIL_STEP))[None, :]
            others = (tail < before) | (tail >= after)
            within = inside & (tail < extended_stride - OUTER)
            zeros = tl.zeros((ROWS, TAIL_STEP), tl.$dtype)
            tl.store(row + tail, zeros, mask=within & others)
    #]


def launch(ds_parts, flags, segments, slots, scales, jobs, ds, ranks=None, extended=None):
    """Fill dS$and_tail.

    ds_parts   $part [$slabs, M, W]
    flags      float32 [P / $rank_block, $strips]
    segments   int32 [jobs + 1]
    slots      int32 [jobs + 1]
    scales     float32 [jobs]
    ds         [M, W] in $dtype, contiguous, written whole
    ranks      $ranks_told
    extended   $extended_told
    """
    tokens, width = ds.shape
    grid = (width // $rank_block, triton.cdiv(tokens, $rows) + jobs)
    if tokens > 0:
        kernel[grid](
            ds_parts,
            tokens,
            flags,
            segments,
            slots,
            scales,
            jobs,
            ds,
            width,
            #? extend [
            ranks,
            extended,
            extended.stride(0),
            #]
            **META,
        )
'''


def default_tile(spec: KernelSpec) -> Tile:
    """A few rows, and the slabs of `lora_b_backward` with its rule."""
    slab = lora_b_backward.default_tile(spec).slab
    return _tile(spec, slab, _ELEMENTS)


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """More rows a program; the slab is the one that `lora_b_backward` was given."""
    slab = spec.tile.slab if spec.tile else lora_b_backward.default_tile(spec).slab
    return tuple(_tile(spec, slab, elements) for elements in (_ELEMENTS, 2 * _ELEMENTS))


def _tile(spec: KernelSpec, slab: int, elements: int) -> Tile:
    rows = max(4, elements // spec.rank_block)
    return Tile(rows=rows, columns=spec.rank_block, depth=0, warps=4, stages=1, slab=slab)


def source(spec: KernelSpec) -> str:
    """The module's text."""
    constants = {
        "OUTER": spec.outer,
        "RANK_BLOCK": spec.rank_block,
        "STRIPS": _strips(spec),
        "ROWS": spec.cut.rows,
        "SLABS": slabs_of(spec),
        "BATCH": _batch(spec),
        "JOBS": spec.job_capacity,
    }
    if not spec.extend:
        del constants["OUTER"]
    else:
        constants["TAIL_STEP"] = 64
    return module(
        spec,
        constants=constants,
        signature=_signature(spec),
        pieces=["segment_tile", "fault_flags"],
        body=fill(_BODY, _values(spec)),
    )


def _values(spec: KernelSpec) -> dict[str, object]:
    tables = ["segments", "slots", "scales", *(["ranks"] if spec.extend else [])]
    wide = accumulator(spec.dtype)
    return {
        "dtype": spec.dtype,
        "overlap": overlaps(spec),
        "wide": wide,
        "part": wide.removeprefix("tl."),
        "rank_block": spec.rank_block,
        "rows": spec.cut.rows,
        "slabs": slabs_of(spec),
        "strips": _strips(spec),
        "extend": spec.extend,
        "ragged": slabs_of(spec) % _batch(spec) != 0,
        "tables": str(tables).replace("'", '"'),
        "and_tail": ", and the tail of dy" if spec.extend else "",
        "ranks_told": "int32 [jobs + 1]" if spec.extend else "not read",
        "extended_told": f"[M, {spec.outer} + T] in {spec.dtype}, its last T columns are written "
        "whole"
        if spec.extend
        else "not read",
    }


def _signature(spec: KernelSpec) -> dict[str, str]:
    own = f"*{short(spec.dtype)}"
    part = "*fp64" if spec.dtype == "float64" else "*fp32"
    types = {"ds_parts": part, "tokens": "i32", "flags": "*fp32", "segments": "*i32"}
    types |= {"slots": "*i32", "scales": "*fp32", "jobs": "i32", "ds": own, "width": "i32"}
    tail = {"ranks": "*i32", "extended": own, "extended_stride": "i32"}
    return types | (tail if spec.extend else {})


def _batch(spec: KernelSpec) -> int:
    """Slabs that a thread loads before it adds them."""
    return min(_BATCH, 1 << (slabs_of(spec) - 1).bit_length())


def _strips(spec: KernelSpec) -> int:
    return -(-spec.inner // STRIP) - (-spec.outer // STRIP)


def flops(spec: KernelSpec) -> str:
    """Additions."""
    return f"{slabs_of(spec)} M r"


def bytes_moved(spec: KernelSpec) -> str:
    """The shares once, dS once; with `extend` also the tail of T columns."""
    part = 8 if spec.dtype == "float64" else 4
    tail = f" + {size(spec.dtype)} M T" if spec.extend else ""
    return f"{part * slabs_of(spec)} M r + {size(spec.dtype)} M r{tail}"


def cost(spec: KernelSpec, tokens: int, rank_rows: int) -> tuple[int, int]:
    """FLOP and bytes, with every job's ranks rounded up as their mean is, without a tail."""
    part = 8 if spec.dtype == "float64" else 4
    padded = padded_rank_rows(spec, tokens, rank_rows)
    slabs = slabs_of(spec)
    return slabs * padded, (part * slabs + size(spec.dtype)) * padded
