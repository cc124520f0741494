"""Equal models are traced once in a process: most of what compiling a small model takes is tracing.

A compilation gets a copy of the graph that an earlier one traced, if all that decides it is equal:
the base's config, modules and code, and the job's adapters. Tests of tracing (tests/tracing) trace
each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer

from tlora_fx import ladder as _ladder
from tlora_fx.backbone import Backbone
from tlora_fx.graph import AdapterSite, Form, JobGraph
from tlora_fx.job import Job
from tlora_fx.numerics.state import copy_state

Trace = Callable[..., JobGraph]
ladder: Any = _ladder
_known: dict[Hashable, JobGraph] = {}


def install() -> None:
    """Let the driver ask for a known graph before it traces."""
    if not hasattr(ladder.trace_job, "plain"):
        ladder.trace_base = _base(ladder.trace_base)
        ladder.trace_job = _job(ladder.trace_job)


def uninstall() -> None:
    """Trace each time."""
    if hasattr(ladder.trace_job, "plain"):
        ladder.trace_base, ladder.trace_job = ladder.trace_base.plain, ladder.trace_job.plain


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
        # Ranks and scalings too: PEFT's are compared with the planned ones where it is traced.
        adapters = (repr(sorted(job.lora_fields.items())), job.adapter_dtype, repr(sites))
        key = (form, fold, exact, adapters, _code(LoraLayer.__subclasses__()))
        graph = _once(backbone, key, lambda: plain(job, backbone, sites, form, fold, exact))
        return replace(graph, name=job.name, sites=sites)

    trace_job.plain = plain  # type: ignore[attr-defined]
    return trace_job


def _once(backbone: Backbone, how: Hashable, trace: Callable[[], JobGraph]) -> JobGraph:
    """A copy that passes may rewrite; a module given from Python is traced each time."""
    if backbone.config is None or any("forward" in vars(m) for m in backbone.model.modules()):
        return trace()
    key = (_model(backbone), how)
    if key not in _known:
        _known[key] = trace()
    copied = copy_state(_known[key])
    assert isinstance(copied, JobGraph)
    return replace(copied, notes=list(copied.notes))


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
