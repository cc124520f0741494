"""Copies of graphs as a pass found them, and which of their layers are run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from tlora_fx.ir.graph import HEAD, LOSS, Block, GroupGraph, JobGraph, copy_graph


def copy_state(graphs: JobGraph | GroupGraph) -> JobGraph | GroupGraph:
    """A copy that later passes leave alone; tensors are shared with the original."""
    if isinstance(graphs, JobGraph):
        return _copy_job(graphs, {})
    known: dict[int, tuple[fx.Graph, dict[str, Block]]] = {}
    if graphs.fused:
        base, jobs = graphs.base, [replace(job, sites=dict(job.sites)) for job in graphs.jobs]
    else:
        base = _copy_job(graphs.base, known)
        jobs = [_copy_job(job, known) for job in graphs.jobs]
    return replace(
        graphs,
        base=base,
        jobs=jobs,
        root=copy_graph(graphs.root),
        blocks=_copy_blocks(graphs.blocks),
        constants=dict(graphs.constants),
        notes=list(graphs.notes),
        facts=dict(graphs.facts),
    )


def _copy_job(job: JobGraph, known: dict[int, tuple[fx.Graph, dict[str, Block]]]) -> JobGraph:
    """A job's graphs; jobs that share graphs share copies."""
    if id(job.root) not in known:
        known[id(job.root)] = (copy_graph(job.root), _copy_blocks(job.blocks))
    root, blocks = known[id(job.root)]
    return replace(
        job,
        root=root,
        blocks=blocks,
        sites=dict(job.sites),
        constants=dict(job.constants),
        facts=dict(job.facts),
    )


def _copy_blocks(blocks: dict[str, Block]) -> dict[str, Block]:
    return {name: replace(block, graph=copy_graph(block.graph)) for name, block in blocks.items()}


def layers_to_run(graphs: JobGraph | GroupGraph) -> frozenset[str]:
    """One layer of each structure, of a job's graph those that were traced; none: it runs whole."""
    if isinstance(graphs, JobGraph):
        first = {block.instances[0] for block in graphs.blocks.values()}
        traced = graphs.plan.traced() if graphs.plan is not None and graphs.blocks else ()
        return frozenset(first.union(traced))
    if graphs.fused:
        return frozenset(b.instances[0] for b in graphs.blocks.values() if b.name != HEAD)
    return frozenset(_one_of_each(graphs))


def layer_calls(graphs: JobGraph | GroupGraph) -> list[str]:
    """The layers that a root calls, in order; none before they are folded, or before fusing."""
    called = [str(node.target) for node in graphs.root.nodes if node.op == "call_module"]
    return [path for path in called if path != LOSS]


def _one_of_each(group: GroupGraph) -> Iterator[str]:
    """The first of all layers that run the same blocks in the base and in every job."""
    seen = set()
    blocks = [
        {layer: block.name for block in graph.blocks.values() for layer in block.instances}
        for graph in (group.base, *group.jobs)
    ]
    for layer in blocks[0]:
        key = tuple(by_layer.get(layer) for by_layer in blocks)
        if key not in seen:
            seen.add(key)
            yield layer
