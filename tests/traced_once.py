"""Equal models are traced once in a test run: tracing is most of compiling a small model.

A compilation gets a copy of the graph that an earlier one traced, if all that decides it is equal:
the base's config, modules and code, and the job's adapters; of plain LoRA what is in a graph, which
its rates and starts are not. So it is with a base's own loss, which is compared with that of the
next token. Tests of tracing (tests/tracing) do both each time.

Processes of a group (tests/parallel/processes.py) train the same jobs under plan after plan. There
passes run once over equal jobs too.

Processes read what any process of the test run has traced, if the model's code is a library's. The
graphs lie in the folder that TRACES names.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer

from tlora_fx import compiler as _compiler
from tlora_fx.compiler import Prepared
from tlora_fx.config.job import Job
from tlora_fx.errors import GraphNotStorable
from tlora_fx.graph_file import Document, from_document, to_document
from tlora_fx.ir.graph import AdapterSite, Form, GroupGraph, JobGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.state import copy_state
from tlora_fx.pipeline import Runner
from tlora_fx.tracing import attention
from tlora_fx.tracing import export as _export
from tlora_fx.tracing.adapters import check_wrapped, layer_signature
from tlora_fx.tracing.layers import plan_layers, pruned_copy

with suppress(ImportError):
    # PEFT imports it when it first wraps a model, and keys name all kinds of layers.
    import peft.tuners.lora.bnb  # noqa: F401

Trace = Callable[..., JobGraph]
compiler: Any = _compiler
_known: dict[Hashable, JobGraph] = {}
_wrapped: set[Hashable] = set()
_compared: dict[Hashable, str | None] = {}
TRACES = "TLORA_FX_TEST_TRACES"
LIBRARIES = ("torch", "transformers", "peft")
INSTALLED = str(Path(torch.__file__).parents[1])


def install() -> None:
    """Let the compiler ask for a known graph before it traces."""
    if not hasattr(compiler.trace_job, "plain"):
        compiler.trace_base = _base(compiler.trace_base)
        compiler.trace_job = _job(compiler.trace_job)
        compiler.refuse_other_loss = _loss(compiler.refuse_other_loss)


def install_fused() -> None:
    """Let the compiler ask for a fused group before passes run; for processes of a group."""
    install()
    if not hasattr(compiler.fuse, "plain"):
        compiler.fuse = _fuse(compiler.fuse)


def uninstall() -> None:
    """Trace each time."""
    if hasattr(compiler.trace_job, "plain"):
        for name in ("trace_base", "trace_job", "refuse_other_loss"):
            setattr(compiler, name, getattr(compiler, name).plain)


def _base(plain: Trace) -> Trace:
    def trace_base(backbone: Backbone, *how: Any) -> JobGraph:
        return _once(backbone, how, lambda: plain(backbone, *how))

    trace_base.plain = plain  # type: ignore[attr-defined]
    return trace_base


def _job(plain: Trace) -> Trace:
    def trace_job(
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
        numbers = tuple((site.path, site.rank, site.scaling) for site in sites.values())
        plain_lora = (compiler._structure(job, backbone, sites, exact), numbers)
        structure = adapters if exact else plain_lora
        seen = (form, fold, adapters, code)
        traced = []

        def trace() -> JobGraph:
            traced.append(seen)
            return plain(job, backbone, sites, form, fold, exact)

        graph = _once(backbone, (form, fold, exact, structure, code), trace)
        if not exact and not traced:
            _wrap_once(seen, job, backbone, sites, fold)
        return replace(graph, name=job.name, sites=sites)

    trace_job.plain = plain  # type: ignore[attr-defined]
    return trace_job


def _wrap_once(
    seen: Hashable, job: Job, backbone: Backbone, sites: dict[str, AdapterSite], fold: bool
) -> None:
    """Compare what PEFT makes of a job's fields with what is planned, as tracing does."""
    key = (_model(backbone), seen)
    if key in _wrapped:
        return
    bias = str(getattr(job.lora_config(), "bias", "none"))
    plan = plan_layers(backbone, lambda layer: layer_signature(sites, layer, bias, False), fold)
    model = pruned_copy(backbone, plan)[0]
    check_wrapped(_export._wrap(model, job, job.lora_config(), backbone), sites, job)
    _wrapped.add(key)


def _fuse(plain: Callable[..., GroupGraph]) -> Callable[..., GroupGraph]:
    known: dict[Hashable, GroupGraph] = {}

    def fuse(given: Prepared, runner: Runner, *, probed: bool = False) -> GroupGraph:
        if _is_from_python(given.backbone):
            return plain(given, runner, probed=probed)
        jobs = (repr(given.jobs), repr(given.sites), given.exact, given.notes)
        key = (_model(given.backbone), jobs, str(runner.pipeline), runner.verify, probed)
        if key not in known:
            known[key] = plain(given, runner, probed=probed)
        copied = copy_state(known[key])
        assert isinstance(copied, GroupGraph)
        return copied

    fuse.plain = plain  # type: ignore[attr-defined]
    return fuse


def _loss(plain: Callable[[Backbone], str | None]) -> Callable[[Backbone], str | None]:
    def refuse_other_loss(backbone: Backbone) -> str | None:
        if _is_from_python(backbone):
            return plain(backbone)
        key = (_model(backbone), backbone.spec.is_classifier)
        if key not in _compared:
            _compared[key] = plain(backbone)
        return _compared[key]

    refuse_other_loss.plain = plain  # type: ignore[attr-defined]
    return refuse_other_loss


def _is_from_python(backbone: Backbone) -> bool:
    return backbone.config is None or any("forward" in vars(m) for m in backbone.model.modules())


def _once(backbone: Backbone, how: Hashable, trace: Callable[[], JobGraph]) -> JobGraph:
    """A copy that passes may rewrite; a module given from Python is traced each time."""
    if _is_from_python(backbone):
        return trace()
    key = (_model(backbone), how)
    if key not in _known:
        _known[key] = _kept(_words(key), trace)
    copied = copy_state(_known[key])
    assert isinstance(copied, JobGraph)
    return replace(copied, notes=list(copied.notes))


def _kept(words: str | None, trace: Callable[[], JobGraph]) -> JobGraph:
    """The graph of the folder, or a traced one, which is put there."""
    folder = os.environ.get(TRACES)
    if not folder or words is None:
        return trace()
    path = Path(folder) / hashlib.sha256(words.encode()).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        # Processes of one group want the same at once: one traces, the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            graph = trace()
            _write(path, graph)
            return graph
    attention.register()
    read = from_document(pickle.loads(path.read_bytes()))
    assert isinstance(read, JobGraph)
    return read


def _write(path: Path, graph: JobGraph) -> None:
    try:
        document: Document = to_document(graph)
    except GraphNotStorable:
        return
    if not document.left_out:
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(document))
        written.rename(path)


def _words(key: Any) -> str | None:
    """A key as another process would write it; None where it holds code that is no library's."""
    if isinstance(key, tuple):
        words = [_words(item) for item in key]
        return None if None in words else repr(words)
    if not callable(key):
        return repr(key)
    code = getattr(key, "__code__", None)
    if not str(key.__module__).startswith(LIBRARIES) or (
        code is not None and not code.co_filename.startswith(INSTALLED)
    ):
        return None
    return f"{key.__module__}.{key.__qualname__}"


def _model(backbone: Backbone) -> Hashable:
    """What decides a base's graph: its config, and of every module class, code and tensors."""
    config = {k: v for k, v in backbone.config.to_dict().items() if k != "_name_or_path"}
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
