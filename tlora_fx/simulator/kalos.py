"""The converted Kalos file: completed jobs of AcmeTrace's smaller cluster, as iterations.

A job's GPUs are `gpu_workers * gpu_per_worker`: a worker is a node, which shows in the counts
(62 and 63 workers of 8 are the 496 and 504 GPUs of AcmeTrace's own distribution). Its duration is
`num_iteration * iteration_computing_time`; the converter drew the iterations from the duration at
half a second each, and its networking time stands for the type (Pretrain, or any other).
"""

from __future__ import annotations

from tlora_fx.simulator.trace_rows import Row, WrongRow, duration, gpus, number
from tlora_fx.simulator.traces import TraceJob

NEEDED = (
    "job_id",
    "arrival_time",
    "num_iteration",
    "iteration_computing_time",
    "gpu_workers",
    "gpu_per_worker",
)
RULES = (
    "duration = num_iteration * iteration_computing_time",
    "GPUs = gpu_workers * gpu_per_worker (a worker is a node)",
    "type = Pretrain where the networking time exceeds the computing time, else Other",
)


def job_of(row: Row) -> TraceJob:
    """A row as a job."""
    each = duration(row, "iteration_computing_time")
    count = number(row, "gpu_workers") * number(row, "gpu_per_worker")
    if count != int(count):
        raise WrongRow("gpu_workers * gpu_per_worker is not a whole number")
    return TraceJob(
        name=str(row["job_id"]),
        submitted=number(row, "arrival_time"),
        duration_seconds=duration(row, "num_iteration") * each,
        gpus=gpus(int(count)),
        type=_type(row, each),
    )


def _type(row: Row, each: float) -> str:
    if not row.get("iteration_networking_time"):
        return "Other"
    return "Pretrain" if number(row, "iteration_networking_time") > each else "Other"
