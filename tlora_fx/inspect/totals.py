"""Sums of a listing: a job's adapters, and the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tlora_fx.inspect.cost import Cost, total
from tlora_fx.inspect.meter import Meter
from tlora_fx.inspect.rows import is_branch
from tlora_fx.inspect.schema import BlockEntry, JobEntry, Totals
from tlora_fx.inspect.training import training_cost
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.model.supermodel import SuperModel


def job_entry(job: JobGraph, blocks: Iterable[BlockEntry]) -> JobEntry:
    """One job and its adapters."""
    sites = list(job.sites.values())
    adapted = [site for site in sites if site.rank]
    own = [
        (max(1, len(block.layers)), branch)
        for block in blocks
        for row in block.rows
        for branch in row.branches
        if branch.job == job.name
    ]
    return JobEntry(
        name=job.name,
        ranks=sorted({site.rank for site in adapted}),
        scalings=sorted({site.scaling for site in adapted}),
        dropouts=sorted({site.dropout for site in adapted}),
        kinds=list(dict.fromkeys(site.kind for site in sites)),
        targets=list(dict.fromkeys(site.path.rpartition(".")[2] for site in sites)),
        sites=len(sites),
        lowered=sum(layers for layers, branch in own if branch.lowered),
        parameters=round(sum(layers * branch.parameters for layers, branch in own)),
    )


def totals_of(model: SuperModel, blocks: Sequence[BlockEntry], meter: Meter) -> Totals:
    """Sums over all blocks, each as often as it runs."""
    shared, alone = _counted(model.group)
    parameters = list(model.backbone.model.parameters())
    rows = [(max(1, len(block.layers)), row) for block in blocks for row in block.rows]
    sites = [site for job in model.group.jobs for site in job.sites.values()]
    own = [(times, branch) for times, row in rows for branch in row.branches]
    cost = total(
        Cost(times * (row.flop_per_token or 0.0), times * row.flop_per_length)
        if row.flop_per_token is not None
        else Cost(unknown=(row.module,))
        for times, row in rows
    )
    training = training_cost(model.group, meter)
    return Totals(
        shared_parameters=sum(p.numel() for p in parameters),
        shared_bytes=sum(p.numel() * p.dtype.itemsize for p in parameters),
        adapter_parameters=round(sum(times * branch.parameters for times, branch in own)),
        adapter_bytes=round(sum(times * row.adapter_bytes for times, row in rows)),
        sites=len({site.path for site in sites}),
        adapters=len(sites),
        lowered=sum(times for times, branch in own if branch.lowered),
        shared_nodes=shared,
        branch_nodes=alone,
        flop_per_token=cost.flop_per_token,
        flop_per_length=cost.length,
        training_flop_per_token=None if training.unknown else round(training.token, 3),
        training_flop_per_length=None if training.unknown else round(training.length, 3),
    )


def _counted(group: GroupGraph) -> tuple[int, int]:
    """Operators that serve all jobs, and those that serve one, all layers counted."""
    counts = [0, 0]
    for times, graph in [(1, group.root)] + [
        (len(block.instances), block.graph) for block in group.blocks.values()
    ]:
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
                counts[is_branch(node)] += times
    return counts[0], counts[1]
