"""`tlora_fx_extension::l2_normalize`: divide by the norm along a dimension, as one operator."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from tlora_fx.passes.tensor_parallel import rules as tensor_parallel
from tlora_fx.passes.tensor_parallel.rules import CannotCarry, Cut, Operands
from tlora_fx.passes.token_parallel import rules as token_parallel
from tlora_fx.passes.token_parallel.rules import Axis, MixesTokens, dim_of, rank_of

ops = torch.ops.tlora_fx_extension


@torch.library.custom_op("tlora_fx_extension::l2_normalize", mutates_args=())
def l2_normalize(x: Tensor, dim: int) -> Tensor:
    """x over its norm along `dim`."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return x / norm


@l2_normalize.register_fake
def _fake(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tlora_fx_extension::l2_normalize_backward", mutates_args=())
def l2_normalize_backward(dy: Tensor, x: Tensor, dim: int) -> Tensor:
    """The gradient of x."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    y = x / norm
    return (dy - y * (dy * y).sum(dim, keepdim=True)) / norm


@l2_normalize_backward.register_fake
def _fake_backward(dy: Tensor, x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return ops.l2_normalize_backward(dy, x, ctx.dim), None


l2_normalize.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(ops.l2_normalize)
def _flop(x_shape: tuple[int, ...], dim: int, **_: Any) -> int:
    return 3 * prod(x_shape)


def _arguments(node: fx.Node) -> Any:
    return node.args


@token_parallel.rule(ops.l2_normalize)
def _axis(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    x, dim = _arguments(node)
    axis = axis_of(x)
    if axis == dim_of(dim, rank_of(x)):
        raise MixesTokens("it divides by a norm over the row")
    return axis


@tensor_parallel.rule(ops.l2_normalize, runs="kept")
def _cut(call: Operands) -> Cut:
    x, dim = _arguments(call.node)
    if call.cut(x) == dim_of(dim, rank_of(x)):
        raise CannotCarry("its norm needs the whole of what is cut")
    return call.cut(x)
