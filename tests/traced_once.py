"""Equal models are traced once in a test run: tracing is most of compiling a small model.

A compilation gets a copy of the graph that an earlier one traced, if all that decides it is equal:
the base's config, modules and code, and the job's adapters; of plain LoRA what is in a graph, which
its rates and starts are not. So it is with the sites of adapters. A base's own loss is compared
with that of the next token on the first samples that any process has, which stand for all: no base
of a config looks at ids. Tests of tracing (tests/tracing) do all of it each time.

Where tests only train what was compiled, passes run once over equal jobs too: files train the same
jobs again and again, and processes of a group (tests/parallel/processes.py) under plan after plan.
Equal are jobs of the same names, adapters and base: its folder, their data and their steps are not
in a fused group.

Processes read what any process has traced, in this test run or in one before, from the product's
own cache (tlora_fx/tracing/trace_cache.py). It lies in the folder that TRACES names.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer

from tlora_fx import compiler as _compiler
from tlora_fx.compiler import Prepared
from tlora_fx.config.job import Job
from tlora_fx.host import environment
from tlora_fx.ir.graph import AdapterSite, Form, GroupGraph, JobGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.state import copy_state
from tlora_fx.pipeline import Runner
from tlora_fx.runtime import checks as _checks
from tlora_fx.tracing import trace_cache
from tlora_fx.tracing.adapters import graph_structure
from tlora_fx.tracing.export import wrap_pruned

with suppress(ImportError):
    # PEFT imports it when it first wraps a model, and keys name all kinds of layers.
    import peft.tuners.lora.bnb  # noqa: F401

Trace = Callable[..., JobGraph]
compiler: Any = _compiler
checks: Any = _checks
_known: dict[Hashable, JobGraph] = {}
_sites: dict[Hashable, dict[str, AdapterSite]] = {}
_wrapped: set[Hashable] = set()
_compared: dict[Hashable, str | None] = {}
_fused: OrderedDict[Hashable, GroupGraph] = OrderedDict()
#: The fused groups that a process keeps: tests that train equal jobs stand near each other.
MAX_FUSED = 32
TRACES = "TLORA_FX_TEST_TRACES"
# Fields of a config that decide how weights are drawn and where texts end, which no graph has, and
# the name of the class that is asked for itself.
IN_NO_GRAPH = frozenset({"architectures", "bos_token_id", "eos_token_id", "initializer_range"})


def install(*, fused: bool = False) -> None:
    """Let the compiler ask for a known graph before it traces.

    fused    and for a fused group before passes run
    """
    os.environ.pop(environment.TRACE_CACHE, None)
    if not hasattr(compiler.job_graph, "plain"):
        compiler.base_graph = _base(compiler.base_graph)
        compiler.job_graph = _job(compiler.job_graph)
        compiler.resolved_sites = _resolved(compiler.resolved_sites)
        for module in (compiler, checks):
            module.require_common_loss = _loss(module.require_common_loss)
    _run_all_passes()
    if fused:
        compiler.fuse = _fuse(compiler.fuse)


def uninstall() -> None:
    """Trace each time."""
    os.environ[environment.TRACE_CACHE] = "0"
    _run_all_passes()
    if hasattr(compiler.job_graph, "plain"):
        for name in ("base_graph", "job_graph", "resolved_sites", "require_common_loss"):
            setattr(compiler, name, getattr(compiler, name).plain)
        checks.require_common_loss = checks.require_common_loss.plain


def _base(plain: Trace) -> Trace:
    def base_graph(backbone: Backbone, *how: Any) -> JobGraph:
        return _once(backbone, ("base", *how), lambda: plain(backbone, *how))

    base_graph.plain = plain  # type: ignore[attr-defined]
    return base_graph


def _job(plain: Trace) -> Trace:
    def job_graph(
        job: Job,
        backbone: Backbone,
        sites: dict[str, AdapterSite],
        form: Form,
        fold: bool = True,
        exact: bool = False,
    ) -> JobGraph:
        # Sites have the rate, if one is given or not.
        fields = sorted(
            i for i in job.lora_fields.items() if i[0] != "lora_dropout" or not job.is_lora
        )
        adapters = (repr(fields), job.adapter_dtype, repr(sites))
        code = _code(LoraLayer.__subclasses__())
        plain_lora = (graph_structure(job, backbone, sites, exact), tuple(sites))
        structure = adapters if exact else plain_lora
        seen = (form, fold, adapters, code)
        traced = []

        def trace() -> JobGraph:
            traced.append(seen)
            return plain(job, backbone, sites, form, fold, exact)

        graph = _once(backbone, (form, fold, exact, structure, code), trace)
        if _is_from_python(backbone):
            return graph
        if not exact and not traced and (_model(backbone), seen) not in _wrapped:
            wrap_pruned(job, backbone, sites, fold)
        _wrapped.add((_model(backbone), seen))
        return replace(graph, name=job.name, sites=sites)

    job_graph.plain = plain  # type: ignore[attr-defined]
    return job_graph


def _run_all_passes() -> None:
    compiler.fuse = getattr(compiler.fuse, "plain", compiler.fuse)


def _fuse(plain: Callable[..., GroupGraph]) -> Callable[..., GroupGraph]:
    def fuse(given: Prepared, runner: Runner, *, probed: bool = False) -> GroupGraph:
        watched = runner.instruments or runner.limits or runner.halt_at is not None
        if watched or _is_from_python(given.backbone):
            return plain(given, runner, probed=probed)
        fused = ([_fused_fields(job) for job in given.jobs], given.sites, given.exact, given.notes)
        passes = (str(runner.pipeline), *(type(item).run for item in runner.pipeline.passes))
        code = (compiler.base_graph, compiler.job_graph, compiler.probe_once)
        key = (_model(given.backbone), repr(fused), passes, runner.verify, probed, code)
        if key not in _fused:
            _fused[key] = plain(given, runner, probed=probed)
        _fused.move_to_end(key)
        if len(_fused) > MAX_FUSED:
            _fused.popitem(last=False)
        copied = copy_state(_fused[key])
        assert isinstance(copied, GroupGraph)
        return copied

    fuse.plain = plain  # type: ignore[attr-defined]
    return fuse


def _fused_fields(job: Job) -> tuple[object, ...]:
    """All of a job that fusing may read; a base is compared by its config and modules."""
    adapter = (sorted(job.lora_fields.items()), job.lora, job.adapter, job.optim)
    base = job.base.model_copy(update={"config": None, "tokenizer": None, "seed": 0})
    numbers = (job.adapter_dtype, job.adapter_compute, job.neftune_noise_alpha)
    return (job.name, adapter, numbers, base)


def _resolved(plain: Callable[..., list[dict[str, AdapterSite]]]) -> Callable[..., Any]:
    def resolved_sites(jobs: Sequence[Job], backbone: Backbone) -> list[dict[str, AdapterSite]]:
        if _is_from_python(backbone):
            return plain(jobs, backbone)
        model, code = _model(backbone), _code(LoraLayer.__subclasses__())
        keys = [(model, code, repr(sorted(job.lora_fields.items())), job.optim) for job in jobs]
        unknown = {key: job for key, job in zip(keys, jobs, strict=True) if key not in _sites}
        if unknown:
            _sites.update(zip(unknown, plain([*unknown.values()], backbone), strict=True))
        return [dict(_sites[key]) for key in keys]

    resolved_sites.plain = plain  # type: ignore[attr-defined]
    return resolved_sites


def _loss(plain: Callable[..., str | None]) -> Callable[..., str | None]:
    def require_common_loss(
        backbone: Backbone, rows: Sequence[Any] = (), jobs: Sequence[str] = ()
    ) -> str | None:
        if _is_from_python(backbone):
            return plain(backbone, rows, jobs)
        key = (_model(backbone), backbone.spec.is_classifier, bool(rows))
        if key not in _compared:
            _compared[key] = _note(backbone, bool(rows), lambda: plain(backbone, rows, jobs))
        return _compared[key]

    require_common_loss.plain = plain  # type: ignore[attr-defined]
    return require_common_loss


def _note(backbone: Backbone, has_rows: bool, compare: Callable[[], str | None]) -> str | None:
    """What comparing a base's loss notes, or what it noted in another process."""
    key = trace_cache.base_key(backbone, "loss in tests", has_rows)
    known = trace_cache.KEPT.read(key) if key else None
    if known is not None:
        note: str | None = known["note"]
        return note
    note = compare()
    if key:
        trace_cache.KEPT.write(key, {"note": note})
    return note


def _is_from_python(backbone: Backbone) -> bool:
    return backbone.config is None or any("forward" in vars(m) for m in backbone.model.modules())


def _once(backbone: Backbone, how: Hashable, trace: Callable[[], JobGraph]) -> JobGraph:
    """A copy that passes may rewrite; a module given from Python is traced each time."""
    if _is_from_python(backbone):
        return trace()
    key = (_model(backbone, IN_NO_GRAPH), how)
    if key not in _known:
        with _alone((key[0][0], how)):
            _known[key] = trace()
    copied = copy_state(_known[key])
    assert isinstance(copied, JobGraph)
    return replace(copied, notes=list(copied.notes))


@contextmanager
def _alone(key: Hashable) -> Iterator[None]:
    """Processes of one group want the same at once: one traces, the others wait and read."""
    folder = os.environ.get(TRACES)
    if not folder:
        yield
        return
    words = re.sub(r" at 0x\w+", "", repr(key))  # functions lie elsewhere in another process
    name = hashlib.sha256(words.encode()).hexdigest()[:3]
    with (Path(folder) / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _model(backbone: Backbone, ignored: frozenset[str] = frozenset()) -> tuple[Hashable, ...]:
    """What decides a base's graph: its config, and of every module class, code and tensors."""
    ignored = ignored | {"_name_or_path"}
    config = {k: v for k, v in backbone.config.to_dict().items() if k not in ignored}
    tensors = [*backbone.model.named_parameters(), *backbone.model.named_buffers()]
    return (
        repr(sorted(config.items())),
        tuple((name, tuple(t.shape), t.dtype) for name, t in tensors),
        tuple((m.training, getattr(m, "p", None)) for m in backbone.model.modules()),
        _code(type(module) for module in backbone.model.modules()),
        torch.export.export,
    )


def _code(classes: Any) -> Hashable:
    """The forwards of classes, which a test may have replaced."""
    return tuple((own, getattr(own, "forward", None)) for own in classes)
