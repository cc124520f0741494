"""Frozen tensors that are kept in another form than the base has them, such as int8.

A pass says so in the `TensorRef` of a get_attr node: which tensor of the base, and which function
makes of it what is stored. It runs once, when the model takes its weights; what it was made of is
let go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from tlora_fx.errors import StoredFormWrong
from tlora_fx.ir.graph import TensorRef

Form = Callable[[Tensor], Tensor]


def stored_as(ref: TensorRef, form: Form) -> TensorRef:
    """The reference to a tensor of the base in another form.

    ref      the tensor as the base has it
    form     a function of a module, from the base's tensor to the one that is stored; it is run
             here on the meta device, for shape and dtype
    raises   StoredFormWrong for a tensor that is not the base's, or a function without a name
    """
    name = f"{form.__module__}:{form.__qualname__}"
    if ref.owner != "base" or ref.original is not None or "<" in name:
        raise StoredFormWrong(
            "a tensor cannot be stored in this form",
            tensor=ref.name,
            found=f"owner {ref.owner}, form {name}",
            expected="a tensor of the base as it is, and a function at the top of a module",
            help="only frozen tensors have other forms, and functions are found by their name",
        )
    made = form(torch.empty(ref.shape, dtype=ref.dtype, device="meta"))
    return replace(ref, shape=tuple(made.shape), dtype=made.dtype, form=name, original=ref)


def stored_value(ref: TensorRef, base: Tensor) -> Tensor:
    """What is stored for a reference, of the base's tensor.

    raises   StoredFormWrong where the function is not there or makes something else
    """
    if ref.original is None:
        return base
    made = _form(ref)(base.to(ref.original.dtype)).detach()
    if tuple(made.shape) != ref.shape or made.dtype != ref.dtype:
        raise StoredFormWrong(
            "a stored form has another shape or dtype than the graph says",
            tensor=ref.name,
            form=ref.form,
            expected=f"{list(ref.shape)} {ref.dtype}",
            found=f"{list(made.shape)} {made.dtype}",
            help="the function must not depend on the values of the tensor, nor change later",
        )
    return made


def _form(ref: TensorRef) -> Form:
    module, _, name = ref.form.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise StoredFormWrong(
            "the function of a stored form cannot be found",
            tensor=ref.name,
            form=ref.form,
            found=f"{type(error).__name__}: {error}",
            help="install the package that the pass comes from",
        ) from error
    return cast(Form, found)
