"""Trace and fuse as the models allow: packed rows or padded ones, layers folded or not."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from tlora_fx.config.job import Job
from tlora_fx.errors import (
    AttentionNotPackable,
    BaseNotTraceable,
    CompileError,
    LayersNotChained,
    NotFoldable,
    NotTokenParallel,
)
from tlora_fx.ir.graph import AdapterSite, Form, GroupGraph, JobGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.pipeline import Runner
from tlora_fx.tracing.adapters import idle_patterns, layer_signature
from tlora_fx.tracing.job_graph import trace_base, trace_job
from tlora_fx.tracing.layers import layer_list

log = logging.getLogger(__name__)

Fold = Literal["structures", "layers", "nothing"]
Sites = list[dict[str, AdapterSite]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Jobs that may share a base, ready to be traced.

    sites    each job's adapters by module path
    exact    every branch must carry its own numbers, because no pass lowers the plain ones
    """

    jobs: list[Job]
    backbone: Backbone
    sites: Sites
    exact: bool = False


def fuse(given: Prepared, runner: Runner) -> GroupGraph:
    """Run a pipeline over the jobs: packed where the base allows it, else padded.

    raises    CompileError
    """
    asked = given.backbone.spec.attention
    forms: tuple[Form, ...] = ("packed", "batch") if asked == "auto" else (asked,)
    if given.backbone.config is None and asked == "auto":
        forms = ("batch",)
    refused: CompileError | None = None
    for form in forms:
        try:
            group = _fuse_folded(given, runner, form)
        except (AttentionNotPackable, NotTokenParallel, BaseNotTraceable) as error:
            if refused is not None:
                error.add_note(f"and before that, in packed form:\n{refused}")
            if form == forms[-1]:
                raise
            refused = error
        else:
            if refused is not None:
                group.notes.insert(0, ("trace", f"rows are padded, not packed: {refused.what}"))
                group.notes.insert(1, ("trace", str(refused)))
            for job, sites in zip(given.jobs, given.sites, strict=True):
                group.notes.extend(("trace", told) for told in idle_patterns(job, sites))
            return group
    raise AssertionError("no form was tried")


def _fuse_folded(given: Prepared, runner: Runner, form: Form) -> GroupGraph:
    """Fold as far as the model allows.

    Equal structures first, then equal numbers too, then each layer by itself, then no layers.
    """
    ladder: list[tuple[Fold, bool]] = [
        ("structures", False), ("structures", True), ("layers", True), ("nothing", True)
    ]  # fmt: skip
    reasons: list[str] = []
    chained = True
    for fold, exact in ladder:
        if given.exact and not exact:
            continue
        if not chained and fold != "nothing":
            continue
        try:
            group = _fuse_once(given, runner, form, fold, exact)
        except NotFoldable as error:
            log.info("not folded (fold=%s, exact=%s): %s", fold, exact, error)
            reasons.append(error.render())
            chained = not isinstance(error, LayersNotChained)
            last = error
        else:
            group.notes.extend(("fold-layers", reason) for reason in reasons)
            return group
    raise last


def _fuse_once(given: Prepared, runner: Runner, form: Form, fold: Fold, exact: bool) -> GroupGraph:
    """Trace and fuse at one step of the ladder.

    exact    every branch carries its own numbers; False: only those of jobs that train more than
             plain LoRA, whose branches run as they are
    """
    backbone = given.backbone
    runner.start()
    base = trace_base(backbone, form, fold == "structures")
    _run_job(runner, base, fold)
    known: dict[Hashable, JobGraph] = {}
    graphs = []
    for job, own in zip(given.jobs, given.sites, strict=True):
        as_it_is = exact or any(site.kind != "lora" for site in own.values())
        key = _structure(job, backbone, own, as_it_is)
        if key not in known:
            known[key] = trace_job(job, backbone, own, form, fold == "structures", as_it_is)
            _run_job(runner, known[key], fold)
            graphs.append(known[key])
        else:
            graphs.append(known[key].for_job(job.name, own))
    group = GroupGraph(base, graphs, exact, given.jobs[0].adapter_compute)
    for graph in (base, *known.values()):
        group.notes.extend(graph.notes)
    runner.run_group(group)
    return group


def _run_job(runner: Runner, graph: JobGraph, fold: Fold) -> None:
    if fold == "nothing":
        graph.plan = None
    runner.run_job(graph)


def _structure(
    job: Job, backbone: Backbone, sites: dict[str, AdapterSite], exact: bool
) -> Hashable:
    """What two jobs must have in common to share one traced graph."""
    bias = str(job.lora_config().bias)
    parts = [layer_signature(sites, layer, bias, exact) for layer in layer_list(backbone.model)]
    return (exact, job.adapter_dtype, layer_signature(sites, "", bias, exact), *parts)
