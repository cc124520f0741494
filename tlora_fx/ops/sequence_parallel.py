"""`tlora_fx::tp_scatter`, `tp_gather`, `tp_split` and `tp_segments`: rows cut along their tokens.

Between the regions that tensor-parallel processes compute together, each may hold a piece of the
row's tokens: process p those from p * c on, c = ceil(T / processes). The last pieces end in zeros
where T does not divide; no operator lets them out.

    tp_scatter    sums over the group, of which each process keeps its tokens
    tp_gather     all tokens of what processes hold pieces of
    tp_split      a process's tokens of what all have alike
    tp_segments   where jobs' tokens lie within a process's piece

A gradient goes the way back: of a piece it is a piece, of a whole value alike in all processes, or
in each a part of a sum (tp_gather's `partial`). Made of functional collectives like tp_reduce; on
the CPU a sum is an all-reduce, for gloo scatters no sums of every type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from tlora_fx.ops.tensor_groups import Place, all_reduced, place_of

torch.library.define("tlora_fx::tp_scatter", "(Tensor x, int dim, int pieces, str group) -> Tensor")
torch.library.define("tlora_fx::tp_split", "(Tensor x, int dim, int pieces, str group) -> Tensor")
torch.library.define(
    "tlora_fx::tp_gather",
    "(Tensor x, SymInt size, int dim, int pieces, bool partial, str group) -> Tensor",
)


def piece_size(tokens: int, pieces: int) -> int:
    """How many tokens a piece has, zeros at the end included."""
    return (tokens + pieces - 1) // pieces


def tp_scatter(x: Tensor, dim: int, pieces: int, group: str) -> Tensor:
    """Sum what each process computed a part of, and keep this process's tokens.

    x        tokens along `dim`, the same shape in all processes
    pieces   as many as the group has processes
    group    name of the group, see `use_group`
    returns  `dim` as long as a piece; its gradient comes back whole
    raises   TensorGroupMissing
    """
    made: Tensor = torch.ops.tlora_fx.tp_scatter.default(x, dim, pieces, group)
    return made


def tp_gather(x: Tensor, size: int, dim: int, pieces: int, partial: bool, group: str) -> Tensor:
    """All tokens of what processes hold pieces of.

    x        a piece along `dim`
    size     tokens of the whole
    partial  each process computes a part of the result's gradient: parts are summed. Otherwise all
             processes compute the same gradient, and take their tokens of it
    returns  `dim` as long as `size`
    raises   TensorGroupMissing
    """
    made: Tensor = torch.ops.tlora_fx.tp_gather.default(x, size, dim, pieces, partial, group)
    return made


def tp_split(x: Tensor, dim: int, pieces: int, group: str) -> Tensor:
    """This process's tokens of what all processes have alike.

    x        tokens along `dim`
    returns  `dim` as long as a piece, a copy; its gradient comes back whole, alike in all processes
    raises   TensorGroupMissing
    """
    made: Tensor = torch.ops.tlora_fx.tp_split.default(x, dim, pieces, group)
    return made


@torch.library.custom_op(
    "tlora_fx::tp_segments",
    mutates_args=(),
    schema="(Tensor segments, SymInt tokens, int pieces, str group) -> Tensor",
)
def tp_segments(segments: Tensor, tokens: int, pieces: int, group: str) -> Tensor:
    """Where jobs' tokens lie within this process's piece.

    segments  int32 [J + 1] on the CPU, of a row of so many tokens
    returns   like segments, from 0 to the size of a piece; zeros at its end are the last job's
    raises    TensorGroupMissing
    """
    place = place_of(group, segments)
    if place is None:
        return segments.clone()
    size = piece_size(tokens, pieces)
    own = (segments - place.rank * size).clamp(0, size)
    own[-1] = size
    return own


@tp_segments.register_fake
def _segments_fake(segments: Tensor, tokens: int, pieces: int, group: str) -> Tensor:
    return torch.empty_like(segments)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, place: Place) -> Tensor:
        ctx.size, ctx.dim, ctx.place = x.shape[dim], dim, place
        return _scattered(x, dim, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.size, ctx.dim, ctx.place), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, dim: int, partial: bool, place: Place) -> Tensor:
        ctx.dim, ctx.partial, ctx.place = dim, partial, place
        return _gathered(x, size, dim, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = _scattered if ctx.partial else _own
        return back(grad, ctx.dim, ctx.place), None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, place: Place) -> Tensor:
        ctx.size, ctx.dim, ctx.place = x.shape[dim], dim, place
        return _own(x, dim, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.size, ctx.dim, ctx.place), None, None


@torch.library.impl("tlora_fx::tp_scatter", "CompositeImplicitAutograd")
def _scatter(x: Tensor, dim: int, pieces: int, group: str) -> Tensor:
    place = _place(x, pieces, group)
    if place is None:
        return _shaped(x, piece_size(x.shape[dim], pieces), dim)
    made: Tensor = _Scatter.apply(x, dim, place)  # type: ignore[no-untyped-call]
    return made


@torch.library.impl("tlora_fx::tp_gather", "CompositeImplicitAutograd")
def _gather(x: Tensor, size: int, dim: int, pieces: int, partial: bool, group: str) -> Tensor:
    place = _place(x, pieces, group)
    if place is None:
        return _shaped(x, size, dim)
    made: Tensor = _Gather.apply(x, size, dim, partial, place)  # type: ignore[no-untyped-call]
    return made


@torch.library.impl("tlora_fx::tp_split", "CompositeImplicitAutograd")
def _split(x: Tensor, dim: int, pieces: int, group: str) -> Tensor:
    place = _place(x, pieces, group)
    if place is None:
        return _shaped(x, piece_size(x.shape[dim], pieces), dim)
    made: Tensor = _Split.apply(x, dim, place)  # type: ignore[no-untyped-call]
    return made


def _place(x: Tensor, pieces: int, group: str) -> Place | None:
    place = place_of(group, x)
    assert place is None or place.size == pieces, (place, pieces)
    return place


def _shaped(x: Tensor, size: int, dim: int) -> Tensor:
    """A value of a process that is alone: the same. Where only shapes count, one of that size."""
    if TracingContext.try_get() is None and (isinstance(x, FakeTensor) or x.is_meta):
        return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])
    return x.view_as(x)


def _scattered(x: Tensor, dim: int, place: Place) -> Tensor:
    """A process's tokens of the sum."""
    if x.device.type == "cpu":
        return _own(all_reduced(x, place), dim, place)
    return _summed_in_pieces(x, dim, place)


def _summed_in_pieces(x: Tensor, dim: int, place: Place) -> Tensor:
    """The same, in half of the bytes."""
    padded = _padded(x.movedim(dim, 0), place).contiguous()
    started = torch.ops._c10d_functional.reduce_scatter_tensor.default(
        padded, "sum", place.size, place.name
    )
    done: Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return done.movedim(0, dim)


def _gathered(x: Tensor, size: int, dim: int, place: Place) -> Tensor:
    """The pieces of all processes behind each other, without the zeros at the end."""
    started = torch.ops._c10d_functional.all_gather_into_tensor.default(
        x.movedim(dim, 0).contiguous(), place.size, place.name
    )
    done: Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return done.narrow(0, 0, size).movedim(0, dim)


def _own(x: Tensor, dim: int, place: Place) -> Tensor:
    """A process's tokens of a whole value; a copy, so that the whole may go."""
    size = piece_size(x.shape[dim], place.size)
    padded = _padded(x.movedim(dim, 0), place)
    return padded.narrow(0, place.rank * size, size).clone().movedim(0, dim)


def _padded(x: Tensor, place: Place) -> Tensor:
    """A value with zeros behind its last token, so many that pieces are equal."""
    extra = piece_size(x.shape[0], place.size) * place.size - x.shape[0]
    # Compiled code is to ask nothing about the row's size.
    if isinstance(extra, int) and extra == 0:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, extra])
