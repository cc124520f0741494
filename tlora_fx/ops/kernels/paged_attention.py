"""Attention of one token of each sequence to keys and values in pages, on a GPU.

A program takes one sequence, one key head with all query heads that share it, and a share of the
keys. Where a sequence has several shares, each leaves its part of the result and the logarithm of
its weights' sum, and a second kernel adds them up. How many there are follows from the longest
sequence alone.

source   Dao et al. 2023, Flash-Decoding for long-context inference; Kwon et al. 2023, Efficient
         Memory Management for Large Language Model Serving with PagedAttention
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Keys of a step of a program; a page holds a multiple of it.
KEYS = 64
# Keys of a share, and shares of a sequence at most.
_SHARE, _MAX_SHARES = 1024, 16


@triton.jit(do_not_specialize=["window", "table_step", "share"])
def _attend(
    q, keys, values, tables, lengths, parts, norms, table_step, share, scale, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    sequence, head, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(2)
    heads = tl.num_programs(1)
    length = tl.load(lengths + sequence)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    value_columns = tl.arange(0, VALUE_PADDED)
    row = sequence * heads * GROUP + head * GROUP + rows
    own = rows < GROUP
    queries = tl.load(
        q + row[:, None] * WIDTH + columns[None, :],
        mask=own[:, None] & (columns < WIDTH)[None, :],
        other=0.0,
    )
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, VALUE_PADDED), tl.float32)
    begin = tl.program_id(2) * share
    stop = tl.minimum(begin + share, length)
    if WINDOWED:
        begin = tl.maximum(begin, tl.maximum(length - window, 0) // KEYS * KEYS)
    for step in range(begin, stop, KEYS):
        page = tl.load(tables + sequence * table_step + step // PAGE).to(tl.int64)
        key = step + tl.arange(0, KEYS)
        seen = key < stop
        if WINDOWED:
            seen &= length - 1 - key < window
        place = (page * PAGE + key % PAGE) * heads + head
        held = tl.load(
            keys + place[:, None] * WIDTH + columns[None, :],
            mask=seen[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, tl.trans(held), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * (scale * 1.4426950408889634), float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        # Of rows that see none of the keys so far.
        base = tl.where(better == float("-inf"), 0.0, better)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weights, axis=1)
        # What others left in a page, which may be NaN, is read by nobody.
        said = tl.load(
            values + place[:, None] * VALUE_WIDTH + value_columns[None, :],
            mask=seen[:, None] & (value_columns < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        summed = tl.dot(
            weights.to(said.dtype), said, summed * fade[:, None], input_precision="ieee"
        )
        best = better
    empty = total == 0.0
    part = summed / tl.where(empty, 1.0, total)[:, None]
    at = row * shares + tl.program_id(2)
    tl.store(
        parts + at[:, None] * VALUE_WIDTH + value_columns[None, :],
        part.to(parts.dtype.element_ty),
        mask=own[:, None] & (value_columns < VALUE_WIDTH)[None, :],
    )
    if shares > 1:
        tl.store(norms + at, tl.where(empty, float("-inf"), best + tl.log2(total)), mask=own)


@triton.jit
def _combine(
    parts, norms, out, SHARES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    share, columns = tl.arange(0, SHARES), tl.arange(0, PADDED)
    norm = tl.load(norms + row * SHARES + share)
    weights = tl.exp2(norm - tl.max(norm, axis=0))
    part = tl.load(
        parts + (row * SHARES + share)[:, None] * WIDTH + columns[None, :],
        mask=(columns < WIDTH)[None, :],
        other=0.0,
    )
    result = tl.sum(part * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    where = row * WIDTH + columns
    tl.store(out + where, result.to(out.dtype.element_ty), mask=columns < WIDTH)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, longest: int,
    scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Attention of the last token of each sequence to all of its tokens.

    q        [n, H, D], float32 or half precision
    keys     [pages, page_tokens, Hkv, D]; a page has a multiple of KEYS tokens
    values   [pages, page_tokens, Hkv, Dv]
    tables   int32 [n, P]: pages of each sequence, in order
    lengths  int32 [n]
    longest  of `lengths`, or more
    window   tokens that are seen, the last one included; 0 or less: all
    returns  [n, H, Dv] in q's type
    """
    count, query_heads, width = q.shape
    heads, value_width = values.shape[2:]
    group = query_heads // heads
    q, tables = q.contiguous(), tables.contiguous()
    shares = 1
    while shares < _MAX_SHARES and shares * _SHARE < longest:
        shares *= 2
    share = -(-longest // (shares * KEYS)) * KEYS
    out = q.new_empty(count, query_heads, value_width)
    wide = torch.float32
    parts = out if shares == 1 else q.new_empty(count, query_heads, shares, value_width, dtype=wide)
    norms = q.new_empty(count, query_heads, shares if shares > 1 else 0, dtype=wide)
    padded = max(16, triton.next_power_of_2(value_width))
    _attend[(count, heads, shares)](
        q, keys, values, tables, lengths, parts, norms,
        tables.shape[1], share, scale, window,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        WIDTH=width, VALUE_WIDTH=value_width,
        PADDED=max(16, triton.next_power_of_2(width)), VALUE_PADDED=padded,
        KEYS=KEYS, PAGE=keys.shape[1], WINDOWED=window > 0, num_warps=4,
    )  # fmt: skip
    if shares > 1:
        grid = (count * query_heads,)
        _combine[grid](parts, norms, out, SHARES=shares, WIDTH=value_width, PADDED=padded)
    return out
