"""Branches on where and how a model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.silence.modules import Cases, Make, decoder, with_part


def tries(x: Tensor) -> Tensor:
    """Reads a number, where it can."""
    try:
        return x * (1 + abs(float(x.detach()[0, 0, 0])))
    except RuntimeError:
        return x


def asks_for_numbers(x: Tensor) -> Tensor:
    """Reads a number, where it can, and hides every error."""
    try:
        return x * 2 if bool((x == x).all()) else x
    except Exception:  # noqa: BLE001  (as careless models do)
        return x * 3


def as_numpy(x: Tensor) -> Tensor:
    """Looks at NumPy's view, where there is one."""
    try:
        x.detach().numpy()
    except (RuntimeError, TypeError):
        return x
    return x * 2


class Fakes(nn.Module):
    """Branches on the kind of its tensors or weights."""

    def __init__(self, asks: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Twice as loud where the answer is yes."""
        return x * 2 if self.asks(layer, x) else x


def asks(question: Callable[[Any, Tensor], bool]) -> Make:
    """A decoder that asks each layer something."""
    return with_part(lambda: Fakes(question))


ENVIRONMENT: Cases = {
    "is meta": asks(lambda l, x: x.is_meta),
    "device is cpu": asks(lambda l, x: x.device.type == "cpu"),
    "device is not meta": asks(lambda l, x: str(x.device) != "meta"),
    "device by equality": asks(lambda l, x: x.device == torch.device("cpu")),
    "device of a weight": asks(lambda l, x: l.norm.weight.device.type == "cpu"),
    "weight is meta": asks(lambda l, x: l.norm.weight.is_meta),
    "is cuda": asks(lambda l, x: x.is_cuda),
    "is cpu": asks(lambda l, x: x.is_cpu),
    "is compiling": asks(lambda l, x: torch.compiler.is_compiling()),
    "is exporting": asks(lambda l, x: torch.compiler.is_exporting()),
    "is dynamo compiling": asks(lambda l, x: torch.compiler.is_dynamo_compiling()),
    "jit is tracing": asks(lambda l, x: torch.jit.is_tracing()),
    "type is Tensor": asks(lambda l, x: type(x) is Tensor),
    "type of the weight": asks(lambda l, x: type(l.norm.weight) is nn.Parameter),
    "type of a size": asks(lambda l, x: type(x.shape[1]) is int),
    "size is an int": asks(lambda l, x: isinstance(x.shape[1], int)),
    "gradients are on": asks(lambda l, x: torch.is_grad_enabled()),
    "x wants a gradient": asks(lambda l, x: x.requires_grad),
    "weight wants a gradient": asks(lambda l, x: l.norm.weight.requires_grad),
    "x has a history": asks(lambda l, x: x.grad_fn is not None),
    "autocast is on": asks(lambda l, x: torch.is_autocast_enabled("cpu")),
    "training": asks(lambda l, x: l.training),
    "deterministic": asks(lambda l, x: torch.are_deterministic_algorithms_enabled()),
    "dtype is float64": asks(lambda l, x: x.dtype == torch.float64),
    "the linear is a Linear": asks(lambda l, x: type(l.inner) is nn.Linear),
    "the linear has a base": asks(lambda l, x: hasattr(l.inner, "base_layer")),
    "contiguous": asks(lambda l, x: x.transpose(0, 1).is_contiguous()),
    "tries float": decoder(lambda l, x: tries(x)),
    "tries bool": decoder(lambda l, x: asks_for_numbers(x)),
    "tries numpy": decoder(lambda l, x: as_numpy(x)),
    "a symbol's type": asks(lambda l, x: isinstance(x.shape[0], torch.SymInt)),
    "modes": asks(lambda l, x: len(torch.overrides._get_current_function_mode_stack()) > 0),
    "a pointer": asks(lambda l, x: _pointer(x) > 0),
}


def _pointer(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0
