"""DoRA behind a lowered site: `tlora_fx::dora_scale`.

`multi_lora_linear` gives W x + s B A x + bias for all jobs; this scales what a DoRA job's tokens
got, without the bias, by its magnitudes over the norms of the rows of W + s B A. A norm has no
gradient, as in PEFT. Graphs hold this one operator, which is made of others:

    dora_norms             the norms, which nobody differentiates
    dora_columns           the columns scaled, by magnitude over norm
    dora_columns_backward  its gradients

source   Liu et al. 2024, DoRA, section 4.3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tlora_fx.codegen.ahead import ahead
from tlora_fx.errors import AdapterTableError
from tlora_fx.host.environment import kernel_mode
from tlora_fx.ops.kernels import support
from tlora_fx.ops.kernels.device_tables import row_tables, site_tables
from tlora_fx.ops.kernels.launch import on_device
from tlora_fx.ops.kernels.select import is_strict
from tlora_fx.ops.tables import check_scales, named, rank_bounds, token_bounds, tokens_of

Function = TypeVar("Function", bound=Callable[..., Any])

_TABLES = "Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor rates, Tensor site"
_ROW = "Tensor segments, Tensor keys"
_FACTORS = "Tensor magnitudes, Tensor norms"
torch.library.define(
    "tlora_fx::dora_scale",
    f"(Tensor y, Tensor weight, Tensor? bias, Tensor[] magnitudes, {_TABLES}, {_ROW}, int[] jobs, "
    "int max_rank) -> Tensor",
)


def _operator(name: str, schema: str) -> Callable[[Function], Function]:
    """Define an operator by a function: `torch.library.custom_op` asks more at every call.

    It has no gradient unless one is registered.
    """

    def of(function: Function) -> Function:
        def run(*arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return function(*arguments)

        torch.library.define(f"tlora_fx::{name}", schema)
        for backend in ("CPU", "CUDA"):
            torch.library.impl(f"tlora_fx::{name}", backend, run)
        return function

    return of


# Rows of a weight that are made wider at a time.
_BLOCK = 1024
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def dora_scale(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    magnitudes: Sequence[Tensor],
    *tables: Any,
    **settings: Any,
) -> Tensor:
    """Scale the columns of DoRA jobs' tokens; all others come back as they are, bit by bit.

    y             float [..., out], what `multi_lora_linear` gave for the same tables
    weight, bias  [out, in] and [out] of that linear, frozen
    magnitudes    n times [out], a DoRA job's each
    tables        a, b, ranks, scales, rates and site of its adapters, segments and keys of the row,
                  as `multi_lora_linear` has them
    jobs          the n jobs' indices
    max_rank      the largest rank that one of them has
    returns       [..., out] in y's dtype; rows of job j hold
                  m_j / |W + s_j B_j A_j| * (y - bias) + bias
    raises        AdapterTableError, SegmentError
    source        Liu et al. 2024, DoRA, equation 5

    Norms are computed in float32, or in float64 where the base or the adapters are, as
    |w|² + 2 s b·(A wᵀ) + s² b (A Aᵀ) bᵀ. Against the norm of the sum itself that is off by a few
    roundings of (|w| + |s b A|)² / |w + s b A|², so 1e-6 in float32 unless an adapter takes away
    most of its weight's row.
    """
    scaled: Tensor = torch.ops.tlora_fx.dora_scale.default(
        y, weight, bias, magnitudes, *tables, **settings
    )
    return scaled


@torch.library.impl("tlora_fx::dora_scale", "CompositeImplicitAutograd")
def _scale(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    magnitudes: list[Tensor],
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    rates: Tensor,
    site: Tensor,
    segments: Tensor,
    keys: Tensor,
    jobs: list[int],
    max_rank: int,
) -> Tensor:
    if not jobs or len(magnitudes) != len(jobs) or any(m.shape != b.shape[1:] for m in magnitudes):
        raise AdapterTableError(
            "DoRA needs one magnitude a column of each of its jobs",
            expected=f"{len(jobs)} of [{b.shape[1]}]",
            found=[list(magnitude.shape) for magnitude in magnitudes],
        )
    norms = torch.ops.tlora_fx.dora_norms.default(
        weight.detach(), a.detach(), b.detach(), ranks, scales, rates, site, jobs, max_rank
    )
    stacked = torch.stack([magnitude.to(norms.dtype) for magnitude in magnitudes])
    result: Tensor = torch.ops.tlora_fx.dora_columns.default(
        y, bias, stacked, norms, segments, keys, jobs
    )
    return result


class Norms(dict[tuple[object, ...], tuple[Tensor, object]]):
    """A round's norms by the addresses of what they follow from, and what keeps those addresses.

    given   whether somebody was asked for norms that are known to be needed
    """

    given = False


# What is computed in `norms_kept`; None outside.
_kept: Norms | None = None


@contextmanager
def norms_kept() -> Iterator[None]:
    """Inside, no adapter changes: each site's norms are computed once.

    A CUDA graph computes them each time, for it may be replayed later.
    """
    global _kept  # noqa: PLW0603  (operators have no argument that could tell them)
    before, _kept = _kept, Norms() if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


class NormsAtOnce(Protocol):
    """Computes together what was asked for one by one before."""

    def give(self, kept: Norms) -> None:
        """Add to a round's norms, once, those that are known to be asked for."""

    def note(self, key: tuple[object, ...], compute: Callable[[], Tensor]) -> None:
        """Hear of norms that are asked for, and how they are computed."""


_at_once: NormsAtOnce | None = None


@contextmanager
def norms_at_once(computer: NormsAtOnce | None) -> Iterator[None]:
    """Inside, and inside of `norms_kept`, norms are computed together where that can be."""
    global _at_once  # noqa: PLW0603  (as above)
    before, _at_once = _at_once, computer
    if computer is not None and _kept is not None and not _kept.given:
        _kept.given = True
        computer.give(_kept)
    try:
        yield
    finally:
        _at_once = before


#: By a weight's address, shape and strides: the squares of its rows' lengths, and the weight, that
#: no other takes its address.
Lengths = dict[tuple[object, ...], tuple[Tensor, Tensor]]
_lengths: Lengths | None = None


@contextmanager
def lengths_kept(store: Lengths | None) -> Iterator[None]:
    """Inside, weights stay where and as they are: what norms need of them alone is computed once.

    store   of what was computed, which a CUDA graph that is captured inside reads when it is
            replayed; None: nothing is kept
    """
    global _lengths  # noqa: PLW0603  (as above)
    before, _lengths = _lengths, store
    try:
        yield
    finally:
        _lengths = before


def _lengths_of(weight: Tensor) -> Tensor | None:
    """What is kept of a weight, or can be now; in strict mode a norm has the same bits always."""
    from tlora_fx.ops.kernels import dora  # Triton is not everywhere.

    if _lengths is None or is_strict():
        return None
    key = (weight.data_ptr(), weight.shape, weight.stride())
    if key not in _lengths and not _capturing(weight):
        with on_device(weight.device):
            _lengths[key] = dora.lengths(weight), weight
    return _lengths[key][0] if key in _lengths else None


@_operator("dora_norms", f"(Tensor weight, {_TABLES}, int[] jobs, int max_rank) -> Tensor")
def dora_norms(weight: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """The norms of each row of W + s B A.

    returns   [n, out], float32 or wider
    raises    as `dora_scale`
    """
    *tables, jobs, max_rank = rest
    if ahead.is_on:
        # They would be kept for the round behind, which computes them from what is kept of weights.
        return b.new_ones(len(jobs), b.shape[1], dtype=_wide(weight, a))
    kept = None if _capturing(weight) else _kept
    if kept is not None and on_kernels(weight, a):
        # For a capture that follows, though norms themselves are known.
        _lengths_of(weight)
    if kept is None:
        return _norms(weight, a, b, tables, jobs, max_rank)
    compute = partial(_norms, weight, a, b, tables, jobs, max_rank)
    # A base that is gathered for each row lies somewhere else each time.
    held = (a, b) if _at_once is None else (weight, a, b)
    key = (*((each.data_ptr(), each.shape) for each in held), *jobs)
    if key not in kept:
        kept[key] = compute(), held
    if _at_once is not None:
        _at_once.note(key, compute)
    # Compiled code may write into what an operator gave.
    return kept[key][0].clone()


@torch.library.register_fake("tlora_fx::dora_norms")  # type: ignore[untyped-decorator]
def _norms_fake(weight: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return b.new_empty(len(rest[-2]), b.shape[1], dtype=_wide(weight, a))


def _wide(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 where a tensor is."""
    return torch.float64 if torch.float64 in [t.dtype for t in tensors] else torch.float32


def _norms(
    weight: Tensor, a: Tensor, b: Tensor, tables: Sequence[Tensor], jobs: list[int], max_rank: int
) -> Tensor:
    if is_strict():
        # The bits of a product follow from its shape, so each job has one of its own.
        each = [
            _norms_at_once(weight, a, b, tables, [job], int(tables[0][job : job + 2].diff()))
            for job in jobs
        ]
        return torch.cat(each)
    return _norms_at_once(weight, a, b, tables, jobs, max_rank)


def _norms_at_once(
    weight: Tensor, a: Tensor, b: Tensor, tables: Sequence[Tensor], jobs: list[int], max_rank: int
) -> Tensor:
    ranks, scales, rates, site = tables
    if on_kernels(weight, a):
        from tlora_fx.ops.kernels import dora  # Triton is not everywhere.

        block = support.rank_block(max_rank)
        mirrored = ranks, scales, rates, site
        device = site_tables(mirrored, len(a), block, a.device, _capturing(a))
        numbers = device.ranks, device.scales
        adapters = a.contiguous(), b.contiguous()
        counts = ranks.diff().tolist()
        used = sum(counts[job] for job in jobs)
        with on_device(a.device):
            lengths = _lengths_of(weight)
            return dora.norms(weight, *adapters, *numbers, tuple(jobs), max_rank, used, lengths)
    with named(site):
        bounds = rank_bounds(ranks, ranks.shape[0] - 1, len(a))
        factors = check_scales(scales, ranks.shape[0] - 1)
    return norms_of(weight, a, b, bounds, factors, jobs)


def norms_of(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bounds: Sequence[int],
    scales: Sequence[float],
    jobs: Sequence[int],
) -> Tensor:
    """The norms [n, out] of each row of W + s B A of some jobs, by rank offsets on the host."""
    kind = _wide(weight, a)
    spans = [slice(bounds[job], bounds[job + 1]) for job in jobs]
    downs = [a[span].to(kind) for span in spans]
    stacked, blocks = torch.cat(downs).t(), torch.split(weight, _BLOCK)
    products = torch.cat([block.to(kind) @ stacked for block in blocks])
    lengths = torch.linalg.vector_norm(weight, dim=1, dtype=kind).square()
    norms = []
    sizes = [len(down) for down in downs]
    for job, span, down, product in zip(
        jobs, spans, downs, torch.split(products, sizes, 1), strict=True
    ):
        up, scale = b[span].to(kind).t(), scales[job]
        sides = lengths + scale**2 * ((up @ (down @ down.t())) * up).sum(1)
        square = sides + 2 * scale * (product * up).sum(1)
        # Rounding cannot tell less than that from nothing.
        norms.append(torch.maximum(square, sides * torch.finfo(kind).eps).sqrt())
    return torch.stack(norms)


@_operator("dora_columns", f"(Tensor y, Tensor? bias, {_FACTORS}, {_ROW}, int[] jobs) -> Tensor")
def dora_columns(
    y: Tensor,
    bias: Tensor | None,
    magnitudes: Tensor,
    norms: Tensor,
    segments: Tensor,
    keys: Tensor,
    jobs: list[int],
) -> Tensor:
    """Scale the columns of some jobs' tokens by magnitude over norm, all but the bias.

    magnitudes, norms   [n, out], of one type
    returns             like y, contiguous
    raises              as `dora_scale`
    """
    rows = _rows(y)
    if on_kernels(y, norms):
        from tlora_fx.ops.kernels import dora  # Triton is not everywhere.

        offsets = _offsets(segments, keys, rows)
        with on_device(rows.device):
            scaled = dora.scale(
                rows, bias, magnitudes.contiguous(), norms.contiguous(), offsets, tuple(jobs)
            )
        return scaled.view(y.shape)
    out = rows.clone(memory_format=torch.contiguous_format)
    shift = 0 if bias is None else bias.to(norms.dtype)
    bounds = token_bounds(segments, len(rows))
    for factor, job in zip(magnitudes / norms, jobs, strict=True):
        span = slice(bounds[job], bounds[job + 1])
        out[span] = ((rows[span].to(norms.dtype) - shift) * factor + shift).to(y.dtype)
    return out.view(y.shape)


@torch.library.register_fake("tlora_fx::dora_columns")  # type: ignore[untyped-decorator]
def _columns_fake(y: Tensor, *rest: Any) -> Tensor:
    return y.new_empty(y.shape)


@_operator(
    "dora_columns_backward",
    f"(Tensor dy, Tensor y, Tensor? bias, {_FACTORS}, {_ROW}, int[] jobs) -> (Tensor, Tensor)",
)
def dora_columns_backward(
    dy: Tensor,
    y: Tensor,
    bias: Tensor | None,
    magnitudes: Tensor,
    norms: Tensor,
    segments: Tensor,
    keys: Tensor,
    jobs: list[int],
) -> tuple[Tensor, Tensor]:
    """The gradients of y and the magnitudes; each job's sum is over its own tokens, in one order.

    returns   like y, contiguous; like the magnitudes, zeros for jobs without tokens
    raises    as `dora_scale`
    """
    rows, base = _rows(dy), _rows(y)
    if on_kernels(y, norms):
        from tlora_fx.ops.kernels import dora  # Triton is not everywhere.

        offsets = _offsets(segments, keys, rows)
        with on_device(rows.device):
            factors = magnitudes.contiguous(), norms.contiguous()
            dx, sums = dora.gradient(rows, base, bias, *factors, offsets, tuple(jobs))
        return dx.view(y.shape), sums
    dx, sums = rows.clone(memory_format=torch.contiguous_format), torch.empty_like(norms)
    shift = 0 if bias is None else bias.to(norms.dtype)
    bounds = token_bounds(segments, len(rows))
    for factor, total, job in zip(magnitudes / norms, sums, jobs, strict=True):
        span = slice(bounds[job], bounds[job + 1])
        grad = rows[span].to(norms.dtype)
        dx[span] = (grad * factor).to(dy.dtype)
        total.copy_((grad * (base[span].to(norms.dtype) - shift)).sum(0))
    return dx.view(y.shape), sums / norms


@torch.library.register_fake("tlora_fx::dora_columns_backward")  # type: ignore[untyped-decorator]
def _columns_backward_fake(
    dy: Tensor, y: Tensor, bias: Tensor | None, magnitudes: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(y.shape), magnitudes.new_empty(magnitudes.shape)


def _columns_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.jobs = inputs
    ctx.save_for_backward(*tensors)


def _columns_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, sums = torch.ops.tlora_fx.dora_columns_backward.default(grad, *ctx.saved_tensors, ctx.jobs)
    return dx, None, sums, None, None, None, None


torch.library.register_autograd(
    "tlora_fx::dora_columns", _columns_gradient, setup_context=_columns_setup
)


def has_kernels(*dtypes: torch.dtype) -> bool:
    """Whether a GPU with Triton serves tensors of these types."""
    return kernel_mode() != "off" and all(dtype in _TYPES for dtype in dtypes)


def on_kernels(*tensors: Tensor) -> bool:
    """Whether Triton serves these."""
    if not has_kernels(*(tensor.dtype for tensor in tensors)):
        return False
    if not tensors[0].is_cuda:
        return kernel_mode() == "interpret"
    return support.has_triton()


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _rows(x: Tensor) -> Tensor:
    """[T, out], each row dense."""
    rows = x.reshape(tokens_of(x), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _offsets(segments: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """The row's token offsets on the device, one copy with the operators of adapters."""
    return row_tables(segments, keys, len(rows), rows.device, _capturing(rows)).segments
