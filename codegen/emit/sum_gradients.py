"""da and db out of the shares that `lora_a_backward` and `lora_b_backward` left, in the order of tokens.

A program takes one row of da or db and a strip of its columns, and adds the shares of its job's
chunks from the first to the last. Rows of jobs without tokens, and rows behind the last job's,
are zero; no share is read for them. The job's own chunks decide the sum, so neighbours do not.
"""  # noqa: E501  (its first line is the first of generated files)

from __future__ import annotations

from tlora_fx.codegen.emit.lora_b_backward import chunk_of, padded_rank_rows
from tlora_fx.codegen.source import accumulator, fill, module, overlaps, short, size
from tlora_fx.codegen.spec import KernelSpec, Tile

_COLUMNS = 1024  # of a program: two pieces of 16 bytes for each of 128 threads
_BATCH = 4  # chunks that a thread loads before it adds them

_BODY = '''
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


def default_tile(spec: KernelSpec) -> Tile:
    """Strips of one row, `rows` chunks at a time: programs enough even for one job of rank 16."""
    widest = max(spec.inner, spec.outer)
    columns = min(_COLUMNS, 1 << (widest - 1).bit_length())
    return Tile(rows=_BATCH, columns=columns, depth=0, warps=4, stages=1, chunk=chunk_of(spec))


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """It reads what others left in the L2 cache; there is nothing to tune."""
    return (default_tile(spec),)


def source(spec: KernelSpec) -> str:
    """The module's text."""
    constants = {
        "INNER": spec.inner,
        "OUTER": spec.outer,
        "COLUMNS": spec.cut.columns,
        "BATCH": spec.cut.rows,
        "A_STRIPS": -(-spec.inner // spec.cut.columns),
        "CHUNK": spec.cut.chunk,
        "JOBS": spec.job_capacity,
    }
    wide = accumulator(spec.dtype)
    values = {
        "wide": wide,
        "overlap": overlaps(spec),
        "part": wide.removeprefix("tl."),
        "adapter_dtype": spec.adapter_dtype,
        "inner": spec.inner,
        "outer": spec.outer,
        "chunk": spec.cut.chunk,
        "strips": -(-spec.inner // spec.cut.columns) - (-spec.outer // spec.cut.columns),
    }
    return module(
        spec,
        constants=constants,
        signature=_signature(spec),
        pieces=["job_of", "chunks_of"],
        body=fill(_BODY, values),
    )


def _signature(spec: KernelSpec) -> dict[str, str]:
    part = "*fp64" if spec.dtype == "float64" else "*fp32"
    own = f"*{short(spec.adapter_dtype)}"
    types = {"da_parts": part, "db_parts": part, "width": "i32", "segments": "*i32"}
    return types | {"ranks": "*i32", "jobs": "i32", "da": own, "db": own}


def flops(spec: KernelSpec) -> str:
    """Additions."""
    return f"M r (I + O) / {spec.cut.chunk}"


def bytes_moved(spec: KernelSpec) -> str:
    """The shares once, the gradients once."""
    part = 8 if spec.dtype == "float64" else 4
    return f"({part} M r / {spec.cut.chunk} + {size(spec.adapter_dtype)} R) (I + O)"


def cost(spec: KernelSpec, tokens: int, rank_rows: int) -> tuple[int, int]:
    """FLOP and bytes, for one job whose rank is the mean."""
    part = 8 if spec.dtype == "float64" else 4
    padded = padded_rank_rows(spec, tokens, rank_rows)
    columns = spec.inner + spec.outer
    rank = -(-rank_rows // max(tokens, 1))
    adds = padded * columns // spec.cut.chunk
    return adds, part * adds + size(spec.adapter_dtype) * rank * columns
