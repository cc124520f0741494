"""Compile jobs: trace, run the passes, and hang the fused graph into a module."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Literal

import torch

import tlora_fx.ops
import tlora_fx.passes
from tlora_fx.backbone import Backbone, load_backbone
from tlora_fx.errors import (
    AttentionNotPackable,
    BaseNotTraceable,
    BaseRefused,
    CompileError,
    JobsDiffer,
    LayersNotChained,
    NotFoldable,
    NotTokenParallel,
)
from tlora_fx.graph import AdapterSite, Form, GroupGraph, JobGraph
from tlora_fx.job import Job
from tlora_fx.jobfile import JobFile, load_job_file
from tlora_fx.pipeline import Pipeline, parse_pipeline
from tlora_fx.supermodel import SuperModel
from tlora_fx.tracing.adapters import layer_signature, resolve_sites
from tlora_fx.tracing.job_graph import trace_base, trace_job
from tlora_fx.tracing.layers import layer_list
from tlora_fx.tracing.rope import prepare_rope

log = logging.getLogger(__name__)

DEFAULT_PIPELINE = (
    "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone,lower-adapters,"
    "key-dropouts,lower-loss"
)
Fold = Literal["structures", "layers", "nothing"]
Jobs = JobFile | Sequence[Job] | Job | str | Path


def compile(
    jobs: Jobs, pipeline: str | Pipeline | None = None, *, dropout: bool = True
) -> SuperModel:
    """Fuse jobs on one base into one Shared Super-Model, without weights.

    jobs       a job file, its path, or jobs
    pipeline   passes to run instead of the default
    dropout    False: every rate is 0, the base's too
    raises     TloraError, whose subclasses name the job, the node and the line of model code
    """
    given = as_jobs(jobs)
    _demand_one_base(given)
    if not dropout:
        given = [_without_dropout(job) for job in given]
    passes = _pipeline(pipeline or default_pipeline(given[0]))
    backbone = load_backbone(given[0].base, dropout=dropout)
    _refuse_auxiliary_losses(backbone)
    _refuse_adapter_dtype(given[0], backbone)
    prepare_rope(backbone)
    sites = [resolve_sites(job, backbone) for job in given]
    group = _compile_forms(given, backbone, sites, passes)
    return SuperModel(group, backbone, given)


def trace(job: Job) -> JobGraph:
    """One job's graph over one row, cleaned, tagged and folded."""
    backbone = load_backbone(job.base)
    prepare_rope(backbone)
    sites = resolve_sites(job, backbone)
    form: Form = "batch" if job.base.attention == "batch" else "packed"
    graph = trace_job(job, backbone, sites, form, exact=True)
    _pipeline(None).run_job(graph)
    return graph


def as_jobs(jobs: Jobs) -> list[Job]:
    """Jobs from whatever names them."""
    if isinstance(jobs, (str, Path)):
        jobs = load_job_file(jobs)
    if isinstance(jobs, JobFile):
        return list(jobs.jobs)
    return [jobs] if isinstance(jobs, Job) else list(jobs)


def default_pipeline(job: Job) -> str:
    """The passes that run when none are named; adapters multiply as the job file says."""
    if job.adapter_compute == "base":
        return DEFAULT_PIPELINE
    return DEFAULT_PIPELINE.replace("lower-adapters", "lower-adapters{compute=float32}")


def _without_dropout(job: Job) -> Job:
    fields = {**job.lora_fields, "lora_dropout": 0.0}
    return job.model_copy(update={"lora": fields, "adapter": None})


def find_passes() -> None:
    """Make all of our own passes known to pipelines by importing their files."""
    for module in pkgutil.iter_modules(tlora_fx.passes.__path__):
        importlib.import_module(f"tlora_fx.passes.{module.name}")


def _pipeline(given: str | Pipeline | None) -> Pipeline:
    find_passes()
    return given if isinstance(given, Pipeline) else parse_pipeline(given or DEFAULT_PIPELINE)


def _demand_one_base(jobs: Sequence[Job]) -> None:
    if not jobs:
        raise JobsDiffer("there is no job to compile", help="give at least one job")
    first = jobs[0]
    names = [job.name for job in jobs]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise JobsDiffer("two jobs have one name", found=", ".join(doubled), help="rename one")
    for job in jobs[1:]:
        for field in ("base", "adapter_dtype", "adapter_compute"):
            one, two = getattr(first, field), getattr(job, field)
            if one != two:
                raise JobsDiffer(
                    f"jobs '{first.name}' and '{job.name}' cannot share a backbone",
                    field=field,
                    expected=f"{one} (job {first.name})",
                    found=f"{two} (job {job.name})",
                    help="load both with one base and dtype, or put them into different groups",
                )


def _refuse_adapter_dtype(job: Job, backbone: Backbone) -> None:
    if job.adapter_dtype == "bfloat16" and backbone.dtype is not torch.bfloat16:
        raise JobsDiffer(
            "bfloat16 adapters need a bfloat16 base",
            expected="adapter_dtype: float32",
            found=f"adapter_dtype: bfloat16 on a base in {backbone.dtype}",
            help="leave adapter_dtype out, or load the base in bfloat16",
        )


def _refuse_auxiliary_losses(backbone: Backbone) -> None:
    if getattr(backbone.config, "output_router_logits", False):
        raise BaseRefused(
            "the base adds a loss of its own (router_aux_loss) to every job's loss",
            found="output_router_logits: true in the base's config",
            help="set output_router_logits to false in config.json",
        )


def _compile_forms(
    jobs: Sequence[Job],
    backbone: Backbone,
    sites: list[dict[str, AdapterSite]],
    passes: Pipeline,
) -> GroupGraph:
    """Packed form where the base allows it, else batch form with the reason in the report."""
    asked = backbone.spec.attention
    forms: tuple[Form, ...] = ("packed", "batch") if asked == "auto" else (asked,)
    if backbone.config is None and asked == "auto":
        forms = ("batch",)
    refused: CompileError | None = None
    for form in forms:
        try:
            group = _compile_folded(jobs, backbone, sites, passes, form)
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
            return group
    raise AssertionError("no form was tried")


def _compile_folded(
    jobs: Sequence[Job],
    backbone: Backbone,
    sites: list[dict[str, AdapterSite]],
    passes: Pipeline,
    form: Form,
) -> GroupGraph:
    """Fold as far as the model allows.

    Equal structures first, then equal numbers too, then each layer by itself, then no layers.
    """
    ladder: list[tuple[Fold, bool]] = [
        ("structures", False), ("structures", True), ("layers", True), ("nothing", True)
    ]  # fmt: skip
    reasons: list[str] = []
    chained = True
    for fold, exact in ladder:
        if not chained and fold != "nothing":
            continue
        try:
            group = _compile_once(jobs, backbone, sites, passes, form, fold, exact)
        except NotFoldable as error:
            log.info("not folded (fold=%s, exact=%s): %s", fold, exact, error)
            reasons.append(error.render())
            chained = not isinstance(error, LayersNotChained)
            last = error
        else:
            group.notes.extend(("fold-layers", reason) for reason in reasons)
            return group
    raise last


def _compile_once(
    jobs: Sequence[Job],
    backbone: Backbone,
    sites: list[dict[str, AdapterSite]],
    passes: Pipeline,
    form: Form,
    fold: Fold,
    exact: bool,
) -> GroupGraph:
    """Trace and fuse at one step of the ladder.

    exact    every branch carries its own numbers; False: only those of jobs that train more than
             plain LoRA, whose branches run as they are
    """
    base = trace_base(backbone, form, fold == "structures")
    _run_job(passes, base, fold)
    known: dict[Hashable, JobGraph] = {}
    graphs = []
    for job, own in zip(jobs, sites, strict=True):
        as_it_is = exact or any(site.kind != "lora" for site in own.values())
        key = _structure(job, backbone, own, as_it_is)
        if key not in known:
            known[key] = trace_job(job, backbone, own, form, fold == "structures", as_it_is)
            _run_job(passes, known[key], fold)
            graphs.append(known[key])
        else:
            graphs.append(known[key].for_job(job.name, own))
    group = GroupGraph(base, graphs, exact)
    for graph in (base, *known.values()):
        group.notes.extend(graph.notes)
    passes.run_group(group)
    return group


def _run_job(passes: Pipeline, graph: JobGraph, fold: Fold) -> None:
    if fold == "nothing":
        graph.plan = None
    passes.run_job(graph)


def _structure(
    job: Job, backbone: Backbone, sites: dict[str, AdapterSite], exact: bool
) -> Hashable:
    """What two jobs must have in common to share one traced graph."""
    bias = str(job.lora_config().bias)
    parts = [layer_signature(sites, layer, bias, exact) for layer in layer_list(backbone.model)]
    return (exact, job.adapter_dtype, layer_signature(sites, "", bias, exact), *parts)
