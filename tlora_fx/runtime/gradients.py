"""The gradients of a job's parameters, zeroed, measured and clipped together.

torch.nn.utils looks every gradient up and sorts all by dtype at each call, which for hundreds of
small ones costs the host more than the kernels cost a GPU. Here their list is made once; what the
operators get, and in which order, is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# CUDA's reductions read so many numbers at once where their address allows it.
_VECTOR = 4
# Where torch.nn.utils hands whole lists to an operator.
_LISTED = frozenset({"cpu", "cuda"})


class Gradients:
    """A list of gradients that holds as long as each parameter keeps its tensor (`holds`).

    params    parameters in the optimizer's order; those without a gradient are left out
    tensors   their gradients, the parameters' own tensors
    alike     all are plain tensors of one dtype on one device, so that an operator takes the list
              as it is; other lists are left to torch.nn.utils
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._all = list(params)
        self._found = [param.grad for param in self._all]
        self.params = [param for param in self._all if param.grad is not None]
        self.tensors = [gradient for gradient in self._found if gradient is not None]
        kinds = {(type(each), each.device, each.dtype) for each in self.tensors}
        self.alike = len(kinds) == 1 and all(
            kind is Tensor and device.type in _LISTED for kind, device, _ in kinds
        )
        # Which are measured in a copy, and in which dtype.
        self._moved = {
            place: _wide_dtype(each)
            for place, each in enumerate(self.tensors)
            if not _is_in_place(each)
        }
        self._dtype = torch.float32
        for each in self.tensors:
            self._dtype = torch.promote_types(self._dtype, each.dtype)

    def holds(self) -> bool:
        """Whether every parameter still has the gradient tensor that it had, or none."""
        return all(map(operator.is_, [param.grad for param in self._all], self._found))

    @torch.no_grad()
    def zero(self) -> None:
        """Fill every gradient with zeros, in place."""
        if self.tensors:
            torch._foreach_zero_(self.tensors)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm over all gradients, in float32 or the widest gradient's dtype.

        returns   [], on the gradients' device; nobody has waited for it
        """
        if not self.alike:
            return torch.nn.utils.get_total_norm(self._wide())
        norms = torch._foreach_norm(self._wide(), 2.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        return total

    @torch.no_grad()
    def clip(self, norm: float, largest: float) -> None:
        """Scale all gradients by `largest / norm` where that is below 1."""
        if not self.tensors:
            return
        total = torch.tensor(norm, dtype=self._dtype, device=self.tensors[0].device)
        if not self.alike:
            torch.nn.utils.clip_grads_with_norm_(self.params, largest, total)
            return
        # The arithmetic of clip_grads_with_norm_, on the device and in the norm's dtype.
        scale = torch.clamp(largest / (total + 1e-6), max=1.0)
        torch._foreach_mul_(self.tensors, scale)

    def _wide(self) -> list[Tensor]:
        """The gradients in float32 at least, each where a vector may begin; copied together."""
        wide = list(self.tensors)
        for place, dtype in self._moved.items():
            wide[place] = torch.empty_like(wide[place], dtype=dtype)
        if self._moved:
            places = [wide[place] for place in self._moved]
            torch._foreach_copy_(places, [self.tensors[place] for place in self._moved])
        return wide


def _is_in_place(gradient: Tensor) -> bool:
    """Whether a gradient is measured where it lies, not in a copy.

    Where a job's view begins depends on its neighbours' ranks, and CUDA's reductions sum in
    another order on another alignment.
    """
    wide = _wide_dtype(gradient)
    return gradient.dtype == wide and gradient.data_ptr() % (_VECTOR * wide.itemsize) == 0


def _wide_dtype(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)
