"""Where operators put the dimensions of the one value that they read.

Token parallelism follows the row through a graph, and tensor parallelism the pieces of a value. A
fact says of some operators where a dimension of their first argument stands in each result, or that
its elements do not stay apart. Both tables of rules read these facts and add their own operators:
token_parallel/rules.py and tensor_parallel/rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import arguments_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Fact:
    """Use that some operators make of a dimension of their first argument.

    move        the dimension in each result; None where its elements do not stay apart
    operators   that both kinds of parallelism know
    of_row      what is wrong where that is the row's dimension
    of_pieces   what is wrong where that is the dimension of pieces
    rows_only   operators that token parallelism alone knows by this fact
    """

    move: Callable[[fx.Node, int], int | None]
    operators: tuple[Any, ...]
    of_row: str = ""
    of_pieces: str = ""
    rows_only: tuple[Any, ...] = ()


def rank_of(value: Any) -> int:
    """Number of dimensions of a node's value."""
    return len(value.meta["val"].shape)


def dim_of(value: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return value + ndim if value < 0 else value


def symbols_of(size: Any) -> set[str]:
    """The symbols in a size, none of a number."""
    return set() if isinstance(size, int) else {str(s) for s in size.node.expr.free_symbols}


def key_of(target: Any) -> str:
    """The name of an operator, the same for all its overloads."""
    return str(getattr(target, "overloadpacket", target))


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Argument of a call by its name in the schema, or the default that the operator takes."""
    return arguments_of(node).get(name, default)


def results(node: fx.Node, dim: Any) -> Any:
    """The dimension of a call's result, once for each where it has several."""
    value = node.meta["val"]
    return (dim,) * len(value) if isinstance(value, (tuple, list)) else dim


def _transposed(node: fx.Node, dim: int) -> int:
    first, second = (dim_of(int(d), rank_of(node)) for d in node.args[1:3])  # type: ignore[arg-type]
    return {first: second, second: first}.get(dim, dim)


def _permuted(node: fx.Node, dim: int) -> int:
    order: Any = node.args[1]
    return [dim_of(d, rank_of(node)) for d in order].index(dim)


def _unsqueezed(node: fx.Node, dim: int) -> int:
    return dim + (dim_of(int(argument(node, "dim")), rank_of(node)) <= dim)


def _dims(node: fx.Node, given: Any) -> set[int]:
    """Dimensions of the first argument; all where none is given."""
    ndim = rank_of(node.args[0])
    several = [given] if isinstance(given, int) else list(given or range(ndim))
    return {dim_of(int(d), ndim) for d in several}


def _without(gone: set[int], dim: int) -> int | None:
    return None if dim in gone else dim - sum(d < dim for d in gone)


def _taken(node: fx.Node, dim: int) -> int | None:
    return _without(_dims(node, argument(node, "dim", 0)), dim)


def reduced(node: fx.Node, dim: int) -> int | None:
    """Some dimensions, or all, become one number each."""
    left = _without(_dims(node, argument(node, "dim")), dim)
    return left if left is None or not argument(node, "keepdim", False) else dim


def _turned(node: fx.Node, dim: int) -> int:
    """The last two dimensions change places; a vector stays."""
    ndim = rank_of(node)
    return 2 * ndim - 3 - dim if dim >= ndim - 2 >= 0 else dim


def _parted(node: fx.Node, dim: int) -> int | None:
    return None if dim in _dims(node, argument(node, "dim", 0)) else dim


def _along(node: fx.Node, dim: int) -> int | None:
    given = argument(node, "dim", argument(node, "dims", -1))
    return None if dim in _dims(node, given) else dim


def _normalised(node: fx.Node, dim: int) -> int | None:
    inner = len(argument(node, "normalized_shape"))
    return dim if dim < rank_of(node.args[0]) - inner else None


FACTS = (
    Fact(_transposed, (aten.transpose, aten.swapaxes)),
    Fact(_permuted, (aten.permute,)),
    Fact(_unsqueezed, (aten.unsqueeze,)),
    Fact(_turned, (), rows_only=(aten.t, aten.mT)),
    Fact(
        _parted,
        (),
        of_row="it takes some tokens of the row by their place",
        rows_only=(aten.slice, aten.narrow, aten.index_select),
    ),
    Fact(
        _parted,
        (),
        of_row="it splits the row",
        rows_only=(aten.split, aten.chunk, aten.split_with_sizes),
    ),
    Fact(_along, (), of_row="it subtracts neighbours in the row", rows_only=(aten.diff,)),
    Fact(
        _taken,
        (aten.select,),
        of_row="it takes some tokens of the row by their place",
        of_pieces="it takes a part of what is cut",
    ),
    Fact(
        _taken,
        (aten.unbind,),
        of_row="it splits the row",
        of_pieces="it parts what is cut",
    ),
    Fact(
        reduced,
        (aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std),
        of_row="it reduces over the row",
        of_pieces="it reduces over what is cut",
        rows_only=(
            *(aten.any, aten.all, aten.linalg_vector_norm, aten.logsumexp),
            *(aten.argmax, aten.argmin),
        ),
    ),
    Fact(
        _along,
        (aten.softmax, aten._softmax, aten.log_softmax),
        of_row="it reduces over the row",
        of_pieces="it normalises over what is cut",
        rows_only=(
            *(aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp),
            *(aten.sort, aten.argsort, aten.topk, aten.flip),
        ),
    ),
    Fact(
        _along,
        (),
        of_row="it transforms the row",
        rows_only=(aten.fft_fft, aten.fft_ifft, aten.fft_rfft, aten.fft_irfft),
    ),
    Fact(
        _normalised,
        (aten.rms_norm, aten.layer_norm),
        of_row="it normalises over the row",
        of_pieces="it normalises over what is cut",
    ),
)
