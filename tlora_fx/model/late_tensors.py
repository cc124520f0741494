"""Tensors that lie in pieces in a checkpoint, and are put together where they are needed.

A checkpoint of a mixture of experts has each expert's matrices by themselves, and transformers
stacks them while it loads: on one thread, into main memory of the base's size. Inside `MergesLater`
large stacks are tensors without memory, of which `LoadedTensors` knows the pieces. Those are pages
of files, which can go to a GPU directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

#: Smaller tensors are put together at once.
LATE_BYTES = 16 * 2**20
_MERGES = (torch.stack, torch.cat)
#: What `x[0] = y` and `x += y` call; other functions that write end with one underscore.
_WRITES = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__",
    "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__",
    "__irshift__",
}  # fmt: skip


class Piece(NamedTuple):
    """A part of a tensor.

    tensor   on the CPU, with as many dimensions as the whole
    start    index in the whole at which it begins, by dimension
    """

    tensor: Tensor
    start: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The view of the whole that this piece fills."""
        ends = zip(self.start, self.tensor.shape, strict=True)
        return whole[tuple(slice(start, start + size) for start, size in ends)]


@dataclass(frozen=True, slots=True)
class LateTensor:
    """A tensor in pieces, which cover it.

    stand_in   of the same shape, strides and dtype, without memory
    """

    pieces: tuple[Piece, ...]
    stand_in: Tensor

    def whole(self) -> Tensor:
        """The tensor in main memory; put together at each call."""
        result = torch.empty_like(self.stand_in, device="cpu")
        for piece in self.pieces:
            piece.of(result).copy_(piece.tensor)
        return result

    def is_seen_by(self, tensor: Tensor) -> bool:
        """Whether a tensor is the stand-in, or another name for all of it."""
        mine = self.stand_in
        return _memory_of(tensor) == _memory_of(mine) and (
            (tensor.shape, tensor.stride(), tensor.dtype) == (mine.shape, mine.stride(), mine.dtype)
        )


class LoadedTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint by name; those in pieces are put together each time.

    tensors   in main memory, or in pieces
    """

    def __init__(self, tensors: Mapping[str, Tensor | LateTensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors[name]
        return found.whole() if isinstance(found, LateTensor) else found

    def late(self, name: str) -> LateTensor | None:
        """A tensor that is in pieces; None for another one."""
        found = self._tensors[name]
        return found if isinstance(found, LateTensor) else None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class CannotWait(RuntimeError):
    """Something would be written into a tensor that has no memory yet."""


class MergesLater(TorchFunctionMode):
    """Inside, in this thread, large tensors on the CPU are not stacked and concatenated yet.

    What is called with such a tensor, and does not only look at it, gets it put together.

    raises   CannotWait where it is written to: load without this then
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, LateTensor] = {}

    @property
    def was_used(self) -> bool:
        """Whether any tensor has been left in pieces."""
        return bool(self._late)

    def late(self, tensor: Tensor) -> LateTensor | None:
        """The pieces of a tensor that has come from here, of all of it; None for any other."""
        if tensor.device.type != "meta":
            return None
        found = self._late.get(_memory_of(tensor))
        return found if found is not None and found.is_seen_by(tensor) else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func in _MERGES and (merged := self._merge(func, *args, **kwargs)) is not None:
            return merged
        if not self._late or not any(map(self._is_late, pytree.tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if _writes(func) or kwargs.get("out") is not None:
            raise CannotWait(f"{func.__name__} may write to a tensor that has no memory yet")
        if func not in _MERGES:
            try:
                seen = func(*args, **kwargs)
            except (RuntimeError, TypeError):  # it asks for numbers
                seen = torch.empty(0)
            tensors = [leaf for leaf in pytree.tree_leaves(seen) if isinstance(leaf, Tensor)]
            if all(map(self.late, tensors)):
                return seen
        args, kwargs = pytree.tree_map(self._whole, (args, kwargs))
        return func(*args, **kwargs)

    def _merge(
        self, func: Any, tensors: Sequence[Tensor], dim: int = 0, **more: Any
    ) -> Tensor | None:
        """The stand-in of a large stack; None for what is put together at once."""
        if more or len(tensors) < 2 or not all(map(self._may_wait, tensors)):
            return None
        first = tensors[0]
        if sum(each.nbytes for each in tensors) < LATE_BYTES:
            return None
        if any(each.dtype != first.dtype for each in tensors):
            return None
        stand_in: Tensor = func([each.to("meta") for each in tensors], dim)
        dim %= stand_in.dim()
        pieces, at = [], 0
        for each in tensors:
            for piece in self._pieces(each):
                start = piece.start
                if func is torch.stack:
                    start = (*start[:dim], at, *start[dim:])
                    pieces.append(Piece(piece.tensor.unsqueeze(dim), start))
                else:
                    moved = start[dim] + at
                    pieces.append(Piece(piece.tensor, (*start[:dim], moved, *start[dim + 1 :])))
            at += 1 if func is torch.stack else each.shape[dim]
        self._late[_memory_of(stand_in)] = LateTensor(tuple(pieces), stand_in)
        return stand_in

    def _may_wait(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.requires_grad
        return (plain and tensor.is_contiguous()) or self.late(tensor) is not None

    def _pieces(self, tensor: Tensor) -> tuple[Piece, ...]:
        late = self.late(tensor)
        return (Piece(tensor, (0,) * tensor.dim()),) if late is None else late.pieces

    def _is_late(self, value: object) -> bool:
        if not isinstance(value, Tensor) or value.device.type != "meta":
            return False
        return _memory_of(value) in self._late

    def _whole(self, value: Any) -> Any:
        if not self._is_late(value):
            return value
        late = self.late(value)
        if late is None:
            raise CannotWait("a part of a tensor that has no memory yet is read")
        return late.whole()


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    own = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return own or name in _WRITES


def _memory_of(tensor: Tensor) -> int:
    """What tells a tensor's memory from others, without memory too."""
    found: int = tensor.untyped_storage()._cdata
    return found
