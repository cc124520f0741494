"""Compile a Shared Super-Model layer by layer: one compilation serves all layers of a structure.

A whole model as one graph takes longer to compile the deeper it is. Here `torch.compile` sees one
layer's code, once for each structure. What one layer hands to the next asks for its gradient in the
first layer too, though nobody reads it there: code of its own for that layer would take as long to
compile as that of all others. Sizes that depend on the row are marked as dynamic before every call,
by what tracing knows of them, so that no row gives rise to another compilation: neither its number
of tokens, nor a size that happens to equal another one, nor a job without tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.callback import callback_handler
from torch.export import Dim, ExportedProgram, export
from torch.utils.checkpoint import checkpoint

from tlora_fx.codegen.ahead import ahead
from tlora_fx.host.phases import phase
from tlora_fx.ir.graph import GroupGraph, placeholders
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.model.loss import ChunkedLoss
from tlora_fx.ops.torch_compile import (
    allow_empty_grids,
    hold_rows,
    keep_kernels,
    mark_compile_caches,
)

# Sizes below it are constants to torch: it would make code for each.
SMALLEST_DYNAMIC = 2
# Tables of one size for all rows, and those as long as the row has targets (see batch.py).
PER_JOB = ("segments", "keys", "target_segments")
PER_TARGET = ("target_rows", "targets")

Sizes = Sequence[Sequence[int]]
Forward = Callable[..., Any]


class CompiledMethod:
    """Compiled method of one instance, in place of the method that its class has.

    plain     the method as the class has it
    form      the method that is compiled
    code      the same, compiled
    owner     the instance
    dynamic   for each argument the dimensions whose size depends on the row
    carried   positions of arguments that layers hand to each other
    """

    def __init__(
        self,
        plain: Forward,
        form: Forward,
        code: Forward,
        owner: nn.Module,
        dynamic: Sizes,
        carried: Sequence[int] = (),
    ) -> None:
        self.plain, self.form, self.code, self.owner = plain, form, code, owner
        self.dynamic, self.carried = dynamic, carried

    def __call__(self, *args: Any) -> Any:
        """Run compiled; inside another compilation, and where a size is 0 or 1, run as it is.

        While kernels are compiled ahead, what would be compiled runs as it is: it asks for the same
        kernels, and is compiled while processes compile those.
        """
        if torch.compiler.is_compiling() or self._is_small(args):
            return self.plain(self.owner, *args)
        if torch.is_grad_enabled():
            args = tuple(
                _with_gradient(value) if place in self.carried else value
                for place, value in enumerate(args)
            )
        if ahead.is_on:
            return self.form(self.owner, *args)
        for value, dimensions in zip(args, self.dynamic, strict=True):
            for dimension in dimensions:
                torch._dynamo.mark_dynamic(value, dimension)
        return self.code(self.owner, *args)

    def _is_small(self, args: Sequence[Any]) -> bool:
        return any(
            value.shape[dimension] < SMALLEST_DYNAMIC
            for value, dimensions in zip(args, self.dynamic, strict=True)
            for dimension in dimensions
        )


def _with_gradient(value: Tensor) -> Tensor:
    if value.requires_grad or not value.is_floating_point():
        return value
    return value.detach().requires_grad_()


def compile_method(
    owners: Sequence[nn.Module],
    name: str,
    dynamic: Sizes,
    options: dict[str, Any],
    form: Forward | None = None,
    carried: Sequence[int] = (),
) -> None:
    """Compile a method of one class once, and let these instances run it.

    dynamic   for each argument the dimensions whose size depends on the row
    options   of `torch.compile`; with `dynamic=False` no size is marked
    form      the same method in a form that is better compiled; None: as the class has it
    carried   positions of arguments that get a gradient whether anybody asks for it or not
    """
    _note_compilations()
    allow_empty_grids()
    hold_rows()
    mark_compile_caches()
    keep_kernels()
    # torch.compile takes some of its inner options out of the mapping that it is given.
    options = {k: dict(v) if isinstance(v, dict) else v for k, v in options.items()}
    plain = getattr(type(owners[0]), name)
    form = plain if form is None else form
    inner, stage = getattr(form, "inner", None), getattr(form, "stage", None)
    if stage is not None:
        options = stage.options(options)
    # What is computed again is the compiled code as a whole.
    code = (
        torch.compile(_own_code(form), **options)
        if inner is None
        else recomputed(torch.compile(_own_code(inner), **options))
    )
    marked: Sizes = [()] * len(dynamic) if options.get("dynamic") is False else dynamic
    for owner in owners:
        # An instance's own attribute stands before its class's method.
        owner.__dict__[name] = CompiledMethod(plain, form, code, owner, marked, carried)


def repeatable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `torch.compile` with which another process gets code of the same bits.

    Inductor would take what was fastest just then, and each of its choices has bits of its own.

    options   as they are where they name another backend, or a mode, which goes with no options
    """
    if "backend" in options or options.get("mode") is not None:
        return dict(options)
    inner = options.get("options") or {}
    return {**options, "options": {"deterministic": True, **inner}}


_compiling: list[AbstractContextManager[None]] = []


def _note_compilations() -> None:
    """From now on what torch compiles is a phase of the start: it does so when code first runs."""
    if _compilation_began not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_compilation_began)
        callback_handler.register_end_callback(_compilation_ended)


def _compilation_began(what: object) -> None:
    entered = phase("layers")
    entered.__enter__()
    _compiling.append(entered)


def _compilation_ended(what: object) -> None:
    while _compiling:
        _compiling.pop().__exit__(None, None, None)


def _own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own: Dynamo compiles one piece so often, then never again.

    A class's method is one piece for all models of a process; they share no compilation anyhow.
    """
    own = FunctionType(
        method.__code__.replace(),
        method.__globals__,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    return wraps(method)(own)


def row_sizes(graph: fx.Graph) -> dict[str, tuple[int, ...]]:
    """Dimensions of each input of a graph whose size depends on the row."""
    return {name: _sizes(name, node.meta["val"]) for name, node in placeholders(graph).items()}


def _sizes(name: str, value: Tensor) -> tuple[int, ...]:
    if name in PER_JOB:
        return ()
    if name in PER_TARGET:
        return (0,)
    sizes = enumerate(value.shape)
    return tuple(dimension for dimension, size in sizes if isinstance(size, torch.SymInt))


def recomputed(forward: Forward) -> Forward:
    """Decorate a layer's forward: only its inputs are kept for the backward.

    Dropout masks are keyed, so what is computed again is the same, bit for bit.

    forward   `forward(self, *tensors)`; what it is decorated of stays at `.inner`
    """

    @wraps(forward)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    run.inner = forward  # type: ignore[attr-defined]
    return run


def export_net(
    net: nn.Module, group: GroupGraph, loss: ChunkedLoss, max_targets: int
) -> ExportedProgram:
    """A net as one flat `torch.export` program, traced over one row that stands for all others.

    It runs where torch and `tlora_fx.ops` are, without transformers, PEFT and the graphs that it
    was made of.

    net           the modules that run the group's root
    loss          the net's loss
    max_targets   the loss runs in as many chunks as so many targets need
    """
    device = next(net.parameters()).device
    row = _example(group).to(device)
    sizes = row_sizes(group.root)
    inputs = {name: getattr(row, name) for name in sizes}
    dynamic = {name: dict.fromkeys(dimensions, Dim.DYNAMIC) for name, dimensions in sizes.items()}
    loss.pieces = loss.pieces_for(max_targets)
    try:
        return export(net, (), inputs, dynamic_shapes=dynamic, strict=False)
    finally:
        loss.pieces = None


def _example(group: GroupGraph) -> PackedBatch:
    """A row in the group's form, in which no size is 0 or 1: torch makes constants of those."""
    sequences = [[0, 0, 0], [0, 0, 0]]
    tokens = [JobTokens(sequences, sequences) for _ in group.jobs]
    return pack(tokens) if group.form == "packed" else pad(tokens)
