"""LoRA of all jobs on a mixture's experts on a GPU: experts x jobs in one launch.

Chosen pairs of token and expert are sorted by expert. Jobs lie side by side along the tokens, so
pairs of one expert lie by job too: each of the E * J groups is a run. A program takes some rows of
one group, multiplies them with the group's two small matrices, adds what the frozen product gave,
and writes the sums where the pairs stand: the scatter that a sorted product needs anyway.

    apply    y[pair] = frozen + (x first) second, and the low-rank rows; turned around it gives dX
    outer    of each group the sum of outer products of low-rank rows and x, or dy: dA and dB

Rows count from a group's first, sizes of tiles are fixed, and there are no atomics: no bit of a job
depends on its neighbours, or on the run. A and B stay where each job has them, in PEFT's layout: a
table holds their addresses. A is [E r, in], expert by expert; of B [out, r E], which is stored by
columns, expert e has columns e, E + e, 2 E + e, ...
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_fx.errors import TableNotOnDevice
from tlora_fx.ops.kernels import launch

#: int64 a job: addresses of A and B, rank, scale as float64, rows of all jobs before it.
WORDS = 5
#: Rows of a tile where pairs are multiplied, and where they are summed over.
ROWS, SUMMED = 64, 32
#: Columns of x at a time, and of what is made; and those that a program sums outer products of.
COLUMNS, WIDE_COLUMNS = 64, 128
#: Programs of a group: skewed routing sends many pairs to few groups.
SPLITS = 4
MIN_RANK = 16
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_MAX_TABLES = 4096


@triton.jit
def _rows_of(lanes, expert, rank, EXPERTS: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Which rows of A, or columns of B, an expert's ranks are."""
    rows = expert * rank + lanes
    if BY_COLUMN:
        rows = lanes * EXPERTS + expert
    return rows.to(tl.int64)[:, None]


@triton.jit
def _apply(
    x, frozen, y, low, order, ends, table,
    JOBS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, INNER: tl.constexpr,
    OUTER: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr,
    WIDE: tl.constexpr, WRITES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    row = table + group % JOBS * 5
    expert = group // JOBS
    rank = tl.load(row + 2).to(tl.int32)
    scale = tl.load(row + 3).to(tl.float64, bitcast=True).to(WIDE)
    first = tl.multiple_of(tl.load(row + FIRST).to(tl.pointer_type(KIND)), 16)
    second = tl.multiple_of(tl.load(row + 1 - FIRST).to(tl.pointer_type(KIND)), 16)
    lanes = tl.arange(0, RANK)
    first += _rows_of(lanes, expert, rank, EXPERTS, FIRST) * INNER
    second += _rows_of(lanes, expert, rank, EXPERTS, 1 - FIRST) * OUTER
    held = (lanes < rank)[:, None]
    for begin in range(start + tl.program_id(1) * ROWS, stop, ROWS * SPLITS):
        rows = begin + tl.arange(0, ROWS)
        inside = (rows < stop)[:, None]
        pair = tl.load(order + rows, mask=rows < stop, other=0)
        tokens = x + (pair // CHOSEN)[:, None] * INNER
        small = tl.zeros((ROWS, RANK), WIDE)
        if rank > 0:
            for step in range(0, INNER, COLUMNS):
                columns = step + tl.arange(0, COLUMNS)[None, :]
                values = tl.load(tokens + columns, mask=inside & (columns < INNER), other=0.0)
                matrix = tl.load(first + columns, mask=held & (columns < INNER), other=0.0)
                small = tl.dot(
                    values, tl.trans(matrix.to(values.dtype)), small,
                    input_precision="ieee", out_dtype=WIDE,
                )  # fmt: skip
            # Of a token that is not finite, ranks that nobody has are no numbers either.
            small = tl.where((lanes < rank)[None, :], small * scale, 0.0)
        narrow = small.to(x.dtype.element_ty)
        place = rows.to(tl.int64)[:, None]
        tl.store(low + place * RANK + lanes[None, :], narrow, mask=inside)
        if WRITES:
            for step in range(0, OUTER, COLUMNS):
                columns = step + tl.arange(0, COLUMNS)[None, :]
                within = inside & (columns < OUTER)
                total = tl.load(frozen + place * OUTER + columns, mask=within, other=0.0).to(WIDE)
                if rank > 0:
                    matrix = tl.load(second + columns, mask=held & (columns < OUTER), other=0.0)
                    total = tl.dot(
                        narrow, matrix.to(narrow.dtype), total,
                        input_precision="ieee", out_dtype=WIDE,
                    )  # fmt: skip
                total = total.to(x.dtype.element_ty)
                tl.store(y + pair[:, None] * OUTER + columns, total, mask=within)


@triton.jit
def _outer(
    low, x, out, order, ends, table,
    JOBS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, BY_COLUMN: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = table + group % JOBS * 5
    rank = tl.load(row + 2).to(tl.int32)
    if rank == 0:
        return
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    lanes = tl.arange(0, RANK)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((RANK, COLUMNS), WIDE)
    for begin in range(start, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        inside = (rows < stop)[:, None]
        pair = tl.load(order + rows, mask=rows < stop, other=0)
        small = tl.load(
            low + rows.to(tl.int64)[:, None] * RANK + lanes[None, :], mask=inside, other=0.0
        )
        values = tl.load(
            x + (pair // CHOSEN)[:, None] * WIDTH + columns,
            mask=inside & (columns < WIDTH), other=0.0,
        )  # fmt: skip
        total = tl.dot(tl.trans(small), values, total, input_precision="ieee", out_dtype=WIDE)
    rows = _rows_of(lanes, group // JOBS, rank, EXPERTS, BY_COLUMN)
    out += (tl.load(row + 4) + rows) * WIDTH + columns
    mask = (lanes < rank)[:, None] & (columns < WIDTH)
    tl.store(out, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sorted pairs, and whose adapters they meet.

    order     int64 [S], pairs by expert and job
    ends      int32 [E * J], where each group's pairs end
    table     int64 [J, WORDS] on the device
    jobs      J of the row
    experts   E
    rank      what the ranks are padded to
    kind      the adapters' type
    """

    order: Tensor
    ends: Tensor
    table: Tensor
    jobs: int
    experts: int
    rank: int
    kind: torch.dtype


def padded(rank: int) -> int:
    """Size that ranks up to this one are padded to."""
    return max(MIN_RANK, 1 << max(0, rank - 1).bit_length())


def options(rank: int) -> dict[str, int]:
    """Warps and stages of `apply`: as few registers as let several programs share a processor."""
    return {"num_warps": 8 if rank > 32 else 4, "num_stages": 2 if rank > 64 else 3}


def apply(
    x: Tensor, frozen: Tensor | None, pairs: Pairs, outer: int, *, chosen: int, by_b: bool
) -> tuple[Tensor, Tensor]:
    """Multiply the pairs with both small matrices.

    x         [T, in], dense, of which `chosen` pairs each are made, or [S, in] and 1
    frozen    [S, outer] in the pairs' sorted order, what is added to; None: low-rank rows alone
    by_b      B reads x, and A makes the result
    returns   [S, outer] where the pairs stand, [0] without `frozen`; [S, rank], sorted and scaled
    """
    count, inner = len(pairs.order), x.shape[1]
    like = {"dtype": x.dtype, "device": x.device}
    low = launch.empty((count, pairs.rank), **like)
    y = launch.empty((0,) if frozen is None else (count, outer), **like)
    if count:
        _apply[pairs.experts * pairs.jobs, SPLITS](
            x, y if frozen is None else frozen, y, low, pairs.order, pairs.ends, pairs.table,
            JOBS=pairs.jobs, EXPERTS=pairs.experts, CHOSEN=chosen, INNER=inner, OUTER=outer,
            RANK=pairs.rank, FIRST=int(by_b), KIND=_TYPES[pairs.kind], WIDE=_wide(x),
            WRITES=frozen is not None, ROWS=ROWS, COLUMNS=COLUMNS, SPLITS=SPLITS,
            **options(pairs.rank),
        )  # fmt: skip
    return y, low


def outer_sums(
    low: Tensor, x: Tensor, pairs: Pairs, rows: int, *, chosen: int, of_b: bool
) -> Tensor:
    """The gradients of all jobs' A, or of their B turned, below each other.

    low       [S, rank] as `apply` gives it
    x         as of `apply`, what each low-rank row is multiplied with
    rows      of all jobs
    returns   [rows, width] in the adapters' type
    """
    width = x.shape[1]
    sums = launch.empty((rows, width), dtype=pairs.kind, device=x.device)
    _outer[pairs.experts * pairs.jobs, triton.cdiv(width, WIDE_COLUMNS)](
        low, x, sums, pairs.order, pairs.ends, pairs.table,
        JOBS=pairs.jobs, EXPERTS=pairs.experts, CHOSEN=chosen, WIDTH=width, RANK=pairs.rank,
        BY_COLUMN=int(of_b), WIDE=_wide(x), ROWS=SUMMED, COLUMNS=WIDE_COLUMNS,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums


def _wide(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


_tables: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
_captured: set[tuple[Any, ...]] = set()


def adapter_table(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    owners: Sequence[int],
    scales: Sequence[float],
    jobs: int,
    experts: int,
) -> Tensor:
    """Addresses of each job's adapters, int64 [J, WORDS] on their device, made once.

    a, b     A and B turned, both by rows, of the jobs in `owners`
    raises   TableNotOnDevice where a CUDA graph is captured that would have to make it
    """
    device = a[0].device
    words, before = [0] * (jobs * WORDS), 0
    for job, scale, own_a, own_b in zip(owners, scales, a, b, strict=True):
        (bits,) = struct.unpack("<q", struct.pack("<d", scale))
        rows = own_a.shape[0]
        words[job * WORDS : (job + 1) * WORDS] = [
            own_a.data_ptr(), own_b.data_ptr(), rows // experts, bits, before,
        ]  # fmt: skip
        before += rows
    key = (device, *words)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if key not in _tables:
        if capturing:
            raise TableNotOnDevice(
                "adapters of experts reached the operator for the first time while a CUDA graph "
                "is captured",
                help="run the step once before the capture",
            )
        pinned = device.type == "cuda"
        host = torch.tensor(words, dtype=torch.int64, pin_memory=pinned).view(jobs, WORDS)
        _tables[key] = host.to(device, non_blocking=pinned)
        _forget(key)
    if capturing:
        _captured.add(key)
    return _tables[key]


def _forget(newest: tuple[Any, ...]) -> None:
    """Drop old tables that no captured graph reads."""
    for key in list(_tables) if len(_tables) > _MAX_TABLES else ():
        if key not in _captured and key != newest:
            del _tables[key]
