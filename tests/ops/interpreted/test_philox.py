"""Triton's random numbers are those of the operators."""

import torch
import triton
import triton.language as tl

from tlora_fx.ops.philox import philox


@triton.jit
def draw(out, k0, token, block, site, count: tl.constexpr):
    i = tl.arange(0, count).to(tl.uint32)
    zero = i * 0
    key = k0.to(tl.uint64)
    r0, r1, r2, r3 = tl.philox(key, token + i, block + zero, site + zero, zero, 7)
    for j in tl.static_range(4):
        r = r0 if j == 0 else r1 if j == 1 else r2 if j == 2 else r3
        tl.store(out + j * count + i, r.to(tl.int64))


def test_triton_draws_the_same_words():
    """tl.philox with seven rounds gives our words."""
    out = torch.zeros(4, 16, dtype=torch.int64)
    draw[(1,)](out, (5 << 32) | 9, 100, 3, 77, 16)

    n = torch.arange(100, 116)
    assert torch.equal(
        out & 0xFFFFFFFF, torch.stack(philox(n, n * 0 + 3, n * 0 + 77, n * 0, (9, 5)))
    )
