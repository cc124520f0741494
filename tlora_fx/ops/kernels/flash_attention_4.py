"""FlashAttention-4, where its package is installed: rows of long sequences on Hopper.

Its tiles read on behind a sequence, and weights of 0 do not hide the NaN of a neighbour. So it is
called for each job, or for a batch, whose sequences end where its tensors do.

source   flash-attn-4 (`pip install "tlora-fx[flash]"`), its kernels in CuTe DSL for Hopper
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.kernels import select

logger = logging.getLogger("tlora_fx.kernels")

MODULE = "flash_attn.cute.interface"
#: By the width of heads, forwards and backwards: tokens of each sequence of a batch from which it
#: is faster than cuDNN (benchmarks/results/attention-flash4-2026-11-27.json).
BATCH = {64: (2048, 1024), 128: (2048, 1024), 256: (1024, math.inf)}
#: Tokens of one job's longest sequence from which it is faster than ours.
ONE_JOB = 1024
#: The same of several jobs, and what they have on average: calls for small ones take longer.
SEVERAL_JOBS = 2048


@dataclass(frozen=True, slots=True)
class Parts:
    """What it is called for.

    bounds   of the jobs, from 0 to the number of tokens; none: a batch of equal sequences
    """

    bounds: tuple[int, ...] = ()

    def spans(self) -> Iterator[slice]:
        """The tokens of each job that has any."""
        for start, stop in itertools.pairwise(self.bounds):
            if start < stop:
                yield slice(start, stop)


def parts_of(
    tokens: int, width: int, longest: int, segments: Tensor, *, equal: bool
) -> tuple[Parts | None, Parts | None]:
    """How it serves a row forwards and backwards, None where another kernel shall.

    longest    sequence of the row, in tokens
    segments   int32 [J + 1] on the CPU, where jobs begin
    equal      all sequences have as many tokens
    """
    none, least = math.inf, BATCH.get(width, (math.inf, math.inf))
    jobs = segments.numel() - 1
    if not equal and width in BATCH:
        many = select.may_cut_by_jobs() and tokens >= jobs * SEVERAL_JOBS
        least = (ONE_JOB if jobs == 1 else SEVERAL_JOBS if many else none,) * 2
    if longest < min(least) or not is_installed():
        return None, None
    bounds: tuple[int, ...] = ()
    if not equal:
        bounds = (0, tokens) if jobs == 1 else (*segments.tolist(), tokens)
    forward, backward = (Parts(bounds) if longest >= one else None for one in least)
    return forward, backward


def is_installed() -> bool:
    """Whether its functions can be called; FlashAttention-2 is a package of the same name."""
    return _interface() is not None


@lru_cache(maxsize=1)
def _interface() -> Any:
    """Its forward and its backward."""
    try:
        found = import_module(MODULE)
        return found._flash_attn_fwd, found._flash_attn_bwd
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and MODULE.startswith(str(error.name)):
            return None
        logger.warning("FlashAttention-4 is not used: %s", error)
        return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, parts: Parts
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each sequence of a row.

    q, k, v   [T, H, D], and [T, Hkv, D] twice, of halves on CUDA
    bounds    int32 [S + 1], where sequences begin
    returns   out [T, H, D] in q's type, lse float32 [H, T]
    """
    run, _ = _interface()
    told: dict[str, Any] = {"softmax_scale": scale, "causal": True, "return_lse": True}
    if not parts.bounds:
        out, lse, *_ = run(*(_batch(x, longest) for x in (q, k, v)), **told)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for span in parts.spans():
        cut = _sequences(bounds, longest, span)
        _, found, *_ = run(q[span], k[span], v[span], out=out[span], **cut, **told)
        lse[:, span] = found
    return out, lse


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, longest: int, scale: float,
    parts: Parts,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `forward`: dq, dk, dv.

    saved   q, k, v, out and lse of `forward`
    """
    _, run = _interface()
    told: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    q, k, v, out, lse = saved
    if not parts.bounds:
        rows = (_batch(x, longest) for x in (q, k, v, out, dout))
        heads = torch.unflatten(lse, 1, (-1, longest)).transpose(0, 1).contiguous()
        dq, dk, dv = (x.flatten(0, 1) for x in run(*rows, heads, **told)[:3])
        return dq, dk, dv
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    for span in parts.spans():
        rows = (x[span] for x in (q, k, v, out, dout))
        grads = {"dq": dq[span], "dk": dk[span], "dv": dv[span]}
        cut = _sequences(bounds, longest, span)
        run(*rows, lse[:, span].contiguous(), **grads, **cut, **told)
    return dq, dk, dv


def _batch(x: Tensor, longest: int) -> Tensor:
    return torch.unflatten(x, 0, (-1, longest))


def _sequences(bounds: Tensor, longest: int, span: slice) -> dict[str, Any]:
    """Where a job's sequences begin, counted from its first token; others are empty."""
    tokens = span.stop - span.start
    own, most = (bounds - span.start).clamp_(0, tokens), min(longest, tokens)
    return {"cu_seqlens_q": own, "cu_seqlens_k": own, "max_seqlen_q": most, "max_seqlen_k": most}
