"""Whether a model by itself gives a sequence the positions that a packed row has: 0 to n - 1.

A packed row hands its positions over; alone, a model is given none and makes its own. Both calls
run on the meta device, where whatever comes from sizes and positions alone is computed along on the
CPU. What the rest of the model reads of that must be equal. A model that counts its positions by
the ids, as RoBERTa does, is given none in a row either: it counts within each sequence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tlora_fx.errors import AttentionNotPackable
from tlora_fx.ir.graph import TABLES
from tlora_fx.tracing.attention import current_row, row_of
from tlora_fx.tracing.masks import BATCH_HELP, unpacked_lines

LENGTH = 7

#: An operator that read values known without weights, and these values.
Read = tuple[str, tuple[Tensor, ...]]


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the values of tensors that depend on neither weights nor ids, and notes who reads them.

    A tensor is known where all that it is made of is known: sizes, numbers, and tensors so made.

    counts    whether integers that depend on ids are summed up along a line
    """

    def __init__(self, known: dict[Tensor, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = {id(tensor): value for tensor, value in known.items()}
        self.alive: list[Tensor] = list(known)  # ids stay unique
        self.reads: list[Read] = []
        self.counts = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self._value(tensor) for tensor in tensors]
        random_numbers = torch.Tag.nondeterministic_seeded in func.tags
        if random_numbers or any(value is None for value in values):
            self.counts |= func is torch.ops.aten.cumsum.default and _is_counted(*args)
            kept = tuple(value.clone() for value in values if value is not None and value.dim())
            if kept:
                self.reads.append((str(func), kept))
            if func._schema.is_mutable and tensors:
                self.values.pop(id(tensors[0]), None)
            return func(*args, **kwargs)
        shadow_args, shadow_kwargs = tree_map(self._shadow, (args, kwargs))
        shadow = func(*shadow_args, **shadow_kwargs)
        if not isinstance(shadow, (Tensor, tuple, list)):
            return shadow  # a number, which no tensor on meta could have given
        result = func(*args, **kwargs)
        for tensor, value in zip(tree_leaves(result), tree_leaves(shadow), strict=True):
            if isinstance(tensor, Tensor):
                self.values[id(tensor)] = value
                self.alive.append(tensor)
        return result

    def _value(self, tensor: Tensor) -> Tensor | None:
        return self.values.get(id(tensor), None if tensor.is_meta else tensor)

    def _shadow(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._value(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def counts_positions(model: nn.Module, values: Mapping[Tensor, Tensor]) -> bool:
    """Whether a model counts its positions by the ids, and so must not be handed a packed row's.

    A model that cannot run on meta is not judged here.

    model     on meta, to be thrown away; its forward takes position_ids
    values    of its buffers of integers, such as one that holds all positions
    raises    AttentionNotPackable where its own positions are others than a packed row's
    """
    ids = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    places = torch.arange(LENGTH)[None]
    handed = places.to("meta")
    try:
        with _quietly():
            alone = KnownValues(dict(values))
            with alone:
                model(input_ids=ids, use_cache=False)
            packed = KnownValues({**values, handed: places})
            with packed:
                model(input_ids=ids, position_ids=handed, use_cache=False)
    except Exception:  # noqa: BLE001  (whatever it is, tracing meets it again and reports it)
        return False
    if (first := _first_difference(alone.reads, packed.reads)) is not None:
        if alone.counts and not packed.counts:
            return True
        raise AttentionNotPackable(
            "a base's own positions are not those of a packed row",
            operator=first[0],
            expected=f"0 to {LENGTH - 1} in a sequence of {LENGTH} tokens",
            found=first[1],
            help=BATCH_HELP,
        )
    return False


def _is_counted(value: Tensor, dim: int) -> bool:
    """Whether a running sum is one of integers along the tokens of lines."""
    integers = not (value.is_floating_point() or value.is_complex())
    return integers and value.dim() > 1 and dim in (1, 1 - value.dim())


class CountsBySequence(TorchFunctionMode):
    """Lets running sums of integers along a packed row start anew with each sequence."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        # As text: sizes that are compared would be fixed by the comparison.
        self._row = str(tuple(ids.shape))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in (torch.cumsum, Tensor.cumsum) and not named.keys() - {"input", "dim"}:
            value: Tensor = args[0] if args else named["input"]
            dim: int = args[1] if len(args) > 1 else named["dim"]
            starts = current_row()["cu_seqlens"]
            if _is_counted(value, dim) and str(tuple(value.shape[:2])) == self._row:
                return torch.ops.tlora_fx.sequence_cumsum(value, starts, 1)
        return func(*args, **named)


@contextmanager
def _quietly() -> Iterator[None]:
    """Within this, a model can run on meta, and draws no random number from anybody's generator."""
    tables = {name: torch.zeros(2, dtype=torch.int32, device="meta") for name in TABLES}
    state = random.getstate()
    try:
        with row_of(tables), unpacked_lines(padded=False), torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


def _first_difference(alone: list[Read], packed: list[Read]) -> tuple[str, str] | None:
    """The first operator that reads other values, and what it reads alone."""
    for (operator, values), (other, theirs) in zip(alone, packed, strict=False):
        if operator != other or len(values) != len(theirs):
            return other, "other positions, by the ids or by another way"
        if not all(map(_equal, values, theirs)):
            seen = [value.flatten()[:LENGTH].tolist() for value in values]
            return operator, f"it reads {', '.join(map(str, seen))}"
    if len(alone) != len(packed):
        return "the model", "it reads positions only if they are given, or only if not"
    return None


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two values agree, where one may be the other's copies along new dimensions."""
    try:
        return bool((first == second).all())
    except RuntimeError:  # they do not broadcast
        return False
