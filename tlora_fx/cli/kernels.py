"""`tlora-fx kernels`: look at generated kernels, compile them without a GPU, tune them on one."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from tlora_fx.cli.options import command_group, takes_options
from tlora_fx.codegen.compiled_check import (
    Resources,
    faults,
    require_architecture,
    resources,
    specs_of,
)
from tlora_fx.codegen.kernels import build, emitter, first_line, stem
from tlora_fx.codegen.loading import kernel_folder
from tlora_fx.codegen.spec import KINDS, KernelSpec, Tile
from tlora_fx.errors import (
    KernelNotCompilable,
    KernelSpecError,
    KernelToolMissing,
    TloraError,
    UnknownKernel,
    nearest,
)

if TYPE_CHECKING:
    from tlora_fx.ops.kernels.support import Site


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options that name one kernel, for the commands that take one."""

    kind: Annotated[str, typer.Argument(help="One of `tlora-fx kernels list`.")]
    inner: Annotated[int, typer.Option("--in", help="Inputs of the frozen linear.")]
    outer: Annotated[int, typer.Option("--out", help="Its outputs.")]
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16"
    adapter_dtype: Annotated[str, typer.Option(help="Of the stored adapters.")] = "fp32"
    rank_block: Annotated[int, typer.Option(help="Ranks are padded to a multiple.")] = 16
    dropout: Annotated[bool, typer.Option("--dropout", help="Some job drops.")] = False
    bias: Annotated[bool, typer.Option("--bias", help="The linear has a bias.")] = False
    weight_layout: Annotated[str, typer.Option(help="out_in, or in_out as in Conv1D.")] = "out_in"
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Add to what the output holds.")
    ] = False
    sites: Annotated[int, typer.Option(help="Linears that share the input.")] = 1
    beside: Annotated[str, typer.Option(help="Outputs of the further ones, such as 1024,1024.")] = (
        ""
    )
    extend: Annotated[str, typer.Option(help="For concat-K: tail or copy.")] = ""
    gated: Annotated[
        str, typer.Option(help="Activation of a gate that makes x: silu or gelu_tanh.")
    ] = ""
    whole: Annotated[bool, typer.Option("--whole", help="No job has more than a chunk.")] = False
    job_capacity: Annotated[int, typer.Option(help="Most jobs of a row.")] = 64
    arch: Annotated[int, typer.Option(help="Compute capability: 80, 90, 100.")] = 90
    tile: Annotated[
        str | None,
        typer.Option(help="rows,columns,depth,warps,stages,chunk,slab instead of the rule's."),
    ] = None

    def spec(self) -> KernelSpec:
        """What they name; raises UnknownKernel, KernelSpecError."""
        words = {field.name: getattr(self, field.name) for field in fields(self)}
        words |= {name: _SHORT.get(words[name], words[name]) for name in ("dtype", "adapter_dtype")}
        return KernelSpec(**words | {"tile": _tile(self.tile), "beside": _widths(self.beside)})


def _widths(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() for word in words):
        raise KernelSpecError(
            "--beside are numbers with commas between", expected="1024,1024", found=text
        )
    return tuple(map(int, words))


def _tile(text: str | None) -> Tile | None:
    if text is None:
        return None
    names = [field.name for field in fields(Tile)]
    words = text.split(",")
    if not 5 <= len(words) <= len(names) or not all(word.strip().isdecimal() for word in words):
        raise KernelSpecError(
            "a tile is five to seven numbers", expected=",".join(names), found=text
        )
    return Tile(*(int(word) for word in words))


CHECKED_ARCHITECTURES = (80, 90, 100)

group = command_group("List, show, explain, check and tune the generated kernels.")


@group.command("list")
def list_kinds() -> None:
    """List the kinds of kernels, and the generated files in the cache."""
    table = Table("kind", "what it does", box=None, pad_edge=False)
    for kind in KINDS:
        table.add_row(kind, first_line(emitter(kind).__doc__))
    console = Console()
    console.print(table)
    folder = kernel_folder()
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
@takes_options
def show(kernel: KernelOptions) -> None:
    """Print the source of one kernel."""
    typer.echo(build(kernel.spec()).text, nl=False)


@group.command()
@takes_options
def explain(
    kernel: KernelOptions,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a call.")] = 8192,
    ranks: Annotated[str, typer.Option(help="Ranks of its jobs, equally long.")] = "16,16,16,16",
    gpu: Annotated[str, typer.Option(help="Whose measurements decide.")] = "NVIDIA H200",
) -> None:
    """Say how a kernel cuts its work and why, what a call costs, and what it compiles to.

    Compiles for --arch without a GPU, where Triton is installed.
    """
    spec, words = kernel.spec(), ranks.split(",")
    if not all(word.strip().isdecimal() for word in words) or not any(map(int, words)):
        raise typer.BadParameter(f"--ranks are numbers, such as 4,8,16; not {ranks!r}")
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
    for number in arch or ():
        require_architecture(number)
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
        for number in arch or CHECKED_ARCHITECTURES:
            line, good = _checked(spec, number)
            broken += not good
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(specs)} specs, {broken} faults", highlight=False)
    if broken:
        raise typer.Exit(1)


def _checked(spec: KernelSpec, arch: int) -> tuple[str, bool]:
    name = stem(spec).removesuffix(f"_sm{spec.arch}")
    head = f"{name:<48} sm_{arch:<4}"
    try:
        used = resources(spec, arch)
    except KernelToolMissing:
        raise
    except TloraError as error:
        return f"{head} {error}", False
    wrong = faults(spec, used)
    sizes = f"{used.registers:>4} registers {used.shared_bytes:>7} shared {used.total:>6} instr."
    return f"{head}{sizes}  {'; '.join(wrong) or 'ok'}", not wrong


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
    plans_only: Annotated[
        bool, typer.Option("--plans-only", help="Keep the tiles that tables have; time plans.")
    ] = False,
) -> None:
    """Time plans and tiles on this machine's GPU and add the best to a table."""
    linears = [_shape(text) for text in shapes] if shapes else None
    from tlora_fx.ops.kernels.tune import tune as measure

    measure(
        linears,
        tokens,
        ranks,
        "bfloat16" if dtype == "bf16" else "float16",
        output,
        budget_seconds,
        ship=ship,
        plans_only=plans_only,
    )


def _shape(text: str) -> tuple[int, int]:
    inner, cross, outer = text.partition("x")
    if not cross or not inner.isdecimal() or not outer.isdecimal():
        raise typer.BadParameter(f"a shape is written INxOUT, such as 4096x14336; not {text!r}")
    return int(inner), int(outer)


# Measured on an H200: a copy, and a bf16 matrix product.
H200_BYTES_PER_SECOND, H200_FLOP_PER_SECOND = 4.27e12, 752e12


def page(spec: KernelSpec, tokens: int, ranks: list[int], gpu: str) -> Iterator[str | Table]:
    """Spec, tile and why, plan, costs, and what it compiles to.

    tokens, ranks   of the call that is priced; its jobs have equal lengths
    """
    site = _site(spec, ranks)
    tile, why = _tile_and_reason(spec, site, tokens, gpu)
    generated = build(replace(spec, tile=tile))
    yield generated.spec.text()
    yield f"file  {generated.name}.py\n"
    yield f"tile  {why}"
    yield _tile_table(generated.spec)
    yield from _plan(spec, site, tokens, gpu)
    yield f"\na call with {tokens:,} tokens of {len(ranks)} jobs, equally long"
    yield _cost_table(generated.spec, tokens, ranks)
    yield ""
    try:
        used = resources(generated.spec)
    except (KernelToolMissing, KernelNotCompilable) as error:
        yield str(error)
        return
    yield _resource_table(used)
    for fault in faults(generated.spec, used):
        yield f"fault          {fault}"


def _site(spec: KernelSpec, ranks: list[int]) -> Site:
    from tlora_fx.ops.kernels.support import Site, rank_block

    block = max(spec.rank_block, rank_block(max(ranks)))
    return Site(
        inner=spec.inner,
        outer=spec.outer,
        dtype=spec.dtype,
        adapter_dtype=spec.adapter_dtype,
        rank_block=block,
        width=-(-max(ranks) // block) * block,
        rows=sum(ranks),
        layout=spec.weight_layout,
        drops=spec.dropout,
        job_capacity=spec.job_capacity,
        arch=spec.arch,
    )


def _tile_and_reason(
    spec: KernelSpec, site: Site, tokens: int, gpu: str
) -> tuple[Tile | None, str]:
    from tlora_fx.ops.kernels import select

    if spec.tile is not None:
        return spec.tile, "given with --tile"
    if measured := select.tile_for(spec.kind, site, tokens, gpu, spec.sites):
        return measured, f"measured on {gpu}"
    rule = " ".join((emitter(spec.kind).default_tile.__doc__ or "").split())
    return None, f"by the rule, for nothing like it was measured on {gpu}: {rule}"


def _plan(spec: KernelSpec, site: Site, tokens: int, gpu: str) -> Iterator[str]:
    """The plan that a site with this kernel takes, and where that comes from."""
    from tlora_fx.ops.kernels import select

    if spec.kind not in get_args(select.Direction):
        return
    direction: select.Direction = "forward" if spec.kind == "forward" else "input_gradient"
    choice = select.choose(direction, site, tokens, extended=False, gpu=gpu)
    yield f"plan  {choice.plan}, by {'the rule' if choice.source == 'rule' else choice.source}"
    with_extended = select.able_plans(direction, site, extended=True)
    without = select.able_plans(direction, site, extended=False)
    for plan, seconds in select.estimates(direction, site, tokens).items():
        bar = "" if plan in without else ", where weight and input are extended; not here"
        if plan not in with_extended:
            bar = ", but not with dropout"
        yield f"      {plan:<8} estimated at {seconds * 1e6:,.0f} µs with the frozen product{bar}"


def _tile_table(spec: KernelSpec) -> Table:
    table = Table("tile", "", box=None, pad_edge=False, show_header=False)
    for field in fields(spec.cut):
        if value := getattr(spec.cut, field.name):
            table.add_row(f"      {field.name}", str(value))
    return table


def _cost_table(spec: KernelSpec, tokens: int, ranks: list[int]) -> Table:
    kind = emitter(spec.kind)
    flop, moved = kind.cost(spec, tokens, tokens * sum(ranks) // len(ranks))
    seconds = (flop / H200_FLOP_PER_SECOND, moved / H200_BYTES_PER_SECOND)
    table = Table("", "number", "at least, on an H200", "formula", box=None, pad_edge=False)
    table.add_row("FLOP", f"{flop:,}", f"{seconds[0] * 1e6:.1f} µs", kind.flops(spec))
    table.add_row("bytes", f"{moved:,}", f"{seconds[1] * 1e6:.1f} µs", kind.bytes_moved(spec))
    return table


def _resource_table(used: Resources) -> Table:
    table = Table("compiled", f"for sm_{used.arch}", box=None, pad_edge=False)
    rows = {
        "registers": used.registers,
        "spills": used.spills,
        "shared bytes": used.shared_bytes,
        "instructions": used.total,
        "tensor core": used.tensor_core,
        "bulk loads": used.bulk_loads,
        "16-byte loads": used.wide_loads,
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    return table
