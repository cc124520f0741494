"""DoRA on a GPU: the norms of adapted weights, and the columns of each job's tokens scaled.

Chunks of tokens count from their job's first token, and parts are summed in their order: no bit of
a job depends on its neighbours or on the run. Which job a chunk is of is found on the device, so a
captured CUDA graph serves rows of other segments.

A norm is that of W + s B A for each row. Nothing of W's size is made: with P = A Wᵀ and G = A Aᵀ,

    |w_i + s b_i A|² = |w_i|² + 2 s b_i P_i + s² b_i G b_iᵀ

Three launches serve all jobs. `_split` puts A's rows together as tensor cores take them;
`_products` makes P of all jobs, G, and each |w_i|² unless that is known, in shares of W's columns;
`_norms` sums the shares in their order. A lane is a rank of a job: those of a job follow
on those of the job before it.

source   Liu et al. 2024, DoRA: Weight-Decomposed Low-Rank Adaptation
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tokens of a chunk, which is a program's work: forward and backward.
SCALED, SUMMED = 64, 64
_ROWS = 32
_COLUMNS = 128
# Lanes of a program that reads the weight, what ranks of one job are padded to where they meet each
# other, and columns that they meet in.
_LANES, _BLOCK, _GRAM_STEP = 64, 16, 32
# Lanes and columns of a program that splits A.
_SPLIT_ROWS, _SPLIT_COLUMNS = 16, 128
# Programs that a GPU runs at once, and the fewest columns of the weight that one of them sums over.
_PROGRAMS, _MIN_SHARE = 264, 256
# Norms of a program.
_NORMS = 64


class _Form(NamedTuple):
    """How a program reads the weight: rows of it, columns at a time, and what A is split into.

    Two bfloat16 hold 16 bits of a float32: what is left is 4e-6 of an element, and by a sum over
    elements next to nothing.
    """

    columns: int
    step: int
    parts: int
    warps: int
    stages: int


# Of other types than bfloat16, and of it. float32 does not fit into registers with 64 at a time.
_forms = _Form(128, 32, 1, 8, 3), _Form(128, 64, 2, 4, 4)


@triton.jit
def _chunk(segments, jobs, CHUNK: tl.constexpr, JOBS: tl.constexpr):
    """A program's job, and its tokens; none where there are fewer chunks than programs."""
    chunk = tl.program_id(0)
    each = tl.arange(0, JOBS)
    start = tl.load(segments + each, mask=each < jobs, other=0)
    end = tl.load(segments + each + 1, mask=each < jobs, other=0)
    count = (end - start + CHUNK - 1) // CHUNK
    before = tl.cumsum(count, axis=0) - count
    mine = (chunk >= before) & (chunk < before + count)
    job = tl.sum(tl.where(mine, each, 0), axis=0)
    first = tl.sum(tl.where(mine, start + (chunk - before) * CHUNK, 0), axis=0)
    return job, first, tl.sum(tl.where(mine, end, 0), axis=0)


@triton.jit
def _factor(magnitudes, norms, place, held):
    """What columns are scaled by; 1 where none is held."""
    magnitude = tl.load(magnitudes + place, mask=held, other=1.0)
    return tl.div_rn(magnitude, tl.load(norms + place, mask=held, other=1.0))


@triton.jit(do_not_specialize=["jobs"])
def _scale(
    y, bias, magnitudes, norms, out, segments, slots, jobs, y_step,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    JOBS: tl.constexpr,
):  # fmt: skip
    job, first, stop = _chunk(segments, jobs, CHUNK, JOBS)
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
    COLUMNS: tl.constexpr, JOBS: tl.constexpr,
):  # fmt: skip
    job, first, stop = _chunk(segments, jobs, CHUNK, JOBS)
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
def _counts(ranks, indices, jobs, JOBS: tl.constexpr):
    """Where each job's rows of A begin, how many they are, and its first lane."""
    slot = tl.arange(0, JOBS)
    job = tl.load(indices + slot, mask=slot < jobs, other=0)
    start = tl.load(ranks + job, mask=slot < jobs, other=0)
    count = tl.load(ranks + job + 1, mask=slot < jobs, other=0) - start
    return start, count, tl.cumsum(count, axis=0) - count


@triton.jit(do_not_specialize=["jobs", "lanes"])
def _split(
    a, parts, ranks, indices, jobs, lanes,
    INNER: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    JOBS: tl.constexpr,
):  # fmt: skip
    start, count, before = _counts(ranks, indices, jobs, JOBS)
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = lane[:, None] - before[None, :]
    inside = (own >= 0) & (own < count[None, :])
    rank = tl.sum(tl.where(inside, own + start[None, :], 0), axis=1)
    # Zeros for lanes of no rank.
    used = tl.sum(count, axis=0)
    inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    among = (inner < INNER)[None, :]
    at = rank.to(tl.int64)[:, None] * INNER + inner[None, :]
    down = tl.load(a + at, mask=(lane < used)[:, None] & among, other=0.0).to(tl.float32)
    place = parts + lane.to(tl.int64)[:, None] * INNER + inner[None, :]
    for _ in tl.static_range(PARTS):
        rounded = down.to(parts.dtype.element_ty)
        tl.store(place, rounded, mask=(lane < lanes)[:, None] & among)
        down -= rounded.to(tl.float32)
        place += lanes.to(tl.int64) * INNER


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


@triton.jit
def _product_tile(
    weight, parts, products, row_step, column_step, lanes, block, across, share, extent,
    WIDTH: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One share of A by the weight for some lanes and columns."""
    row = tl.arange(0, PARTS * ROWS)
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    held = (columns < WIDTH)[None, :]
    # The parts of a lane are rows of one product, and are summed at its end.
    downs = parts + (row // ROWS * lanes + block * ROWS + row % ROWS).to(tl.int64)[:, None] * INNER
    tiles = weight + columns.to(tl.int64)[None, :] * row_step
    total = tl.zeros((PARTS * ROWS, COLUMNS), tl.float32)
    for first in range(share * extent, share * extent + extent, STEP):
        inner = first + tl.arange(0, STEP)
        among = inner < INNER
        at = inner.to(tl.int64)[:, None] * column_step
        tile = tl.load(tiles + at, mask=among[:, None] & held, other=0.0)
        down = tl.load(downs + inner[None, :], mask=among[None, :], other=0.0)
        if PARTS == 1:
            total = tl.dot(down, tile.to(tl.float32), total, input_precision="tf32x3")
        else:
            total = tl.dot(down, tile, total)
    whole = tl.sum(tl.reshape(total, (PARTS, ROWS, COLUMNS)), axis=0)
    lane = block * ROWS + tl.arange(0, ROWS)
    place = (share * lanes + lane).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(products + place, whole, mask=held)


@triton.jit
def _length_tile(
    weight, lengths, row_step, column_step, across, share, extent,
    WIDTH: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One share of the squares of some rows of the weight.

    Apart from their product: with that, tiles were overwritten that a program still read (Triton
    3.6, seen as wrong norms).
    """
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    tiles = weight + columns.to(tl.int64)[:, None] * row_step
    square = tl.zeros((COLUMNS, STEP), tl.float32)
    for first in tl.range(share * extent, share * extent + extent, STEP, num_stages=4):
        inner = first + tl.arange(0, STEP)
        at = inner.to(tl.int64)[None, :] * column_step
        tile = tl.load(tiles + at, mask=(inner < INNER)[None, :] & held[:, None], other=0.0)
        wide = tile.to(tl.float32)
        square += wide * wide
    tl.store(lengths + share * WIDTH + columns, tl.sum(square, axis=1), mask=held)


@triton.jit
def _lengths(
    weight, lengths, row_step, column_step,
    WIDTH: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    _length_tile(
        weight, lengths, row_step, column_step, tl.program_id(0), 0, INNER,
        WIDTH, INNER, COLUMNS, STEP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["jobs", "lanes"])
def _products(
    weight, a, parts, products, grams, lengths, ranks, indices, row_step, column_step, jobs, lanes,
    extent, gram_extent,
    RANK: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr,
    KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, GRAM_STEP: tl.constexpr, JOBS: tl.constexpr,
):  # fmt: skip
    program, share = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(lanes, ROWS)
    pairs: tl.constexpr = (RANK // BLOCK) * (RANK // BLOCK)
    if program < jobs * pairs:
        _gram_tile(
            a, grams, ranks, indices, jobs, program, share, gram_extent,
            RANK, INNER, BLOCK, GRAM_STEP,
        )  # fmt: skip
    else:
        # Programs beside each other read the same part of the weight.
        tile = program - jobs * pairs
        beside = blocks + 1 - KEPT
        _, count, _ = _counts(ranks, indices, jobs, JOBS)
        block = tile % beside
        if block == blocks:
            _length_tile(
                weight, lengths, row_step, column_step, tile // beside, share, extent,
                WIDTH, INNER, COLUMNS, STEP,
            )  # fmt: skip
        elif block * ROWS < tl.sum(count, axis=0):
            _product_tile(
                weight, parts, products, row_step, column_step, lanes, block, tile // beside,
                share, extent, WIDTH, INNER, PARTS, ROWS, COLUMNS, STEP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["jobs", "lanes"])
def _norms(
    products, grams, lengths, b, scales, ranks, indices, norms, jobs, lanes,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, JOBS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    job = tl.load(indices + slot)
    start = tl.load(ranks + job)
    rank = tl.load(ranks + job + 1) - start
    _, _, before = _counts(ranks, indices, jobs, JOBS)
    first_lane = tl.sum(tl.where(tl.arange(0, JOBS) == slot, before, 0), axis=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    own = tl.arange(0, BLOCK)
    b += start.to(tl.int64) * WIDTH
    length = tl.zeros((COLUMNS,), tl.float32)
    for share in tl.static_range(LENGTHS):
        length += tl.load(lengths + share * WIDTH + columns, mask=held, other=0.0)
    cross = tl.zeros((COLUMNS,), tl.float32)
    square = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rank, BLOCK):
        row = first + own
        inside = (row < rank)[:, None] & held[None, :]
        ups = tl.load(b + row[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
        ups = ups.to(tl.float32)
        product = tl.zeros((BLOCK, COLUMNS), tl.float32)
        for share in tl.static_range(SHARES):
            at = (share * lanes + first_lane + row).to(tl.int64)[:, None] * WIDTH
            product += tl.load(products + at + columns[None, :], mask=inside, other=0.0)
        cross += tl.sum(ups * product, axis=0)
        for other in range(0, rank, BLOCK):
            line = other + own
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
        JOBS=triton.next_power_of_2(count),
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
    """Gradients of the inputs of `scale`.

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
        JOBS=triton.next_power_of_2(count),
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
    used: int,
    lengths: Tensor | None = None,
) -> Tensor:
    """The norms of each row of W + s B A of some jobs.

    weight         [out, in], in 16 bits or float32
    a, b           [R, in] and [R, out], contiguous
    ranks, scales  int32 [J + 1] and float32 [J] on the device
    jobs           the n jobs
    max_rank       the largest of their ranks
    used           about the sum of their ranks, by which work is shared out
    lengths        what `lengths` gave for the weight; None: they are computed with the norms
    returns        float32 [n, out]
    """
    width, inner = weight.shape
    rank = -(-max(1, max_rank) // _BLOCK) * _BLOCK
    form = _forms[weight.dtype == torch.bfloat16]
    blocks = -(-len(jobs) * max(1, max_rank) // _LANES)
    lanes, across = blocks * _LANES, -(-width // form.columns)
    # Of blocks of lanes that no rank has, programs end at once.
    busy = (max(1, -(-used // _LANES)) + (lengths is None)) * across
    extent, shares = _shares(busy, inner, form.step)
    gram_extent = -(-inner // (shares * _GRAM_STEP)) * _GRAM_STEP
    _, indices = _on_device(jobs, ranks.shape[0] - 1, a.device)

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=a.device)

    kind = torch.bfloat16 if form.parts == 2 else torch.float32
    parts = empty(form.parts, lanes, inner, dtype=kind)
    products, kept = empty(shares, lanes, width), lengths is not None
    lengths = empty(shares, width) if lengths is None else lengths
    grams, out = empty(shares, len(jobs), rank, rank), empty(len(jobs), width)
    every = triton.next_power_of_2(len(jobs))
    _split[(-(-lanes // _SPLIT_ROWS), -(-inner // _SPLIT_COLUMNS))](
        a, parts, ranks, indices, len(jobs), lanes,
        INNER=inner, PARTS=form.parts, ROWS=_SPLIT_ROWS, COLUMNS=_SPLIT_COLUMNS, JOBS=every,
    )  # fmt: skip
    pairs = len(jobs) * (rank // _BLOCK) ** 2
    _products[(pairs + across * (blocks + 1 - kept), shares)](
        weight, a, parts, products, grams, lengths, ranks, indices, *weight.stride(), len(jobs),
        lanes, extent, gram_extent,
        RANK=rank, WIDTH=width, INNER=inner, PARTS=form.parts, KEPT=kept, ROWS=_LANES,
        COLUMNS=form.columns, BLOCK=_BLOCK, STEP=form.step, GRAM_STEP=_GRAM_STEP, JOBS=every,
        num_warps=form.warps, num_stages=form.stages,
    )  # fmt: skip
    _norms[(len(jobs), -(-width // _NORMS))](
        products, grams, lengths, b, scales, ranks, indices, out, len(jobs), lanes,
        RANK=rank, WIDTH=width, SHARES=shares, LENGTHS=1 if kept else shares, BLOCK=_BLOCK,
        COLUMNS=_NORMS, JOBS=every,
    )  # fmt: skip
    return out


def lengths(weight: Tensor) -> Tensor:
    """The square of the length of each row of a weight [out, in]; float32 [1, out]."""
    width, inner = weight.shape
    form = _forms[0]
    found = torch.empty(1, width, dtype=torch.float32, device=weight.device)
    _lengths[(-(-width // form.columns),)](
        weight, found, *weight.stride(), WIDTH=width, INNER=inner, COLUMNS=form.columns,
        STEP=form.step, num_warps=form.warps,
    )  # fmt: skip
    return found


def _shares(tiles: int, inner: int, step: int) -> tuple[int, int]:
    """Columns of the weight that one program sums over, and how many programs it takes for all.

    Programs then fill the GPU at once; none has less to do than writing its part is worth.
    """
    most = -(-inner // _MIN_SHARE)
    wanted = min(max(1, _PROGRAMS // tiles), most)
    extent = -(-inner // (wanted * step)) * step
    return extent, -(-inner // extent)
