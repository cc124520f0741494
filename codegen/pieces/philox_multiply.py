"""One multiplication of Philox."""

import triton
import triton.language as tl


@triton.jit
def philox_multiply(word, FACTOR: tl.constexpr):
    """The high and the low half of a 32-bit word times FACTOR: one wide multiplication."""
    product = word.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)
