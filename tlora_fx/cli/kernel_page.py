"""What `tlora-fx kernels explain` says of one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, get_args

from rich.table import Table

from tlora_fx.codegen.compiled_check import Resources, faults, resources
from tlora_fx.codegen.kernels import build, emitter
from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.errors import KernelNotCompilable, KernelToolMissing

if TYPE_CHECKING:
    from tlora_fx.ops.kernels.support import Site

# Measured on an H200: a copy, and a bf16 matrix product.
H200_BYTES_PER_SECOND, H200_FLOP_PER_SECOND = 4.27e12, 752e12


def page(spec: KernelSpec, tokens: int, ranks: list[int], gpu: str) -> Iterator[str | Table]:
    """Spec, tile and why, plan, costs, and what it compiles to.

    tokens, ranks   of the call that is priced; its jobs have equal lengths
    gpu             whose measurements are looked up
    """
    site = _site(spec, ranks)
    tile, why = _tile(spec, site, tokens, gpu)
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
        found = resources(generated.spec)
    except (KernelToolMissing, KernelNotCompilable) as error:
        yield str(error)
        return
    yield _resource_table(found)
    for fault in faults(generated.spec, found):
        yield f"fault          {fault}"


def _site(spec: KernelSpec, ranks: list[int]) -> Site:
    """The linear as the plans' selector sees it."""
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


def _tile(spec: KernelSpec, site: Site, tokens: int, gpu: str) -> tuple[Tile | None, str]:
    from tlora_fx.ops.kernels import select as selector

    if spec.tile is not None:
        return spec.tile, "given with --tile"
    if measured := selector.tile_for(spec.kind, site, tokens, gpu):
        return measured, f"measured on {gpu}"
    rule = " ".join((emitter(spec.kind).default_tile.__doc__ or "").split())
    return None, f"by the rule, for nothing like it was measured on {gpu}: {rule}"


def _plan(spec: KernelSpec, site: Site, tokens: int, gpu: str) -> Iterator[str]:
    """The plan that a site with this kernel takes, and where that comes from."""
    from tlora_fx.ops.kernels import select as selector

    if spec.kind not in get_args(selector.Direction):
        return
    direction: selector.Direction = "forward" if spec.kind == "forward" else "input_gradient"
    choice = selector.choose(direction, site, tokens, room=False, gpu=gpu)
    yield f"plan  {choice.plan}, by {'the rule' if choice.source == 'rule' else choice.source}"
    with_room = selector.able_plans(direction, site, room=True)
    without = selector.able_plans(direction, site, room=False)
    for plan, seconds in selector.estimates(direction, site, tokens).items():
        bar = "" if plan in without else ", where weight and input have room; not here"
        if plan not in with_room:
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


def _resource_table(found: Resources) -> Table:
    table = Table("compiled", f"for sm_{found.arch}", box=None, pad_edge=False)
    rows = {
        "registers": found.registers,
        "spills": found.spills,
        "shared bytes": found.shared_bytes,
        "instructions": found.total,
        "tensor core": found.tensor_core,
        "bulk loads": found.bulk_loads,
        "16-byte loads": found.wide_loads,
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    return table
