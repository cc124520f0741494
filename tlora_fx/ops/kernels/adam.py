"""The end of a round on a GPU: norms, clipping and Adam of all jobs, in three launches.

Where processes hold parts of a job there is a launch more, for the squares that they add up before
the last two.

What jobs train are hundreds of short runs of memory each. A table lists them in chunks, with the
addresses of parameter, gradient and moments; every chunk is one job's. Nothing is read on the
host, so the next round is on its way before this one has ended.

A job's sums run over its own chunks in their order, so that neighbours do not change its bits.

source   Kingma and Ba 2015; Loshchilov and Hutter 2019; the arithmetic of torch.optim's fused Adam
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Elements of a chunk.
CHUNK = 4096
#: float64 a job that come back: loss, norm before clipping, whether it was updated, its scale.
FACTS = 4

_SUMMED = 1024
# Elements of a chunk that a program updates: eight a thread leave registers for four an SM.
_PIECE = 2048
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _squares(table, sums, KIND: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    row = table + chunk.to(tl.int64) * 7
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(KIND)), 16)
    count = tl.load(row + 4)
    lanes = tl.arange(0, CHUNK)
    value = tl.load(gradient + lanes, mask=lanes < count, other=0.0).to(WIDE)
    tl.store(sums + chunk, tl.sum(value * value, axis=0))


@triton.jit
def _sum_of(sums, counted, start, stop, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Of chunks from one to another, those alone that count where `counted` is not None."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    for first in range(start, stop, BLOCK):
        mine = first + lanes < stop
        if counted is not None:
            mine = mine & (tl.load(counted + first + lanes, mask=mine, other=0) != 0)
        total += tl.load(sums + first + lanes, mask=mine, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _total(sums, counted, firsts, places, squares, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    job = tl.program_id(0)
    start = tl.load(firsts + job)
    total = _sum_of(sums, counted, start, tl.load(firsts + job + 1), WIDE, BLOCK)
    tl.store(squares + tl.load(places + job), total.to(tl.float64))


@triton.jit
def _settle(
    sums, squares, firsts, places, losses, given, alive, facts, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0)
    place = tl.load(places + job)
    if squares is None:
        start = tl.load(firsts + job)
        norm = tl.sqrt(_sum_of(sums, None, start, tl.load(firsts + job + 1), WIDE, BLOCK))
        norm = norm.to(tl.float64)
    else:
        norm = tl.sqrt(tl.load(squares + place))
    loss = tl.load(losses + place).to(tl.float64)
    # Of what is no number, or infinite, the difference to itself is not zero.
    sound = ((norm - norm == 0.0) & (loss - loss == 0.0)).to(tl.int32)
    sound = sound * tl.load(alive + job)
    tl.store(alive + job, sound)
    largest = tl.load(given + job * 10)
    scale = tl.where(largest > 0.0, tl.minimum(largest / (norm + 1e-6), 1.0), 1.0)
    tl.store(facts + job * 4, loss)
    tl.store(facts + job * 4 + 1, norm)
    tl.store(facts + job * 4 + 2, sound.to(tl.float64))
    tl.store(facts + job * 4 + 3, scale)


@triton.jit
def _step(
    row, begin, given, facts, count,
    KIND: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Update a chunk of so many elements from one on, and zero its gradient there."""
    param_at = tl.multiple_of(tl.load(row).to(tl.pointer_type(KIND)), 16)
    gradient_at = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(KIND)), 16)
    first_at = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(KIND)), 16)
    second_at = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(KIND)), 16)
    job = tl.load(row + 5)
    lanes = begin + tl.arange(0, PIECE)
    # With a mask a thread would move its four numbers one by one, each store a part of a sector.
    mine = None if WHOLE else lanes < count
    if tl.load(facts + job * 4 + 2) != 0.0:
        scale = tl.load(facts + job * 4 + 3).to(WIDE)
        own = given + tl.load(row + 6) * 10
        rate = tl.load(own + 1).to(WIDE)
        shrink = tl.load(own + 2).to(WIDE)
        decay = tl.load(own + 3).to(WIDE)
        beta1 = tl.load(own + 4).to(WIDE)
        rest1 = tl.load(own + 5).to(WIDE)
        beta2 = tl.load(own + 6).to(WIDE)
        rest2 = tl.load(own + 7).to(WIDE)
        epsilon = tl.load(own + 8).to(WIDE)
        root = tl.load(own + 9).to(WIDE)
        param = tl.load(param_at + lanes, mask=mine).to(WIDE)
        gradient = tl.load(gradient_at + lanes, mask=mine).to(WIDE) * scale
        first = tl.load(first_at + lanes, mask=mine).to(WIDE)
        second = tl.load(second_at + lanes, mask=mine).to(WIDE)
        gradient += param * decay
        param -= param * shrink
        first = beta1 * first + rest1 * gradient
        second = beta2 * second + rest2 * gradient * gradient
        param -= rate * first / (tl.sqrt(second) / root + epsilon)
        tl.store(param_at + lanes, param.to(KIND), mask=mine)
        tl.store(first_at + lanes, first.to(KIND), mask=mine)
        tl.store(second_at + lanes, second.to(KIND), mask=mine)
    tl.store(gradient_at + lanes, tl.zeros([PIECE], KIND), mask=mine)


@triton.jit
def _update(table, given, facts, KIND: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr):
    row = table + tl.program_id(0).to(tl.int64) * 7
    count = tl.load(row + 4)
    begin = tl.program_id(1) * PIECE
    if begin + PIECE <= count:
        _step(row, begin, given, facts, count, KIND, WIDE, PIECE, WHOLE=True)
    elif begin < count:
        _step(row, begin, given, facts, count, KIND, WIDE, PIECE, WHOLE=False)


def ask_for_adam(dtype: torch.dtype, losses: torch.dtype, device: torch.device) -> None:
    """Ask for the kernels of `adam`, while kernels are compiled ahead.

    What is compiled already is started, and changes nothing: the table lists no element.

    dtype    of parameters, gradients and moments
    losses   of the losses
    """
    table = torch.zeros((1, 7), dtype=torch.int64, device=device)
    indices = torch.zeros(2, dtype=torch.int32, device=device)
    given = torch.zeros((1, 10), dtype=torch.float64, device=device)
    adam(table, indices, indices[:1], given[0, :1].to(losses), given, indices, dtype)


def squares_into(
    squares: Tensor,
    table: Tensor,
    firsts: Tensor,
    places: Tensor,
    counted: Tensor,
    dtype: torch.dtype,
) -> None:
    """Write the sum of squares of each job's gradients, those of chunks that count.

    squares   float64 [J], of which this process's jobs are overwritten
    counted   int32 [C], 0 for a chunk that another process counts

    table, firsts, places, dtype   as of `adam`
    """
    wide: Any = tl.float64 if dtype == torch.float64 else tl.float32
    sums = _squares_of(table, dtype)
    _total[(places.shape[0],)](
        sums, counted, firsts, places, squares, WIDE=wide, BLOCK=_SUMMED, num_warps=4
    )


def _squares_of(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each chunk of gradients."""
    wide: Any = tl.float64 if dtype == torch.float64 else tl.float32
    sums = table.new_empty(table.shape[0], dtype=torch.promote_types(dtype, torch.float32))
    _squares[(table.shape[0],)](
        table, sums, KIND=_TYPES[dtype], WIDE=wide, CHUNK=CHUNK, num_warps=8
    )
    return sums


def adam(
    table: Tensor,
    firsts: Tensor,
    places: Tensor,
    losses: Tensor,
    given: Tensor,
    alive: Tensor,
    dtype: torch.dtype,
    squares: Tensor | None = None,
) -> Tensor:
    """Update what all jobs of a round train, and zero its gradients.

    A job whose loss or gradient norm is not finite stays as it is, now and from then on.

    table     int64 [C, 7]: addresses of parameter, gradient and moments, elements, job k, and the
              row of `given` that the chunk is updated by
    firsts    int32 [K + 1], where each job's chunks begin
    places    int32 [K], where `losses` has the job's
    losses    float [J]
    given     float64 [G, 10], of which the first K rows are the jobs': the largest norm (0: any),
              rate over the first bias correction, rate times decoupled decay, coupled decay, each
              beta and what it lacks to 1, epsilon, and the root of the second bias correction
    alive     int32 [K], 1 until a job is left as it is
    dtype     of parameters, gradients and moments, which begin at multiples of 16 bytes
    squares   float64 [J], the sum of squares of each job's gradients over all processes; None: they
              are all here
    returns   float64 [K, 4]: loss, norm before clipping, 1 where the job was updated, and what its
              gradients were multiplied with
    """
    chunks, jobs = table.shape[0], places.shape[0]
    kind: Any = _TYPES[dtype]
    wide: Any = tl.float64 if dtype == torch.float64 else tl.float32
    facts = table.new_empty((jobs, FACTS), dtype=torch.float64)
    sums = _squares_of(table, dtype) if squares is None else None
    _settle[(jobs,)](
        sums,
        squares,
        firsts,
        places,
        losses,
        given,
        alive,
        facts,
        WIDE=wide,
        BLOCK=_SUMMED,
        num_warps=4,
    )
    _update[(chunks, CHUNK // _PIECE)](
        table, given, facts, KIND=kind, WIDE=wide, PIECE=_PIECE, num_warps=8
    )
    return facts
