"""`tlora_fx::packed_attention`: attention inside each sequence of a packed row.

Kernels that torch ships serve what they can: a whole row on CUDA, a sequence on the CPU. A row is a
batch to cuDNN where its sequences are equally long, and goes through our own kernels where those
were measured to be faster, and there in strict mode at any length, for they give the same bits in
every company and in every run. FlashAttention-4, where it is installed, takes rows of long
sequences. All else is written out, one sequence after the other. There scores
are taken in float32 at least, block of queries by block, so that they never exist whole; block
sizes depend on the sequence alone, so a neighbour cannot change a job's rounding.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from tlora_fx.errors import AttentionShapeError, MaskKeyError, SegmentError
from tlora_fx.host.environment import kernel_mode
from tlora_fx.ops.attention_rule import AttentionRule, replacement, wide_dtype
from tlora_fx.ops.dropout import JobMasks, keep_scale, threshold_of
from tlora_fx.ops.kernels import flash_attention_4, select, support
from tlora_fx.ops.philox import sixteens
from tlora_fx.ops.tables import INTEGERS, check_rate

if TYPE_CHECKING:
    from tlora_fx.ops.kernels.short_attention import Form, Tiles

logger = logging.getLogger(__name__)

#: What computes a row: our kernels, FlashAttention-4, torch's varlen kernel, or cuDNN on a batch of
#: equal sequences.
RowKernel: TypeAlias = "Tiles | flash_attention_4.JobSpans | Literal['flash', 'batch']"


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Arguments of `packed_attention` beside q, k and v, as the schema has them."""

    cu_seqlens: Tensor
    max_seqlen: Tensor
    segments: Tensor
    keys: Tensor
    token_index: Tensor
    site: Tensor | None
    scale: float
    causal: bool
    window: int
    softcap: float
    sinks: Tensor | None
    dropout: float

    @property
    def rule(self) -> AttentionRule:
        """Numbers of the attention rule."""
        dropout = check_rate(self.dropout)
        return AttentionRule(self.scale, self.causal, self.window, self.softcap, dropout)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Spans of the sequences of a row, and the masks of each sequence's job."""

    spans: tuple[tuple[int, int], ...]  # without empty ones
    masks: JobMasks

    @classmethod
    def read(cls, tables: AttentionTables, tokens: int) -> Sequences:
        """Check the tables of a row; raises AttentionShapeError, SegmentError, MaskKeyError."""
        segments, site, dropout = tables.segments, tables.site, tables.dropout
        if site is None and threshold_of(dropout):
            raise MaskKeyError("attention dropout needs the site of its masks", found=None)
        rates = torch.full((segments.numel() - 1,), dropout, dtype=torch.float64)
        number = 0 if site is None else site
        masks = JobMasks.read(rates, segments, tables.keys, tables.token_index, number, tokens)
        # After the tables of the host, which tell whether a graph is being captured.
        spans = _spans(tables.cu_seqlens.tolist(), tokens)
        for start, stop in spans:
            if stop > masks.bounds[bisect_right(masks.bounds, start)]:
                raise SegmentError(
                    "a sequence reaches from one job into the next",
                    found=f"tokens {start}:{stop}, jobs at {masks.bounds}",
                )
        return cls(spans, masks)

    def keep(self, queries: slice, keys: slice, heads: int) -> Tensor:
        """Mask of the attention weights that dropout keeps, bool [heads, queries, keys]."""
        masks = self.masks
        assert masks.token_index is not None
        job = bisect_right(masks.bounds, queries.start) - 1
        index = masks.token_index[keys]
        blocks, which = torch.unique(index >> 3, return_inverse=True)
        values = sixteens(
            masks.token_index[queries][:, None],
            blocks,
            blocks.new_full((), masks.site),
            torch.arange(1, heads + 1, device=index.device)[:, None, None],
            masks.keys[job],
        )
        keep = values.flatten(2) >= threshold_of(masks.rates[job]) - 32768
        return keep.index_select(2, which * 8 + (index & 7))

    @property
    def keep_scale(self) -> float:
        """Factor of kept weights."""
        return keep_scale(self.masks.rates[0])


def _spans(bounds: list[int], tokens: int) -> tuple[tuple[int, int], ...]:
    pairs = tuple(itertools.pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != tokens or any(first > last for first, last in pairs):
        raise AttentionShapeError(
            "cu_seqlens must rise from 0 to the number of tokens",
            expected=f"0 ... {tokens}",
            found=bounds,
        )
    return tuple((first, last) for first, last in pairs if first < last)


def check_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    """Refuse shapes and types that do not fit each other; raises AttentionShapeError."""
    if not (q.dim() == k.dim() == v.dim() == 3):
        raise AttentionShapeError(
            "q, k and v must be [T, heads, dim]",
            found=f"{q.dim()}, {k.dim()} and {v.dim()} dimensions",
        )
    fits = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]
    if not fits or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise AttentionShapeError(
            "q, k and v must share tokens, and q's heads be a multiple of k's",
            expected="q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv]",
            found=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        )
    if not (q.dtype == k.dtype == v.dtype) or not q.dtype.is_floating_point:
        raise AttentionShapeError(
            "q, k and v need one floating type", found=f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in INTEGERS:
        raise AttentionShapeError(
            "cu_seqlens must be int32 [sequences + 1]",
            found=f"{cu_seqlens.dtype}{list(cu_seqlens.shape)}",
        )


# Scores of one block: they stay in a CPU's cache, or within 256 MiB on a GPU.
_CPU_SCORES, _CUDA_SCORES = 1 << 20, 1 << 26


@dataclass(frozen=True, slots=True)
class SequenceMath:
    """One sequence's queries and keys, heads first, in the wide type.

    q [Hkv, G, L, D], k [Hkv, L, D], v [Hkv, L, Dv]; G query heads share a key head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rule: AttentionRule
    sequences: Sequences
    start: int

    @classmethod
    def take(
        cls, q: Tensor, k: Tensor, v: Tensor, span: slice, rule: AttentionRule, rows: Sequences
    ) -> SequenceMath:
        """Cut one sequence out of a row of q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv]."""
        wide, groups = wide_dtype(q.dtype), k.shape[1]
        heads = torch.unflatten(q[span].to(wide), 1, (groups, q.shape[1] // groups))
        return cls(
            heads.permute(1, 2, 0, 3).contiguous(),
            k[span].to(wide).transpose(0, 1).contiguous(),
            v[span].to(wide).transpose(0, 1).contiguous(),
            rule,
            rows,
            span.start,
        )

    def forward(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The attention of the sequence: out [L, H, Dv] and lse [H, L], wide."""
        groups, share, length, _ = self.q.shape
        out = self.v.new_empty(groups, share, length, self.v.shape[2])
        lse = self.q.new_empty(groups, share, length)
        for queries, keys in self._pieces():
            scores, _ = self._scores(queries, keys)
            total = torch.logsumexp(scores, -1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.to(total.dtype).view(groups, share, 1))
            weights, keep = self._weights(queries, keys, scores, total)
            lse[:, :, queries] = total
            product = self._dropped(weights, keep) @ self.v[:, keys]
            out[:, :, queries] = torch.unflatten(product, 1, (share, -1))
        return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1)

    def backward(self, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients dq [L, H, D], dk [L, Hkv, D], dv [L, Hkv, Dv], wide.

        dout [L, H, Dv], lse [H, L] as `forward` gave it
        """
        groups, share, _, _ = self.q.shape
        dout = torch.unflatten(dout.to(self.q.dtype), 1, (groups, share)).permute(1, 2, 0, 3)
        lse = torch.unflatten(lse, 0, (groups, share))
        dq, dk, dv = torch.empty_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        for queries, keys in self._pieces():
            scores, slope = self._scores(queries, keys)
            weights, keep = self._weights(queries, keys, scores, lse[:, :, queries])
            grad = dout[:, :, queries].flatten(1, 2)
            dv[:, keys] += self._dropped(weights, keep).mT @ grad
            dweights = self._dropped(grad @ self.v[:, keys].mT, keep)
            # The gradient of the unscaled products q kᵀ, [Hkv, G * queries, keys], in place.
            mean = (weights * dweights).sum(-1, keepdim=True)
            dscores = dweights.sub_(mean).mul_(weights)
            if slope is not None:
                dscores.mul_(slope.flatten(1, 2))
            dscores.mul_(self.rule.scale)
            dq[:, :, queries] = torch.unflatten(dscores @ self.k[:, keys], 1, (share, -1))
            dk[:, keys] += dscores.mT @ self.q[:, :, queries].flatten(1, 2)
        return dq.flatten(0, 1).transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        groups, share, length, _ = self.q.shape
        budget = _CUDA_SCORES if self.q.is_cuda else _CPU_SCORES
        step = max(16, budget // (groups * share * length))
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield slice(start, stop), slice(*self.rule.visible(start, stop, length))

    def _scores(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Scores [Hkv, G, queries, keys], -inf where hidden, and the soft cap's derivative."""
        rule, slope = self.rule, None
        q = self.q[:, :, queries]
        product = q.flatten(1, 2) @ self.k[:, keys].mT
        scores = torch.unflatten(product.mul_(rule.scale), 1, (q.shape[1], -1))
        if rule.softcap:
            bent = scores.div_(rule.softcap).tanh_()
            slope = 1 - bent.square()
            scores = bent.mul_(rule.softcap)
        rows, columns = range(queries.start, queries.stop), range(keys.start, keys.stop)
        hidden = rule.hidden(rows, columns, scores.device)
        return (scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)), slope

    def _weights(
        self, queries: slice, keys: slice, scores: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Turn scores into weights [Hkv, G * queries, keys], in place; and what dropout keeps."""
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().flatten(1, 2)
        keep = None
        if self.rule.drops:
            heads, rows = scores.shape[0] * scores.shape[1], self.start
            keep = self.sequences.keep(_shift(queries, rows), _shift(keys, rows), heads)
            keep = keep.reshape(weights.shape)
        return weights, keep

    def _dropped(self, values: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None:
            return values
        return torch.where(keep, values * self.sequences.keep_scale, 0)


def _shift(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)


_HALVES = (torch.float16, torch.bfloat16)
# A sequence is a place in a grid's last dimension, which CUDA bounds.
_MAX_SEQUENCES = 65535
# What was measured was 9.19; widths up to 256 came before.
_OLDEST_CUDNN = 91000


def flash_fits_row(q: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule) -> bool:
    """Whether the varlen kernel on CUDA can do the whole row."""
    return q.is_cuda and has_row_kernel(q, v, sinks, rule)


def has_row_kernel(q: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule) -> bool:
    """The same of tensors on any device: whether on CUDA it could."""
    bare = rule.softcap == 0 and not rule.drops and sinks is None
    width = q.shape[2]
    fits = width == v.shape[2] and width % 8 == 0 and width <= 256
    return q.dtype in _HALVES and bare and fits


def row_kernels(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, longest: int, rule: AttentionRule, segments: Tensor
) -> tuple[RowKernel, RowKernel]:
    """Kernels for a row that the varlen kernel can do: forward, and backward.

    In strict mode neither the longest sequence nor their number decides: neighbours have both.
    """
    forward, backward = _chosen(q, k, cu_seqlens, longest, rule, segments)
    _say(q.shape[1], k.shape[1], q.shape[2], _named(forward), _named(backward))
    return forward, backward


def _chosen(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, longest: int, rule: AttentionRule, segments: Tensor
) -> tuple[RowKernel, RowKernel]:
    form = _short_form(q, k, cu_seqlens, rule)
    if select.is_strict():
        own: RowKernel = "flash" if form is None else form.tiles
        return own, own
    forward, backward = _other_kernels(q, k, cu_seqlens, longest, rule, form)
    if _is_plain(q, longest, rule) and support.arch_of(q.device) == 90:
        sizes = len(q), q.shape[2], len(cu_seqlens) - 1, longest
        forward_spans, backward_spans = flash_attention_4.job_spans(*sizes, segments)
        forward, backward = forward_spans or forward, backward_spans or backward
    return forward, backward


def _other_kernels(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, longest: int, rule: AttentionRule, form: Form | None
) -> tuple[RowKernel, RowKernel]:
    """What serves where FlashAttention-4 does not."""
    batch = is_batch(q, cu_seqlens, longest, rule)
    if form is None:
        return ("batch", "batch") if batch else ("flash", "flash")
    own = form.tiles_for(k.shape[1] * (len(cu_seqlens) - 1), longest)

    def kernel(most: int, least: int) -> RowKernel:
        if batch and longest >= least:
            return "batch"
        return own if longest <= most else "flash"

    forward, backward = form.bounds(windowed=0 < rule.window < longest)
    return kernel(*forward), kernel(*backward)


def _named(kernel: RowKernel) -> str:
    if isinstance(kernel, flash_attention_4.JobSpans):
        return "FlashAttention-4"
    if kernel == "flash":
        return "FlashAttention-2"
    return "cuDNN" if kernel == "batch" else "ours"


@lru_cache(maxsize=256)
def _say(heads: int, key_heads: int, width: int, forward: str, backward: str) -> None:
    """Log once what such heads go through."""
    logger.info(
        "attention of %d heads, %d key heads, width %d: forward %s, backward %s",
        *(heads, key_heads, width, forward, backward),
    )


def _short_form(q: Tensor, k: Tensor, cu_seqlens: Tensor, rule: AttentionRule) -> Form | None:
    """What was measured of our kernels for such heads."""
    many = len(cu_seqlens) > _MAX_SEQUENCES
    if many or not rule.causal or not support.has_triton() or kernel_mode() == "off":
        return None
    # Triton is not everywhere.
    from tlora_fx.ops.kernels.short_attention import FORMS

    arch, group = support.arch_of(q.device), q.shape[1] // k.shape[1]
    return FORMS.get((arch, q.dtype, group, q.shape[2]))


#: Tokens of each sequence; shorter ones were not tried.
SHORTEST_BATCH = 128


def is_batch(q: Tensor, cu_seqlens: Tensor, longest: int, rule: AttentionRule) -> bool:
    """Whether cuDNN can take a row that the varlen kernel can do, as a batch of equal sequences.

    Where so many sequences of at most `longest` tokens have that many together, all have. The host
    knows that without a look at the bounds, and in a captured graph it stays so. Other types,
    widths and masks than these were not tried.
    """
    tried = longest >= SHORTEST_BATCH and q.shape[2] >= 64 and _is_plain(q, longest, rule)
    return tried and len(q) == (len(cu_seqlens) - 1) * longest and _batches_pay(q)


def _is_plain(q: Tensor, longest: int, rule: AttentionRule) -> bool:
    """Whether a row has the type and the mask that kernels of others were tried with."""
    return q.dtype == torch.bfloat16 and rule.causal and rule.is_plain(longest)


def _batches_pay(q: Tensor) -> bool:
    """Whether cuDNN was measured to be faster than the varlen kernel here, and is wanted."""
    wanted: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if support.arch_of(q.device) != 90 or not wanted:
        return False
    return _cudnn_version() >= _OLDEST_CUDNN


def _cudnn_version() -> int:
    cudnn: Any = torch.backends.cudnn
    return int(cudnn.version()) if cudnn.is_available() else 0


def flash_fits_sequence(
    q: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule, length: int
) -> bool:
    """Whether the CPU kernel can do one sequence of this length."""
    plain = rule.is_plain(length) and sinks is None
    return plain and q.device.type == "cpu" and q.shape[2] == v.shape[2]


def _windows(rule: AttentionRule) -> dict[str, int | float]:
    left = rule.window - 1 if rule.window > 0 else -1
    right = 0 if rule.causal else left
    return {"scale": rule.scale, "window_size_left": left, "window_size_right": right}


def _near(x: Tensor) -> Tensor:
    """The kernels read rows of heads whose last dimension is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor) -> Tensor:
    """Our kernels read tokens whose heads lie side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def row_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    rule: AttentionRule,
    kernel: RowKernel = "flash",
) -> tuple[Tensor, Tensor]:
    """All sequences of a row on CUDA: out [T, H, D] and lse float32 [H, T].

    kernel   "batch": only where `is_batch`
    """
    if kernel == "batch":
        return _batch_forward(q, k, v, longest, rule)
    bounds = cu_seqlens.to(torch.int32)
    if isinstance(kernel, flash_attention_4.JobSpans):
        return flash_attention_4.forward(q, k, v, bounds, longest, rule.scale, kernel)
    if kernel != "flash":
        from tlora_fx.ops.kernels import short_attention as short

        numbers = short.Rule(longest, rule.scale, rule.window)
        return short.forward(_dense(q), _dense(k), _dense(v), bounds, numbers, kernel.forward)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(_near(q), _near(k), _near(v)),
        *(bounds, bounds, _longest(longest), _longest(longest)),
        *(0.0, rule.causal and rule.window < 0, False),
        **_windows(rule),
    )
    # The kernel keeps q's strides, the operator promises contiguous results.
    return out.contiguous(), lse.contiguous()


def row_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    rule: AttentionRule,
    kernel: RowKernel = "flash",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `row_forward`, by whichever kernel: dq, dk, dv."""
    if kernel == "batch":
        return _batch_backward(dout, q, k, v, out, lse, longest, rule)
    bounds, dout, lse = cu_seqlens.to(torch.int32), dout.contiguous(), lse.contiguous()
    if isinstance(kernel, flash_attention_4.JobSpans):
        saved = q, k, v, out, lse
        return flash_attention_4.backward(dout, saved, bounds, longest, rule.scale, kernel)
    if kernel != "flash":
        from tlora_fx.ops.kernels import short_attention as short

        numbers = short.Rule(longest, rule.scale, rule.window)
        dense = _dense(q), _dense(k), _dense(v), out, lse
        return short.backward(dout, dense, bounds, numbers, kernel)
    rows = dout, _near(q), _near(k), _near(v), out
    if select.is_strict():
        return _backward_by_sequence(rows, lse, cu_seqlens, rule)
    return _flash_backward((*rows, lse), bounds, longest, rule)


def _flash_backward(
    saved: tuple[Tensor, ...], bounds: Tensor, longest: int, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    no_state = torch.zeros(2, dtype=torch.uint64, device=bounds.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *saved,
        *(bounds, bounds, _longest(longest), _longest(longest)),
        *(0.0, rule.causal and rule.window < 0, no_state, saved[0].new_empty(0)),
        **_windows(rule),
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _backward_by_sequence(
    rows: tuple[Tensor, ...], lse: Tensor, cu_seqlens: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `row_forward` with bits that depend on the sequence alone.

    FlashAttention-2 adds up dq by atomics. If it may not, how it groups the sums depends on the
    number of sequences of a call.
    """
    dq, dk, dv = grads = _like(rows[1]), _like(rows[2]), _like(rows[3])
    with _in_fixed_order():
        for start, stop in itertools.pairwise(cu_seqlens.tolist()):
            if start == stop:
                continue
            bounds = torch.tensor([0, stop - start], dtype=torch.int32, device=lse.device)
            own = *(each[start:stop] for each in rows), lse[:, start:stop].contiguous()
            parts = _flash_backward(own, bounds, stop - start, rule)
            for grad, part in zip(grads, parts, strict=True):
                grad[start:stop] = part
    return dq, dk, dv


@contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Inside, operators of torch add up in one order, where they can."""
    from torch._inductor import config  # torch sets `deterministic` there too

    before, compiled = torch.are_deterministic_algorithms_enabled(), config.deterministic
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        config.deterministic = compiled


def _batch_forward(
    q: Tensor, k: Tensor, v: Tensor, longest: int, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._cudnn_attention_forward(
        *(_batch(x, longest) for x in (q, k, v)), None, None, None,
        *(longest, longest, True, 0.0, rule.causal, False),
        scale=rule.scale,
    )  # fmt: skip
    return _unbatched(out), lse.squeeze(-1).transpose(0, 1).flatten(1)


def _batch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    longest: int, rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse = torch.unflatten(lse, 1, (-1, longest)).transpose(0, 1).contiguous().unsqueeze(-1)
    no_state = q.new_empty((), dtype=torch.int64)
    grads = torch.ops.aten._cudnn_attention_backward(
        *(_batch(x, longest) for x in (dout, q, k, v, out)), lse, no_state, no_state,
        *(None, None, None, longest, longest, 0.0, rule.causal),
        scale=rule.scale,
    )  # fmt: skip
    dq, dk, dv = map(_unbatched, grads)
    return dq, dk, dv


#: Elements of two bytes: cuDNN reads from addresses that are multiples of 16 bytes.
_ALIGNED = 8


def _batch(x: Tensor, longest: int) -> Tensor:
    """Rows of heads as sequences of heads, [S, H, L, D]; a view where cuDNN can read it."""
    steps = (*x.stride()[:2], x.storage_offset())
    if x.stride(-1) != 1 or any(step % _ALIGNED for step in steps):
        x = x.contiguous()
    return torch.unflatten(x, 0, (-1, longest)).transpose(1, 2)


def _unbatched(x: Tensor) -> Tensor:
    """The way back: [S, H, L, D] as [T, H, D], contiguous; a view of what cuDNN writes."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _longest(longest: int) -> int:
    # At 1 the kernel folds query heads into tokens and lays out lse by another order.
    return max(longest, 2)


def sequence_forward(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """One sequence q [L, H, D] on the CPU: out [L, H, D] and lse [H, L], wide."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_grouped(q, k, v), 0.0, rule.causal, scale=rule.scale
    )
    return _rowwise(out), lse.flatten(0, 1)


def sequence_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `sequence_forward`: dq [L, H, D], dk and dv [L, Hkv, D]."""
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    heads = (groups, share)
    # The kernel gives lse with the heads innermost, and reads it so.
    lse = torch.unflatten(lse.t().contiguous().t(), 0, heads)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(dout, heads), *_grouped(q, k, v), _heads_first(out, heads), lse),
        *(0.0, rule.causal),
        scale=rule.scale,
    )
    return _rowwise(dq), _summed(dk), _summed(dv)


def _heads_first(x: Tensor, heads: tuple[int, int]) -> Tensor:
    return torch.unflatten(_near(x), 1, heads).permute(1, 2, 0, 3)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [Hkv, G, L, D]; keys repeat by a stride of 0, without a copy."""
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    keys = _heads_first(k, (groups, 1)).expand(-1, share, -1, -1)
    values = _heads_first(v, (groups, 1)).expand(-1, share, -1, -1)
    return _heads_first(q, (groups, share)), keys, values


def _rowwise(x: Tensor) -> Tensor:
    return x.flatten(0, 1).transpose(0, 1)


def _summed(x: Tensor) -> Tensor:
    return x.sum(1).transpose(0, 1) if x.shape[1] > 1 else x.squeeze(1).transpose(0, 1)


_TABLES = (
    "Tensor cu_seqlens, Tensor max_seqlen, Tensor segments, Tensor keys, Tensor token_index, "
    "Tensor? site, float scale, bool causal, int window, float softcap, Tensor? sinks, "
    "float dropout"
)


@torch.library.custom_op(
    "tlora_fx::packed_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_TABLES}) -> (Tensor, Tensor)",
)
def packed_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Attend within each sequence of a row.

    q, k, v      [T, H, D], [T, Hkv, D], [T, Hkv, Dv], one float type, Hkv divides H
    cu_seqlens   int32 [S + 1] on q's device; sequence i is tokens cu_seqlens[i]:cu_seqlens[i + 1]
    max_seqlen   int32 scalar on the CPU, at least the longest sequence
    segments     int32 [J + 1] on the CPU; a sequence belongs to one job
    keys         int64 [J, 2] on the CPU, (seed, step); read only for dropout
    token_index  int32, one a token; read only for dropout
    site         int64 scalar on the CPU, `site_id`; needed for dropout
    scale        multiplies q kᵀ
    causal       token i sees tokens j <= i
    window       token i sees tokens with |i - j| < window; -1: no window
    softcap      scores s become softcap * tanh(s / softcap); 0: none
    sinks        one more logit a head, [H], that takes weight and has no value; or None
    dropout      rate in [0, 1) on the weights, drawn by each job's keyed masks
    returns      out [T, H, Dv] in q's type, lse [H, T] float32 (float64 for float64);
                 lse has no gradient
    raises       AttentionShapeError, SegmentError, MaskKeyError
    """
    tables = AttentionTables(*rest)
    rule, sinks = tables.rule, tables.sinks
    check_attention(q, k, v, tables.cu_seqlens)
    rule.check()
    if (attend := replacement()) and (attended := attend(q, k, v, rule, sinks)) is not None:
        return attended, _outputs(q, v)[1]
    if len(q) and flash_fits_row(q, v, sinks, rule):
        longest = int(tables.max_seqlen)
        kernel, _ = row_kernels(q, k, tables.cu_seqlens, longest, rule, tables.segments)
        return row_forward(q, k, v, tables.cu_seqlens, longest, rule, kernel)
    rows = Sequences.read(tables, len(q))
    out, lse = _outputs(q, v)
    for start, stop in rows.spans:
        span = slice(start, stop)
        if flash_fits_sequence(q, v, sinks, rule, stop - start):
            part = sequence_forward(q[span], k[span], v[span], rule)
        else:
            part = SequenceMath.take(q, k, v, span, rule, rows).forward(sinks)
        out[span], lse[:, span] = part
    return out, lse


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=wide_dtype(q.dtype))


@packed_attention.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *tables: Any
) -> tuple[Tensor, Tensor]:
    check_attention(q, k, v, cu_seqlens)
    return _outputs(q, v)


@torch.library.custom_op(
    "tlora_fx::packed_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_TABLES}) -> (Tensor, Tensor, Tensor)",
)
def packed_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `packed_attention` by q, k and v; weights and masks are computed again.

    dout      [T, H, Dv]
    out, lse  as `packed_attention` gave them
    returns   dq, dk, dv like q, k, v
    raises    as `packed_attention`
    """
    tables = AttentionTables(*rest)
    rule, sinks = tables.rule, tables.sinks
    check_attention(q, k, v, tables.cu_seqlens)
    rule.check()
    if len(q) and flash_fits_row(q, v, sinks, rule):
        longest = int(tables.max_seqlen)
        _, kernel = row_kernels(q, k, tables.cu_seqlens, longest, rule, tables.segments)
        saved = dout, q, k, v, out, lse
        return row_backward(*saved, tables.cu_seqlens, longest, rule, kernel)
    rows = Sequences.read(tables, len(q))
    grads = _like(q), _like(k), _like(v)
    for start, stop in rows.spans:
        span = slice(start, stop)
        if flash_fits_sequence(q, v, sinks, rule, stop - start):
            span_rows = dout[span], q[span], k[span], v[span], out[span], lse[:, span]
            parts = sequence_backward(*span_rows, rule)
        else:
            sequence = SequenceMath.take(q, k, v, span, rule, rows)
            parts = sequence.backward(dout[span], lse[:, span])
        for grad, part in zip(grads, parts, strict=True):
            grad[span] = part
    return grads


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@packed_attention_backward.register_fake
def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.causal, ctx.window, ctx.softcap, sinks, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, sinks, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 15
    q, k, v, *tables, sinks, out, lse = ctx.saved_tensors
    numbers = ctx.scale, ctx.causal, ctx.window, ctx.softcap, sinks, ctx.dropout
    op = torch.ops.tlora_fx.packed_attention_backward
    dq, dk, dv = op(dout, q, k, v, out, lse, *tables, *numbers)
    dsinks = None
    if ctx.needs_input_grad[13]:
        dsinks = _sinks_gradient(dout, out, lse, sinks)
    return dq, dk, dv, *[None] * 10, dsinks, None


def _sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink takes weight exp(sink - lse) and adds nothing, so its logit lowers the output."""
    pull = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(weight * pull).sum(1).to(sinks.dtype)


packed_attention.register_autograd(_backward, setup_context=_setup)
