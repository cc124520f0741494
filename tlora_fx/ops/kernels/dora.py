"""DoRA on a GPU: the norms of adapted weights, and the columns of each job's tokens scaled.

Chunks of tokens count from their job's first token, and parts are summed in their order: no bit of
a job depends on its neighbours or on the run. Which job a chunk is of is found on the device, so a
captured CUDA graph serves rows of other segments.

A norm is that of W + s B A for each row. Nothing of W's size is made: with P = A Wᵀ and G = A Aᵀ,

    |w_i + s b_i A|² = |w_i|² + 2 s b_i P_i + s² b_i G b_iᵀ

Two launches serve all jobs: `_products` reads W once, for P of all jobs and each |w_i|², with G
beside it, all in shares of W's columns; `_norms` sums the shares in their order.

source   Liu et al. 2024, DoRA: Weight-Decomposed Low-Rank Adaptation
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tokens of a chunk, which is a program's work: forward and backward.
SCALED, SUMMED = 64, 128
_ROWS = 32
_COLUMNS = 128
# Ranks of a program that reads the weight, columns that it reads at a time, and what ranks are
# padded to. With 64 columns at a time float32 does not fit into registers.
_RANKS, _STEP, _BLOCK = 64, 32, 16
# Programs that a GPU runs at once, and the fewest columns of the weight that one of them sums over.
_PROGRAMS, _LEAST_SHARE = 256, 256
# Norms of a program.
_NORMS = 64


@triton.jit
def _chunk(segments, jobs, CHUNK: tl.constexpr):
    """A program's job, and its tokens; none where there are fewer chunks than programs."""
    chunk = tl.program_id(0)
    job = chunk * 0
    first = chunk * 0
    stop = chunk * 0
    before = chunk * 0
    for each in range(jobs):
        start = tl.load(segments + each)
        end = tl.load(segments + each + 1)
        count = (end - start + CHUNK - 1) // CHUNK
        mine = (chunk >= before) & (chunk < before + count)
        job = tl.where(mine, each, job)
        first = tl.where(mine, start + (chunk - before) * CHUNK, first)
        stop = tl.where(mine, end, stop)
        before += count
    return job, first, stop


@triton.jit
def _factor(magnitudes, norms, place, held):
    """What columns are scaled by; 1 where none is held."""
    magnitude = tl.load(magnitudes + place, mask=held, other=1.0)
    return tl.div_rn(magnitude, tl.load(norms + place, mask=held, other=1.0))


@triton.jit(do_not_specialize=["jobs"])
def _scale(
    y, bias, magnitudes, norms, out, segments, slots, jobs, y_step,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    job, first, stop = _chunk(segments, jobs, CHUNK)
    if first >= stop:
        return
    slot = tl.load(slots + job).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    row = first + tl.arange(0, CHUNK)
    inside = (row < stop)[:, None] & held[None, :]
    place = row.to(tl.int64)[:, None]
    value = tl.load(y + place * y_step + columns[None, :], mask=inside, other=0.0)
    if slot >= 0:
        factor = _factor(magnitudes, norms, slot * WIDTH + columns, held)[None, :]
        wide = value.to(tl.float32)
        if BIASED:
            shift = tl.load(bias + columns, mask=held, other=0.0).to(tl.float32)[None, :]
            wide = (wide - shift) * factor + shift
        else:
            wide = wide * factor
        value = wide.to(value.dtype)
    tl.store(out + place * WIDTH + columns[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["jobs"])
def _gradient(
    dy, y, bias, magnitudes, norms, dx, parts, segments, slots, jobs, dy_step, y_step,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    job, first, stop = _chunk(segments, jobs, CHUNK)
    if first >= stop:
        return
    slot = tl.load(slots + job).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    scaled = slot >= 0
    factor = _factor(magnitudes, norms, slot * WIDTH + columns, held & scaled)[None, :]
    shift = tl.zeros((1, COLUMNS), tl.float32)
    if BIASED:
        shift = tl.load(bias + columns, mask=held, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    stop = tl.minimum(stop, first + CHUNK)
    for step in range(first, stop, ROWS):
        row = step + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & held[None, :]
        place = row.to(tl.int64)[:, None]
        value = tl.load(dy + place * dy_step + columns[None, :], mask=inside, other=0.0)
        wide = value.to(tl.float32)
        if scaled:
            base = tl.load(y + place * y_step + columns[None, :], mask=inside, other=0.0)
            total += tl.where(inside, wide * (base.to(tl.float32) - shift), 0.0)
            value = (wide * factor).to(value.dtype)
        tl.store(dx + place * WIDTH + columns[None, :], value, mask=inside)
    if scaled:
        part = parts + tl.program_id(0).to(tl.int64) * WIDTH
        tl.store(part + columns, tl.sum(total, axis=0), mask=held)


@triton.jit
def _sum(
    parts, norms, sums, segments, slots,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0)
    slot = tl.load(slots + job).to(tl.int64)
    if slot < 0:
        return
    before = job * 0
    for each in range(job):
        tokens = tl.load(segments + each + 1) - tl.load(segments + each)
        before += (tokens + CHUNK - 1) // CHUNK
    own = tl.load(segments + job + 1) - tl.load(segments + job)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    part = parts + before.to(tl.int64) * WIDTH + columns
    for _ in range((own + CHUNK - 1) // CHUNK):
        total += tl.load(part, mask=held, other=0.0)
        part += WIDTH
    norm = tl.load(norms + slot * WIDTH + columns, mask=held, other=1.0)
    tl.store(sums + slot * WIDTH + columns, tl.div_rn(total, norm), mask=held)


@triton.jit
def _weight_tile(
    weight, a, products, lengths, ranks, indices, row_step, column_step, count, block, across,
    share, extent,
    RANK: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One share of A by the weight for some ranks and columns, and of the columns' squares."""
    lane = block * ROWS + tl.arange(0, ROWS)
    listed = lane < count
    job = tl.load(indices + lane // RANK, mask=listed, other=0)
    rank = tl.load(ranks + job) + lane % RANK
    mine = (listed & (rank < tl.load(ranks + job + 1)))[:, None]
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    a += rank.to(tl.int64)[:, None] * INNER
    weight += columns.to(tl.int64)[None, :] * row_step
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    square = tl.zeros((COLUMNS,), tl.float32)
    for first in range(share * extent, share * extent + extent, STEP):
        inner = first + tl.arange(0, STEP)
        inside = inner < INNER
        down = tl.load(a + inner[None, :], mask=mine & inside[None, :], other=0.0).to(tl.float32)
        at = inner.to(tl.int64)[:, None] * column_step
        tile = tl.load(weight + at, mask=inside[:, None] & held[None, :], other=0.0)
        wide = tile.to(tl.float32)
        square += tl.sum(wide * wide, axis=0)
        if tile.dtype == tl.bfloat16:
            # Three bfloat16 hold the 24 bits of a float32.
            for _ in tl.static_range(3):
                rounded = down.to(tl.bfloat16)
                total = tl.dot(rounded, tile, total)
                down -= rounded.to(tl.float32)
        else:
            total = tl.dot(down, wide, total, input_precision="tf32x3")
    place = (share * count + lane).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(products + place, total, mask=listed[:, None] & held[None, :])
    tl.store(lengths + share * WIDTH + columns, square, mask=held & (block == 0))


@triton.jit
def _gram_tile(
    a, grams, ranks, indices, jobs, program, share, extent,
    RANK: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One share of a job's A by itself for some pairs of ranks."""
    tiles: tl.constexpr = RANK // BLOCK
    slot = program // (tiles * tiles)
    lanes = tl.arange(0, BLOCK)
    row = program // tiles % tiles * BLOCK + lanes
    line = program % tiles * BLOCK + lanes
    job = tl.load(indices + slot)
    start = tl.load(ranks + job)
    count = tl.load(ranks + job + 1) - start
    a += start.to(tl.int64) * INNER
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(share * extent, share * extent + extent, STEP):
        inner = first + tl.arange(0, STEP)
        inside = (inner < INNER)[None, :]
        at = inner[None, :]
        one = tl.load(
            a + row[:, None] * INNER + at, mask=inside & (row < count)[:, None], other=0.0
        )
        other = tl.load(
            a + line[:, None] * INNER + at, mask=inside & (line < count)[:, None], other=0.0
        )
        one, other = one.to(tl.float32), tl.trans(other.to(tl.float32))
        total = tl.dot(one, other, total, input_precision="ieee")
    place = ((share * jobs + slot) * RANK + row)[:, None] * RANK + line[None, :]
    tl.store(grams + place, total)


@triton.jit(do_not_specialize=["jobs"])
def _products(
    weight, a, products, grams, lengths, ranks, indices, row_step, column_step, jobs, extent,
    RANK: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    program, share = tl.program_id(0), tl.program_id(1)
    count = jobs * RANK
    blocks = tl.cdiv(count, ROWS)
    tiles = blocks * tl.cdiv(WIDTH, COLUMNS)
    if program < tiles:
        # Programs beside each other read the same part of the weight.
        _weight_tile(
            weight, a, products, lengths, ranks, indices, row_step, column_step, count,
            program % blocks, program // blocks, share, extent,
            RANK, WIDTH, INNER, ROWS, COLUMNS, STEP,
        )  # fmt: skip
    else:
        _gram_tile(
            a, grams, ranks, indices, jobs, program - tiles, share, extent,
            RANK, INNER, BLOCK, STEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["jobs"])
def _norms(
    products, grams, lengths, b, scales, ranks, indices, norms, jobs,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    job = tl.load(indices + slot)
    start = tl.load(ranks + job)
    rank = tl.load(ranks + job + 1) - start
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    lanes = tl.arange(0, BLOCK)
    b += start.to(tl.int64) * WIDTH
    length = tl.zeros((COLUMNS,), tl.float32)
    for share in tl.static_range(SHARES):
        length += tl.load(lengths + share * WIDTH + columns, mask=held, other=0.0)
    cross = tl.zeros((COLUMNS,), tl.float32)
    square = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rank, BLOCK):
        row = first + lanes
        inside = (row < rank)[:, None] & held[None, :]
        ups = tl.load(b + row[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
        ups = ups.to(tl.float32)
        product = tl.zeros((BLOCK, COLUMNS), tl.float32)
        for share in tl.static_range(SHARES):
            at = ((share * jobs + slot) * RANK + row).to(tl.int64)[:, None] * WIDTH
            product += tl.load(products + at + columns[None, :], mask=inside, other=0.0)
        cross += tl.sum(ups * product, axis=0)
        for other in range(0, rank, BLOCK):
            line = other + lanes
            among = (line < rank)[:, None] & held[None, :]
            others = tl.load(b + line[:, None] * WIDTH + columns[None, :], mask=among, other=0.0)
            angles = tl.zeros((BLOCK, BLOCK), tl.float32)
            for share in tl.static_range(SHARES):
                pair = ((share * jobs + slot) * RANK + row)[:, None] * RANK + line[None, :]
                angles += tl.load(grams + pair)
            inner = tl.dot(angles, others.to(tl.float32), input_precision="ieee")
            square += tl.sum(ups * inner, axis=0)
    scale = tl.load(scales + job)
    sides = length + scale * scale * square
    total = sides + 2.0 * scale * cross
    # What rounding cannot tell from nothing; a NaN is not less.
    floor = sides * 1.1920929e-07
    total = tl.where(total < floor, floor, total)
    tl.store(norms + slot.to(tl.int64) * WIDTH + columns, tl.sqrt(total), mask=held)


@cache
def _on_device(jobs: tuple[int, ...], count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 [J], each job's row of the factors or -1; int32 [n], whose each row is."""
    slots = [jobs.index(job) if job in jobs else -1 for job in range(count)]
    made = (torch.tensor(table, dtype=torch.int32, device=device) for table in (slots, jobs))
    first, second = made
    return first, second


def scale(
    y: Tensor,
    bias: Tensor | None,
    magnitudes: Tensor,
    norms: Tensor,
    segments: Tensor,
    jobs: tuple[int, ...],
) -> Tensor:
    """Scale the columns of some jobs' tokens by magnitude over norm; those of others are copied.

    y                  [T, out], rows dense
    bias               [out], what y has in it and is not scaled
    magnitudes, norms  float32 [n, out], contiguous
    segments           int32 [J + 1] on the device, token offsets
    jobs               whose each row of the magnitudes is
    returns            [T, out]
    """
    tokens, width = y.shape
    count = segments.shape[0] - 1
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    slots, _ = _on_device(jobs, count, y.device)
    grid = (-(-tokens // SCALED) + count, -(-width // _COLUMNS))
    _scale[grid](
        y, y if bias is None else bias, magnitudes, norms, out, segments, slots, count, y.stride(0),
        WIDTH=width, BIASED=bias is not None, CHUNK=SCALED, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out


def gradient(
    dy: Tensor,
    y: Tensor,
    bias: Tensor | None,
    magnitudes: Tensor,
    norms: Tensor,
    segments: Tensor,
    jobs: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """What `scale` is differentiated by.

    returns   dy scaled, [T, out]; of each magnitude, float32 [n, out]
    """
    tokens, width = y.shape
    count = segments.shape[0] - 1
    dx = torch.empty((tokens, width), dtype=dy.dtype, device=y.device)
    chunks, blocks = -(-tokens // SUMMED) + count, -(-width // _COLUMNS)
    parts = torch.empty((chunks, width), dtype=torch.float32, device=y.device)
    sums = torch.empty(norms.shape, dtype=torch.float32, device=y.device)
    slots, _ = _on_device(jobs, count, y.device)
    _gradient[(chunks, blocks)](
        dy, y, y if bias is None else bias, magnitudes, norms, dx, parts, segments, slots, count,
        dy.stride(0), y.stride(0),
        WIDTH=width, BIASED=bias is not None, CHUNK=SUMMED, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    _sum[(count, blocks)](
        parts, norms, sums, segments, slots, WIDTH=width, CHUNK=SUMMED, COLUMNS=_COLUMNS
    )
    return dx, sums


def norms(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    jobs: tuple[int, ...],
    max_rank: int,
) -> Tensor:
    """The norms of each row of W + s B A of some jobs.

    weight         [out, in], in 16 bits or float32
    a, b           [R, in] and [R, out], contiguous
    ranks, scales  int32 [J + 1] and float32 [J] on the device
    jobs           the n jobs
    max_rank       the largest of their ranks
    returns        float32 [n, out]
    """
    width, inner = weight.shape
    rank = -(-max(1, max_rank) // _BLOCK) * _BLOCK
    count = len(jobs) * rank
    tiles = -(-count // _RANKS) * -(-width // _COLUMNS)
    extent, shares = _shares(tiles, inner)
    _, indices = _on_device(jobs, ranks.shape[0] - 1, a.device)

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=a.device)

    products, lengths = empty(shares, count, width), empty(shares, width)
    grams, out = empty(shares, len(jobs), rank, rank), empty(len(jobs), width)
    pairs = len(jobs) * (rank // _BLOCK) ** 2
    _products[(tiles + pairs, shares)](
        weight, a, products, grams, lengths, ranks, indices, *weight.stride(), len(jobs),
        extent, RANK=rank, WIDTH=width, INNER=inner, ROWS=_RANKS, COLUMNS=_COLUMNS, BLOCK=_BLOCK,
        STEP=_STEP,
    )  # fmt: skip
    _norms[(len(jobs), -(-width // _NORMS))](
        products, grams, lengths, b, scales, ranks, indices, out, len(jobs),
        RANK=rank, WIDTH=width, SHARES=shares, BLOCK=_BLOCK, COLUMNS=_NORMS,
    )  # fmt: skip
    return out


def _shares(tiles: int, inner: int) -> tuple[int, int]:
    """Columns of the weight that one program sums over, and how many programs it takes for all.

    Programs then fill the GPU at once; none has less to do than writing its part is worth.
    """
    most = -(-inner // _LEAST_SHARE)
    wanted = min(max(1, _PROGRAMS // tiles), most)
    extent = -(-inner // (wanted * _STEP)) * _STEP
    return extent, -(-inner // extent)
