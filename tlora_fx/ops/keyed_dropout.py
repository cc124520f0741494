"""`tlora_fx::keyed_dropout`: dropout whose masks belong to the jobs."""

import math
from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.masks import JobMasks


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
            masks.apply_(job, rows[masks.bounds[job] : masks.bounds[job + 1]])
    return out


@keyed_dropout.register_fake
def _fake(
    x: Tensor,
    rates: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor,
    token_dims: int,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.token_dims = inputs
    ctx.save_for_backward(*tables)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.tlora_fx.keyed_dropout(grad, *ctx.saved_tensors, ctx.token_dims)
    return dx, None, None, None, None, None, None


keyed_dropout.register_autograd(_backward, setup_context=_setup)
