"""DoRA on a GPU: the norms of adapted weights, and the columns of each job's tokens scaled.

Chunks of tokens count from their job's first token, and parts are summed in their order: no bit of
a job depends on its neighbours or on the run. Which job a chunk is of is found on the device, so a
captured CUDA graph serves rows of other segments.

A norm is that of W + s B A for each row. Nothing of W's size is made: with P = A Wᵀ and G = A Aᵀ,

    |w_i + s b_i A|² = |w_i|² + 2 s b_i P_i + s² b_i G b_iᵀ

source   Liu et al. 2024, DoRA: Weight-Decomposed Low-Rank Adaptation
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tokens of a chunk, which is a program's work: forward and backward.
SCALED, SUMMED = 64, 128
_ROWS = 32
_COLUMNS = 128
_RANKS = 16
_WIDE = 1024


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


@triton.jit(do_not_specialize=["jobs"])
def _scale(
    y, bias, factors, out, segments, slots, jobs, y_step,
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
        factor = tl.load(factors + slot * WIDTH + columns, mask=held, other=0.0)[None, :]
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
    dy, y, bias, factors, dx, parts, segments, slots, jobs, dy_step, y_step,
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
    factor = tl.load(factors + slot * WIDTH + columns, mask=held & scaled, other=1.0)[None, :]
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
    parts, sums, segments, slots,
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
    tl.store(sums + slot * WIDTH + columns, total, mask=held)


@triton.jit
def _gather(
    a, rows, parts, ranks, indices, count,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    job = tl.load(indices + row // RANK)
    place = tl.load(ranks + job) + row % RANK
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = columns < WIDTH
    mine = held & (place < tl.load(ranks + job + 1))
    value = tl.load(a + place.to(tl.int64) * WIDTH + columns, mask=mine, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * WIDTH + columns
    tl.store(rows + at, value, mask=held)
    if SPLIT:
        # Three bfloat16 hold the 24 bits of a float32.
        for part in tl.static_range(3):
            rounded = value.to(tl.bfloat16)
            tl.store(parts + part * count * WIDTH + at, rounded, mask=held)
            value -= rounded.to(tl.float32)


@triton.jit
def _norms(
    products, gram, b, own, scales, ranks, indices, norms, count,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
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
    cross = tl.zeros((COLUMNS,), tl.float32)
    square = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rank, BLOCK):
        row = first + lanes
        inside = (row < rank)[:, None] & held[None, :]
        ups = tl.load(b + row[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
        ups = ups.to(tl.float32)
        product = tl.zeros((BLOCK, COLUMNS), tl.float32)
        for part in tl.static_range(PARTS):
            at = (part * count + slot * RANK + row).to(tl.int64)[:, None] * WIDTH
            product += tl.load(products + at + columns[None, :], mask=inside, other=0.0)
        cross += tl.sum(ups * product, axis=0)
        for other in range(0, rank, BLOCK):
            line = other + lanes
            among = (line < rank)[:, None] & held[None, :]
            others = tl.load(b + line[:, None] * WIDTH + columns[None, :], mask=among, other=0.0)
            pair = (slot * RANK + row)[:, None] * RANK + line[None, :]
            both = (row < rank)[:, None] & (line < rank)[None, :]
            angles = tl.load(gram + pair, mask=both, other=0.0)
            inner = tl.dot(angles, others.to(tl.float32), input_precision="ieee")
            square += tl.sum(ups * inner, axis=0)
    scale = tl.load(scales + job)
    length = tl.load(own + columns, mask=held, other=0.0)
    sides = length * length + scale * scale * square
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
    y: Tensor, bias: Tensor | None, factors: Tensor, segments: Tensor, jobs: tuple[int, ...]
) -> Tensor:
    """Scale the columns of some jobs' tokens; those of others are copied.

    y         [T, out], rows dense
    bias      [out], what y has in it and is not scaled
    factors   float32 [n, out]
    segments  int32 [J + 1] on the device, token offsets
    jobs      whose each row of the factors is
    returns   [T, out]
    """
    tokens, width = y.shape
    count = segments.shape[0] - 1
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    slots, _ = _on_device(jobs, count, y.device)
    grid = (-(-tokens // SCALED) + count, -(-width // _COLUMNS))
    _scale[grid](
        y, y if bias is None else bias, factors, out, segments, slots, count, y.stride(0),
        WIDTH=width, BIASED=bias is not None, CHUNK=SCALED, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out


def gradient(
    dy: Tensor,
    y: Tensor,
    bias: Tensor | None,
    factors: Tensor,
    segments: Tensor,
    jobs: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """What `scale` is differentiated by.

    returns   dy scaled, [T, out]; of each factor, float32 [n, out]
    """
    tokens, width = y.shape
    count = segments.shape[0] - 1
    dx = torch.empty((tokens, width), dtype=dy.dtype, device=y.device)
    chunks, blocks = -(-tokens // SUMMED) + count, -(-width // _COLUMNS)
    parts = torch.empty((chunks, width), dtype=torch.float32, device=y.device)
    sums = torch.empty(factors.shape, dtype=torch.float32, device=y.device)
    slots, _ = _on_device(jobs, count, y.device)
    _gradient[(chunks, blocks)](
        dy, y, y if bias is None else bias, factors, dx, parts, segments, slots, count,
        dy.stride(0), y.stride(0),
        WIDTH=width, BIASED=bias is not None, CHUNK=SUMMED, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    _sum[(count, blocks)](parts, sums, segments, slots, WIDTH=width, CHUNK=SUMMED, COLUMNS=_COLUMNS)
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
    rank = -(-max_rank // _RANKS) * _RANKS
    count, made = len(jobs) * rank, {"dtype": torch.float32, "device": a.device}
    _, indices = _on_device(jobs, ranks.shape[0] - 1, a.device)
    split = weight.dtype == torch.bfloat16
    rows: Any = torch.empty((count, inner), **made)
    parts = rows.new_empty((3 * count, inner), dtype=torch.bfloat16) if split else rows
    _gather[(count, -(-inner // _WIDE))](
        a, rows, parts, ranks, indices, count,
        RANK=rank, WIDTH=inner, SPLIT=split, COLUMNS=_WIDE,
    )  # fmt: skip
    if split:
        products = torch.mm(parts, weight.t(), out_dtype=torch.float32)
    else:
        products = rows @ weight.to(torch.float32).t()
    square = rows.view(len(jobs), rank, inner)
    gram = torch.bmm(square, square.mT)
    own = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    out = torch.empty((len(jobs), width), **made)
    _norms[(len(jobs), -(-width // _COLUMNS))](
        products, gram, b, own, scales, ranks, indices, out, count,
        RANK=rank, WIDTH=width, PARTS=3 if split else 1, BLOCK=_RANKS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out
