"""Pollux's workload CSVs: 160 jobs in eight hours, with applications and without durations.

What a job does in GPU-hours is drawn, log-uniformly, from the size class of its application in the
Pollux paper; its duration is that over its GPUs. The draw belongs to the seed and the job's name.

source   github.com/petuum/adaptdl, branch osdi21-artifact; Pollux (OSDI 2021), section 5.1
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from tlora_fx.simulator.trace_rows import Row, WrongRow, gpus, number, whole
from tlora_fx.simulator.traces import TraceJob

NEEDED = ("name", "time", "application", "num_replicas")
#: GPU-hours, least and most, of the paper's classes small, medium, large and extra large; the
#: paper's small class begins at 0, ours at six minutes.
SMALL, MEDIUM, LARGE, EXTRA_LARGE = (0.1, 1.0), (1.0, 10.0), (10.0, 100.0), (100.0, 1000.0)
GPU_HOURS = {
    "cifar10": SMALL,
    "ncf": SMALL,
    "deepspeech2": MEDIUM,
    "bert": MEDIUM,
    "yolov3": LARGE,
    "imagenet": EXTRA_LARGE,
}
RULES = (
    (
        "the file has no durations: GPU-hours are drawn log-uniformly from the size class of the "
        "application (cifar10, ncf 0.1-1; deepspeech2, bert 1-10; yolov3 10-100; imagenet "
        "100-1000), duration = GPU-hours / num_replicas"
    ),
)


def reader(seed: int) -> Callable[[Row], TraceJob]:
    """What reads a row as a job, with durations drawn by a seed."""

    def job_of(row: Row) -> TraceJob:
        application = str(row.get("application") or "").strip()
        if application not in GPU_HOURS:
            raise WrongRow(f"an application of unknown size: {application or 'none'}")
        count = gpus(whole(row, "num_replicas"))
        name = str(row["name"])
        return TraceJob(
            name=name,
            submitted=number(row, "time"),
            duration_seconds=_gpu_hours(application, name, seed) * 3600.0 / count,
            gpus=count,
            type=application,
        )

    return job_of


def _gpu_hours(application: str, name: str, seed: int) -> float:
    least, most = GPU_HOURS[application]
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    draw = random.Random(key).random()  # noqa: S311  (a draw, not a secret)
    return float(least * (most / least) ** draw)
