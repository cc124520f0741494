"""`tlora_fx::cross_entropy`: losses of rows of logits, by a kernel of ours on a GPU.

Of torch 2.11 Inductor makes kernels for it that take two to three times as long as reading the
logits does, because they take two exponentials a column.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_fx.host.environment import kernel_mode
from tlora_fx.ops.kernels import support
from tlora_fx.ops.kernels.launch import on_device
from tlora_fx.ops.parallel import IGNORED

_SERVED = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op(
    "tlora_fx::cross_entropy",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets) -> (Tensor, Tensor)",
)
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the logarithm of its sum of exponentials, which has no gradient.

    logits    float [n, V]
    targets   int64 [n], in 0..V - 1, or -100: such a row's loss is 0
    returns   [n] twice, float32, or wider where logits are; on a GPU NaN for any other target
    """
    if _is_served(logits):
        from tlora_fx.ops.kernels import cross_entropy as kernels

        with on_device(logits.device):
            return kernels.forward(_rows(logits), targets.contiguous(), IGNORED)
    wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
    losses = F.cross_entropy(wide, targets, reduction="none", ignore_index=IGNORED)
    return losses, wide.logsumexp(-1)


@cross_entropy.register_fake
def _fake(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.float32, logits.dtype)
    losses, lse = (logits.new_empty(logits.shape[0], dtype=dtype) for _ in range(2))
    return losses, lse


@torch.library.custom_op(
    "tlora_fx::cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad_losses, Tensor logits, Tensor targets, Tensor lse) -> Tensor",
)
def cross_entropy_backward(
    grad_losses: Tensor, logits: Tensor, targets: Tensor, lse: Tensor
) -> Tensor:
    """The logits' gradient, [n, V] in their dtype; 0 where the target is -100.

    grad_losses   [n], the gradient of the losses
    lse           of `cross_entropy`
    """
    if _is_served(logits):
        from tlora_fx.ops.kernels import cross_entropy as kernels

        with on_device(logits.device):
            return kernels.backward(grad_losses, _rows(logits), targets.contiguous(), lse, IGNORED)
    counted = targets != IGNORED
    shares = (logits.to(lse.dtype) - lse[:, None]).exp()
    shares.scatter_add_(1, targets.where(counted, 0)[:, None], -torch.ones_like(lse)[:, None])
    grad_logits = torch.where(counted[:, None], shares * grad_losses[:, None], 0)
    return grad_logits.to(logits.dtype).contiguous()


@cross_entropy_backward.register_fake
def _backward_fake(grad_losses: Tensor, logits: Tensor, targets: Tensor, lse: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _is_served(logits: Tensor) -> bool:
    """Whether the kernels take these logits: on a GPU also float32, which needs no tensor cores."""
    if not support.has_triton() or logits.dtype not in _SERVED or not logits.numel():
        return False
    if kernel_mode() == "interpret":
        return logits.dtype != torch.bfloat16  # which Triton's interpreter gets wrong
    return (
        logits.is_cuda
        and kernel_mode() != "off"
        and support.arch_of(logits.device) >= support.OLDEST
    )


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, targets, output[1])


def _backward(ctx: Any, grad_losses: Tensor, _: Any) -> tuple[Tensor, None]:
    backward = torch.ops.tlora_fx.cross_entropy_backward.default
    return backward(grad_losses, *ctx.saved_tensors), None


cross_entropy.register_autograd(_backward, setup_context=_setup)
