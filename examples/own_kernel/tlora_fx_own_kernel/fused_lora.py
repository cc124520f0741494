"""`own_kernel::fused_lora`: add to each job's tokens what its own adapter makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from tlora_fx.ops import JobOperator, register_operator, token_bounds
from tlora_fx.ops.kernels import adapters_on, load_kernel, segments_on, uses_kernels
from tlora_fx_own_kernel.kernels import Branch, Gradient

ops = torch.ops.own_kernel
TABLES = (
    "Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor rates, Tensor site, Tensor segments, "
    "int max_rank"
)


@torch.library.custom_op(
    "own_kernel::fused_lora",
    mutates_args=(),
    schema=f"(Tensor y, Tensor x, {TABLES}) -> Tensor",
)
def fused_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, *tables: Any) -> Tensor:
    """y + scale x Aᵀ B of each job.

    y, x      [..., out] and [..., in] in one dtype
    a, b      [R, in] and [R, out], rows of a job one below the other
    tables    as `tlora_fx.ops.multi_lora_linear` has them; no job drops
    returns   like y
    """
    return _branch(y, x, a, b, *tables)[0]


@fused_lora.register_fake
def _fake(y: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "own_kernel::fused_lora_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, {TABLES}) -> (Tensor, Tensor, Tensor)",
)
def fused_lora_backward(
    dy: Tensor, x: Tensor, a: Tensor, b: Tensor, *tables: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, a and b: the branch with A and B exchanged, and two sums over tokens."""
    dx, ds = _branch(None, dy, b, a, *tables)
    _, s = _branch(None, x, a, None, *tables)
    return dx, _gradient(ds, x, a, *tables), _gradient(s, dy, b, *tables)


@fused_lora_backward.register_fake
def _fake_backward(
    dy: Tensor, x: Tensor, a: Tensor, b: Tensor, *tables: Any
) -> tuple[Tensor, Tensor, Tensor]:
    plain = torch.contiguous_format
    return torch.empty_like(x, memory_format=plain), torch.empty_like(a), torch.empty_like(b)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tensors, ctx.max_rank = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gradients = ops.fused_lora_backward(dy, *ctx.saved_tensors, ctx.max_rank)
    return (dy, *gradients, *(None,) * 6)


fused_lora.register_autograd(_backward, setup_context=_setup)


def _block(max_rank: int) -> int:
    """Ranks are padded to a power of two, from 16 on, which tensor cores take."""
    return max(16, 1 << (max_rank - 1).bit_length())


def _branch(
    y: Tensor | None, x: Tensor, a: Tensor, b: Tensor | None, ranks: Tensor, scales: Tensor,
    rates: Tensor, site: Tensor, segments: Tensor, max_rank: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[..., out], of no columns without b, and s = scale x Aᵀ, [tokens, rank block]."""
    b = a[:, :0] if b is None else b
    inner, outer, block = a.shape[1], b.shape[1], _block(max_rank)
    rows = x.reshape(-1, inner).contiguous()
    s = rows.new_zeros(len(rows), block)
    if not uses_kernels(x.device):
        out = rows.new_zeros(len(rows), outer) if y is None else y.reshape(-1, outer).clone()
        for tokens, own, scale in _jobs(len(rows), segments, ranks, scales):
            low = scale * rows[tokens] @ a[own].to(x.dtype).T
            s[tokens, : low.shape[1]] = low
            out[tokens] += low @ b[own].to(x.dtype)
        return out.view(*x.shape[:-1], outer), s
    out = rows.new_empty(len(rows), outer)
    bounds = segments_on(segments, len(rows), x.device)
    of_ranks, of_scales = adapters_on(ranks, scales, rates, site, len(a), x.device)
    jobs = max(16, 1 << (len(segments) - 2).bit_length())
    template = Branch(inner, outer, block, jobs, _name(x), int(y is not None))
    kernel = load_kernel(template, len(rows), x.device)
    base = out if y is None else y.reshape(-1, outer).contiguous()
    kernel.launch(base, rows, a, b, out, s, bounds, of_ranks, of_scales)
    return out.view(*x.shape[:-1], outer), s


def _gradient(
    s: Tensor, x: Tensor, like: Tensor, ranks: Tensor, scales: Tensor, rates: Tensor,
    site: Tensor, segments: Tensor, max_rank: int,
) -> Tensor:  # fmt: skip
    """sᵀ x of each job, in the rows that its adapter has in `like`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.zeros_like(like)
    if not uses_kernels(x.device):
        for tokens, own, _ in _jobs(len(rows), segments, ranks, scales):
            out[own] = (s[tokens, : own.stop - own.start].T @ rows[tokens]).to(out.dtype)
        return out
    bounds = segments_on(segments, len(rows), x.device)
    of_ranks, _ = adapters_on(ranks, scales, rates, site, len(like), x.device)
    template = Gradient(rows.shape[1], s.shape[1], _name(x))
    load_kernel(template, len(rows), x.device).launch(s, rows, out, bounds, of_ranks)
    return out


def _jobs(
    tokens: int, segments: Tensor, ranks: Tensor, scales: Tensor
) -> Iterator[tuple[slice, slice, float]]:
    """Each job's tokens, its rows of A and B, and its scale."""
    bounds = pairwise(token_bounds(segments, tokens)), pairwise(ranks.tolist())
    for span, own, scale in zip(*bounds, scales.tolist(), strict=True):
        yield slice(*span), slice(*own), scale


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _flop(y_shape: Any, x_shape: Any, a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * prod(x_shape[:-1]) * a_shape[0] * (a_shape[1] + b_shape[1]))


def _flop_backward(dy_shape: Any, x_shape: Any, a_shape: Any, *_: Any, **__: Any) -> int:
    """dx and ds, s, dA, dB."""
    return int(2 * prod(x_shape[:-1]) * a_shape[0] * (3 * a_shape[1] + 2 * dy_shape[-1]))


@register_operator
class FusedLora(JobOperator):
    """Adapters of all jobs behind a frozen linear, in one kernel."""

    target: ClassVar[Any] = ops.fused_lora.default
    rows: ClassVar = {"y": 1, "x": 1}
    tables: ClassVar = ("segments",)
    banks: ClassVar = ("a", "b")
    flops: ClassVar = {ops.fused_lora: _flop, ops.fused_lora_backward: _flop_backward}

    @classmethod
    def reference(cls, y: Tensor, x: Tensor, a: Tensor, b: Tensor, **rest: Any) -> Tensor:
        """One job, in plain PyTorch."""
        scale: float = rest["scales"].item()
        return y + scale * x @ a.T @ b

    @classmethod
    def example(cls, tokens: int, draw: Callable[..., Tensor]) -> dict[str, Any]:
        """A job of rank 3 at a linear from 20 to 36."""
        a, b = draw(3, 20), draw(3, 36)
        return {"y": draw(tokens, 36), "x": draw(tokens, 20), "a": a, "b": b, "max_rank": 4}
