"""Add up the shares that other kernels left, in an order that depends on nothing but the job.

`sum_ds` adds the slabs' shares of dS, `sum_s` those of S where `shrink` leaves such, and
`sum_gradients` the chunks' shares of da and db.
"""

from __future__ import annotations

from itertools import accumulate

from tlora_fx.codegen.kernels import lora_b_backward
from tlora_fx.codegen.kernels.lora_b_backward import chunk_of, slabs_of
from tlora_fx.codegen.kernels.pack import STRIP
from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.codegen.template import (
    common_values,
    constants_of,
    either,
    fill,
    module,
    of_sites,
    written,
)

_ELEMENTS = 512  # of dS in a program: 16 bytes of float32 for each of 128 threads
_S_SLAB = 1024  # of x, where nobody says
_SLABS = 16  # that a thread loads before it adds them
_COLUMNS = 1024  # of da or db in a program: two times 16 bytes for each of 128 threads
_CHUNKS = 4  # that a thread loads before it adds them

_DS = '''
@triton.jit
def sum_site(
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
    tail,  # first column of this site's tail
    tail_width,
    #]
    STRIPS: tl.constexpr,
    SLABS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """$name of one site, some rows of a segment and one rank block; waits for the kernel before."""
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
    if (start < end) & (block * RANK_BLOCK < width):
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
            read = (inside & own)[None, :, :]
            if SLABS % BATCH:
                read = read & (slab < SLABS)
            batch = tl.load(ds_parts + slab * slab_size + near[None, :, :], mask=read, other=0.0)
            total += tl.sum(batch, axis=0)
        value = tl.where(own, total * scale + tl.sum(faults), 0.0).to(tl.$dtype)
        tl.store(ds + start.to(tl.int64) * width + near, value, mask=inside)
        #? extend [

        row = extended + (start + rows).to(tl.int64)[:, None] * extended_stride + tail
        to = before + columns[None, :]
        tl.store(row + to, value, mask=inside & (to < after))
        if block == 0:
            for step in range(0, tail_width, TAIL_STEP):
                rest = (step + tl.arange(0, TAIL_STEP))[None, :]
                others = (rest < before) | (rest >= after)
                within = inside & (rest < tail_width)
                zeros = tl.zeros((ROWS, TAIL_STEP), tl.$dtype)
                tl.store(row + rest, zeros, mask=within & others)
        #]


@triton.jit(
    do_not_specialize=["tokens", "jobs"],
    do_not_specialize_on_alignment=[
        "segments",
        #* sites [
        "slots_$k",
        "scales_$k",
        "ranks_$k",  #? extend
        #]
    ],
)
def kernel(
    tokens,
    segments,  # [jobs + 1]
    jobs,
    #* sites [
    ds_parts_$k,  # [SLABS, tokens, width]
    flags_$k,  # [P / RANK_BLOCK, STRIPS]
    slots_$k,  # [jobs + 1]
    scales_$k,  # [jobs]
    ds_$k,  # [tokens, width]
    width_$k,
    #? extend [
    ranks_$k,  # [jobs + 1]
    extended_$k,  # [tokens, extended_stride]
    extended_stride_$k,
    tail_$k,  # first column of this site's tail
    tail_width_$k,
    #]
    #]
):
    start_next(OVERLAP)  #? overlap
    #* sites [
    if tl.program_id(2) == $k:
        sum_site(
            ds_parts_$k,
            tokens,
            flags_$k,
            segments,
            slots_$k,
            scales_$k,
            jobs,
            ds_$k,
            width_$k,
            #? extend [
            ranks_$k,
            extended_$k,
            extended_stride_$k,
            tail_$k,
            tail_width_$k,
            #]
            STRIPS_$k,
            SLABS_$k,
            BATCH_$k,
        )
    #]


def launch(
    ds_parts,
    flags,
    segments,
    slots,
    scales,
    jobs,
    ds,
    ranks=None,
    extended=None,
    tail_offsets=None,
    tail_widths=None,
):
    """Fill $name$and_tail of $count.

    ds_parts      per site $part [$slabs, M, W]
    flags         per site float32 [P / $rank_block, $strips]
    segments      int32 [jobs + 1]
    slots         per site int32 [jobs + 1]
    scales        per site float32 [jobs]
    ds            per site [M, W] in $dtype, contiguous, written whole
    ranks         $ranks_doc
    extended      $extended_doc
    tail_offsets  $offsets_doc
    tail_widths   $widths_doc
    """
    tokens = ds[0].shape[0]
    blocks = max(rows.shape[1] for rows in ds) // $rank_block
    grid = (blocks, triton.cdiv(tokens, $rows) + jobs, $sites)
    if tokens > 0:
        kernel[grid](
            tokens,
            segments,
            jobs,
            #* sites [
            ds_parts[$k],
            flags[$k],
            slots[$k],
            scales[$k],
            ds[$k],
            ds[$k].shape[1],
            #? extend [
            ranks[$k],
            extended[$k],
            extended[$k].stride(0),
            tail_offsets[$k],
            tail_widths[$k],
            #]
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
    value = total.to(tl.$adapter_dtype)
    #? accumulate [
    # Rounded before it is added, as a sum of whole gradients is.
    before = tl.load(gradient + columns, mask=inside, other=0.0).to($adapter_wide)
    value = (before + value.to($adapter_wide)).to(tl.$adapter_dtype)
    #]
    tl.store(gradient + columns, value, mask=inside)


@triton.jit
def sum_site(
    da_parts,  # [chunks, width, INNER]
    db_parts,  # [chunks, width, OUTER]
    width,
    segments,  # [jobs + 1]
    ranks,  # [jobs + 1]
    jobs,
    da,  # [rows, INNER]
    db,  # [rows, OUTER]
    rows,
    strip,
    OUTER: tl.constexpr,
):
    """A strip of one row of da or db of one site; waits for the kernel before."""
    row = tl.program_id(0)
    job = job_of(row, ranks, jobs, JOBS)
    first, count = chunks_of(job, segments, jobs, CHUNK, JOBS)
    rank = row - tl.load(ranks + job)
    await_previous(OVERLAP)  #? overlap
    taken = row < rows  #? not accumulate
    taken = (row < rows) & (count > 0)  #? accumulate
    if taken:
        if strip < A_STRIPS:
            sum_row(da_parts, da, row, rank, first, count, width, strip, INNER)
        else:
            sum_row(db_parts, db, row, rank, first, count, width, strip - A_STRIPS, OUTER)


@triton.jit(
    do_not_specialize=[
        "jobs",
        #* sites [
        "rows_$k",
        #]
    ],
    do_not_specialize_on_alignment=[
        "segments",
        #* sites [
        "ranks_$k",
        #]
    ],
)
def kernel(
    segments,  # [jobs + 1]
    jobs,
    #* sites [
    da_parts_$k,  # [chunks, width, INNER]
    db_parts_$k,  # [chunks, width, OUTER]
    width_$k,
    ranks_$k,  # [jobs + 1]
    da_$k,  # [rows, INNER]
    db_$k,  # [rows, OUTER]
    rows_$k,
    #]
):
    start_next(OVERLAP)  #? overlap
    strip = tl.program_id(1)
    #* sites [
    if (strip >= FIRST_$k) & (strip < END_$k):
        sum_site(
            da_parts_$k,
            db_parts_$k,
            width_$k,
            segments,
            ranks_$k,
            jobs,
            da_$k,
            db_$k,
            rows_$k,
            strip - FIRST_$k,
            OUTER_$k,
        )
    #]


def launch(da_parts, db_parts, segments, ranks, slots, jobs, da, db):
    """$fills of $count.

    da_parts   per site $part [C, W, $inner], chunks of $chunk tokens
    db_parts   per site $part [C, W, $outers]
    segments   int32 [jobs + 1]
    ranks      per site int32 [jobs + 1]
    slots      not read
    da, db     per site [R, $inner], [R, $outers] in $adapter_dtype, contiguous, $written
    """
    rows = max(gradient.shape[0] for gradient in da)
    if rows > 0:
        kernel[rows, $strips](
            segments,
            jobs,
            #* sites [
            da_parts[$k],
            db_parts[$k],
            da_parts[$k].shape[1],
            ranks[$k],
            da[$k],
            db[$k],
            da[$k].shape[0],
            #]
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
    """

    name, source_name = "dS", "dy"

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        """Width that was cut into slabs, of each site."""
        return spec.outers

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
        own = of_sites(
            STRIPS=[_strips(spec, outer) for outer in spec.outers],
            SLABS=(counts := self._slabs(spec)),
            BATCH=[_batch(count) for count in counts],
        )
        names = "RANK_BLOCK ROWS JOBS"
        names += " TAIL_STEP" * bool(spec.extend)
        return module(
            spec,
            constants=constants_of(spec, f"{names} {' '.join(own)}", TAIL_STEP=64, **own),
            functions=["segment_tile", "fault_flags"],
            body=fill(_DS, self._values(spec)),
        )

    def _slabs(self, spec: KernelSpec) -> list[int]:
        return [slabs_of(spec, width) for width in self.widths(spec)]

    def _values(self, spec: KernelSpec) -> dict[str, object]:
        wide = f"per site [M, {either(self.widths(spec))} + T or wider] in {spec.dtype}"
        return common_values(spec) | {
            "name": self.name,
            "slabs": either(self._slabs(spec)),
            "strips": either([_strips(spec, outer) for outer in spec.outers]),
            "and_tail": f", and the tail of {self.source_name}" if spec.extend else "",
            "ranks_doc": "per site int32 [jobs + 1]" if spec.extend else "not read",
            "extended_doc": wide if spec.extend else "not read",
            "offsets_doc": "per site its tail's first column" if spec.extend else "not read",
            "widths_doc": "per site its tail's columns, written whole"
            if spec.extend
            else "not read",
        }


class _SumS(_SumDs):
    """S out of the shares that `shrink` left: summed, scaled and rounded.

    As `sum_ds`, but what was cut into slabs is x, which all sites read. With `extend` the rows also
    go behind x.
    """

    name, source_name = "S", "x"

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        """Width of x, at each site."""
        return (spec.inner,) * spec.sites

    def default_tile(self, spec: KernelSpec) -> Tile:
        """A few rows, and the slabs that `shrink` takes of a row of 2,048 tokens."""
        return self.tile(spec, _S_SLAB)

    def tile(self, spec: KernelSpec, slab: int) -> Tile:
        """A few rows, and the slabs that `shrink` had."""
        return _tile(spec, slab, _ELEMENTS)

    def candidates(self, spec: KernelSpec) -> tuple[Tile, ...]:
        """More rows a program; the slab is the one that `shrink` was given."""
        slab = spec.tile.slab if spec.tile else _S_SLAB
        return tuple(_tile(spec, slab, elements) for elements in (_ELEMENTS, 2 * _ELEMENTS))


def _tile(spec: KernelSpec, slab: int, elements: int) -> Tile:
    rows = max(4, elements // spec.rank_block)
    return Tile(rows=rows, columns=spec.rank_block, depth=0, warps=4, stages=1, slab=slab)


def _batch(slabs: int) -> int:
    """Slabs that a thread loads before it adds them."""
    return min(_SLABS, 1 << (slabs - 1).bit_length())


def _strips(spec: KernelSpec, outer: int) -> int:
    return -(-spec.inner // STRIP) - (-outer // STRIP)


class _SumGradients:
    """da and db out of the shares that `lora_a_backward` and `lora_b_backward` left, in the order of tokens.

    A program takes one row of da or db and a strip of its columns, and adds the shares of its job's
    chunks from the first to the last. Rows of jobs without tokens, and rows behind the last job's,
    are zero; no share is read for them. The job's own chunks decide the sum, so neighbours do not.

    With `accumulate` the sum is added to what is there, and rows without tokens stay as they are.
    """  # noqa: E501  (its first line is the first of generated files)

    def default_tile(self, spec: KernelSpec) -> Tile:
        """Strips of one row, `rows` chunks at a time: programs enough for one job of rank 16."""
        widest = max(spec.inner, *spec.outers)
        columns = min(_COLUMNS, 1 << (widest - 1).bit_length())
        return Tile(rows=_CHUNKS, columns=columns, depth=0, warps=4, stages=1, chunk=chunk_of(spec))

    def candidates(self, spec: KernelSpec) -> tuple[Tile, ...]:
        """The rule's tile alone: the kernel reads the L2 cache, so there is nothing to tune."""
        return (self.default_tile(spec),)

    def source(self, spec: KernelSpec) -> str:
        """The module's text."""
        a_strips = -(-spec.inner // spec.cut.columns)
        ends = [*accumulate(a_strips - (-outer // spec.cut.columns) for outer in spec.outers)]
        own = of_sites(OUTER=spec.outers, FIRST=[0, *ends[:-1]], END=ends)
        return module(
            spec,
            constants=constants_of(
                spec,
                f"INNER COLUMNS BATCH A_STRIPS CHUNK JOBS {' '.join(own)}",
                BATCH=spec.cut.rows,
                A_STRIPS=a_strips,
                **own,
            ),
            functions=["job_of", "chunks_of"],
            body=fill(_GRADIENTS, common_values(spec) | written(spec) | {"strips": ends[-1]}),
        )


sum_ds = _SumDs()
sum_s = _SumS()
sum_gradients = _SumGradients()
