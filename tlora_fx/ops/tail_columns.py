"""`tlora_fx::append_tail_columns`: put tensors side by side, with columns behind them.

Plan concat-K writes S and dS behind x and dy (see kernels/packed.py). In Inductor's code whoever
computes a part writes it where it stands. Of a `cat` with an empty tensor Inductor would make one
kernel that asks of every element which part it belongs to, which took four times as long for the
gradients of q, k and v side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op(
    "tlora_fx::append_tail_columns",
    mutates_args=(),
    schema="(Tensor[] parts, int tail_columns) -> Tensor",
)
def append_tail_columns(parts: list[Tensor], tail_columns: int) -> Tensor:
    """Put tensors side by side.

    parts     [..., n] each, alike but in n
    tail_columns  columns behind them, which are not written
    returns   [..., sum of n + tail_columns]
    """
    first, columns = parts[0], sum(part.shape[-1] for part in parts)
    whole = first.new_empty(*first.shape[:-1], columns + tail_columns)
    torch.cat(parts, -1, out=whole[..., :columns])
    return whole


@append_tail_columns.register_fake
def _append_tail_columns_fake(parts: list[Tensor], tail_columns: int) -> Tensor:
    first = parts[0]
    return first.new_empty(*first.shape[:-1], sum(part.shape[-1] for part in parts) + tail_columns)


@functools.cache
def teach_inductor() -> None:
    """Register how Inductor makes code of it, once a process.

    source   torch 2.11 to 2.13, `ConcatKernel` in _inductor/ir.py; `empty_strided` in
             _inductor/lowering.py shows how a buffer that nobody fills is made
    """
    from torch._inductor import ir, lowering

    @lowering.register_lowering(
        torch.ops.tlora_fx.append_tail_columns.default, type_promotion_kind=None
    )
    def lowered(parts: list[Any], tail_columns: int) -> Any:
        first = parts[0]
        pieces = list(parts)
        if tail_columns:
            size = [*first.get_size()[:-1], tail_columns]
            pieces.append(_nothing(size, first.get_dtype(), first.get_device()))
        return ir.TensorBox(ir.ConcatKernel.create(pieces, len(first.get_size()) - 1))


def _nothing(size: list[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A buffer that no kernel writes, and that may come to stand in another one."""
    from torch._inductor import lowering

    piece = lowering.full(size, 0, dtype=dtype, device=device)
    piece.realize()
    buffer = piece.data.data
    buffer.data = dataclasses.replace(buffer.data, ranges=[0] * len(size))
    return piece
