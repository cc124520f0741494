"""Cache of probes at `compile`: an equal graph on an equal base is not tried again.

A file under $TLORA_FX_CACHE/probes holds the result. Its name is a hash of all that decides it: the
fused graph, the base's config and code, the jobs' adapters, and the versions and the source of what
runs the probe. A base that is given as a Python module is tried each time, for its weights and code
may be any.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from torch import nn

from tlora_fx.codegen.loading import cache_folder
from tlora_fx.config.job import Job
from tlora_fx.host.durable import replace_file
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.probe import ProbeResult, probe_compiled

log = logging.getLogger(__name__)


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
    return cache_folder().parent / "probes"


def _read(path: Path) -> ProbeResult | None:
    try:
        stored = json.loads(path.read_text("utf-8"))
        return ProbeResult(**stored | {"lengths": tuple(stored["lengths"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.info("the result of a probe cannot be read from %s: %s", path, error)
        return None


def _write(path: Path, found: ProbeResult) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(found)).encode())
    except OSError as error:
        log.info("the result of a probe cannot be kept in %s: %s", path, error)


def _key(group: GroupGraph, backbone: Backbone, jobs: Sequence[Job]) -> str:
    versions = [version(library) for library in ("torch", "transformers", "peft")]
    adapters = [(sorted(job.lora_fields.items()), job.adapter_dtype, job.name) for job in jobs]
    described = (
        versions,
        _our_source(),
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
        yield f"{kind.__module__}.{kind.__qualname__} {body} {_source_of(kind.__module__)}"


@functools.cache
def _source_of(module: str) -> str:
    """A hash of the file of a Python module; code of the hub has no version."""
    try:
        return hashlib.sha256(Path(inspect.getfile(sys.modules[module])).read_bytes()).hexdigest()
    except (OSError, TypeError, KeyError):
        return ""


@functools.cache
def _our_source() -> str:
    """A hash of tlora_fx's own code, of which any part may change what a graph computes."""
    known = hashlib.sha256()
    for part in sorted(Path(__file__).parents[1].iterdir()):
        # Some packages are links in a checkout, which rglob does not follow.
        for path in [part] if part.suffix == ".py" else sorted(part.resolve().rglob("*.py")):
            known.update(path.read_bytes())
    return known.hexdigest()
