"""Compile jobs: trace, run the passes, and build a module of the fused graph."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from tlora_fx.config.job import Job
from tlora_fx.config.job_file import JobFile, load_job_file
from tlora_fx.errors import (
    AttentionNotPackable,
    BaseNotTraceable,
    CompileError,
    FusedDiffers,
    FusionError,
    GraphInvalid,
    JobError,
    JobsDiffer,
    LayersNotChained,
    NotAdmitted,
    NotFoldable,
    NotTokenParallel,
    NumericsBroken,
    OwnLossDiffers,
    PaddingSeen,
    PipelineError,
    StoppedAfter,
    TloraError,
    nearest,
)
from tlora_fx.host import collector
from tlora_fx.host.environment import LOG, log_words
from tlora_fx.host.phases import phase
from tlora_fx.host.quiet_import import without_foreign_notices
from tlora_fx.inspect.instruments import Watch, watch_from
from tlora_fx.ir.graph import (
    IDLE,
    AdapterSite,
    Form,
    GroupGraph,
    JobGraph,
    OpenSlots,
    rename_job,
    vacant,
)
from tlora_fx.model.backbone import Backbone, load_backbone
from tlora_fx.model.elastic import Resolve
from tlora_fx.model.slots import VECTOR
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.numerics import Numerics, watch_numerics
from tlora_fx.numerics.probe import probe_compiled
from tlora_fx.numerics.probe_cache import probe_once
from tlora_fx.numerics.state import copy_state
from tlora_fx.passes import find_passes
from tlora_fx.passes.token_parallel.check import CheckTokenParallel
from tlora_fx.pipeline import Instrument, Pipeline, Runner, Verify, parse_pipeline
from tlora_fx.tracing.adapters import (
    graph_structure,
    idle_adapters,
    idle_patterns,
    moved_targets,
    require_trained,
    resolve_sites,
)
from tlora_fx.tracing.layers import plan_layers
from tlora_fx.tracing.rope import prepare_rope
from tlora_fx.tracing.surroundings import undisturbed
from tlora_fx.tracing.trace_cache import (
    base_graph,
    job_graph,
    looking_once,
    require_common_loss,
    resolved_sites,
)

logger = logging.getLogger(__name__)

Fold = Literal["structures", "layers", "nothing"]
Sites = list[dict[str, AdapterSite]]
DEFAULT_PIPELINE = (
    "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone,lower-adapters,"
    "share-input,key-dropouts,lower-loss"
)
#: What one form cannot do and the other may.
NOT_IN_THIS_FORM = (
    AttentionNotPackable, BaseNotTraceable, PaddingSeen, FusedDiffers, NotTokenParallel
)  # fmt: skip
Jobs = JobFile | Sequence[Job] | Job | str | Path


@dataclass(frozen=True, slots=True)
class Prepared:
    """Jobs that may share a base, ready to be traced.

    sites    each job's adapters by module path
    exact    every branch must carry its own numbers, because no pass lowers the plain ones
    notes    what the report says of the base
    traced   graphs of the base alone, by form and whether equal layers were left out
    """

    jobs: list[Job]
    backbone: Backbone
    sites: Sites
    exact: bool = False
    notes: tuple[str, ...] = ()
    traced: dict[tuple[Form, bool], JobGraph] = field(default_factory=dict)


#: Called with what was being fused, the runner that met the error, and the error.
OnFailure = Callable[[Prepared, Runner, TloraError], None]


@undisturbed()
@phase("tracing")
@looking_once()
@collector.rarely()
@without_foreign_notices()  # this imports PEFT, which imports what it finds
def compile(
    jobs: Jobs,
    pipeline: str | Pipeline | None = None,
    *,
    open: OpenSlots | None = None,  # noqa: A002  (the group is open)
    dropout: bool = True,
    verify: Verify | None = None,
    instruments: Sequence[Instrument] = (),
    on_failure: OnFailure | None = None,
) -> SuperModel:
    """Fuse jobs on one base into one Shared Super-Model, without weights.

    jobs          a job file, its path, or jobs
    pipeline      passes to run instead of the default
    open          slots for jobs that come and go (`SuperModel.admit`, `release`)
    dropout       False: every rate is 0, the base's too
    verify        what is checked after each pass: "none", "structure" or "numerics"; by default
                  what TLORA_FX_LOG says, else "structure"
    instruments   what watches the passes, besides what TLORA_FX_LOG asks for
    on_failure    told where a pass fails, such as `partial(tools.replay.keep_replay, folder)`
    raises        TloraError, whose subclasses name the job, the node and the line of model code
    """
    watch = watch_from(log_words())
    jobs = as_jobs(jobs)
    passes = _as_asked(resolve_pipeline(pipeline), jobs)
    _require_fusing(passes)
    lowers = _lowers(passes)
    if watch.stop_after is not None:
        passes = passes.until(watch.stop_after)
    runner = _runner(passes, instruments, verify, watch)
    with runner.phase("compile"):
        given = _prepare_for(jobs, runner, dropout=dropout, lowers=lowers)
        members, resolve = given.jobs, None
        if open is not None:
            given, resolve = _opened(given, open, dropout=dropout)
        group = _fuse(given, runner, on_failure, probed=watch.stop_after is None)
        if watch.stop_after is not None:
            raise StoppedAfter(
                f"compiling stopped after pass '{watch.stop_after}'",
                found=f"stop-after in {LOG}",
                help="leave it out to build the model, or use tlora_fx.run_passes",
            )
        with runner.phase("build the module"):
            if open is None:
                return SuperModel(group, given.backbone, given.jobs)
            return _occupied(group, given, open, members, resolve)


def _opened(given: Prepared, slots: OpenSlots, *, dropout: bool) -> tuple[Prepared, Resolve]:
    """Slots in place of jobs, each a job that adapts every open site; and how to find sites."""
    if not isinstance(slots, OpenSlots):
        raise NotAdmitted(
            "open is no tlora_fx.OpenSlots",
            expected="OpenSlots(jobs=8, rank=16, rows=64), or None",
            found=repr(slots),
        )
    if slots.rank % VECTOR or slots.rows % VECTOR or not 0 < slots.rank <= slots.rows:
        raise NotAdmitted(
            f"rows and the largest rank of open slots are multiples of {VECTOR}",
            found=f"rows={slots.rows}, rank={slots.rank}",
            help=f"choose the next multiple of {VECTOR}",
        )
    targets = slots.sites if isinstance(slots.sites, str) else list(slots.sites)
    rate = 0.5 if slots.dropout and dropout else 0.0
    lora = {"r": slots.rank, "target_modules": targets, "lora_dropout": rate}
    jobs = [
        given.jobs[0].model_copy(update={"name": vacant(slot), "lora": lora, "adapter": None})
        for slot in range(slots.jobs)
    ]
    sites = resolve_sites(jobs[0], given.backbone)

    def resolve(job: Job) -> dict[str, AdapterSite]:
        return resolve_sites(job if dropout else _without_dropout(job), given.backbone)

    return replace(given, jobs=jobs, sites=[sites] * slots.jobs), resolve


def _occupied(
    group: GroupGraph,
    given: Prepared,
    slots: OpenSlots,
    members: Sequence[Job],
    resolve: Resolve | None,
) -> SuperModel:
    """An open model with its first jobs."""
    if group.exact:
        raise NotAdmitted(
            "this base cannot be open for jobs that come and go",
            base=given.backbone.title,
            reason=group.notes[-1][1] if group.notes else None,
            help="leave `open` out",
        )
    group.open = slots
    for slot in range(slots.jobs):
        rename_job(group, slot, vacant(slot), {})
    model = SuperModel(group, given.backbone, given.jobs, resolve)
    for job in members:
        model.admit(job)
    return model


@undisturbed()
def run_passes(
    jobs: Jobs,
    pipeline: str | Pipeline | None = None,
    *,
    stop_after: str | None = None,
    verify: Verify | None = None,
    instruments: Sequence[Instrument] = (),
    on_failure: OnFailure | None = None,
) -> GroupGraph:
    """Trace jobs and run passes without building a module: for those who look at graphs.

    stop_after   name of the last pass to run; where that is a job pass, the group is not fused
    returns      the group, whose base and jobs hold the graphs before fusing
    raises       TloraError as `compile` does, PipelineError for a pass that is not there

    verify, instruments, on_failure   as of `compile`
    """
    watch = watch_from(log_words())
    jobs = as_jobs(jobs)
    passes = _as_asked(resolve_pipeline(pipeline), jobs)
    lowers = _lowers(passes)
    last = stop_after or watch.stop_after
    if last is not None:
        passes = passes.until(last)
    runner = _runner(passes, instruments, verify, watch)
    with runner.phase("compile"):
        return _fuse(_prepare_for(jobs, runner, dropout=True, lowers=lowers), runner, on_failure)


def _as_asked(passes: Pipeline, jobs: Sequence[Job]) -> Pipeline:
    """The pipeline, with the passes that fields of the jobs ask for; raises PipelineError."""
    names = [item.name for item in passes.passes]
    alphas = [job.neftune_noise_alpha or 0.0 for job in jobs]
    if any(alphas) and "key-dropouts" in names:
        text = json.dumps(alphas, separators=(",", ":"))
        passes = passes.adding(f"add-noise{{alphas={text}}}@after:key-dropouts")
    return _quantising(passes, jobs)


def _quantising(passes: Pipeline, jobs: Sequence[Job]) -> Pipeline:
    """The pipeline, with the pass that stores the jobs' base in the form that they name.

    raises    PipelineError where the pipeline has such a pass already
    """
    form = jobs[0].base.quantize if jobs else None
    names = [item.name for item in passes.passes]
    if form is None or "fuse-backbone" not in names:
        return passes
    if "quantize-base" in names:
        raise PipelineError(
            "the base and the pipeline both say how the base is quantised",
            found=f"quantize: {form}, and {passes.passes[names.index('quantize-base')]}",
            help="leave out one of them",
        )
    place = "before:lower-adapters" if _lowers(passes) else "after:fuse-backbone"
    return passes.adding(f"quantize-base{{to={form} required=true}}@{place}")


def _lowers(passes: Pipeline) -> bool:
    """Whether a pass lowers plain branches."""
    return any(item.name == "lower-adapters" for item in passes.passes)


def _prepare_for(jobs: Jobs, runner: Runner, *, dropout: bool, lowers: bool) -> Prepared:
    """Prepared jobs; where no pass lowers plain branches, each must carry its own numbers."""
    with runner.phase("prepare the base"):
        return replace(prepare(jobs, dropout=dropout), exact=not lowers)


def _runner(
    passes: Pipeline, instruments: Sequence[Instrument], verify: Verify | None, watch: Watch
) -> Runner:
    """A runner with all that watches; what is asked for here counts before the environment.

    raises    PipelineError where `verify` or an instrument is something else
    """
    asked = verify or watch.verify or "structure"
    if asked not in get_args(Verify):
        raise PipelineError(
            "nobody knows what to verify",
            expected=", ".join(get_args(Verify)),
            found=f"verify={verify!r}",
            nearest=nearest(str(verify), get_args(Verify)),
        )
    listed = isinstance(instruments, Sequence)
    other = [item for item in instruments if not isinstance(item, Instrument)] if listed else []
    if other or not listed:
        found = other[0] if other else instruments
        raise PipelineError(
            "instruments are no list of instruments",
            expected="instances of tlora_fx.pipeline.Instrument, such as [Recorder()]",
            found=f"the class {found.__name__}" if isinstance(found, type) else repr(found),
        )
    known = any(isinstance(item, Numerics) for item in instruments)
    watch = replace(watch, verify=None if known else asked)
    return Runner(passes, [*instruments, *watch.instruments()], asked)


def _require_fusing(passes: Pipeline) -> None:
    """Only a fused graph becomes a model."""
    if not any(item.name == "fuse-backbone" for item in passes.passes):
        raise PipelineError(
            "this pipeline builds no model: it never fuses the jobs",
            found=str(passes) or "no pass",
            help="add fuse-backbone, or look at the graphs with tlora_fx.run_passes",
        )


def _fuse(
    given: Prepared, runner: Runner, on_failure: OnFailure | None, *, probed: bool = False
) -> GroupGraph:
    """Fuse; where a pass is at fault, tell who asked to know."""
    watch_numerics(runner, given.backbone)
    try:
        return fuse(given, runner, probed=probed)
    except (GraphInvalid, FusionError) as error:
        if on_failure is not None:
            on_failure(given, runner, error)
        raise


def prepare(jobs: Jobs, *, dropout: bool = True) -> Prepared:
    """Load the base of jobs and find their sites, before anything is traced.

    raises    TloraError
    """
    given = as_jobs(jobs)
    _require_one_base(given)
    if not dropout:
        given = [_without_dropout(job) for job in given]
    backbone = load_backbone(given[0].base, dropout=dropout)
    silent = [job.name for job in given if job.assumes_common_loss]
    _leave_out_router_loss(backbone, silent)
    _refuse_adapter_dtype(given[0], backbone)
    sites = _sites(given, backbone)
    unknown = require_common_loss(backbone, (), silent) if silent else None
    prepare_rope(backbone)
    return Prepared(given, backbone, sites, notes=(unknown,) if unknown else ())


def _sites(jobs: Sequence[Job], backbone: Backbone) -> list[dict[str, AdapterSite]]:
    """Each job's sites; jobs with equal adapters are looked at once."""
    keys = [repr((sorted(job.lora_fields.items()), job.optim)) for job in jobs]
    alike = {key: jobs[keys.index(key)] for key in keys}
    known = dict(zip(alike, resolved_sites([*alike.values()], backbone), strict=True))
    return [dict(known[key]) for key in keys]


@undisturbed()
def trace(job: Job) -> JobGraph:
    """One job's graph over one row, cleaned, tagged and folded.

    returns   rows and layers as in `compile`: packed and folded where the base allows it
    raises    TloraError, as `compile` does
    """
    passes = resolve_pipeline(None).until("fold-layers")
    (graph,) = fuse(replace(prepare([job]), exact=True), Runner(passes)).jobs
    return graph


def as_jobs(jobs: Jobs) -> list[Job]:
    """Jobs from whatever names them; raises JobError where one is something else."""
    if isinstance(jobs, (str, Path)):
        jobs = load_job_file(jobs)
    if isinstance(jobs, JobFile):
        return list(jobs.jobs)
    held: Any = jobs
    several = isinstance(held, Iterable) and not isinstance(held, (Job, Mapping, nn.Module))
    given: list[Job] = list(held) if several else [held]
    for job in given:
        if not isinstance(job, Job):
            raise _no_job(job)
    return given


def _no_job(found: object) -> JobError:
    model = isinstance(found, nn.Module)
    return JobError(
        "a job is no tlora_fx.Job",
        expected="a Job, a list of them, or the path of a YAML file of jobs",
        found=type(found).__name__,
        help="a model is the base of a job: tlora_fx.Job('name', base=model, lora=8, data=rows)"
        if model
        else "",
    )


def _without_dropout(job: Job) -> Job:
    rates = {job.dropout_field: 0.0} if job.dropout_field else {}
    fields = {**job.lora_fields, **rates}
    return job.model_copy(update={"lora": fields, "adapter": None})


def resolve_pipeline(given: str | Pipeline | None = None, added: Sequence[str] = ()) -> Pipeline:
    """The pipeline that is meant: given, or the default; with passes added.

    added     "my-pass@after:fuse-backbone"
    raises    PipelineError, PluginBroken
    """
    find_passes()
    text = DEFAULT_PIPELINE if given is None else given
    if not isinstance(text, (str, Pipeline)):
        raise PipelineError(
            "the pipeline is neither a text nor a Pipeline",
            expected="'drop-export-noise,tag-roles,...', or Pipeline((DropExportNoise(), ...))",
            found=type(text).__name__,
            help="resolve_pipeline(added=['my-pass@after:tag-roles']) of tlora_fx.compiler adds "
            "a pass",
        )
    passes = text if isinstance(text, Pipeline) else parse_pipeline(text)
    for text in added:
        passes = passes.adding(text)
    return passes


def _require_one_base(jobs: Sequence[Job]) -> None:
    if not jobs:
        raise JobsDiffer("there is no job to compile", help="give at least one job")
    first = jobs[0]
    names = [job.name for job in jobs]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise JobsDiffer("two jobs have one name", found=", ".join(doubled), help="rename one")
    for job in jobs[1:]:
        for name in ("base", "adapter_dtype", "adapter_compute"):
            expected, found = getattr(first, name), getattr(job, name)
            if name == "base" and str(expected) == str(found) and expected != found:
                raise JobsDiffer(
                    f"jobs '{first.name}' and '{job.name}' cannot share a backbone",
                    found="two objects, as the model or as the tokenizer",
                    help="give all jobs the same object, and not a copy",
                )
            if expected != found:
                raise JobsDiffer(
                    f"jobs '{first.name}' and '{job.name}' cannot share a backbone",
                    field=name,
                    expected=f"{expected} (job {first.name})",
                    found=f"{found} (job {job.name})",
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


def _leave_out_router_loss(backbone: Backbone, silent: Sequence[str]) -> None:
    """Leave out the loss that a mixture adds for its router, where all jobs name their loss.

    silent    names of the jobs that do not
    raises    OwnLossDiffers
    """
    text = getattr(backbone.config, "text_config", None)
    for config in (backbone.config, text):
        if config is None or not getattr(config, "output_router_logits", False):
            continue
        if silent:
            raise OwnLossDiffers(
                "the base adds a loss of its own (router_aux_loss) to every job's loss",
                job=", ".join(silent),
                found="output_router_logits: true in the base's config",
                help="set loss: cross_entropy in the job, which leaves it out, or set "
                "output_router_logits to false in config.json",
            )
        config.output_router_logits = False


# Trace and fuse as the models allow: packed rows or padded ones, layers folded or not.


def fuse(given: Prepared, runner: Runner, *, probed: bool = False) -> GroupGraph:
    """Run a pipeline over the jobs: packed where the base allows it, else padded.

    probed    the fused graph is tried against the base alone

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
            if probed:
                with runner.phase("try it against the base"):
                    _probe(group, given, runner.pipeline)
        except NOT_IN_THIS_FORM as error:
            if refused is not None:
                error.add_note(f"and before that, in packed form:\n{refused.render()}")
            if form == forms[-1]:
                raise
            # What it advises is to pad the rows, which comes next.
            error.help = ""
            refused = error
        else:
            if refused is not None:
                group.notes.insert(0, ("trace", f"rows are padded, not packed: {refused.what}"))
                group.notes.insert(1, ("trace", refused.render()))
            group.notes.extend(("trace", note) for note in given.notes)
            for job, sites in zip(given.jobs, given.sites, strict=True):
                moved = moved_targets(job, given.backbone, sites)
                group.notes.extend(("trace", note) for note in moved)
                group.notes.extend((IDLE, note) for note in idle_patterns(job, sites))
            return group
    raise AssertionError("no form was tried")


@phase("probe")
def _probe(group: GroupGraph, given: Prepared, passes: Pipeline) -> None:
    """Try the fused graph against the base alone; the report says where that cannot be done."""
    foreign = [
        p.name for p in passes.passes if not type(p).__module__.startswith("tlora_fx.passes.")
    ]
    with torch.enable_grad():
        try:
            found = probe_once(group, given.backbone, given.jobs)
        except FusedDiffers as error:
            _blame_joint(group, given, error)
            if foreign:
                error.help = (
                    f"it may be a pass that was added ({', '.join(foreign)}): verify='numerics', "
                    f"or --verify numerics, says how each changes numbers. Else {error.help}"
                )
                error.args = (error.render(),)
            raise
    logger.info("%s", found)
    if found.skipped:
        group.notes.append(("probe", str(found)))


def _blame_joint(group: GroupGraph, given: Prepared, differs: FusedDiffers) -> None:
    """Try the fused graph with fewer and fewer passes of the stage joint, as one may be to blame.

    raises   NumericsBroken, naming it
    """
    staged = {name: block.joint for name, block in group.blocks.items() if block.joint}
    passes = max(staged.values(), key=len, default=())
    try:
        for count in reversed(range(len(passes))):
            for name, joint in staged.items():
                group.blocks[name].joint = joint[:count]
            try:
                probe_compiled(group, given.backbone, given.jobs)
            except FusedDiffers:
                continue
            raise NumericsBroken(
                f"pass '{passes[count][0]}' changes what layers compute",
                **differs.facts,
                help="this is a defect of the pass: `tlora-fx bisect` names the values it changed",
            ) from differs
    finally:
        for name, joint in staged.items():
            group.blocks[name].joint = joint


def _fuse_folded(given: Prepared, runner: Runner, form: Form) -> GroupGraph:
    """Fold as far as the model allows.

    Equal structures first, then equal numbers too, then each layer by itself, then no layers. What
    is no chain of layers is never folded, and its jobs may share a graph.
    """
    attempts: list[tuple[Fold, bool]] = [
        ("structures", False), ("structures", True), ("layers", True), ("nothing", False),
        ("nothing", True),
    ]  # fmt: skip
    reasons: list[str] = []
    chained = True
    for fold, exact in attempts:
        if given.exact and not exact:
            continue
        if (not chained and fold != "nothing") or (chained and (fold, exact) == attempts[3]):
            continue
        try:
            numbers = ", each with its own numbers" if exact else ""
            with runner.phase(f"{form} rows, fold {fold}{numbers}"):
                group = _fuse_once(given, runner, form, fold, exact)
        except NotFoldable as error:
            logger.info("not folded (fold=%s, exact=%s): %s", fold, exact, error)
            reasons.append(error.render())
            chained = not isinstance(error, LayersNotChained)
            last = error
        else:
            group.notes.extend(("fold-layers", reason) for reason in reasons)
            return group
    raise last


def _fuse_once(given: Prepared, runner: Runner, form: Form, fold: Fold, exact: bool) -> GroupGraph:
    """Trace and fuse once.

    exact    every branch carries its own numbers; False: only those of jobs that train more than
             plain LoRA, whose branches run as they are
    """
    backbone = given.backbone
    runner.start()
    with runner.phase("trace the base"):
        base = _traced_base(given, form, folds=fold == "structures")
    _run_job(runner, base, fold)
    if fold == "nothing":  # Without folding, tracing takes longest: the base is looked at before.
        _refuse_early(runner, GroupGraph(base, [], exact))
    known: dict[Hashable, JobGraph] = {}
    idle: dict[Hashable, list[str]] = {}
    graphs, notes = [], []
    for job, own in zip(given.jobs, given.sites, strict=True):
        as_it_is = exact or any(site.kind != "lora" for site in own.values())
        key = graph_structure(job, backbone, own, as_it_is)
        if key not in known:
            with runner.phase(f"trace job {job.name}"):
                known[key] = job_graph(job, backbone, own, form, fold == "structures", as_it_is)
            idle[key] = require_trained(job, known[key])
            _run_job(runner, known[key], fold)
            graphs.append(known[key])
        else:
            graphs.append(known[key].for_job(job.name, own))
        if idle[key]:
            notes.append((IDLE, idle_adapters(job, idle[key])))
    group = GroupGraph(base, graphs, exact, given.jobs[0].adapter_compute)
    for graph in (base, *known.values()):
        group.notes.extend(graph.notes)
    group.notes.extend(notes)
    runner.run_group(group)
    return group


def _traced_base(given: Prepared, form: Form, *, folds: bool) -> JobGraph:
    """The base's graph, for passes to change; it is traced once, whatever is tried with it."""
    if (form, folds) not in given.traced:
        graph = given.traced[form, folds] = base_graph(given.backbone, form, folds)
        if folds and graph.plan is not None and len(graph.plan.traced()) == len(graph.plan.layers):
            every = plan_layers(given.backbone, fold=False)
            given.traced[form, False] = replace(graph, plan=every, notes=[])
    kept = given.traced[form, folds]
    copied = copy_state(kept)
    assert isinstance(copied, JobGraph)
    return replace(copied, notes=list(kept.notes))


def _refuse_early(runner: Runner, base: GroupGraph) -> None:
    """Run the passes that look at the base alone before jobs are traced.

    raises    NotTokenParallel
    """
    for item in runner.pipeline.passes:
        if isinstance(item, CheckTokenParallel):
            item.run(base)


def _run_job(runner: Runner, graph: JobGraph, fold: Fold) -> None:
    if fold == "nothing":
        graph.plan = None
    runner.run_job(graph)
