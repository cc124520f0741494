"""The two halves of a tile's columns."""

import triton
import triton.language as tl


@triton.jit
def column_halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile [ROWS, COLUMNS], both [ROWS, COLUMNS // 2].

    Threads that hold an accumulator of a tensor core hold whole halves: nothing moves.
    """
    parts = tl.reshape(tile, (ROWS, 2, COLUMNS // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))
