"""Causal attention of packed sequences on a GPU: forward, and backward in two kernels.

A program takes some tokens of one sequence and one key head with all query heads that share it:
row r of its tile is query head r % GROUP of token r // GROUP. Where four heads share a key, a tile
of 128 rows is 32 tokens, so little of it lies beyond the causal mask or the sequence's end, and
keys and values are read once for the group.

Blocks count from the sequence's first token and there are no atomics: no bit of a sequence depends
on its neighbours, on where it stands, or on the run. The grid follows from the longest sequence
and from the number of sequences alone; programs without work end at once.

source   Dao 2023, FlashAttention-2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_fx.codegen.spec import Tile


@triton.jit
def _rows(first, length, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Token and query head of a tile's rows, and which of them the sequence has."""
    rows = tl.arange(0, ROWS)
    token = first + rows // GROUP
    # Where GROUP does not divide ROWS, the last rows are no whole token.
    inside = (rows < ROWS // GROUP * GROUP) & (token < length)
    return token, tl.program_id(1) * GROUP + rows % GROUP, inside


@triton.jit
def _seen(token, key, window, WINDOWED: tl.constexpr):
    """Which keys each token sees."""
    seen = key <= token
    if WINDOWED:
        seen &= token - key < window
    return seen


@triton.jit
def _first_key(first, window, KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """The first key of the first block that a tile from `first` on sees."""
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // KEYS * KEYS
    return begin


@triton.jit(do_not_specialize=["tokens", "window"])
def _forward(
    q, k, v, out, lse, bounds, q_step, k_step, v_step, tokens, scale, window,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    start = tl.load(bounds + tl.program_id(2))
    length = tl.load(bounds + tl.program_id(2) + 1) - start
    # The last tokens see the most keys: theirs are the first programs.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * (ROWS // GROUP)
    if first >= length:
        return
    token, head, inside = _rows(first, length, GROUP, ROWS)
    columns = tl.arange(0, PADDED)[None, :]
    place = (start + token).to(tl.int64)
    within = inside[:, None] & (columns < WIDTH)
    head_columns = head[:, None] * WIDTH + columns
    queries = tl.load(q + place[:, None] * q_step + head_columns, mask=within, other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, PADDED), tl.float32)
    k += start.to(tl.int64) * k_step + tl.program_id(1) * WIDTH + columns
    v += start.to(tl.int64) * v_step + tl.program_id(1) * WIDTH + columns
    stop = tl.minimum(first + ROWS // GROUP, length)
    for step in range(_first_key(first, window, KEYS, WINDOWED), stop, KEYS):
        key = step + tl.arange(0, KEYS)
        held = (key < stop)[:, None] & (columns < WIDTH)
        keys = tl.load(k + key[:, None] * k_step, mask=held, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores *= scale * 1.4426950408889634
        seen = _seen(token[:, None], key[None, :], window, WINDOWED)
        scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        base = better
        if WINDOWED:
            # Of rows that see none of the keys so far.
            base = tl.where(better == float("-inf"), 0.0, better)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(v + key[:, None] * v_step, mask=held, other=0.0)
        summed = tl.dot(
            weights.to(values.dtype), values, summed * fade[:, None], input_precision="ieee"
        )
        best = better
    width = tl.num_programs(1) * GROUP * WIDTH
    result = (summed / total[:, None]).to(queries.dtype)
    tl.store(out + place[:, None] * width + head_columns, result, mask=within)
    natural = (best + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + head.to(tl.int64) * tokens + place, natural, mask=inside)


@triton.jit(do_not_specialize=["tokens", "window"])
def _query_gradient(
    q, k, v, out, dout, lse, dq, delta, bounds, q_step, k_step, v_step, tokens, scale, window,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    start = tl.load(bounds + tl.program_id(2))
    length = tl.load(bounds + tl.program_id(2) + 1) - start
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * (ROWS // GROUP)
    if first >= length:
        return
    token, head, inside = _rows(first, length, GROUP, ROWS)
    columns = tl.arange(0, PADDED)[None, :]
    place = (start + token).to(tl.int64)
    within = inside[:, None] & (columns < WIDTH)
    head_columns = head[:, None] * WIDTH + columns
    queries = tl.load(q + place[:, None] * q_step + head_columns, mask=within, other=0.0)
    dense = place[:, None] * (tl.num_programs(1) * GROUP * WIDTH) + head_columns
    pulls = tl.load(dout + dense, mask=within, other=0.0)
    results = tl.load(out + dense, mask=within, other=0.0)
    mean = tl.sum(pulls.to(tl.float32) * results.to(tl.float32), axis=1)
    row = head.to(tl.int64) * tokens + place
    tl.store(delta + row, mean, mask=inside)
    norm = tl.load(lse + row, mask=inside, other=0.0) * 1.4426950408889634
    summed = tl.zeros((ROWS, PADDED), tl.float32)
    k += start.to(tl.int64) * k_step + tl.program_id(1) * WIDTH + columns
    v += start.to(tl.int64) * v_step + tl.program_id(1) * WIDTH + columns
    stop = tl.minimum(first + ROWS // GROUP, length)
    for step in range(_first_key(first, window, KEYS, WINDOWED), stop, KEYS):
        key = step + tl.arange(0, KEYS)
        held = (key < stop)[:, None] & (columns < WIDTH)
        keys = tl.load(k + key[:, None] * k_step, mask=held, other=0.0)
        values = tl.load(v + key[:, None] * v_step, mask=held, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        seen = _seen(token[:, None], key[None, :], window, WINDOWED)
        weights = tl.exp2(scores * (scale * 1.4426950408889634) - norm[:, None])
        weights = tl.where(seen, weights, 0.0)
        slopes = tl.dot(pulls, tl.trans(values), input_precision="ieee")
        slopes = (weights * (slopes - mean[:, None])).to(keys.dtype)
        summed = tl.dot(slopes, keys, summed, input_precision="ieee")
    tl.store(dq + dense, (summed * scale).to(queries.dtype), mask=within)


@triton.jit(do_not_specialize=["tokens", "window"])
def _key_gradient(
    q, k, v, dout, lse, delta, dk, dv, bounds, q_step, k_step, v_step, tokens, scale, window,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    start = tl.load(bounds + tl.program_id(2))
    length = tl.load(bounds + tl.program_id(2) + 1) - start
    # The first keys are seen by the most tokens.
    begin = tl.program_id(0) * KEYS
    if begin >= length:
        return
    columns = tl.arange(0, PADDED)[None, :]
    key = begin + tl.arange(0, KEYS)
    held = (key < length)[:, None] & (columns < WIDTH)
    place = (start + key).to(tl.int64)[:, None]
    own = tl.program_id(1) * WIDTH + columns
    keys = tl.load(k + place * k_step + own, mask=held, other=0.0)
    values = tl.load(v + place * v_step + own, mask=held, other=0.0)
    dkeys = tl.zeros((KEYS, PADDED), tl.float32)
    dvalues = tl.zeros((KEYS, PADDED), tl.float32)
    width = tl.num_programs(1) * GROUP * WIDTH
    q += start.to(tl.int64) * q_step
    dout += start.to(tl.int64) * width
    stop = length
    if WINDOWED:
        stop = tl.minimum(begin + KEYS + window - 1, length)
    for step in range(begin, stop, ROWS // GROUP):
        token, head, inside = _rows(step, stop, GROUP, ROWS)
        within = inside[:, None] & (columns < WIDTH)
        head_columns = head[:, None] * WIDTH + columns
        queries = tl.load(q + token[:, None] * q_step + head_columns, mask=within, other=0.0)
        pulls = tl.load(dout + token[:, None] * width + head_columns, mask=within, other=0.0)
        row = head.to(tl.int64) * tokens + start + token
        norm = tl.load(lse + row, mask=inside, other=0.0) * 1.4426950408889634
        mean = tl.load(delta + row, mask=inside, other=0.0)
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        seen = _seen(token[None, :], key[:, None], window, WINDOWED) & inside[None, :]
        weights = tl.exp2(scores * (scale * 1.4426950408889634) - norm[None, :])
        weights = tl.where(seen, weights, 0.0)
        dvalues = tl.dot(weights.to(pulls.dtype), pulls, dvalues, input_precision="ieee")
        slopes = tl.dot(values, tl.trans(pulls), input_precision="ieee")
        slopes = (weights * (slopes - mean[None, :])).to(queries.dtype)
        dkeys = tl.dot(slopes, queries, dkeys, input_precision="ieee")
    at = place * (tl.num_programs(1) * WIDTH) + own
    tl.store(dk + at, (dkeys * scale).to(keys.dtype), mask=held)
    tl.store(dv + at, dvalues.to(keys.dtype), mask=held)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile of each kernel.

    A tile's `rows` are tokens times the query heads of a key head, its `columns` are keys.
    """

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


@dataclass(frozen=True, slots=True)
class Form:
    """Shapes for which these kernels were measured to be faster than FlashAttention-2 and cuDNN.

    tiles              the fastest of those that were tried
    longest_backward   tokens of the longest sequence backwards; forwards `LONGEST_FORWARD`
    windowed           the same, both ways, where a window hides keys
    few                of the key gradient, where all programs run at once
    batch_backward     from so many tokens a sequence on cuDNN is faster backwards, where all have
                       as many; forwards from `BATCH_FORWARD` on
    """

    tiles: Tiles
    longest_backward: int = 8192
    windowed: int = 0
    few: Tile | None = None
    batch_backward: int = 1024

    def bounds(self, *, windowed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Longest sequence, and tokens from which cuDNN is faster: of forward, and of backward."""
        forward, backward = LONGEST_FORWARD, self.longest_backward
        if windowed:
            forward = backward = self.windowed
        return (forward, BATCH_FORWARD), (backward, self.batch_backward)

    def tiles_for(self, heads: int, longest: int) -> Tiles:
        """The tiles of so many key heads of all sequences: of few, a program's own time decides."""
        if self.few is None or heads * -(-longest // self.few.columns) > PROCESSORS:
            return self.tiles
        return replace(self.tiles, key_gradient=self.few)


def _tile(rows: int, keys: int, warps: int, stages: int) -> Tile:
    return Tile(rows, keys, 0, warps, stages)


_DEEP = Tiles(_tile(64, 64, 4, 3), _tile(64, 64, 4, 2), _tile(32, 64, 4, 3))
_FLAT = replace(_DEEP, key_gradient=_tile(32, 64, 4, 2))
#: Of an H200, and of an H100.
PROCESSORS = 132
#: Tokens of the longest sequence forwards, and of each from which on cuDNN is faster there.
LONGEST_FORWARD, BATCH_FORWARD = 8192, 256
#: By compute capability, type, query heads a key head, and width. The times are of an H100, in
#: benchmarks/results/attention-heads-2026-11-27.json; of windows and of few sequences of an H200,
#: in attention-2026-11-23.json and attention-2026-11-26.json.
FORMS = {
    (90, torch.bfloat16, 1, 128): Form(_FLAT),
    (90, torch.bfloat16, 2, 128): Form(_DEEP),
    (90, torch.bfloat16, 3, 128): Form(_FLAT),
    (90, torch.bfloat16, 4, 128): Form(_DEEP, windowed=256, few=_tile(128, 16, 4, 2)),
    (90, torch.bfloat16, 6, 128): Form(_DEEP, longest_backward=512, batch_backward=512),
    (90, torch.bfloat16, 7, 128): Form(_DEEP, longest_backward=1024, batch_backward=512),
    (90, torch.bfloat16, 8, 128): Form(_DEEP),
    (90, torch.bfloat16, 4, 64): Form(_FLAT, batch_backward=2048),
    (90, torch.bfloat16, 7, 64): Form(_DEEP, longest_backward=512, batch_backward=512),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers of one attention.

    longest   at least the tokens of the longest sequence
    scale     multiplies q kᵀ
    window    a token sees itself and those before it, so many in all; below 1: all before it
    """

    longest: int
    scale: float
    window: int


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, rule: Rule, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Attend within each sequence of a row.

    q, k, v    [T, H, D], [T, Hkv, D], [T, Hkv, D], one type, the heads of a token dense
    bounds     int32 [S + 1], 0 ... T
    returns    out [T, H, D] and lse float32 [H, T], both contiguous
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    tensors = q, k, v, out, lse, bounds
    _launch(_forward, tensors, (q, k, v), rule, tile, by_keys=False)
    return out, lse


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, rule: Rule, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward`: dq, dk, dv, contiguous.

    dout      [T, H, D], contiguous
    saved     q, k, v as `forward` took them, out and lse as it gave them
    """
    dq, delta = query_gradient(dout, saved, bounds, rule, tiles.query_gradient)
    return dq, *key_gradient(dout, saved, delta, bounds, rule, tiles.key_gradient)


def query_gradient(
    dout: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, rule: Rule, tile: Tile
) -> tuple[Tensor, Tensor]:
    """dq, and the sum of dout times out of each row, float32 [H, T]."""
    q, k, v, out, lse = saved
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    tensors = q, k, v, out, dout, lse, dq, delta, bounds
    _launch(_query_gradient, tensors, (q, k, v), rule, tile, by_keys=False)
    return dq, delta


def key_gradient(
    dout: Tensor, saved: tuple[Tensor, ...], delta: Tensor, bounds: Tensor, rule: Rule, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Gradients dk and dv."""
    q, k, v, _, lse = saved
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tensors = q, k, v, dout, lse, delta, dk, dv, bounds
    _launch(_key_gradient, tensors, (q, k, v), rule, tile, by_keys=True)
    return dk, dv


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    inputs: tuple[Tensor, Tensor, Tensor],
    rule: Rule,
    tile: Tile,
    *,
    by_keys: bool,
) -> None:
    q, k, _ = inputs
    tokens, heads, width = q.shape
    group = heads // k.shape[1]
    block = tile.columns if by_keys else tile.rows // group
    kernel[triton.cdiv(rule.longest, block), k.shape[1], tensors[-1].shape[0] - 1](
        *tensors, *(x.stride(0) for x in inputs), tokens, rule.scale, rule.window,
        GROUP=group, WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=tile.rows,
        KEYS=tile.columns, WINDOWED=rule.window > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
