"""`tlora_fx::multi_lora_experts`: a frozen product of experts, and all jobs' adapters on it.

Each chosen pair of a token of job j and an expert e gets scale_j * (x A_j,eᵀ) B_j,eᵀ on top of the
frozen product. On a GPU the pairs are sorted once, for the frozen product and for the adapters of
all experts and jobs; without kernels each job's segment runs by itself, expert by expert.

    multi_lora_experts_forward    y; the low-rank rows, and how pairs were sorted
    multi_lora_experts_backward   dx; the gradients of all jobs' A, and of their B turned

A and B are each job's own tensors, in PEFT's layout. What one job computes reads its own pairs
alone, in a fixed order: its bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import ExpertLinearError, FrozenGradientError
from tlora_fx.host.environment import kernel_mode
from tlora_fx.ops.experts import (
    check_experts,
    expert_linear,
    expert_outer,
    grouped,
    has_grouped_types,
    sorted_rows,
)
from tlora_fx.ops.kernels import support
from tlora_fx.ops.kernels.device_tables import offsets_on
from tlora_fx.ops.kernels.launch import on_device
from tlora_fx.ops.tables import token_bounds

#: The largest rank of an expert that kernels take.
MAX_RANK = 128
_SCHEMA = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor index, bool turned, Tensor[] a, Tensor[] b, "
    "int[] jobs, float[] scales, bool crossed, Tensor segments"
)
torch.library.define("tlora_fx::multi_lora_experts", f"({_SCHEMA}) -> Tensor")


@dataclass(frozen=True, slots=True)
class Call:
    """The operators' arguments; see `multi_lora_experts`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    index: Tensor
    turned: bool
    a: list[Tensor]
    b: list[Tensor]
    jobs: list[int]
    scales: list[float]
    crossed: bool
    segments: Tensor

    @property
    def experts(self) -> int:
        """Number of experts, E."""
        return self.weight.shape[0]

    @property
    def outer(self) -> int:
        """Columns of y."""
        return self.weight.shape[2 if self.turned else 1]

    @property
    def chosen(self) -> int:
        """Pairs that are made of a row of x."""
        return self.index.shape[1] if self.x.dim() == 2 else 1

    @property
    def largest(self) -> int:
        """The largest rank of an expert."""
        return max(a.shape[0] for a in self.a) // self.experts

    @property
    def rows(self) -> int:
        """R, of all jobs' A."""
        return sum(a.shape[0] for a in self.a)

    @property
    def pairs(self) -> int:
        """Number of pairs, S."""
        return self.index.shape[0] * self.index.shape[1]

    def check(self, row_jobs: int | None = None) -> None:
        """Refuse what metadata alone shows to be wrong; raises ExpertLinearError.

        row_jobs   J; None where a graph is made, whose segments stand for those of any row
        """
        check_experts(self.x, self.weight, self.bias, self.index, self.turned)
        inner = self.x.shape[-1]
        widths = (self.outer, inner) if self.crossed else (inner, self.outer)
        count = len(self.jobs)
        fits = bool(count) and len(self.a) == len(self.b) == len(self.scales) == count
        fits = fits and len(set(self.jobs)) == count
        fits = fits and min(self.jobs) >= 0 and (row_jobs is None or max(self.jobs) < row_jobs)
        for a, b in zip(self.a, self.b, strict=False):
            fits = fits and a.dim() == b.dim() == 2 and a.shape[0] % self.experts == 0
            fits = fits and a.shape[1] == widths[0]
            fits = fits and tuple(b.shape) == (widths[1], a.shape[0]) and a.dtype == b.dtype
            fits = fits and a.dtype == self.a[0].dtype
        if not fits:
            raise ExpertLinearError(
                "adapters must fit the experts and the jobs of the row",
                expected=f"of each of some of {row_jobs or 'the'} jobs a scale, "
                f"A [E r, {widths[0]}] and B [{widths[1]}, r E] in one dtype, E {self.experts}",
                found=f"jobs {self.jobs}, A {[list(a.shape) for a in self.a]}, "
                f"B {[list(b.shape) for b in self.b]}, {len(self.scales)} scales",
            )


def multi_lora_experts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    turned: bool,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    jobs: Sequence[int],
    scales: Sequence[float],
    crossed: bool,
    segments: Tensor,
) -> Tensor:
    """Multiply tokens with the matrices of their experts, and with their jobs' adapters of these.

    x, weight, bias, index, turned   as of `expert_linear`; the weight is frozen
    a, b       [E r, in] and [out, r E] of each job that adapts the experts, as PEFT has them:
               rows e r + i and columns i E + e are expert e's
    jobs       whose they are, indices into segments
    scales     of each, what its branch is multiplied with
    crossed    B [in, r E] reads x, and A [E r, out] makes the result
    segments   int32 [J + 1] on the CPU, the jobs' tokens
    returns    [T, K, out]
    raises     ExpertLinearError, SegmentError
    """
    y: Tensor = torch.ops.tlora_fx.multi_lora_experts.default(
        x, weight, bias, index, turned, a, b, jobs, scales, crossed, segments
    )
    return y


@torch.library.impl("tlora_fx::multi_lora_experts", "CompositeImplicitAutograd")
def _composed(*arguments: Any) -> Tensor:
    results: list[Tensor] = torch.ops.tlora_fx.multi_lora_experts_forward.default(*arguments)
    return results[0]


@torch.library.custom_op(
    "tlora_fx::multi_lora_experts_forward", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor[]"
)
def multi_lora_experts_forward(*arguments: Any) -> list[Tensor]:
    """The product, and what a backward reads again.

    returns   y [T, K, out]; low-rank rows [S, rank], order int64 [S] and ends int32 [E J] of the
              sorted pairs, all [0] where no kernel serves
    """
    call = Call(*arguments)
    call.check(call.segments.shape[0] - 1)
    if not served(call):
        return [_loop_forward(call), *_nothing(call)]
    with on_device(call.x.device):
        return _grouped_forward(call)


def _grouped_forward(call: Call) -> list[Tensor]:
    from tlora_fx.ops.kernels import expert_pairs

    pairs, kept = _sorted_pairs(call, *_order(call))
    frozen = _frozen(call.x, call.weight, pairs, call.turned, call.chosen)
    y, low = expert_pairs.apply(
        _rows(call.x), frozen, pairs, call.outer, chosen=call.chosen, by_b=call.crossed
    )
    del kept
    if call.bias is not None:
        y = y + call.bias[call.index.reshape(-1)]
    return [y.view(*call.index.shape, call.outer), low, pairs.order, pairs.ends]


@multi_lora_experts_forward.register_fake
def _forward_fake(*arguments: Any) -> list[Tensor]:
    call = Call(*arguments)
    call.check()
    y = call.x.new_empty(*call.index.shape, call.outer)
    if not served(call):
        return [y, *_nothing(call)]
    low = call.x.new_empty(call.pairs, _padded(call))
    order = call.x.new_empty(call.pairs, dtype=torch.int64)
    groups = call.experts * (call.segments.shape[0] - 1)
    return [y, low, order, call.x.new_empty(groups, dtype=torch.int32)]


@torch.library.custom_op(
    "tlora_fx::multi_lora_experts_backward",
    mutates_args=(),
    schema=f"(Tensor dy, {_SCHEMA}, Tensor low, Tensor order, Tensor ends, bool need_dx) "
    "-> Tensor[]",
)
def multi_lora_experts_backward(dy: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of x, and of all adapters.

    dy                 [T, K, out]
    low, order, ends   as the forward gave them
    returns            dx like x, or [0] unless need_dx; all jobs' dA [R, ...] below each other, and
                       their dB turned, R the rows of all A
    """
    *shared, low, order, ends, need_dx = arguments
    call = Call(*shared)
    if low.dim() != 2:
        return _loop_backward(dy, call, need_dx)
    with on_device(call.x.device):
        return _grouped_backward(dy, call, low, order, ends, need_dx)


def _grouped_backward(
    dy: Tensor, call: Call, low: Tensor, order: Tensor, ends: Tensor, need_dx: bool
) -> list[Tensor]:
    from tlora_fx.ops.kernels import expert_pairs

    pairs, kept = _sorted_pairs(call, order, ends)
    grads, inner = dy.reshape(-1, call.outer).contiguous(), call.x.shape[-1]
    frozen = _frozen(grads, call.weight, pairs, not call.turned, 1) if need_dx else None
    dx, dlow = expert_pairs.apply(grads, frozen, pairs, inner, chosen=1, by_b=not call.crossed)
    del kept
    rows = call.rows
    first = expert_pairs.outer_sums(
        dlow, _rows(call.x), pairs, rows, chosen=call.chosen, of_b=call.crossed
    )
    second = expert_pairs.outer_sums(low, grads, pairs, rows, chosen=1, of_b=not call.crossed)
    if need_dx:
        dx = dx.view(*call.index.shape, inner)
        dx = dx.sum(1) if call.x.dim() == 2 else dx
    return [dx, second, first] if call.crossed else [dx, first, second]


@multi_lora_experts_backward.register_fake
def _backward_fake(dy: Tensor, *arguments: Any) -> list[Tensor]:
    *shared, _, _, _, need_dx = arguments
    call = Call(*shared)
    rows, like = call.rows, call.a[0]
    dx = dy.new_empty(call.x.shape) if need_dx else dy.new_empty(0)
    return [dx, like.new_empty(rows, like.shape[1]), like.new_empty(rows, call.b[0].shape[0])]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, index, turned, a, b, jobs, scales, crossed, segments = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, index, segments, *a, *b, *output[1:])
    ctx.settings, ctx.numbers = (turned, crossed), (jobs, scales)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, weight, bias, index, segments, *rest = ctx.saved_tensors
    (turned, crossed), (jobs, scales), count = ctx.settings, ctx.numbers, len(ctx.numbers[0])
    need_x, need_weight, need_bias, _, _, need_a, need_b, *_ = ctx.needs_input_grad
    nothing: list[None] = [None] * count
    if need_weight or need_bias:
        raise FrozenGradientError(
            "multi_lora_experts gives no gradient for its weight and bias",
            help="freeze them",
        )
    if grads[0] is None:
        return (None, *[None] * 4, nothing, nothing, *[None] * 4)
    a, b, saved = rest[:count], rest[count : 2 * count], rest[2 * count :]
    dx, da, db = torch.ops.tlora_fx.multi_lora_experts_backward(
        grads[0], x, weight, bias, index, turned, a, b, jobs, scales, crossed, segments, *saved,
        need_x,
    )  # fmt: skip
    sizes = [own.shape[0] for own in a]
    own_da = [part if need else None for part, need in zip(da.split(sizes), need_a, strict=True)]
    own_db = [
        part.t() if need else None for part, need in zip(db.split(sizes), need_b, strict=True)
    ]
    return (dx if need_x else None, *[None] * 4, own_da, own_db, *[None] * 4)


multi_lora_experts_forward.register_autograd(_backward, setup_context=_setup)


# All experts and jobs at once.


def served(call: Call) -> bool:
    """Whether kernels serve a call, by metadata alone."""
    device, asked = call.x.device.type, kernel_mode()
    if device not in ("cuda", "cpu") or (device == "cpu" and asked != "interpret"):
        return False
    if asked == "off" or not support.has_triton():
        return False
    if device == "cuda" and support.arch_of(call.x.device) < support.OLDEST:
        return False
    return not why_no_kernel(call, asked)


def why_no_kernel(call: Call, asked: str) -> str:
    """Reason why no GPU has kernels for a call under a mode, or ""; its tensors may be anywhere."""
    kind, adapters = call.x.dtype, call.a[0].dtype
    bases = (torch.float16, torch.float32, torch.float64)
    if not (kind in bases if asked == "interpret" else has_grouped_types(kind)):
        return f"torch has no grouped product in {kind}"
    if adapters not in (kind, torch.float32, torch.bfloat16):
        return f"no kernels for {kind} with adapters in {adapters}"
    return f"a rank of an expert is above {MAX_RANK}" if call.largest > MAX_RANK else ""


def _padded(call: Call) -> int:
    from tlora_fx.ops.kernels import expert_pairs

    return expert_pairs.padded(call.largest)


def _order(call: Call) -> tuple[Tensor, Tensor]:
    """Pairs in the order of expert and job, and where each group ends."""
    tokens, device = call.index.shape[0], call.x.device
    jobs, units = call.segments.shape[0] - 1, int(call.segments[-1])
    if units == 0 or tokens % units:
        token_bounds(call.segments, tokens)
    bounds = offsets_on(call.segments, units, device)
    places = torch.arange(tokens, device=device) // (tokens // units if units else 1)
    owners = torch.searchsorted(bounds[1:], places, right=True, out_int32=True)
    groups = call.experts * jobs
    # Few bits sort fast; equal ones keep their order.
    kind = torch.int16 if groups < 1 << 15 else torch.int32
    keys, order = (call.index * jobs + owners[:, None]).view(-1).to(kind).sort(stable=True)
    numbers = torch.arange(groups, device=device, dtype=kind)
    return order, torch.searchsorted(keys, numbers, right=True, out_int32=True)


def _sorted_pairs(call: Call, order: Tensor, ends: Tensor) -> tuple[Any, list[Tensor]]:
    """The pairs as kernels take them, and copies that must live until these are launched."""
    from tlora_fx.ops.kernels import expert_pairs

    a = [_by_rows(own) for own in call.a]
    b = [_by_rows(own.t()) for own in call.b]
    jobs = call.segments.shape[0] - 1
    table = expert_pairs.adapter_table(a, b, call.jobs, call.scales, jobs, call.experts)
    pairs = expert_pairs.Pairs(
        order, ends, table, jobs, call.experts, _padded(call), call.a[0].dtype
    )
    return pairs, [*a, *b]


def _by_rows(matrix: Tensor) -> Tensor:
    """A matrix as kernels read it: dense rows, the first where a vector may begin."""
    dense = matrix.contiguous()
    return dense if dense.data_ptr() % support.GRANULE == 0 else dense.clone()


def _frozen(x: Tensor, weight: Tensor, pairs: Any, turned: bool, chosen: int) -> Tensor:
    """The frozen product of sorted pairs [S, ...]; each expert's jobs lie side by side."""
    ends = pairs.ends.view(pairs.experts, pairs.jobs)[:, -1].contiguous()
    matrices = weight if turned else weight.transpose(1, 2)
    return grouped(sorted_rows(x, pairs.order, chosen), matrices, ends).contiguous()


def _rows(x: Tensor) -> Tensor:
    """One below the other."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _nothing(call: Call) -> list[Tensor]:
    kinds = (call.x.dtype, torch.int64, torch.int32)
    return [call.x.new_empty(0, dtype=kind) for kind in kinds]


# Job by job, in plain PyTorch: on the CPU, and where no kernel serves.


@dataclass(frozen=True, slots=True)
class Branch:
    """One job's tokens and matrices: first [E, ...] reads them, second makes the result.

    rows   of the job in gradients of all jobs
    """

    tokens: slice
    rows: slice
    first: Tensor
    second: Tensor
    scale: float


def _branches(call: Call) -> Iterator[Branch]:
    """Of jobs with tokens."""
    bounds, kind, before = token_bounds(call.segments, call.index.shape[0]), call.x.dtype, 0
    spans = [slice(start, stop) for start, stop in pairwise(bounds)]
    for job, scale, a, b in zip(call.jobs, call.scales, call.a, call.b, strict=True):
        rows = slice(before, before + a.shape[0])
        before = rows.stop
        if a.shape[0] and spans[job].start < spans[job].stop:
            upper = a.to(kind).view(call.experts, -1, a.shape[1])
            lower = b.to(kind).t().view(-1, call.experts, b.shape[0]).permute(1, 2, 0)
            sides = (lower, upper) if call.crossed else (upper, lower)
            yield Branch(spans[job], rows, *sides, scale)


def _loop_forward(call: Call) -> Tensor:
    y: Tensor = expert_linear(call.x, call.weight, call.bias, call.index, call.turned)
    for own in _branches(call):
        index = call.index[own.tokens]
        small = expert_linear(call.x[own.tokens], own.first, None, index, call.crossed)
        y[own.tokens] += expert_linear(small, own.second, None, index, call.crossed) * own.scale
    return y


def _loop_backward(dy: Tensor, call: Call, need_dx: bool) -> list[Tensor]:
    rows, like, shared = call.rows, call.a[0], call.x.dim() == 2
    da, db = like.new_zeros(rows, like.shape[1]), like.new_zeros(rows, call.b[0].shape[0])
    dx = dy.new_empty(0)
    if need_dx:
        dx = expert_linear(dy, call.weight, None, call.index, not call.turned)
        dx = dx.sum(1) if shared else dx
    for own in _branches(call):
        x, index = call.x[own.tokens], call.index[own.tokens]
        grad = dy[own.tokens] * own.scale
        small = expert_linear(x, own.first, None, index, call.crossed)
        dsmall = expert_linear(grad, own.second, None, index, not call.crossed)
        if need_dx:
            through = expert_linear(dsmall, own.first, None, index, not call.crossed)
            dx[own.tokens] += through.sum(1) if shared else through
        sides = ((x, dsmall), (small, grad)) if call.crossed else ((dsmall, x), (grad, small))
        first, second = (expert_outer(*side, index, call.experts) for side in sides)
        upper, lower = (second, first) if call.crossed else (first, second)
        da[own.rows] = upper.flatten(0, 1).to(da.dtype)
        db[own.rows] = lower.permute(2, 0, 1).flatten(0, 1).to(db.dtype)
    return [dx, da, db]
