"""`pack` of all sites of a row in one launch; see pack_together.py, which needs no Triton.

A table lists strips of columns of A or B, with the addresses of what is read and written. A program
takes a strip and one block of packed rows, and does what codegen/kernels/pack.py says.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tlora_fx.codegen.kernels.pack import STRIP

# Elements of one step of a program: half as many as of `pack`, so that twice as many programs fit.
_ELEMENTS = 4096
_TYPES = {
    "float64": tl.float64,
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
}


@triton.jit
def _clean(
    source, rows, count, columns, width, TARGET: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Some rows of A or B in the compute type, with 0 for what is not finite there; and what is."""
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    where = rows.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(source + where, mask=inside, other=0.0).to(TARGET)
    finite = tl.abs(values.to(WIDE)) < float("inf")
    return tl.where(finite, values, 0.0).to(TARGET), finite


@triton.jit(do_not_specialize=["jobs"])
def _pack_strips(
    table, jobs,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, WIDE: tl.constexpr, RANK_BLOCK: tl.constexpr,
    STRIP: tl.constexpr, COLUMNS: tl.constexpr, JOBS: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * 13
    block = tl.program_id(1)
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(TARGET)), 16)
    flag = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + block * tl.load(row + 3)
    ranks = tl.load(row + 4).to(tl.pointer_type(tl.int32))
    slots = tl.load(row + 5).to(tl.pointer_type(tl.int32))
    blocks = tl.load(row + 6)
    width = tl.multiple_of(tl.load(row + 8).to(tl.int32), 16)
    begin = tl.multiple_of(tl.load(row + 9).to(tl.int32), 16)
    own = tl.arange(0, RANK_BLOCK)
    if block < blocks:
        # The job of this block's rows; blocks behind the last job's have none and become zeros.
        index = tl.arange(0, JOBS)
        ends = tl.load(slots + 1 + index, mask=index < jobs, other=2147483647)
        job = tl.sum((ends <= block * RANK_BLOCK).to(tl.int32))
        owned = job < jobs
        done = block * RANK_BLOCK - tl.load(slots + job, mask=owned, other=0)
        first = tl.load(ranks + job, mask=owned, other=0) + done
        count = tl.load(ranks + job + 1, mask=owned, other=0) - first
        source += first.to(tl.int64) * width
        rows = (block * RANK_BLOCK + own).to(tl.int64)
        faults = 0
        for step in range(0, STRIP, COLUMNS):
            columns = begin + step + tl.arange(0, COLUMNS)
            values, finite = _clean(source, own, count, columns, width, TARGET, WIDE)
            faults += tl.sum(1 - finite.to(tl.int32))
            where = rows[:, None] * width + columns[None, :]
            tl.store(target + where, values, mask=(columns < width)[None, :])
        tl.store(flag, tl.where(faults > 0, float("nan"), 0.0))
    elif block < tl.load(row + 7):
        first = (block - blocks).to(tl.int32) * RANK_BLOCK
        count = tl.load(ranks + jobs) - first
        source += first.to(tl.int64) * width
        tail = tl.multiple_of(tl.load(row + 10).to(tl.pointer_type(TARGET)), 16)
        stride = tl.multiple_of(tl.load(row + 11), 16)
        in_rows = tl.load(row + 12) != 0
        for step in range(0, STRIP, COLUMNS):
            columns = begin + step + tl.arange(0, COLUMNS)
            values, _ = _clean(source, own, count, columns, width, TARGET, WIDE)
            inside = (columns < width)[None, :]
            if in_rows:
                where = (first + own).to(tl.int64)[:, None] * stride + columns[None, :]
                tl.store(tail + where, values, mask=inside)
            else:
                where = (first + own)[:, None] + columns.to(tl.int64)[None, :] * stride
                tl.store(tail + where, values, mask=inside)


def pack_strips(
    table: Tensor, blocks: int, jobs: int, stored: str, compute: str, rank_block: int, capacity: int
) -> None:
    """Pack the strips of a table.

    table     int64 [S, 13]: addresses of A or B, of its packed rows and of the flag of the first
              block; flags a block; addresses of ranks and slots; blocks, and those of the tail
              behind them; columns of A or B, and the strip's first; address of the tail, the step
              of its rows, and 1 where rows of A or B are rows there, 0 where they are columns
    blocks    most that a strip has, the tail's with them
    stored    dtype of A and B; compute: as they are packed
    """
    wide: Any = tl.float64 if compute == "float64" else tl.float32
    _pack_strips[(table.shape[0], blocks)](
        table,
        jobs,
        SOURCE=_TYPES[stored],
        TARGET=_TYPES[compute],
        WIDE=wide,
        RANK_BLOCK=rank_block,
        STRIP=STRIP,
        COLUMNS=min(STRIP, _ELEMENTS // rank_block),
        JOBS=capacity,
        num_warps=8,
    )
