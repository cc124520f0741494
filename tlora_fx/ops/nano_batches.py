"""Operators that cut a packed row into nano-batches, runs of whole sequences, and join them again.

Where the cuts lie is data: one graph serves all rows. Sizes must be known on the host, so an
operator that cuts a row on a GPU would wait for it; `remember_starts` tells it what it would read.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tlora_fx.errors import NanoBatchesWrong
from tlora_fx.ops.tables import token_bounds

_STARTS: Any = WeakIdKeyDictionary()


def remember_starts(cu_seqlens: Tensor, starts: Tensor) -> None:
    """Say what a row's `cu_seqlens` holds, so that nobody waits for a device to read it.

    cu_seqlens   the very tensor that goes into the graph
    starts       the same on the CPU; neither may change later
    """
    _STARTS[cu_seqlens] = starts.tolist()


def cut_sequences(starts: Sequence[int], count: int, linear: int) -> list[int]:
    """Cut a row's sequences into runs of about equal cost.

    starts    where each sequence begins, and where the last one ends
    count     runs; where there are fewer sequences, the last runs are empty
    linear    tokens of a sequence whose attention costs as much as its matrix products
    returns   count + 1 indices of sequences, from 0 to their number
    """
    sequences = len(starts) - 1
    lengths = [end - start for start, end in pairwise(starts)]
    costs = [0, *accumulate(length * (linear + length) for length in lengths)]
    cuts = [0]
    for part in range(1, count):
        wanted = costs[-1] * part
        # Each run gets a sequence while there are any.
        first = min(cuts[-1] + 1, sequences)
        last = max(first, sequences - (count - part))
        cuts.append(min(range(first, last + 1), key=lambda at: abs(costs[at] * count - wanted)))
    return [*cuts, sequences]


@torch.library.custom_op(
    "tlora_fx::nano_tables",
    mutates_args=(),
    schema="(Tensor cu_seqlens, Tensor segments, int count, int linear) -> Tensor[]",
)
def nano_tables(cu_seqlens: Tensor, segments: Tensor, count: int, linear: int) -> list[Tensor]:
    """Cut a row into nano-batches of whole sequences and about equal cost.

    cu_seqlens   int32 [S + 1]
    segments     int32 [J + 1] on the CPU
    count        N
    linear       tokens of a sequence whose attention costs as much as its matrix products
    returns      where each nano-batch begins, int32 [N + 1] on the CPU; then for each its own
                 cu_seqlens on the row's device, max_seqlen and segments
    raises       NanoBatchesWrong, SegmentError
    """
    if count < 1 or linear < 0:
        raise NanoBatchesWrong("a row is cut into at least one nano-batch", found=count)
    starts = _STARTS.get(cu_seqlens)
    starts = cu_seqlens.tolist() if starts is None else starts
    bounds = token_bounds(segments, starts[-1])
    sequences = cut_sequences(starts, count, linear)
    cuts = [starts[at] for at in sequences]
    made = [torch.tensor(cuts, dtype=torch.int32)]
    for (low, high), (begin, end) in zip(pairwise(sequences), pairwise(cuts), strict=True):
        longest = max([b - a for a, b in pairwise(starts[low : high + 1])], default=0)
        own = [min(max(bound, begin), end) - begin for bound in bounds]
        made += [
            cu_seqlens[low : high + 1] - begin,
            torch.tensor(longest, dtype=torch.int32),
            torch.tensor(own, dtype=torch.int32),
        ]
    return made


@nano_tables.register_fake
def _tables_fake(cu_seqlens: Tensor, segments: Tensor, count: int, linear: int) -> list[Tensor]:
    made = [segments.new_empty(count + 1)]
    for _ in range(count):
        own = cu_seqlens.new_empty(torch.library.get_ctx().new_dynamic_size())
        made += [own, segments.new_empty(()), segments.new_empty(segments.shape)]
    return made


@torch.library.custom_op(
    "tlora_fx::nano_split",
    mutates_args=(),
    schema="(Tensor x, Tensor cuts, int dim) -> Tensor[]",
)
def nano_split(x: Tensor, cuts: Tensor, dim: int) -> list[Tensor]:
    """Cut a value of a row into nano-batches.

    x         tokens along `dim`
    cuts      int32 [N + 1] on the CPU, as `nano_tables` gives them
    returns   N copies, contiguous
    raises    NanoBatchesWrong
    """
    return [
        x.narrow(dim, begin, end - begin).clone(memory_format=torch.contiguous_format)
        for begin, end in pairwise(_read_cuts(cuts, x.shape[dim]))
    ]


@nano_split.register_fake
def _split_fake(x: Tensor, cuts: Tensor, dim: int) -> list[Tensor]:
    shape: list[Any] = list(x.shape)
    made = []
    for _ in range(int(cuts.shape[0]) - 1):
        shape[dim] = torch.library.get_ctx().new_dynamic_size()
        made.append(x.new_empty(shape))
    return made


@torch.library.custom_op(
    "tlora_fx::nano_join",
    mutates_args=(),
    schema="(Tensor[] parts, Tensor cuts, Tensor row, int dim) -> Tensor",
)
def nano_join(parts: list[Tensor], cuts: Tensor, row: Tensor, dim: int) -> Tensor:
    """Put the nano-batches of a value together again.

    parts     N of one type, tokens along `dim`
    cuts      int32 [N + 1] on the CPU
    row       a value of the row with all tokens along `dim`; only its shape is read
    returns   contiguous
    raises    NanoBatchesWrong
    """
    bounds = _read_cuts(cuts, row.shape[dim])
    sizes = [part.shape[dim] for part in parts]
    if sizes != [end - begin for begin, end in pairwise(bounds)]:
        raise NanoBatchesWrong(
            "nano-batches do not fill the row", expected=f"cuts {bounds}", found=f"sizes {sizes}"
        )
    return torch.cat(parts, dim)


@nano_join.register_fake
def _join_fake(parts: list[Tensor], cuts: Tensor, row: Tensor, dim: int) -> Tensor:
    shape: list[Any] = list(parts[0].shape)
    shape[dim] = row.shape[dim]
    return parts[0].new_empty(shape)


def _read_cuts(cuts: Tensor, tokens: int) -> list[int]:
    bounds: list[int] = cuts.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise NanoBatchesWrong(
            "the cuts do not belong to this row",
            expected=f"rising from 0 to {tokens}",
            found=bounds,
        )
    return bounds


def _split_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, cuts, ctx.dim = inputs
    ctx.save_for_backward(cuts)
    ctx.shape = x.shape


def _split_backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    (cuts,) = ctx.saved_tensors
    row = grads[0].new_empty(1).expand(ctx.shape)
    return torch.ops.tlora_fx.nano_join(grads, cuts, row, ctx.dim), None, None


nano_split.register_autograd(_split_backward, setup_context=_split_setup)


def _join_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, cuts, _, ctx.dim = inputs
    ctx.count = len(parts)
    ctx.save_for_backward(cuts)


def _join_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (cuts,) = ctx.saved_tensors
    return torch.ops.tlora_fx.nano_split(grad, cuts, ctx.dim), None, None, None


nano_join.register_autograd(_join_backward, setup_context=_join_setup)
