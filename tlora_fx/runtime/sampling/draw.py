"""Tokens from logits: temperature, top-k, top-p, and numbers that belong to one completion."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens of the vocabulary whose shares are summed together.
CHUNK = 512


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """How tokens are drawn.

    temperature   logits are divided by it; 0: the most likely token
    top_k         of the k most likely tokens; 0: of all
    top_p         of the fewest tokens that have this probability together; 1: of all
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def draw_tokens(logits: Tensor, numbers: Tensor, options: DrawOptions) -> Tensor:
    """A token of each row, by its number's place in the row's distribution function.

    logits    [n, V]
    numbers   float64 [n], uniform in [0, 1)
    returns   int64 [n]
    """
    if options.temperature == 0:
        return logits.argmax(-1)
    # In float64, that neither the order of sums nor a neighbour moves a border between tokens.
    scores = _filtered(logits.double() / options.temperature, options)
    return _drawn(scores, numbers.to(scores.device))


def _drawn(scores: Tensor, numbers: Tensor) -> Tensor:
    """As `draw_tokens`: first the chunk of the vocabulary in which the place is, then the token.

    A distribution function of a whole vocabulary is slow on a GPU: a block sums a row.
    """
    count, vocabulary = scores.shape
    shares = torch.exp(scores - scores.amax(-1, keepdim=True))
    chunks = F.pad(shares, (0, -vocabulary % CHUNK)).view(count, -1, CHUNK)
    ends = chunks.sum(-1).cumsum(-1)
    # Where a number is rounded up to the whole sum, the last chunk that is not empty has its place.
    last = (ends < ends[:, -1:]).sum(-1, keepdim=True)
    places = numbers[:, None] * ends[:, -1:]
    chunk = torch.minimum(torch.searchsorted(ends, places, right=True), last)
    before = torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp(min=0)), 0)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, 1, CHUNK)).squeeze(1)
    borders = inside.cumsum(-1)
    # Likewise for the last token of the chunk that has a share.
    final = (borders < borders[:, -1:]).sum(-1, keepdim=True)
    token = torch.minimum(torch.searchsorted(borders, places - before, right=True), final)
    return (chunk * CHUNK + token).squeeze(1).clamp_(max=vocabulary - 1)


def _filtered(scores: Tensor, options: DrawOptions) -> Tensor:
    """Scores with -inf where a token is left out; as transformers does, top-k before top-p."""
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    unread = torch.empty(0, dtype=torch.int64)
    if options.top_k:
        scores = TopKLogitsWarper(options.top_k)(unread, scores)
    if options.top_p < 1:
        scores = TopPLogitsWarper(options.top_p)(unread, scores)
    return scores


def numbers_of(
    seed: int, prompt: Sequence[int], occurrence: int, sample: int, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Uniform numbers in [0, 1) of one completion, a token each, by what it is alone."""
    key = key_of(seed, prompt, occurrence, sample)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def key_of(seed: int, prompt: Sequence[int], occurrence: int, sample: int = 0) -> int:
    """128 bits of what a completion is alone.

    occurrence   how many equal prompts of its job stand before it
    """
    said = np.array([seed % 2**64, occurrence, sample], dtype=np.uint64).tobytes()
    text = said + np.array(prompt, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
