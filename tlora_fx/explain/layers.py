"""Which layers share code, and what tells the others apart."""

from __future__ import annotations

from collections.abc import Iterator

from tlora_fx.inspect.wording import layers_label
from tlora_fx.ir.graph import AdapterSite, Block, GroupGraph, JobGraph, under


def about_layers(group: GroupGraph, module: str) -> tuple[str, ...]:
    """Which layers share a module's code, and why those that do not do not."""
    layers = group.base.plan.layers if group.base.plan else ()
    layer = next((path for path in layers if under(module, path)), "")
    noted = [
        f"not folded further: {text}" if by == "fold-layers" else text
        for by, text in group.notes
        if by == "fold-layers" or "folded" in text
    ]
    if not layer:
        outside = "it lies outside the layers, in the root" if layers else "layers are not folded"
        return (outside, *noted)
    block = next((block for block in group.blocks.values() if layer in block.instances), None)
    if block is None:
        return ("layers are not folded: each is code of its own", *noted)
    told = [f"{layers_label(block.instances)}: code of block {block.name}"]
    for other in group.blocks.values():
        if other is not block and set(other.instances) <= set(layers):
            why = "; ".join(_differences(group, block, other))
            told.append(f"{layers_label(other.instances)}: code of block {other.name}, {why}")
    return (*told, *noted)


def _differences(group: GroupGraph, mine: Block, other: Block) -> Iterator[str]:
    """What tells another structure of layers apart."""
    here, there = mine.instances[0], other.instances[0]
    found = False
    if not _same_code(group.base, here, there):
        found = True
        yield "the base computes other things there"
    for job in group.jobs:
        if not _same_code(job, here, there):
            for told in _other_sites(job, here, there):
                found = True
                yield f"job '{job.name}' {told}"
    if not found:
        yield "its code differs"


def _same_code(graph: JobGraph, here: str, there: str) -> bool:
    return any({here, there} <= set(block.instances) for block in graph.blocks.values())


def _other_sites(job: JobGraph, here: str, there: str) -> Iterator[str]:
    mine, theirs = _sites(job, here), _sites(job, there)
    ours, others = (", ".join(sorted(a - b)) for a, b in _both_ways({*mine}, {*theirs}))
    if ours:
        yield f"does not adapt {ours} there"
    if others:
        yield f"adapts {others} there, not here"
    for path in sorted(set(mine) & set(theirs)):
        one, two = _numbers(mine[path]), _numbers(theirs[path])
        if one != two:
            yield f"adapts {path} with {two} there, with {one} here"


def _both_ways(one: set[str], two: set[str]) -> Iterator[tuple[set[str], set[str]]]:
    yield one, two
    yield two, one


def _sites(job: JobGraph, layer: str) -> dict[str, AdapterSite]:
    return {path[len(layer) + 1 :]: site for path, site in job.sites.items() if under(path, layer)}


def _numbers(site: AdapterSite) -> str:
    return f"rank {site.rank}, scaling {site.scaling:g}"
