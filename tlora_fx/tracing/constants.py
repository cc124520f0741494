"""Numbers that model code writes into tensors keep their values while tracing on meta.

`torch.tensor([2], device=x.device)` and `x[..., [2]]` make a tensor where x lies; on the meta
device it has no values, and the graph would hold an empty constant. Within `real_constants` such a
tensor is made on the CPU first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


class RealConstants(TorchFunctionMode):
    """Makes tensors from Python data on the CPU, then moves them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in MAKERS and named.get("device") is not None:
            device = named.pop("device")
            return func(*args, **named).to(device)
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device, **named)
        if func is Tensor.__getitem__:
            args = (args[0], _index(args[1]))
        return func(*args, **named)


def _index(index: Any) -> Any:
    """An index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(_index(item) for item in index)
    return torch.tensor(index) if isinstance(index, list) else index
