"""RMSNorm as an operator of its own, with autograd."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tlora_fx.ir.graph import GroupGraph
from tlora_fx.passes.token_parallel import rules as token_parallel
from tlora_fx.pipeline import GroupPass, Numerics, register
from tlora_fx.rewriting import Rewriter, add, anything, call, constant, mul, stored, uncast

aten, ops = torch.ops.aten, torch.ops.authors
X = uncast(anything("x"))
SQUARES = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, X, 2), [-1], True)
SCALED = mul(X, call(aten.rsqrt.default, add(SQUARES, constant("eps"))))
NORM = mul(stored("w", owner="base"), uncast(SCALED))


@torch.library.custom_op("authors::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@torch.library.custom_op("authors::rms_norm_backward", mutates_args=())
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    r, g = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps), dy * weight
    return g * r - x * r.pow(3) * (g * x).mean(-1, keepdim=True)


def setup(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def backward(ctx, dy):
    return ops.rms_norm_backward(dy, *ctx.saved_tensors, ctx.eps), None, None


rms_norm.register_fake(lambda x, weight, eps: torch.empty_like(x))
rms_norm_backward.register_fake(lambda dy, x, weight, eps: torch.empty_like(x))
rms_norm.register_autograd(backward, setup_context=setup)
token_parallel.rule(ops.rms_norm)(lambda node, axis_of: axis_of(node.args[0]))


@register
@dataclass(frozen=True, slots=True)
class NormOp(GroupPass):
    """Write RMSNorm as one operator."""

    name: ClassVar[str] = "norm-op"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "bound"

    def run(self, group: GroupGraph) -> None:
        for rewriter in map(Rewriter, group.graphs()):
            for found in rewriter.find(NORM):
                args = (found["x"], found["w"], found["eps"])
                rewriter.replace(found, lambda make, a=args: make(ops.rms_norm.default, *a))
