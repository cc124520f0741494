"""`tlora-fx kernels`: look at generated kernels, and tune them on a GPU."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from tlora_fx.cli.arguments.options import command_group, option, takes_options
from tlora_fx.codegen.kernels import build, emitter, expand, first_line, shrink
from tlora_fx.codegen.loading import kernel_folder
from tlora_fx.codegen.spec import KINDS, KernelSpec, Tile
from tlora_fx.errors import KernelSpecError

if TYPE_CHECKING:
    from tlora_fx.ops.kernels.support import Site


#: Compute capabilities that there are, as far back as Triton compiles for.
ARCHITECTURES = (75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options that name one kernel, for the commands that take one."""

    kind: Annotated[str, typer.Argument(help="Kind of kernel; `tlora-fx kernels list` lists them.")]
    inner: int = option(..., "Input features of the frozen linear layer.", "--in")
    outer: int = option(..., "Output features of the frozen linear layer.", "--out")
    dtype: str = option("bf16", "Dtype of inputs and frozen weights: bf16, fp16, fp32 or fp64.")
    adapter_dtype: str = option("fp32", "Dtype of the stored adapters: bf16, fp16, fp32 or fp64.")
    rank_block: int = option(16, "LoRA ranks are padded to a multiple of this power of two.")
    dropout: bool = option(False, "Generate the kernel for jobs with dropout.")
    bias: bool = option(False, "The frozen linear layer has a bias.")
    weight_layout: str = option(
        "out_in", "Layout of the frozen weights: out_in, or in_out as in GPT-2's Conv1D."
    )
    accumulate: bool = option(False, "Add the result to the output instead of overwriting it.")
    sites: int = option(1, "Number of linear layers that share the input.")
    beside: str = option(
        "",
        "With --sites, output features of the second and later linear layers, such as 1024,1024; "
        "if not given, all are as wide as the first.",
    )
    extend: str = option(
        "",
        "For the concat-K plan: write behind the existing rows (tail), or copy those rows too "
        "(copy).",
    )
    gated: str = option(
        "", "Compute the input from a gated activation in the kernel: silu or gelu_tanh."
    )
    whole: bool = option(
        False, "No job has more tokens than one chunk, so gradients need no partial sums."
    )
    job_capacity: int = option(64, "Maximum jobs in one row; a power of two.")
    arch: int = option(90, "CUDA compute capability to compile for: 80, 90 or 100.")
    tile: str | None = option(
        None,
        "Tile sizes as rows,columns,depth,warps,stages,chunk,slab; if not given, the generator "
        "chooses.",
    )

    def spec(self) -> KernelSpec:
        """Spec that the options name; raises UnknownKernel, KernelSpecError."""
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


def require_architecture(arch: int) -> None:
    """Refuse a compute capability that no GPU has, before a compiler fails on it.

    raises    KernelSpecError
    """
    if arch not in ARCHITECTURES:
        raise KernelSpecError(
            f"no GPU has compute capability {arch}",
            expected=", ".join(map(str, ARCHITECTURES)),
            found=arch,
            help="say --arch 80 for an A100, 90 for an H100 or H200, 100 for a B200",
        )


group = command_group("List, show, explain and tune generated GPU kernels.")


@group.command("list")
def list_kinds() -> None:
    """List the kinds of GPU kernels, those of packages, and the cached generated files."""
    from tlora_fx.ops.kernels.templates import plugin_templates

    table = Table("kind", "what it does", box=None, pad_edge=False)
    for kind in KINDS:
        table.add_row(kind, first_line(emitter(kind).__doc__))
    for plugin in plugin_templates():
        told = first_line(inspect.getdoc(plugin.found)) if plugin.found else plugin.broken
        state = "" if plugin.found else "BROKEN: "
        table.add_row(plugin.name, f"{state}{told}  ({plugin.package})")
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
    """Print the generated source of one kernel."""
    typer.echo(build(kernel.spec()).text, nl=False)


@group.command()
@takes_options
def package(
    name: Annotated[str, typer.Argument(help="Kernel of a package; `kernels list` lists them.")],
    values: Annotated[
        list[str] | None, typer.Argument(help="Its fields, as inner=4096 dtype=bfloat16.")
    ] = None,
    tune: int = option(
        0,
        "Time its tiles on this machine's GPU at so many tokens, and save the fastest; 0: print "
        "its source instead.",
        min=0,
    ),
    output: Path | None = option(
        None, "File for the table of --tune; in your cache folder if not given.", "-o", "--output"
    ),
) -> None:
    """Print the generated source of a kernel that a package brings, or tune it."""
    from tlora_fx.ops.kernels.templates import kernel_text, template_of, tune_kernel
    from tlora_fx.ops.kernels.tune import gpu_device

    pairs = [word.partition("=") for word in values or ()]
    if wrong := [key + sign for key, sign, _ in pairs if not sign]:
        raise typer.BadParameter(f"write fields as NAME=VALUE, not {wrong[0]!r}")
    template = template_of(name, {key: value for key, _, value in pairs})
    if not tune:
        typer.echo(kernel_text(template).text, nl=False)
        return
    path, times = tune_kernel(template, tune, gpu_device(), output)
    for tile, microseconds in sorted(times.items(), key=lambda pair: pair[1]):
        typer.echo(f"{microseconds:10.1f} µs  {tile}")
    typer.echo(path)


@group.command()
@takes_options
def repro(
    kernel: KernelOptions,
    tokens: int = option(256, "Number of tokens in the row.", min=1),
    ranks: str = option("4,8,16", "LoRA ranks of the jobs in the row."),
) -> None:
    """Print a script with one kernel's code that compares it with float64.

    The script draws a site and a row, runs them forward and backward with the kernel in the script,
    and compares all results with PyTorch in float64. It exits with 0 if they agree, 1 if not, and 2
    if the site does not launch this kernel. Edit the kernel in it. Without a GPU, run it with
    TLORA_FX_KERNELS=interpret and TRITON_INTERPRET=1.
    """
    from tlora_fx.testing.kernels import repro_script

    typer.echo(repro_script(kernel.spec(), tokens, _ranks(ranks)), nl=False)


def _ranks(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words) or not any(map(int, words)):
        raise typer.BadParameter(f"--ranks are numbers, such as 4,8,16; not {text!r}")
    return [int(word) for word in words]


@group.command()
@takes_options
def explain(
    kernel: KernelOptions,
    tokens: int = option(8192, "Number of tokens in the call to estimate.", min=1),
    ranks: str = option(
        "16,16,16,16", "LoRA ranks of the jobs in that call; each job has equally many tokens."
    ),
    gpu: str = option("NVIDIA H200", "GPU whose measured tile tables are used."),
) -> None:
    """Explain how a kernel divides its work, and why.

    Prints the tile sizes, the plan of a site, and why they were chosen; and the resources of the
    compiled kernel. Needs no GPU: Triton compiles the kernel for --arch, if it is installed.
    """
    spec, ranks_of = kernel.spec(), _ranks(ranks)
    require_architecture(spec.arch)
    console = Console(highlight=False, markup=False)
    for part in page(spec, tokens, ranks_of, gpu):
        console.print(part, soft_wrap=isinstance(part, str))


@group.command()
@takes_options
def tune(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Linear layers to tune for, as INxOUT, such as 4096x14336; those of Llama-3-8B "
            "if none is given."
        ),
    ] = None,
    tokens: list[int] | None = option(None, "Number of tokens in a call; repeatable."),
    ranks: list[int] | None = option(None, "LoRA rank of a job; repeatable, once for each job."),
    dtype: Literal["bf16", "fp16"] = option("bf16", "Dtype of the base model: bf16 or fp16."),
    output: Path | None = option(
        None, "File for the table of results; in your cache folder if not given.", "-o", "--output"
    ),
    budget_seconds: int = option(540, "Seconds after which no new measurement is begun."),
    ship: bool = option(
        False, "Write the table into the installed package, for all users of this GPU."
    ),
    plans_only: bool = option(
        False, "Measure only plans, with the tile sizes that tables already hold."
    ),
) -> None:
    """Measure kernels on this machine's GPU and save the best choices.

    Measures execution plans and tile sizes, and adds the fastest to a table.
    """
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


def page(spec: KernelSpec, tokens: int, ranks: list[int], gpu: str) -> Iterator[str | Table]:
    """Spec, tile and why, and plan.

    tokens, ranks   of a call; its jobs have equal lengths
    """
    site = _site(spec, ranks)
    spec = replace(spec, rank_block=site.rank_block)
    tile, why = _tile_and_reason(spec, site, tokens, gpu)
    generated = build(replace(spec, tile=tile))
    yield generated.spec.text()
    yield f"file  {generated.name}.py\n"
    yield f"tile  {why}"
    yield _tile_table(generated.spec)
    yield from _plan(spec, site, tokens, gpu)


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


def _tile_and_reason(spec: KernelSpec, site: Site, tokens: int, gpu: str) -> tuple[Tile, str]:
    from tlora_fx.ops.kernels import select

    if spec.tile is not None:
        return spec.tile, "given with --tile"
    if measured := select.tile_for(spec.kind, site, tokens, gpu, spec.sites):
        return measured, f"measured on {gpu}"
    tile, rule = _tile_by_rule(spec, site, tokens)
    return tile, f"by the rule, for nothing like it was measured on {gpu}: {' '.join(rule.split())}"


def _tile_by_rule(spec: KernelSpec, site: Site, tokens: int) -> tuple[Tile, str]:
    """The tile of a launch for so many tokens where tables have none, and the rule in words."""
    if spec.kind == "shrink":
        return shrink.tile_for(spec, tokens, site.width), shrink.tile_for.__doc__ or ""
    if spec.kind == "expand":
        return expand.tile_for(spec, tokens), expand.tile_for.__doc__ or ""
    rule = emitter(spec.kind).default_tile
    return rule(spec), rule.__doc__ or ""


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
    measured = select.plan_times(gpu, direction, site, select.bucket(tokens))
    counted = select.measured_costs(measured, direction, site, tokens, without)
    for plan, seconds in select.estimates(direction, site, tokens).items():
        bar = "" if plan in without else ", where weight and input are extended; not here"
        if plan not in with_extended:
            bar = ", but not with dropout"
        told, found = f"estimated at {seconds * 1e6:,.0f} µs", measured.get(plan)
        if found is not None:
            told = f"measured at {found.microseconds:,.0f} µs"
        cost = counted.get(plan)
        if found is not None and cost is not None and cost != found.microseconds:
            bar = f", taken for {cost:,.0f} µs in a round{bar}"
        yield f"      {plan:<8} {told} with the frozen product{bar}"


def _tile_table(spec: KernelSpec) -> Table:
    table = Table("tile", "", box=None, pad_edge=False, show_header=False)
    for field in fields(spec.cut):
        if value := getattr(spec.cut, field.name):
            table.add_row(f"      {field.name}", str(value))
    return table
