"""Random words of dropout's counters."""

import triton
import triton.language as tl

from tlora_fx.codegen.pieces.philox_multiply import philox_multiply


@triton.jit
def philox_words(token, block, site, seed, step):
    """Philox4x32 with seven rounds: four uint32 words a counter (token, block, site, 0).

    token       uint32 [rows, 1]
    block       uint32 [1, blocks], columns divided by 8
    site        uint32 scalar
    seed, step  uint32 scalars, the key
    returns     [rows, blocks] each
    source      Salmon et al., 2011; equal to tlora_fx.ops.philox
    """
    c0, c1, c2 = token, block, site
    c3 = site ^ site
    # Words keep the shape of what they depend on: of 14 multiplications a counter, five belong
    # to a row or a column and leave the loop or are shared.
    for _ in tl.static_range(7):
        high0, low0 = philox_multiply(c0, 0xD2511F53)
        high2, low2 = philox_multiply(c2, 0xCD9E8D57)
        c0 = high2 ^ c1 ^ seed
        c2 = high0 ^ c3 ^ step
        c1 = low2
        c3 = low0
        seed += 0x9E3779B9
        step += 0xBB67AE85
    return c0, c1, c2, c3
