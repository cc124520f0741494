"""What tracing found stays known: an equal base with equal adapters is not traced again.

Files under $TLORA_FX_CACHE/traces hold traced graphs as the text of graph files, the losses that
were compared, and the adapters whose layers PEFT made as planned. A file's name is the hash of all
that decides it (`trace_keys`). A file that cannot be read, or holds something else, is ignored and
written anew. TLORA_FX_TRACE_CACHE is the largest size of the folder in MiB; 0 switches the cache
off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_fx.config.job import Job
from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file import graph_text, graphs_of_text, to_document
from tlora_fx.host import environment
from tlora_fx.host.durable import replace_shared_file
from tlora_fx.host.paths import cache_folder
from tlora_fx.ir.graph import AdapterSite, Form, JobGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing import attention, export, own_loss
from tlora_fx.tracing.trace_keys import base_key, job_key, wrapped_key

logger = logging.getLogger(__name__)

FORMAT = 1


def base_graph(backbone: Backbone, form: Form, fold: bool = True) -> JobGraph:
    """`export.trace_base`, or what it traced before; raises as it does."""

    def trace() -> JobGraph:
        return export.trace_base(backbone, form, fold)

    if not is_on():
        return trace()
    return _graph(base_key(backbone, "graph", form, fold), trace)


def job_graph(
    job: Job,
    backbone: Backbone,
    sites: dict[str, AdapterSite],
    form: Form,
    fold: bool = True,
    exact: bool = False,
) -> JobGraph:
    """`export.trace_job`, or what it traced of a job with equal adapters; raises as it does."""
    traced = []

    def trace() -> JobGraph:
        traced.append(True)
        return export.trace_job(job, backbone, sites, form, fold, exact)

    if not is_on():
        return trace()
    key = job_key(job, backbone, sites, form, fold, exact)
    graph = _graph(key, trace)
    if key is not None:
        _wrap_once(job, backbone, sites, fold=fold, traced=bool(traced))
    return replace(graph, name=job.name, sites=sites)


def require_common_loss(backbone: Backbone) -> str | None:
    """`own_loss.refuse_other_loss`, or what it returned before; raises as it does."""
    key = base_key(backbone, "loss") if is_on() else None
    known = _read(key) if key is not None else None
    if known is not None and isinstance(known.get("note", 0), (str, type(None))):
        note: str | None = known["note"]
        return note
    note = own_loss.refuse_other_loss(backbone)
    if key is not None:
        _write(key, {"note": note})
    return note


def is_on() -> bool:
    """Whether traced graphs are kept and looked for."""
    return max_bytes() > 0


def max_bytes() -> int:
    """How large the folder may be; raises EnvironmentVariableWrong."""
    return environment.max_bytes(environment.TRACE_CACHE)


def traces_folder() -> Path:
    """Where traced graphs lie, beside generated kernels."""
    return cache_folder() / "traces"


def _wrap_once(
    job: Job, backbone: Backbone, sites: dict[str, AdapterSite], *, fold: bool, traced: bool
) -> None:
    """Compare what PEFT makes of a job's fields with what is planned, as tracing does.

    traced    tracing has just done it
    raises    AdapterMismatch
    """
    key = wrapped_key(job, backbone, sites, fold)
    if key is None or (not traced and _read(key) is not None):
        return
    if not traced:
        export.wrap_pruned(job, backbone, sites, fold)
    _write(key, {"wrapped": True})


def _graph(key: str | None, trace: Callable[[], JobGraph]) -> JobGraph:
    """The graph of the folder, else a traced one, which is put there."""
    if key is None:
        return trace()
    known = _read(key)
    graph = _graph_of(known["text"]) if known is not None and "text" in known else None
    if graph is not None:
        return graph
    graph = trace()
    text = _text_of(graph)
    if text is not None:
        _write(key, {"text": text})
    return graph


def _text_of(graph: JobGraph) -> str | None:
    """A graph without its job, as text; None where a text would not give back the same."""
    try:
        document = to_document(replace(graph, name="", sites={}))
        again = _graph_of(document.text)
        if document.left_out or again is None or graph_text(again) != document.text:
            return None
    except (GraphNotStorable, GraphFileNotReadable) as error:
        logger.info("a traced graph is not kept: %s", error)
        return None
    return document.text


def _graph_of(text: object) -> JobGraph | None:
    attention.register()
    try:
        graph = graphs_of_text(str(text))
    except GraphFileNotReadable as error:
        logger.info("a traced graph cannot be read: %s", error)
        return None
    return graph if isinstance(graph, JobGraph) else None


def _read(key: str) -> dict[str, Any] | None:
    """What is kept under a key; None where nothing is, or something else."""
    path = _file(key)
    try:
        stored = json.loads(path.read_text("utf-8"))
        kept, digest = stored["kept"], stored["digest"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("what was traced cannot be read from %s: %s", path, error)
        return None
    if digest != _digest(key, kept) or not isinstance(kept, dict):
        logger.info("%s holds something else than was written", path)
        return None
    with suppress(OSError):
        os.utime(path)  # the oldest files go first
    return kept


def _write(key: str, kept: dict[str, Any]) -> None:
    path = _file(key)
    entry = json.dumps({"digest": _digest(key, kept), "kept": kept}).encode()
    if len(entry) > max_bytes():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_shared_file(path, entry)
        _remove_oldest(path.parent, keep=path)
    except OSError as error:
        logger.info("what was traced cannot be kept in %s: %s", path, error)


def _remove_oldest(folder: Path, *, keep: Path) -> None:
    """Remove the files that were used longest ago, until the rest fits."""
    files = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process removed it
            found = path.stat()
            files.append((path != keep, found.st_mtime_ns, found.st_size, path))
    excess = sum(size for _, _, size, _ in files) - max_bytes()
    for removable, _, size, path in sorted(files):
        if excess > 0 and removable:
            path.unlink(missing_ok=True)
            excess -= size


def _file(key: str) -> Path:
    return traces_folder() / f"{key}.json"


def _digest(key: str, kept: object) -> str:
    text = json.dumps([FORMAT, key, kept], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
