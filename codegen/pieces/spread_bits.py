"""Dropout's bits, just drawn, as a mask over columns."""

import triton
import triton.language as tl


@triton.jit
def spread_bits(bits, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Bool [ROWS, 8 * BYTES]: bit i of byte c of a row is its column 8 * c + i.

    bits  int32 [ROWS, BYTES], below 256

    `expand_bits` of bytes that this program drew: `join` keeps a byte's eight columns in the
    thread that drew it, which is how rows are loaded in 16-byte pieces. Broadcasting instead
    lets the compiler draw twice, for the tile and for the store (145 to 98 instructions a byte).
    """
    # Each join appends the bit of the column's number that it decides: 4, 2, then 1.
    even = tl.join(
        tl.join((bits & 1) != 0, (bits & 16) != 0), tl.join((bits & 4) != 0, (bits & 64) != 0)
    )
    odd = tl.join(
        tl.join((bits & 2) != 0, (bits & 32) != 0), tl.join((bits & 8) != 0, (bits & 128) != 0)
    )
    return tl.reshape(tl.join(even, odd), (ROWS, 8 * BYTES))
