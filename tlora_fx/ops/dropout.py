"""Dropout whose masks belong to the jobs: `tlora_fx::keyed_dropout`.

The mask of a token depends on its job's seed and step, the site, its index in the job's step and
the column, on nothing else: not on neighbours, packing or order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.philox import MASK, sixteens
from tlora_fx.ops.tables import check_keys, check_rates, check_token_index, token_bounds

# Counters of one piece of a mask: its temporaries stay in a core's cache, or fill a GPU.
_CPU_COUNTERS, _CUDA_COUNTERS = 1 << 14, 1 << 22


def threshold_of(rate: float) -> int:
    """Least 16-bit value that is kept at a dropout rate."""
    return min(round(rate * 65536), 65535)


def keep_scale(rate: float) -> float:
    """Factor of kept values at a dropout rate: one over the exact keep rate."""
    return 65536 / (65536 - threshold_of(rate))


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
        span = slice(bounds[job], bounds[job + 1])
        if span.start < span.stop and threshold_of(rate):
            keep[span] = keep_rows(index[span], columns, threshold_of(rate), pairs[job], int(site))
    return keep


@dataclass(frozen=True, slots=True)
class JobMasks:
    """The masks of one site of a row, drawn job by job on demand."""

    bounds: list[int]
    rates: list[float]
    keys: list[tuple[int, int]]
    token_index: Tensor | None  # int64 [tokens], None when no job drops
    site: int

    @classmethod
    def read(
        cls,
        rates: Tensor,
        segments: Tensor,
        keys: Tensor,
        token_index: Tensor,
        site: Tensor | int,
        tokens: int,
    ) -> JobMasks:
        """Check the tables of a row; keys and indices only when some job drops.

        raises  SegmentError, MaskKeyError
        """
        bounds = token_bounds(segments, tokens)
        values = check_rates(rates, len(bounds) - 1)
        if not any(threshold_of(rate) for rate in values):
            return cls(bounds, values, [], None, 0)
        pairs = check_keys(keys, len(values))
        return cls(bounds, values, pairs, check_token_index(token_index, tokens), int(site))

    def drops(self, job: int) -> bool:
        """Whether the job has tokens and a rate above zero."""
        return self.bounds[job] < self.bounds[job + 1] and threshold_of(self.rates[job]) > 0

    def keep(self, job: int, columns: int) -> Tensor:
        """The mask of the job's tokens, bool [its tokens, columns]; True is kept."""
        assert self.token_index is not None
        rows = self.token_index[self.bounds[job] : self.bounds[job + 1]]
        return keep_rows(rows, columns, threshold_of(self.rates[job]), self.keys[job], self.site)


@torch.library.custom_op(
    "tlora_fx::keyed_dropout",
    mutates_args=(),
    schema="(Tensor x, Tensor rates, Tensor segments, Tensor keys, Tensor token_index, "
    "Tensor site, int token_dims) -> Tensor",
)
def keyed_dropout(
    x: Tensor,
    rates: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor,
    token_dims: int,
) -> Tensor:
    """Drop elements by each job's keyed mask and scale the rest.

    x            float [tokens..., columns...]: the first `token_dims` dimensions enumerate
                 tokens, the others flatten to columns
    rates        float64 [J] on the CPU, in [0, 1); a job of rate 0 keeps every bit
    segments     int32 [J + 1] on the CPU
    keys         int64 [J, 2] on the CPU, (seed, step)
    token_index  int32, one a token, on x's device
    site         int64 scalar on the CPU, `site_id` of the module
    returns      like x, contiguous
    raises       SegmentError, MaskKeyError
    """
    tokens = math.prod(x.shape[:token_dims])
    masks = JobMasks.read(rates, segments, keys, token_index, site, tokens)
    out = x.clone(memory_format=torch.contiguous_format)
    rows = out.view(tokens, math.prod(x.shape[token_dims:]))
    for job in range(len(masks.rates)):
        if masks.drops(job):
            part, keep = rows[slice(*masks.bounds[job : job + 2])], masks.keep(job, rows.shape[1])
            part.mul_(keep_scale(masks.rates[job])).masked_fill_(keep.logical_not_(), 0)
    return out


@keyed_dropout.register_fake
def _fake(x: Tensor, *tables: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.token_dims = inputs
    ctx.save_for_backward(*tables)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.tlora_fx.keyed_dropout(grad, *ctx.saved_tensors, ctx.token_dims)
    return dx, None, None, None, None, None, None


keyed_dropout.register_autograd(_backward, setup_context=_setup)
