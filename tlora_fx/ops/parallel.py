"""Operators of graphs that several processes run, or that run a row in parts.

    tp_copy            identity; the backward sums gradients over the group
    tp_reduce          sums over the group; the backward is the identity
    tp_cross_entropy   losses of logits whose vocabulary is cut into pieces
    nano_tables        where a row is cut into nano-batches, runs of whole sequences
    nano_split         a value of a row, cut so
    nano_join          its parts, put together again

(The backward of torch's own functional all-reduce sums again: gradients would grow with the group.)
The tp_ operators are made of torch's functional collectives, which is what AOT graphs hold:
Inductor may schedule them, and CUDA graphs capture them. A graph is the same in every process: it
names its group "tp", and each process says once which group that is.

Where the cuts of nano-batches lie is data: one graph serves all rows. Sizes must be known on the
host, so an operator that cuts a row on a GPU would wait for it; `remember_starts` tells it what it
would read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from tlora_fx.errors import NanoBatchesWrong, TensorGroupMissing
from tlora_fx.ops.tables import token_bounds

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# The name that graphs use for the processes that hold pieces of one matrix.
GROUP = "tp"


@dataclass(frozen=True, slots=True)
class GroupRank:
    """This process in a group.

    name   torch's name of the group
    rank   of this process in it
    size   how many processes it has
    """

    name: str
    rank: int
    size: int


_ranks: dict[str, GroupRank | None] = {}


def use_group(name: str, group: ProcessGroup | None) -> None:
    """Bind a name in graphs to a group of processes.

    Compiled code holds the group that was in use when it was compiled.

    group   None, or a group of one process: there is nobody to sum with
    """
    rank = None
    if group is not None and group.size() > 1:
        rank = GroupRank(str(group.group_name), group.rank(), group.size())
    _ranks[name] = rank


@contextmanager
def traced_for(name: str, size: int) -> Iterator[None]:
    """Inside, graphs are traced on fake tensors as process 0 of so many has them.

    size   1: as where nobody cuts matrices
    """
    before = dict(_ranks)
    _ranks[name] = GroupRank("traced", 0, size) if size > 1 else None
    try:
        yield
    finally:
        _ranks.clear()
        _ranks.update(before)


def facts() -> tuple[object, ...]:
    """Facts that compiled code depends on."""
    return tuple(sorted((name, repr(rank)) for name, rank in _ranks.items()))


def rank_in(name: str, x: Tensor) -> GroupRank | None:
    """This process's place in a group; None where it is alone, and where only shapes count.

    x        what is to be summed
    raises   TensorGroupMissing for real tensors, and for code that is compiled, where nobody said
             which group the name stands for
    """
    if name in _ranks:
        return _ranks[name]
    if TracingContext.try_get() is None and (isinstance(x, FakeTensor) or x.is_meta):
        return None
    raise TensorGroupMissing(
        f"no process group stands behind the name '{name}'",
        expected="tlora_fx.ops.use_group before the first step",
        found="a graph whose matrices are cut into pieces",
        help="run the model by a plan (tlora_fx.planners), which names its groups",
    )


def all_reduced(x: Tensor, rank: GroupRank, how: str = "sum") -> Tensor:
    """A tensor summed over a group, or its largest ("max") or smallest ("min") values.

    Two operators, so that a compiler may put others between the start and the wait.
    """
    started = torch.ops._c10d_functional.all_reduce.default(x, how, rank.name)
    done: Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return done


# Targets that no loss counts, as of torch's cross_entropy.
IGNORED = -100

torch.library.define("tlora_fx::tp_copy", "(Tensor x, str group) -> Tensor")
torch.library.define("tlora_fx::tp_reduce", "(Tensor x, str group) -> Tensor")
torch.library.define(
    "tlora_fx::tp_cross_entropy", "(Tensor logits, Tensor targets, str group) -> Tensor"
)


def tp_copy(x: Tensor, group: str) -> Tensor:
    """Hand a value that all processes have alike to what each computes a piece of.

    x        any shape
    group    name of the group, see `use_group`
    returns  x; its gradient is the sum of all processes' gradients
    raises   TensorGroupMissing
    """
    result: Tensor = torch.ops.tlora_fx.tp_copy.default(x, group)
    return result


def tp_reduce(x: Tensor, group: str) -> Tensor:
    """Sum what each process computed a part of.

    x        any shape, the same in all processes
    group    name of the group, see `use_group`
    returns  the sum, the same bits in all processes; the gradient is the result's
    raises   TensorGroupMissing
    """
    result: Tensor = torch.ops.tlora_fx.tp_reduce.default(x, group)
    return result


def tp_cross_entropy(logits: Tensor, targets: Tensor, group: str) -> Tensor:
    """The loss of each row, where each process holds the logits of a piece of the vocabulary.

    logits    float [n, V / processes], process p's columns begin at p * V / processes
    targets   int64 [n], in 0..V - 1, or -100 for a row without a loss
    group     name of the group, see `use_group`
    returns   [n] in the logits' dtype, the same in all processes
    raises    TensorGroupMissing
    """
    losses: Tensor = torch.ops.tlora_fx.tp_cross_entropy.default(logits, targets, group)
    return losses


def tp_argmax(logits: Tensor, group: str) -> Tensor:
    """Each row's largest logit, where each process holds the logits of a piece of the vocabulary.

    logits    float [n, V / processes], process p's columns begin at p * V / processes
    group     name of the group, see `use_group`
    returns   int64 [n] in 0..V - 1, the first of equal ones, the same in all processes; no gradient
    raises    TensorGroupMissing
    """
    rank, values = rank_in(group, logits), logits.detach()
    largest, indices = values.max(-1)
    if rank is None:
        return indices
    everywhere = all_reduced(largest, rank, "max")
    columns = values.shape[-1]
    mine = indices + rank.rank * columns
    others = torch.full_like(mine, rank.size * columns)
    return all_reduced(torch.where(largest == everywhere, mine, others), rank, "min")


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: GroupRank) -> Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.rank), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: GroupRank) -> Tensor:
        return all_reduced(x, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.library.impl("tlora_fx::tp_copy", "CompositeImplicitAutograd")
def _copy(x: Tensor, group: str) -> Tensor:
    rank = rank_in(group, x)
    result: Tensor = x.view_as(x) if rank is None else _Copy.apply(x, rank)  # type: ignore[no-untyped-call]
    return result


@torch.library.impl("tlora_fx::tp_reduce", "CompositeImplicitAutograd")
def _reduce(x: Tensor, group: str) -> Tensor:
    rank = rank_in(group, x)
    result: Tensor = x.view_as(x) if rank is None else _Reduce.apply(x, rank)  # type: ignore[no-untyped-call]
    return result


@torch.library.impl("tlora_fx::tp_cross_entropy", "CompositeImplicitAutograd")
def _cross_entropy(logits: Tensor, targets: Tensor, group: str) -> Tensor:
    rank = rank_in(group, logits)
    if rank is None:
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    largest = all_reduced(logits.detach().amax(-1), rank, "max")
    shifted = logits - largest.unsqueeze(-1)
    local = targets - rank.rank * logits.shape[-1]
    inside = (local >= 0) & (local < logits.shape[-1])
    picked = shifted.gather(-1, torch.where(inside, local, 0).unsqueeze(-1)).squeeze(-1)
    # One sum for both: the exponentials, and the target's logit, which one process has.
    parts = torch.stack([shifted.exp().sum(-1), torch.where(inside, picked, 0)])
    total: Tensor = _Reduce.apply(parts, rank)  # type: ignore[no-untyped-call]
    return torch.where(targets == IGNORED, 0, total[0].log() - total[1])


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
    tables = [torch.tensor(cuts, dtype=torch.int32)]
    for (low, high), (begin, end) in zip(pairwise(sequences), pairwise(cuts), strict=True):
        longest = max([b - a for a, b in pairwise(starts[low : high + 1])], default=0)
        local_bounds = [min(max(bound, begin), end) - begin for bound in bounds]
        tables += [
            cu_seqlens[low : high + 1] - begin,
            torch.tensor(longest, dtype=torch.int32),
            torch.tensor(local_bounds, dtype=torch.int32),
        ]
    return tables


@nano_tables.register_fake
def _tables_fake(cu_seqlens: Tensor, segments: Tensor, count: int, linear: int) -> list[Tensor]:
    tables = [segments.new_empty(count + 1)]
    for _ in range(count):
        starts = cu_seqlens.new_empty(torch.library.get_ctx().new_dynamic_size())
        tables += [starts, segments.new_empty(()), segments.new_empty(segments.shape)]
    return tables


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
    parts = []
    for _ in range(int(cuts.shape[0]) - 1):
        shape[dim] = torch.library.get_ctx().new_dynamic_size()
        parts.append(x.new_empty(shape))
    return parts


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
