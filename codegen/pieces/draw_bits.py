"""Dropout's decisions."""

import triton
import triton.language as tl

from tlora_fx.codegen.pieces.philox_words import philox_words


@triton.jit
def draw_bits(token, block, site, seed, step, threshold):
    """int32 [rows, blocks]: bit i says that column 8 * block + i of a token is kept.

    Value i of a counter is half of word i // 2, the low half for even i; kept are values that
    reach the threshold (1..65535; at 0 all are kept). Arguments are those of `philox_words`.
    """
    word0, word1, word2, word3 = philox_words(token, block, site, seed, step)
    # A low half is compared in the upper one's place: no word needs to be taken apart.
    least = threshold.to(tl.uint32) << 16
    bits = tl.where((word0 << 16) >= least, 1, 0) | tl.where(word0 >= least, 2, 0)
    bits |= tl.where((word1 << 16) >= least, 4, 0) | tl.where(word1 >= least, 8, 0)
    bits |= tl.where((word2 << 16) >= least, 16, 0) | tl.where(word2 >= least, 32, 0)
    bits |= tl.where((word3 << 16) >= least, 64, 0) | tl.where(word3 >= least, 128, 0)
    return bits
