"""Cache of probes at `compile`: an equal graph on an equal base is not tried again.

A file under $TLORA_FX_CACHE/probes holds the result. Its name is a hash of all that decides it: the
fused graph, the base's config and code, the jobs' adapters, and the versions and the source of what
runs the probe. A base that is given as a Python module is tried each time, for its weights and code
may be any.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from torch import nn

from tlora_fx.config.job import Job
from tlora_fx.host.durable import replace_shared_file
from tlora_fx.host.paths import cache_folder
from tlora_fx.host.sources import own_source, source_of
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.probe import ProbeResult, probe_compiled

#: Rooms whose code the probe, or what made its graph, may run.
ROOMS = (
    "numerics", "passes", "rewriting", "cost", "tracing", "graph_file", "model", "pipeline", "ir",
    "ops", "codegen", "config", "errors", "host",
)  # fmt: skip

logger = logging.getLogger(__name__)


def probe_once(group: GroupGraph, backbone: Backbone, jobs: Sequence[Job]) -> ProbeResult:
    """`probe_compiled`, or what it found before.

    raises    FusedDiffers
    """
    if backbone.config is None:
        return probe_compiled(group, backbone, jobs)
    path = probes_folder() / f"{_key(group, backbone, jobs)}.json"
    known = _read(path)
    if known is None:
        known = probe_compiled(group, backbone, jobs)
        _write(path, known)
    return known


def probes_folder() -> Path:
    """Folder of results, beside generated kernels."""
    return cache_folder() / "probes"


def _read(path: Path) -> ProbeResult | None:
    try:
        stored = json.loads(path.read_text("utf-8"))
        return ProbeResult(**stored | {"lengths": tuple(stored["lengths"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("the result of a probe cannot be read from %s: %s", path, error)
        return None


def _write(path: Path, found: ProbeResult) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_shared_file(path, json.dumps(asdict(found)).encode())
    except OSError as error:
        logger.info("the result of a probe cannot be kept in %s: %s", path, error)


def _key(group: GroupGraph, backbone: Backbone, jobs: Sequence[Job]) -> str:
    versions = [version(library) for library in ("torch", "transformers", "peft")]
    adapters = [(sorted(job.lora_fields.items()), job.adapter_dtype, job.name) for job in jobs]
    described = (
        versions,
        own_source(*ROOMS),
        fingerprint(group).code,
        group.form,
        group.compute,
        backbone.fingerprint(),
        sorted(set(_code(backbone.model))),
        adapters,
    )
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _code(model: nn.Module) -> Iterator[str]:
    """The code of a base: of each module's class its source file and its forward."""
    for kind in {type(module) for module in model.modules()}:
        forward = getattr(kind.forward, "__code__", None)
        body = hashlib.sha256(forward.co_code).hexdigest() if forward is not None else ""
        yield f"{kind.__module__}.{kind.__qualname__} {body} {source_of(kind.__module__)}"
