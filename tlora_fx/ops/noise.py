"""`tlora_fx::embedding_noise`: NEFTune's noise on embeddings, each job's from its own seed.

A number depends on its job's seed and step, its token's index in the job's step and its column; its
size on the longest sequence of the micro-batch. Neighbours, packing and devices change neither.

source   Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, algorithm 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.philox import MASK, WEIGHTS, philox
from tlora_fx.ops.tables import check_keys, check_token_index, is_dropping, token_bounds

#: Third counter word of noise, where random weights have 0.
_NOISE = 1


def noise_rows(token_index: Tensor, columns: int, key: tuple[int, int]) -> Tensor:
    """Uniform numbers of one job's tokens.

    token_index  int64 [n]
    key          the job's seed and optimizer step
    returns      float32 [n, columns], in (-1, 1)
    """
    block = torch.arange((columns + 3) // 4, device=token_index.device)
    third = block.new_full((), _NOISE)
    words = philox(token_index[:, None] & MASK, block, third, third * 0 + WEIGHTS, key)
    word = torch.stack(words, -1).flatten(1)[:, :columns]
    return ((word >> 8).to(torch.float32) + 0.5) * 2.0**-23 - 1


@torch.library.custom_op(
    "tlora_fx::embedding_noise",
    mutates_args=(),
    schema="(Tensor x, float[] alphas, Tensor segments, Tensor keys, Tensor token_index, "
    "Tensor cu_seqlens) -> Tensor",
)
def embedding_noise(
    x: Tensor,
    alphas: list[float],
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Add each job's noise: alpha / sqrt(L H) times uniform numbers between -1 and 1.

    L is the length of the longest of the job's sequences, as a batch that is padded would have it.

    x            float [1, T, H], in batch form [B, S, H]
    alphas       of each job; 0: no noise. There is none in `without_dropout`
    segments     int32 [J + 1] on the CPU, of tokens; in batch form of lines
    keys         int64 [J, 2] on the CPU, (seed, step)
    token_index  int32, as x without H; -1 where a line is padded
    cu_seqlens   int32 [S + 1]
    returns      like x, contiguous
    raises       SegmentError, MaskKeyError
    """
    out = x.clone(memory_format=torch.contiguous_format)
    if not (is_dropping() and any(alphas)):
        return out
    tokens, hidden = token_index.numel(), x.shape[-1]
    width = 1 if len(token_index) == 1 else token_index.shape[1]
    bounds = [place * width for place in token_bounds(segments, tokens // width)]
    pairs, index = check_keys(keys, len(alphas)), check_token_index(token_index, tokens)
    rows, lengths = out.view(tokens, hidden), _lengths(token_index, cu_seqlens)
    starts = cu_seqlens[:-1]
    for job, alpha in enumerate(alphas):
        start, stop = bounds[job : job + 2]
        if not alpha or start == stop:
            continue
        longest = torch.where((starts >= start) & (starts < stop), lengths, 0).max()
        noise = noise_rows(index[start:stop], hidden, pairs[job])
        size = alpha / (longest * hidden).to(torch.float64).sqrt()
        rows[start:stop] += (noise * size).to(x.dtype)
    return out


def _lengths(token_index: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Tokens of each sequence, [S]; in batch form without padding."""
    return cu_seqlens.diff() if len(token_index) == 1 else (token_index >= 0).sum(1)


@embedding_noise.register_fake
def _fake(x: Tensor, *tables: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


embedding_noise.register_autograd(lambda ctx, grad: (grad, None, None, None, None, None))
