"""Dropout's bits, read back word by word, as a mask over columns."""

import triton
import triton.language as tl


@triton.jit
def expand_words(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Bool [ROWS, COLUMNS]: bit i of word c of a row is its column BITS * c + i.

    words  an integer type of at least BITS bits, [ROWS, COLUMNS // BITS]

    As `expand_bits` for words of any width: a thread keeps few of them while it waits for a mask.
    """
    bit = tl.arange(0, BITS)
    kept = (words[:, :, None] >> bit[None, None, :]) & 1
    return tl.reshape(kept != 0, (ROWS, COLUMNS))
