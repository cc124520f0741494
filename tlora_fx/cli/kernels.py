"""`tlora-fx kernels`: look at generated kernels, compile them without a GPU, tune them on one."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from tlora_fx.cli.kernel_options import takes_kernel
from tlora_fx.codegen.spec import KINDS, KernelSpec
from tlora_fx.errors import (
    KernelToolMissing,
    TloraError,
    UnknownKernel,
    nearest,
)

CHECKED_ARCHITECTURES = (80, 90, 100)

group = typer.Typer(
    help="List, show, explain, check and tune the generated kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@group.command("list")
def list_kinds() -> None:
    """List the kinds of kernels, and the generated files in the cache."""
    from tlora_fx.codegen.kernels import emitter, first_line
    from tlora_fx.codegen.loading import cache_folder

    table = Table("kind", "what it does", box=None, pad_edge=False)
    for kind in KINDS:
        table.add_row(kind, first_line(emitter(kind).__doc__))
    console = Console()
    console.print(table)
    folder = cache_folder()
    files = sorted(folder.glob("*.py"))
    console.print(f"\n{len(files)} generated in {folder}", soft_wrap=True, highlight=False)
    if files:
        console.print(_cached(files))


def _cached(files: list[Path]) -> Table:
    table = Table("file", "bytes", "written", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for file in files:
        facts = file.stat()
        written = datetime.datetime.fromtimestamp(facts.st_mtime, datetime.UTC)
        table.add_row(file.name, f"{facts.st_size:,}", f"{written:%Y-%m-%d %H:%M}")
    return table


@group.command()
@takes_kernel
def show(spec: KernelSpec) -> None:
    """Print the source of one kernel."""
    from tlora_fx.codegen.kernels import build

    typer.echo(build(spec).text, nl=False)


@group.command()
@takes_kernel
def explain(
    spec: KernelSpec,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a call.")] = 8192,
    ranks: Annotated[str, typer.Option(help="Ranks of its jobs, equally long.")] = "16,16,16,16",
    gpu: Annotated[str, typer.Option(help="Whose measurements decide.")] = "NVIDIA H200",
) -> None:
    """Say how a kernel cuts its work and why, what a call costs, and what it compiles to.

    Compiles for --arch without a GPU, where Triton is installed.
    """
    words = ranks.split(",")
    if not all(word.strip().isdecimal() for word in words) or not any(map(int, words)):
        raise typer.BadParameter(f"--ranks are numbers, such as 4,8,16; not {ranks!r}")
    from tlora_fx.cli.kernel_page import page
    from tlora_fx.codegen.compiled_check import require_architecture

    require_architecture(spec.arch)
    console = Console(highlight=False, markup=False)
    for part in page(spec, tokens, [int(word) for word in words], gpu):
        console.print(part, soft_wrap=isinstance(part, str))


@group.command()
def check(
    kinds: Annotated[list[str] | None, typer.Argument(help="Kinds; all where none.")] = None,
    arch: Annotated[list[int] | None, typer.Option(help="80, 90 and 100 where none.")] = None,
    extent: Annotated[
        Literal["few", "forms", "everything"],
        typer.Option("--extent", help="Two specs a kind, all forms, or all forms and shapes."),
    ] = "forms",
) -> None:
    """Compile kernels without a GPU and look for spills, overflows and missing instructions.

    Exits with 1 where a kernel has a fault.
    """
    from tlora_fx.codegen.compiled_check import require_architecture, specs_of

    for one in arch or ():
        require_architecture(one)
    if wrong := [kind for kind in kinds or () if kind not in KINDS]:
        raise UnknownKernel(
            f"there is no kernel kind {wrong[0]!r}",
            nearest=nearest(wrong[0], KINDS),
            help="`tlora-fx kernels list` lists them",
        )
    specs = [spec for spec in specs_of(extent) if not kinds or spec.kind in kinds]
    broken = 0
    console = Console()
    for spec in specs:
        for one in arch or CHECKED_ARCHITECTURES:
            line, good = _checked(spec, one)
            broken += not good
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(specs)} specs, {broken} faults", highlight=False)
    if broken:
        raise typer.Exit(1)


def _checked(spec: KernelSpec, arch: int) -> tuple[str, bool]:
    from tlora_fx.codegen.compiled_check import faults, resources
    from tlora_fx.codegen.kernels import stem

    name = stem(spec).removesuffix(f"_sm{spec.arch}")
    head = f"{name:<48} sm_{arch:<4}"
    try:
        found = resources(spec, arch)
    except KernelToolMissing:
        raise
    except TloraError as error:
        return f"{head} {error}", False
    wrong = faults(spec, found)
    told = f"{found.registers:>4} registers {found.shared_bytes:>7} shared {found.total:>6} instr."
    return f"{head}{told}  {'; '.join(wrong) or 'ok'}", not wrong


@group.command()
def tune(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="Linears as INxOUT, such as 4096x14336.")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a call.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="Ranks of the jobs.")] = None,
    dtype: Annotated[Literal["bf16", "fp16"], typer.Option(help="Of the base.")] = "bf16",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The table; else in the cache folder.")
    ] = None,
    budget_seconds: Annotated[int, typer.Option(help="Stop after so long.")] = 540,
    ship: Annotated[
        bool, typer.Option("--ship", help="Write into this package, for all users of this GPU.")
    ] = False,
) -> None:
    """Time plans and tiles on this machine's GPU and keep the best in a table."""
    given = [_shape(text) for text in shapes] if shapes else None
    from tlora_fx.ops.kernels import tune as tuning

    tuning.tune(
        given,
        tokens,
        ranks,
        "bfloat16" if dtype == "bf16" else "float16",
        output,
        budget_seconds,
        ship=ship,
    )


def _shape(text: str) -> tuple[int, int]:
    inner, cross, outer = text.partition("x")
    if not cross or not inner.isdecimal() or not outer.isdecimal():
        raise typer.BadParameter(f"a shape is written INxOUT, such as 4096x14336; not {text!r}")
    return int(inner), int(outer)
