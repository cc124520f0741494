"""Counter-based random numbers, equal on every device: Philox4x32 with seven rounds.

Dropout masks and starting weights are functions of a key and a counter, never of a generator's
state, so neighbours, packing, recomputation and the number of devices cannot change them.

source   Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); the constants and
         rounds are those of triton.language.philox.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
WEIGHTS = MASK  # fourth counter word of random weights; dropout uses 0, attention head + 1
_MULTIPLY_A, _MULTIPLY_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_SIGNS = -0x7FFF7FFF7FFF8000  # flips the top bit of each 16-bit value of an int64


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: tuple[int, int], rounds: int = 7
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for each counter.

    c0..c3   int64, values in [0, 2**32), of shapes that broadcast
    key      two words in [0, 2**32)
    returns  four int64 tensors of the broadcast shape, values in [0, 2**32)
    """
    w0, w1, w2, w3 = _rounds(c0, c1, c2, c3, key, rounds)
    return w0, w1 & MASK, w2, w3 & MASK


def _rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: tuple[int, int], rounds: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # c1 and c3 keep dirty upper halves between rounds: they are only xored, then masked.
    k0, k1 = key
    for _ in range(rounds):
        product_a, product_b = c0 * _MULTIPLY_A, c2 * _MULTIPLY_B
        c0 = ((product_b >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(MASK)
        c2 = ((product_a >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, c3 = product_b, product_a
        k0, k1 = (k0 + _KEY_A) & MASK, (k1 + _KEY_B) & MASK
    return c0, c1, c2, c3


def sixteens(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: tuple[int, int]) -> Tensor:
    """Eight 16-bit values for each counter, as int16 minus 32768, in a new last dimension.

    Value i is half of word i // 2, the low half for even i. The offset lets signed comparison
    order them: `sixteens(...) >= threshold - 32768`.
    """
    w0, w1, w2, w3 = _rounds(c0, c1, c2, c3, key, 7)
    first = (w1 << 32).bitwise_or_(w0)
    second = (w3 << 32).bitwise_or_(w2)
    pairs = torch.stack((first, second), -1)
    return pairs.bitwise_xor_(_SIGNS).view(torch.int16)


def uniform_at(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Uniform float32 numbers in (0, 1] of the elements with these flat indices (int64)."""
    block, zero = index >> 2, index.new_zeros(())
    words = torch.stack(philox(block & MASK, block >> 32, zero, zero + WEIGHTS, key), -1)
    word = words.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    return ((word >> 8).to(torch.float32) + 0.5) * 2.0**-24


def uniform_rows(
    count: int, seed: int, sites: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """The first `count` numbers of several keys (seed, site), float32 [sites, count].

    Each row is bitwise what `uniform_at` gives for its key; all are drawn together.
    """
    block = torch.arange(-(-count // 4), device=device).expand(len(sites), -1)
    zero = block.new_zeros(())
    keys: Any = seed, torch.tensor(sites, device=device).unsqueeze(1)
    words = torch.stack(philox(block & MASK, block >> 32, zero, zero + WEIGHTS, keys), -1)
    word = words.flatten(1)[:, :count]
    return ((word >> 8).to(torch.float32) + 0.5) * 2.0**-24
