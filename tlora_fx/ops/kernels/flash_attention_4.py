"""FlashAttention-4, where its package is installed: rows of long sequences on Hopper.

Its tiles read on behind a sequence, and weights of 0 do not hide the NaN of a neighbour. So it is
called for each job, or for a batch, whose sequences end where their tensors do.

source   flash-attn-4 (`pip install "tlora-fx[flash]"`), its kernels in CuTe DSL for Hopper
"""

from __future__ import annotations

import inspect
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

from tlora_fx.host.environment import allows_flash_attention_4
from tlora_fx.ops.kernels import select
from tlora_fx.ops.tables import token_bounds

logger = logging.getLogger(__name__)

MODULE = "flash_attn.cute.interface"
_VARLEN = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
_BOTH = {"q", "k", "v", "softmax_scale", "causal", *_VARLEN}
#: Its functions, and the parameters that they are called with.
FUNCTIONS = {
    "_flash_attn_fwd": _BOTH | {"return_lse", "out"},
    "_flash_attn_bwd": _BOTH | {"out", "dout", "lse", "dq", "dk", "dv"},
}
#: By the width of heads, forward and backward: from how many tokens of each sequence of a batch on
#: it is faster than cuDNN and ours (benchmarks/results/attention-flash4-2026-11-27.json; widths 64
#: and 256 in attention-flash4-widths-2026-11-27.json).
BATCH = {64: (2048, 1024), 128: (2048, 1024), 256: (1024, math.inf)}
#: Where uneven sequences of one job were faster: the longest has more tokens, on average as many.
ONE_JOB, ONE_JOB_MEAN = 1024, 256
#: The same of several jobs, and tokens of a job on average: each call takes a while to start.
SEVERAL_JOBS = 2048
SEVERAL_JOBS_WIDTHS = (128,)


@dataclass(frozen=True, slots=True)
class JobSpans:
    """Parts of a row that the kernel is called for.

    bounds   of the jobs, from 0 to the number of tokens; empty: a batch of equal sequences
    """

    bounds: tuple[int, ...] = ()

    def slices(self) -> Iterator[slice]:
        """The tokens of each job that has any."""
        for start, stop in itertools.pairwise(self.bounds):
            if start < stop:
                yield slice(start, stop)


def job_spans(
    tokens: int, width: int, sequences: int, longest: int, segments: Tensor
) -> tuple[JobSpans | None, JobSpans | None]:
    """Parts of a row to call it for, forward and backward; None where another kernel is faster.

    tokens      of the row
    width       of a head
    sequences   of the row, empty ones too
    longest     sequence, in tokens
    segments    int32 [J + 1] on the CPU, where jobs begin
    """
    if width not in BATCH or longest < ONE_JOB or not is_installed():
        return None, None
    if tokens == sequences * longest:
        forward, backward = (
            JobSpans() if longest >= shortest else None for shortest in BATCH[width]
        )
        return forward, backward
    spans = _uneven(tokens, width, sequences, longest, segments)
    return spans, spans


def _uneven(
    tokens: int, width: int, sequences: int, longest: int, segments: Tensor
) -> JobSpans | None:
    """The same, both ways, where sequences differ."""
    jobs = segments.numel() - 1
    if jobs == 1:
        is_faster = longest > ONE_JOB and tokens >= sequences * ONE_JOB_MEAN
        return JobSpans((0, tokens)) if is_faster else None
    is_faster = longest >= SEVERAL_JOBS and tokens >= jobs * SEVERAL_JOBS
    if not is_faster or width not in SEVERAL_JOBS_WIDTHS or not select.may_cut_by_jobs():
        return None
    return JobSpans(tuple(token_bounds(segments, tokens)))


def is_installed() -> bool:
    """Whether it can be called: `TLORA_FX_FLASH4=0` leaves it out.

    FlashAttention-2 is a package of the same name.
    """
    return allows_flash_attention_4() and _functions() is not None


@lru_cache(maxsize=1)
def _functions() -> Any:
    """Its forward and its backward."""
    try:
        module = import_module(MODULE)
        functions = [getattr(module, name) for name in FUNCTIONS]
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and MODULE.startswith(str(error.name)):
            return None
        logger.warning("FlashAttention-4 is not used: %s", error)
        return None
    for function, parameters in zip(functions, FUNCTIONS.values(), strict=True):
        if missing := sorted(parameters - inspect.signature(function).parameters.keys()):
            logger.warning(
                "FlashAttention-4 is not used: %s of this version takes no %s; the extra `flash` "
                "installs the version that was tested",
                *(function.__name__, ", ".join(missing)),
            )
            return None
    return tuple(functions)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float,
    spans: JobSpans,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention inside each sequence of a row.

    q, k, v      [T, H, D], and [T, Hkv, D] twice, of halves on CUDA
    cu_seqlens   int32 [S + 1], where sequences begin
    longest      sequence, in tokens
    returns      out [T, H, D] in q's type, lse float32 [H, T]
    """
    function, _ = _functions()
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True, "return_lse": True}
    out = q.new_empty(q.shape)
    if not spans.bounds:
        batch = (_batch(x, longest) for x in (q, k, v))
        _, lse, *_ = function(*batch, out=_batch(out, longest), **options)
        return out, lse.transpose(0, 1).flatten(1)
    lse_parts = []
    for span in spans.slices():
        options |= _varlen(cu_seqlens, longest, span, len(q))
        _, lse, *_ = function(q[span], k[span], v[span], out=out[span], **options)
        lse_parts.append(lse)
    return out, lse_parts[0] if len(lse_parts) == 1 else torch.cat(lse_parts, 1)


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], cu_seqlens: Tensor, longest: int, scale: float,
    spans: JobSpans,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `forward`: dq, dk, dv.

    saved   q, k, v, out and lse of `forward`
    """
    _, function = _functions()
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    *values, lse = (*saved[:4], dout, saved[4])
    grads = [x.new_empty(x.shape) for x in saved[:3]]
    names = ("dq", "dk", "dv")
    if not spans.bounds:
        lse = torch.unflatten(lse, 1, (-1, longest)).transpose(0, 1).contiguous()
        outputs = {name: _batch(x, longest) for name, x in zip(names, grads, strict=True)}
        function(*(_batch(x, longest) for x in values), lse, **outputs, **options)
    for span in spans.slices():
        outputs = {name: x[span] for name, x in zip(names, grads, strict=True)}
        options |= _varlen(cu_seqlens, longest, span, len(dout))
        function(*(x[span] for x in values), lse[:, span].contiguous(), **outputs, **options)
    dq, dk, dv = grads
    return dq, dk, dv


def _batch(x: Tensor, longest: int) -> Tensor:
    return torch.unflatten(x, 0, (-1, longest))


def _varlen(cu_seqlens: Tensor, longest: int, span: slice, tokens: int) -> dict[str, Any]:
    """Where a job's sequences begin, counted from its first token; others are empty.

    tokens   of the row
    """
    length = span.stop - span.start
    if length < tokens:
        cu_seqlens = (cu_seqlens - span.start).clamp_(0, length)
    max_seqlen = min(longest, length)
    return {
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen,
    }  # fmt: skip
