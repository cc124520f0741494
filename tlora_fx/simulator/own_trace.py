"""Our own traces: whole job requests, one a line, as JSON or as CSV.

What `tlora-fx simulate --save-trace` writes: the jobs after every choice was made, so that the same
replay can be done again, or elsewhere, without the trace they came from.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_fx.cost.demand import Demand
from tlora_fx.errors import TraceFileError
from tlora_fx.scheduler.request import MAX_SLOWDOWN, JobRequest
from tlora_fx.simulator.trace_rows import Row, WrongRow, duration, number, whole
from tlora_fx.simulator.traces import TraceJob

DEMAND = tuple(f"demand.{name}" for name in Demand._fields)
# Older files have no such columns.
LATER = ("demand.launched",)
NEEDED = (
    "name", "base", "gpus", "steps", "submitted", *(one for one in DEMAND if one not in LATER),
)  # fmt: skip
OPTIONAL = (
    *LATER,
    "max_slowdown",
    "deadline",
    "lends",
    "longest",
    "type",
    "duration_seconds",
    "origin",
)
RULES = ("jobs are replayed as they are written: no other choice applies",)


def reader() -> tuple[Callable[[Row], TraceJob], dict[str, JobRequest], set[str]]:
    """What reads a row as a job, the requests that it has read, and where they came from."""
    requests: dict[str, JobRequest] = {}
    origins: set[str] = set()

    def job_of(row: Row) -> TraceJob:
        request = _request(row)
        requests.setdefault(request.name, request)
        if row.get("origin"):
            origins.add(str(row["origin"]))
        seconds = duration(row, "duration_seconds") if row.get("duration_seconds") else 0.0
        kind = str(row.get("type") or "job")
        return TraceJob(request.name, request.submitted, seconds, request.gpus, kind)

    return job_of, requests, origins


def _request(row: Row) -> JobRequest:
    steps = whole(row, "steps")
    if steps < 1:
        raise WrongRow("fewer steps than one")
    slowdown = number(row, "max_slowdown") if row.get("max_slowdown") else MAX_SLOWDOWN
    if slowdown < 1:
        raise WrongRow("max_slowdown below 1")
    return JobRequest(
        name=str(row["name"]),
        base=str(row["base"]),
        demand=Demand(
            *(duration(row, one) if one in NEEDED or row.get(one) else 0.0 for one in DEMAND)
        ),
        gpus=_some(whole(row, "gpus")),
        steps=steps,
        submitted=number(row, "submitted"),
        max_slowdown=slowdown,
        deadline=number(row, "deadline") if row.get("deadline") else None,
        lends=number(row, "lends") if row.get("lends") else 0.0,
        longest=whole(row, "longest") if row.get("longest") else 0,
    )


def _some(count: int) -> int:
    if count < 1:
        raise WrongRow("fewer GPUs than one")
    return count


def row_of(request: JobRequest, job: TraceJob | None, origin: str) -> dict[str, Any]:
    """A request as a row."""
    row: dict[str, Any] = {
        "name": request.name,
        "base": request.base,
        "gpus": request.gpus,
        "steps": request.steps,
        "submitted": request.submitted,
        **dict(zip(DEMAND, request.demand, strict=True)),
        "max_slowdown": request.max_slowdown,
        "deadline": request.deadline,
        "lends": request.lends,
        "longest": request.longest,
        "type": job.type if job else "job",
        "duration_seconds": job.duration_seconds if job else None,
        "origin": origin,
    }
    return row


def write_own(
    path: Path, requests: Sequence[JobRequest], jobs: Mapping[str, TraceJob], origin: str
) -> None:
    """Write requests; CSV where the name ends in .csv, else JSON lines.

    origin    where they came from; a synthetic trace says so
    raises    TraceFileError
    """
    rows = [row_of(request, jobs.get(request.name), origin) for request in requests]
    text = _csv(rows) if path.suffix == ".csv" else _lines(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceFileError("the trace cannot be written", file=path, found=error) from None


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, [*NEEDED, *OPTIONAL], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
