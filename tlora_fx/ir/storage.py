"""Storage of a model's tensors: in another form than the base's, or one piece a process.

A pass names the form, such as int8, in the `TensorRef` of a get_attr node: which tensors of the
base, and which function makes of them what is stored, such as q, k and v as one matrix. It runs
once, when the model takes its weights; the originals are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from tlora_fx.errors import StoredFormWrong, errors_as
from tlora_fx.ir.graph import Pieces, TensorRef

Form = Callable[..., Tensor]


def concatenated(*tensors: Tensor) -> Tensor:
    """Tensors one after the other along their first dimension: the rows of q, k and v as one."""
    return torch.cat(tensors)


def stored_as(refs: TensorRef | Sequence[TensorRef], form: Form, name: str = "") -> TensorRef:
    """The reference to one or several tensors of the base in another form.

    refs     the tensors as the base has them
    form     a function of a module, from the base's tensors to the one that is stored, such as
             `concatenated`; it is run here on the meta device, for shape and dtype
    name     of what is stored, relative to the layer; by default the first tensor's
    raises   StoredFormWrong for a tensor that is not the base's, or a function without a name
    """
    originals = (refs,) if isinstance(refs, TensorRef) else tuple(refs)
    # What has no name of its own, such as a functools.partial, cannot be found again.
    path = f"{form.__module__}:{getattr(form, '__qualname__', f'<{type(form).__name__}>')}"
    wrong = [ref for ref in originals if ref.owner != "base" or ref.originals]
    if wrong or not originals or "<" in path:
        raise StoredFormWrong(
            "a tensor cannot be stored in this form",
            tensor=", ".join(ref.name for ref in wrong or originals) or "none",
            found=f"owner {(wrong or originals)[0].owner}, form {path}" if originals else path,
            expected="tensors of the base as they are, and a function at the top of a module",
            help="only frozen tensors have other forms, and functions are found by their name: "
            "write a function at the top of a module that calls a partial or lambda",
        )
    try:
        empty = (torch.empty(ref.shape, dtype=ref.dtype, device="meta") for ref in originals)
        stored = form(*empty)
    except Exception as error:
        raise StoredFormWrong(
            "the function of a stored form does not run on these tensors",
            tensor=", ".join(ref.name for ref in originals),
            form=path,
            found=f"{type(error).__name__}: {error}",
            help="it takes the tensors in their order, and runs on the meta device",
        ) from error
    return TensorRef(
        "base", name or originals[0].name, tuple(stored.shape), stored.dtype, path, originals
    )


def stored_value(ref: TensorRef, *base: Tensor) -> Tensor:
    """Stored tensor of a reference, made of the base's tensors.

    raises   StoredFormWrong where the function is not there or makes something else
    """
    if not ref.originals:
        return base[0]
    pairs = zip(base, ref.originals, strict=True)
    stored = _form(ref)(*(tensor.to(original.dtype) for tensor, original in pairs)).detach()
    if tuple(stored.shape) != ref.shape or stored.dtype != ref.dtype:
        raise StoredFormWrong(
            "a stored form has another shape or dtype than the graph says",
            tensor=ref.name,
            form=ref.form,
            expected=f"{list(ref.shape)} {ref.dtype}",
            found=f"{list(stored.shape)} {stored.dtype}",
            help="the function must not depend on the values of the tensor, nor change later",
        )
    return stored


def _form(ref: TensorRef) -> Form:
    module, _, name = ref.form.partition(":")
    with errors_as(
        StoredFormWrong, "the function of a stored form cannot be found",
        ImportError, AttributeError, named=True,
        tensor=ref.name, form=ref.form, help="install the package that the pass comes from",
    ):  # fmt: skip
        function: Any = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    return cast(Form, function)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal pieces of a tensor along a dimension.

    runs   sizes in the whole tensor of what lies one after the other along the dimension and is cut
           each by itself: a piece has a part of every run, in their order; () for a single run
    """

    dimension: int
    index: int
    count: int
    runs: tuple[int, ...] = ()

    def of(self, full: Tensor) -> Tensor:
        """The piece: a view of a single run, a new tensor of parts of several."""
        sizes = list(self.runs) or full.shape[self.dimension]
        runs = torch.split(full, sizes, self.dimension)
        parts = [run.tensor_split(self.count, self.dimension)[self.index] for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor of all pieces, by their index."""
        sizes = [size // self.count for size in self.runs] or pieces[0].shape[self.dimension]
        parts = [torch.split(piece, sizes, self.dimension) for piece in pieces]
        return torch.cat([part for run in zip(*parts, strict=True) for part in run], self.dimension)

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor, from a piece's."""
        return tuple(
            size * self.count if dimension == self.dimension else size
            for dimension, size in enumerate(shape)
        )


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Part of a model that a process holds; by default all of it.

    held      module paths, each with all that lies under it; None for every module
    tp_rank   which piece of sharded tensors
    """

    held: frozenset[str] | None = None
    tp_rank: int = 0

    def holds(self, path: str) -> bool:
        """Whether a module or tensor lies in what is held."""
        if self.held is None:
            return True
        parts = path.split(".")
        return any(".".join(parts[:end]) in self.held for end in range(1, len(parts) + 1))

    def shard(self, cut: Pieces | None) -> Shard | None:
        """This process's piece of a tensor that a graph says is cut so."""
        if cut is None:
            return None
        dimension, count, runs = cut
        return Shard(dimension, self.tp_rank, count, runs)
