"""Counter-based random numbers, equal on every device: Philox4x32 with seven rounds.

Dropout masks and starting weights are functions of a key and a counter, never of a generator's
state, so neighbours, packing, recomputation and the number of devices cannot change them.

source   Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); the constants and
         rounds are those of triton.language.philox.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tlora_fx.ops.tables import check_keys, check_rates, check_token_index, token_bounds

MASK = 0xFFFFFFFF
WEIGHTS = MASK  # fourth counter word of random weights; dropout uses 0, attention head + 1
_MULTIPLY_A, _MULTIPLY_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
# Counters of one piece of a mask: its temporaries stay in a core's cache, or fill a GPU.
_CPU_COUNTERS, _CUDA_COUNTERS = 1 << 14, 1 << 22
_SIGNS = -0x7FFF7FFF7FFF8000  # flips the top bit of each 16-bit value of an int64


_names: dict[int, str] = {}


def site_id(path: str) -> int:
    """The 31-bit number of a module path, the third counter word of its masks."""
    digest = hashlib.blake2s(path.encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little") & 0x7FFFFFFF
    _names[number] = path
    return number


def site_name(number: int) -> str:
    """The module path that a number was made of in this process, else the number."""
    number &= MASK
    return _names.get(number, str(number))


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


def threshold_of(rate: float) -> int:
    """What a 16-bit value must reach to be kept at a dropout rate."""
    return min(round(rate * 65536), 65535)


def keep_scale(rate: float) -> float:
    """What kept values are multiplied by at a dropout rate: one over the exact keep rate."""
    return 65536 / (65536 - threshold_of(rate))


def random_uniform(
    shape: tuple[int, ...],
    key: tuple[int, int],
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniform float32 numbers in (0, 1], the same on every device.

    shape    of the result, a run of elements of some larger tensor
    key      two words in [0, 2**32), such as a seed and a `site_id`
    offset   flat index of the first element in that larger tensor
    """
    index = torch.arange(offset, offset + math.prod(shape), device=device)
    return uniform_at(index, key).reshape(shape)


def uniform_at(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Uniform float32 numbers in (0, 1] of the elements with these flat indices (int64)."""
    block, zero = index >> 2, index.new_zeros(())
    words = torch.stack(philox(block & MASK, block >> 32, zero, zero + WEIGHTS, key), -1)
    word = words.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    return ((word >> 8).to(torch.float32) + 0.5) * 2.0**-24


def keep_rows(
    token_index: Tensor, columns: int, threshold: int, key: tuple[int, int], site: int
) -> Tensor:
    """The mask of one job's tokens.

    token_index  int64 [n]
    site         `site_id`; where these columns are a piece of the site's, its bits from 32 on are
                 the piece's first column divided by 8
    returns      bool [n, columns], True where a value reaches the threshold (0..65535)
    """
    blocks, first = (columns + 7) // 8, site >> 32
    keep = torch.empty(len(token_index), blocks * 8, dtype=torch.bool, device=token_index.device)
    block = torch.arange(first, first + blocks, device=token_index.device)
    third, zero = block.new_full((), site & MASK), block.new_zeros(())
    for start, stop in _pieces(len(token_index), blocks, token_index.is_cuda):
        rows = token_index[start:stop, None]
        values = sixteens(rows, block, third, zero, key).flatten(1)
        torch.ge(values, threshold - 32768, out=keep[start:stop])
    return keep[:, :columns]


def _pieces(rows: int, blocks: int, cuda: bool) -> Iterator[tuple[int, int]]:
    step = max(1, (_CUDA_COUNTERS if cuda else _CPU_COUNTERS) // max(1, blocks))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def keep_mask(
    rates: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor | int,
    columns: int,
) -> Tensor:
    """The keep mask of all tokens of a row at one site.

    rates        float64 [J] on the CPU
    segments     int32 [J + 1] on the CPU
    keys         int64 [J, 2] on the CPU, (seed, step)
    token_index  int32 with n elements, decides the device
    site         as of `keep_rows`
    returns      bool [n, columns], all True for jobs of rate 0
    raises       SegmentError, MaskKeyError
    """
    tokens = token_index.numel()
    bounds = token_bounds(segments, tokens)
    values = check_rates(rates, len(bounds) - 1)
    pairs, index = check_keys(keys, len(values)), check_token_index(token_index, tokens)
    keep = torch.ones(tokens, columns, dtype=torch.bool, device=token_index.device)
    for job, rate in enumerate(values):
        own = slice(bounds[job], bounds[job + 1])
        if own.start < own.stop and threshold_of(rate):
            keep[own] = keep_rows(index[own], columns, threshold_of(rate), pairs[job], int(site))
    return keep


def token_scale(rates: Tensor, segments: Tensor, tokens: int) -> Tensor:
    """What kept values of each token are multiplied by, float64 [tokens] on the CPU."""
    bounds = token_bounds(segments, tokens)
    values = check_rates(rates, len(bounds) - 1)
    scales = torch.tensor([keep_scale(rate) for rate in values], dtype=torch.float64)
    return scales.repeat_interleave(torch.tensor(bounds).diff())
