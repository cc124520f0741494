"""AcmeTrace's CSV: jobs of the clusters Seren and Kalos, March to August 2023.

source   github.com/InternLM/AcmeTrace, trace_seren.csv and trace_kalos.csv
"""

from __future__ import annotations

import itertools
from datetime import datetime

from tlora_fx.simulator.trace_rows import Row, WrongRow, duration, gpus, moment, whole
from tlora_fx.simulator.traces import TraceJob

#: Without these there is no job; user, cpu_num, queue and gpu_time are not read.
NEEDED = ("job_id", "gpu_num", "type", "state", "submit_time", "duration")
#: Read where they are there: they show clocks that run backwards.
CLOCKS = ("start_time", "end_time")
RULES = ("a job's duration is the observed one, whatever its last state",)


def job_of(row: Row) -> TraceJob:
    """A row as a job; its month is that of the calendar, counted from the year 0."""
    submitted = moment(row, "submit_time")
    told = [moment(row, name) for name in CLOCKS if str(row.get(name) or "").strip()]
    _forward([submitted, *told])
    return TraceJob(
        name=_name(row),
        submitted=submitted.timestamp(),
        duration_seconds=duration(row, "duration"),
        gpus=gpus(whole(row, "gpu_num")),
        type=str(row.get("type") or "Other").strip() or "Other",
        state=str(row.get("state") or "").strip().upper(),
        month=submitted.year * 12 + submitted.month,
    )


def _forward(moments: list[datetime]) -> None:
    if any(b < a for a, b in itertools.pairwise(moments)):
        raise WrongRow("clocks that run backwards")


def _name(row: Row) -> str:
    name = str(row.get("job_id") or "").strip()
    if not name:
        raise WrongRow("no job_id")
    return name
