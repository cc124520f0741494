"""The options that name one kernel, for the commands of `tlora-fx kernels` that take them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.errors import KernelSpecError

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def asked(
    kind: Annotated[str, typer.Argument(help="One of `tlora-fx kernels list`.")],
    inner: Annotated[int, typer.Option("--in", help="Inputs of the frozen linear.")],
    outer: Annotated[int, typer.Option("--out", help="Its outputs.")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    adapter_dtype: Annotated[str, typer.Option(help="Of the stored adapters.")] = "fp32",
    rank_block: Annotated[int, typer.Option(help="Ranks are padded to a multiple.")] = 16,
    dropout: Annotated[bool, typer.Option("--dropout", help="Some job drops.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="The linear has a bias.")] = False,
    weight_layout: Annotated[str, typer.Option(help="out_in, or in_out as in Conv1D.")] = "out_in",
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Add to what the output holds.")
    ] = False,
    sites: Annotated[int, typer.Option(help="Linears that share the input.")] = 1,
    extend: Annotated[str, typer.Option(help="For concat-K: tail or copy.")] = "",
    job_capacity: Annotated[int, typer.Option(help="Most jobs of a row.")] = 64,
    arch: Annotated[int, typer.Option(help="Compute capability: 80, 90, 100.")] = 90,
    tile: Annotated[
        str | None,
        typer.Option(help="rows,columns,depth,warps,stages,chunk,slab instead of the rule's."),
    ] = None,
) -> KernelSpec:
    """The spec that options name; raises UnknownKernel, KernelSpecError."""
    return KernelSpec(
        kind,  # type: ignore[arg-type]  # the spec checks every word
        inner,
        outer,
        dtype=_SHORT.get(dtype, dtype),  # type: ignore[arg-type]
        adapter_dtype=_SHORT.get(adapter_dtype, adapter_dtype),  # type: ignore[arg-type]
        rank_block=rank_block,
        dropout=dropout,
        bias=bias,
        weight_layout=weight_layout,  # type: ignore[arg-type]
        accumulate=accumulate,
        sites=sites,
        extend=extend,  # type: ignore[arg-type]
        job_capacity=job_capacity,
        arch=arch,
        tile=_tile(tile),
    )


def _tile(text: str | None) -> Tile | None:
    if text is None:
        return None
    names = [field.name for field in fields(Tile)]
    words = text.split(",")
    if not 5 <= len(words) <= len(names) or not all(word.strip().isdecimal() for word in words):
        raise KernelSpecError(
            "a tile is five to seven numbers",
            expected=",".join(names),
            found=text,
        )
    return Tile(*(int(word) for word in words))


def takes_kernel(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first argument is a KernelSpec, the options of `asked` in its place."""
    naming = inspect.signature(asked).parameters
    _, *own = inspect.signature(run).parameters.values()

    @wraps(run)
    def command(**given: Any) -> None:
        spec = asked(**{name: given.pop(name) for name in naming})
        run(spec, **given)

    hints = get_type_hints(asked, include_extras=True) | get_type_hints(run, include_extras=True)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            told.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[told.name])
            for told in (*naming.values(), *own)
        ]
    )
    # What `wraps` copied speaks of the spec, which typer cannot ask for.
    command.__annotations__ = hints
    del command.__wrapped__
    return command
