"""Add up the shares that other kernels left, in an order that depends on nothing but the job.

`sum_ds` adds the slabs' shares of dS, or of S where `shrink` leaves shares of it; `sum_gradients`
adds the chunks' shares of da and db.
"""

from __future__ import annotations

from tlora_fx.codegen.kernels import lora_b_backward
from tlora_fx.codegen.kernels.lora_b_backward import chunk_of, padded_rank_rows, slabs_of
from tlora_fx.codegen.kernels.pack import STRIP
from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.codegen.template import common_values, constants_of, fill, module, size

_ELEMENTS = 512  # of dS in a program: 16 bytes of float32 for each of 128 threads
_SLABS = 16  # that a thread loads before it adds them
_COLUMNS = 1024  # of da or db in a program: two times 16 bytes for each of 128 threads
_CHUNKS = 4  # that a thread loads before it adds them

_DS = '''
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
    ranks      $ranks_doc
    extended   $extended_doc
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

_GRADIENTS = '''
@triton.jit
def sum_row(parts, gradient, row, rank, first, count, width, strip, WIDTH: tl.constexpr):
    """A strip of one row of a gradient [rows, WIDTH] from its shares [chunks, width, WIDTH]."""
    columns = strip * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    chunks = tl.arange(0, BATCH)
    chunk_size = width.to(tl.int64) * WIDTH
    parts += first.to(tl.int64) * chunk_size + rank * WIDTH
    total = tl.zeros((COLUMNS,), $wide)
    # A batch is loaded as one tile, so that its loads are under way together.
    for done in range(0, count, BATCH):
        here = (done + chunks < count)[:, None] & inside[None, :]
        batch = parts + (done + chunks).to(tl.int64)[:, None] * chunk_size + columns[None, :]
        total += tl.sum(tl.load(batch, mask=here, other=0.0), axis=0)
    gradient += row.to(tl.int64) * WIDTH
    tl.store(gradient + columns, total.to(tl.$adapter_dtype), mask=inside)


@triton.jit(
    do_not_specialize=["jobs"],
    do_not_specialize_on_alignment=["segments", "ranks"],
)
def kernel(
    da_parts,  # [chunks, width, INNER]
    db_parts,  # [chunks, width, OUTER]
    width,
    segments,  # [jobs + 1]
    ranks,  # [jobs + 1]
    jobs,
    da,  # [R, INNER]
    db,  # [R, OUTER]
):
    start_next(OVERLAP)  #? overlap
    row = tl.program_id(0)
    strip = tl.program_id(1)
    job = job_of(row, ranks, jobs, JOBS)
    first, count = chunks_of(job, segments, jobs, CHUNK, JOBS)
    rank = row - tl.load(ranks + job)
    await_previous(OVERLAP)  #? overlap
    if strip < A_STRIPS:
        sum_row(da_parts, da, row, rank, first, count, width, strip, INNER)
    else:
        sum_row(db_parts, db, row, rank, first, count, width, strip - A_STRIPS, OUTER)


def launch(da_parts, db_parts, segments, ranks, slots, jobs, da, db):
    """Fill da and db.

    da_parts   $part [C, W, $inner], chunks of $chunk tokens
    db_parts   $part [C, W, $outer]
    segments   int32 [jobs + 1]
    ranks      int32 [jobs + 1]
    slots      not read
    da, db     [R, $inner], [R, $outer] in $adapter_dtype, contiguous, written whole
    """
    rows = da.shape[0]
    if rows > 0:
        kernel[rows, $strips](
            da_parts,
            db_parts,
            da_parts.shape[1],
            segments,
            ranks,
            jobs,
            da,
            db,
            **META,
        )
'''


class _SumDs:
    """dS out of the shares that `lora_b_backward` left: summed, scaled and rounded.

    A program takes some rows of a segment and one rank block of columns, adds the slabs' shares
    in their order, and multiplies by the job's scale. Flags of adapters that are not finite turn
    the whole dS of their job into NaN. All columns of dS are written: zeros behind a job's ranks
    and in rows of jobs without an adapter, whose shares are never read.

    With `extend` the rows also go behind dy, job j's columns at ranks[j], for the GEMM of concat-K.

    It is short: 4.2 MB of shares at 8192 x 4096 and 16 ranks, mostly in the L2 cache. Each thread
    has 16 bytes of every slab's share to load, all at once, and the tile is so small that all SMs
    have several programs.

    It also finishes S where `shrink` leaves shares of it: the spec's `outer` is x's width then.
    """

    def default_tile(self, spec: KernelSpec) -> Tile:
        """A few rows, and the slabs of `lora_b_backward` with its rule."""
        slab = lora_b_backward.default_tile(spec).slab
        return _tile(spec, slab, _ELEMENTS)

    def candidates(self, spec: KernelSpec) -> tuple[Tile, ...]:
        """More rows a program; the slab is the one that `lora_b_backward` was given."""
        slab = spec.tile.slab if spec.tile else lora_b_backward.default_tile(spec).slab
        return tuple(_tile(spec, slab, elements) for elements in (_ELEMENTS, 2 * _ELEMENTS))

    def source(self, spec: KernelSpec) -> str:
        """The module's text."""
        names = "RANK_BLOCK STRIPS ROWS SLABS BATCH JOBS"
        return module(
            spec,
            constants=constants_of(
                spec,
                f"OUTER {names} TAIL_STEP" if spec.extend else names,
                STRIPS=_strips(spec),
                SLABS=slabs_of(spec),
                BATCH=_batch(spec),
                TAIL_STEP=64,
            ),
            functions=["segment_tile", "fault_flags"],
            body=fill(_DS, _ds_values(spec)),
        )

    def flops(self, spec: KernelSpec) -> str:
        """Additions."""
        return f"{slabs_of(spec)} M r"

    def bytes_moved(self, spec: KernelSpec) -> str:
        """The shares once, dS once; with `extend` also the tail of T columns."""
        part = 8 if spec.dtype == "float64" else 4
        tail = f" + {size(spec.dtype)} M T" if spec.extend else ""
        return f"{part * slabs_of(spec)} M r + {size(spec.dtype)} M r{tail}"

    def cost(self, spec: KernelSpec, tokens: int, rank_rows: int) -> tuple[int, int]:
        """FLOP and bytes, with every job's ranks rounded up as their mean is, without a tail."""
        part = 8 if spec.dtype == "float64" else 4
        padded = padded_rank_rows(spec, tokens, rank_rows)
        slabs = slabs_of(spec)
        return slabs * padded, (part * slabs + size(spec.dtype)) * padded


def _tile(spec: KernelSpec, slab: int, elements: int) -> Tile:
    rows = max(4, elements // spec.rank_block)
    return Tile(rows=rows, columns=spec.rank_block, depth=0, warps=4, stages=1, slab=slab)


def _ds_values(spec: KernelSpec) -> dict[str, object]:
    tables = ["segments", "slots", "scales", *(["ranks"] if spec.extend else [])]
    return common_values(spec) | {
        "slabs": slabs_of(spec),
        "strips": _strips(spec),
        "ragged": slabs_of(spec) % _batch(spec) != 0,
        "tables": str(tables).replace("'", '"'),
        "and_tail": ", and the tail of dy" if spec.extend else "",
        "ranks_doc": "int32 [jobs + 1]" if spec.extend else "not read",
        "extended_doc": f"[M, {spec.outer} + T] in {spec.dtype}, its last T columns are written "
        "whole"
        if spec.extend
        else "not read",
    }


def _batch(spec: KernelSpec) -> int:
    """Slabs that a thread loads before it adds them."""
    return min(_SLABS, 1 << (slabs_of(spec) - 1).bit_length())


def _strips(spec: KernelSpec) -> int:
    return -(-spec.inner // STRIP) - (-spec.outer // STRIP)


class _SumGradients:
    """da and db out of the shares that `lora_a_backward` and `lora_b_backward` left, in the order of tokens.

    A program takes one row of da or db and a strip of its columns, and adds the shares of its job's
    chunks from the first to the last. Rows of jobs without tokens, and rows behind the last job's,
    are zero; no share is read for them. The job's own chunks decide the sum, so neighbours do not.
    """  # noqa: E501  (its first line is the first of generated files)

    def default_tile(self, spec: KernelSpec) -> Tile:
        """Strips of one row, `rows` chunks at a time: programs enough for one job of rank 16."""
        widest = max(spec.inner, spec.outer)
        columns = min(_COLUMNS, 1 << (widest - 1).bit_length())
        return Tile(rows=_CHUNKS, columns=columns, depth=0, warps=4, stages=1, chunk=chunk_of(spec))

    def candidates(self, spec: KernelSpec) -> tuple[Tile, ...]:
        """It reads what others left in the L2 cache; there is nothing to tune."""
        return (self.default_tile(spec),)

    def source(self, spec: KernelSpec) -> str:
        """The module's text."""
        a_strips = -(-spec.inner // spec.cut.columns)
        strips = a_strips - (-spec.outer // spec.cut.columns)
        return module(
            spec,
            constants=constants_of(
                spec,
                "INNER OUTER COLUMNS BATCH A_STRIPS CHUNK JOBS",
                BATCH=spec.cut.rows,
                A_STRIPS=a_strips,
            ),
            functions=["job_of", "chunks_of"],
            body=fill(_GRADIENTS, common_values(spec) | {"strips": strips}),
        )

    def flops(self, spec: KernelSpec) -> str:
        """Additions."""
        return f"M r (I + O) / {spec.cut.chunk}"

    def bytes_moved(self, spec: KernelSpec) -> str:
        """The shares once, the gradients once."""
        part = 8 if spec.dtype == "float64" else 4
        return f"({part} M r / {spec.cut.chunk} + {size(spec.adapter_dtype)} R) (I + O)"

    def cost(self, spec: KernelSpec, tokens: int, rank_rows: int) -> tuple[int, int]:
        """FLOP and bytes, for one job whose rank is the mean."""
        part = 8 if spec.dtype == "float64" else 4
        padded = padded_rank_rows(spec, tokens, rank_rows)
        columns = spec.inner + spec.outer
        rank = -(-rank_rows // max(tokens, 1))
        adds = padded * columns // spec.cut.chunk
        return adds, part * adds + size(spec.adapter_dtype) * rank * columns


sum_ds = _SumDs()
sum_gradients = _SumGradients()
