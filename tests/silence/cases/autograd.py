"""Code whose gradient is not what its forward says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.silence.modules import HIDDEN, Cases, Decoder, Ending, decoder, mixes, seeded, with_part


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient goes through as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Rounded."""
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """As it is."""
        return gradient


class Reversed(torch.autograd.Function):
    """Does nothing; its gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Turned round."""
        return -gradient


class Clipped(torch.autograd.Function):
    """A product whose gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Clipped."""
        x, y = ctx.saved_tensors
        small = gradient.clamp(-1e-3, 1e-3)
        return small * y, small * x


def hooked(x: Tensor) -> Tensor:
    """x, whose gradient is halved."""
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


def of_inference(x: Tensor) -> Tensor:
    """A scale that is made in inference mode."""
    with torch.inference_mode():
        scale = x.abs().mean(-1, keepdim=True)
    return x * scale.clone()


def cast(x: Tensor) -> Tensor:
    """A product in bfloat16."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x.float() @ x.new_ones(8, 8).float()).to(x.dtype) / 8


def cast_linear(layer: Any, x: Tensor) -> Tensor:
    """A linear in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x.float(), layer.norm.weight.float().diag()).to(x.dtype)


def without(x: Tensor) -> Tensor:
    """A scale without a gradient."""
    with torch.no_grad():
        scale = x.abs().mean(-1, keepdim=True)
    return x * scale


def inner_gradient(x: Tensor) -> Tensor:
    """The gradient of a function of x."""
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), y)
    return x * gradient


class Hooked(Decoder):
    """A decoder with a hook on a module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        module = self.layers[0].norm
        if kind == "forward":
            module.register_forward_hook(lambda m, inputs, output: output * 2)
        elif kind == "backward":
            module.register_full_backward_hook(lambda m, given, out: (given[0] * 0.5,))
        else:
            module.register_full_backward_pre_hook(lambda m, out: (out[0] * 0.5,))


class Halved(Decoder):
    """A decoder whose gradient is halved at the end of its layers."""

    def run(self, x: Tensor) -> Tensor:
        """All layers, then the hook."""
        return hooked(super().run(x))


class Normed(nn.Module):
    """A linear with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN, bias=False))

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """The linear."""
        return F.linear(x, self.lin.weight)


AUTOGRAD: Cases = {
    **mixes(
        straight_through=StraightThrough.apply,
        gradient_reversed=Reversed.apply,
        gradient_clipped=lambda x: Clipped.apply(x, x),
        tensor_hook=hooked,
        inference_mode=of_inference,
        autocast=cast,
        no_grad=without,
        data=lambda x: x * x.data,
        inner_gradient=inner_gradient,
        checkpointed=lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
        checkpointed_reentrant=lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
        detached_half=lambda x: torch.cat([x[..., :4].detach(), x[..., 4:]], -1),
        vjp=lambda x: torch.func.vjp(torch.sin, x)[1](torch.ones_like(x))[0],
        vmapped=torch.vmap(torch.sin),
        vmapped_tokens=torch.vmap(lambda t: t - t.mean(0)),
    ),
    "autocast of a linear": decoder(cast_linear),
    "reversed behind the layers": seeded(lambda: Ending(Reversed.apply)),
    "hook behind the layers": seeded(Halved),
    "weight norm": with_part(Normed),
    **{
        f"a {kind} hook": seeded(lambda k=kind: Hooked(k))
        for kind in ("forward", "backward", "pre")
    },
}
