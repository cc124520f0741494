"""Dropout's bits, read back, as a mask over columns."""

import triton
import triton.language as tl


@triton.jit
def expand_bits(bits, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Bool [ROWS, 8 * BYTES]: bit i of byte c of a row is its column 8 * c + i.

    bits  uint8 [ROWS, BYTES]

    The compiler moves only the bytes to the threads that hold the columns, whatever the layout of
    the tile that the mask is for, a tensor core's accumulator among them.
    """
    bit = tl.arange(0, 8)
    kept = (bits[:, :, None].to(tl.int32) >> bit[None, None, :]) & 1
    return tl.reshape(kept != 0, (ROWS, 8 * BYTES))
