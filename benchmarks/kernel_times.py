"""Which kernels ran on the GPU, for how long, and which operator started them."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work on the GPU; times in microseconds.

    kind    "kernel", "copy" or "fill"
    op      the operator that started it, as far as the profiler knows
    sizes   of all dimensions of that operator's inputs
    """

    name: str
    kind: str
    start: float
    duration: float
    op: str
    sizes: tuple[int, ...]

    @property
    def stop(self) -> float:
        """When it ended."""
        return self.start + self.duration


def profiled(run: Callable[[], object]) -> list[Kernel]:
    """The kernels of one run on CUDA, in the order of their start."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text())["traceEvents"])


def kernels_of(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The kernels in the events of a Chrome trace, as torch's profiler writes it."""
    complete = [event for event in events if event.get("ph") == "X"]
    ops = {_id(event): event for event in complete if event.get("cat") == "cpu_op"}
    found = [
        _kernel(event, ops.get(_id(event))) for event in complete if event.get("cat") in ON_DEVICE
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def _id(event: Mapping[str, Any]) -> object:
    return event.get("args", {}).get("External id")


def _kernel(event: Mapping[str, Any], op: Mapping[str, Any] | None) -> Kernel:
    args: Mapping[str, Any] = {} if op is None else op.get("args", {})
    return Kernel(
        name=_label(event),
        kind=ON_DEVICE[str(event["cat"])],
        start=float(event["ts"]),
        duration=float(event["dur"]),
        op="" if op is None else str(op["name"]),
        sizes=tuple(_flat(args.get("Input Dims", ()))),
    )


def _label(event: Mapping[str, Any]) -> str:
    """A kernel's name; one that is called just that, by its registers and grid too."""
    name, args = str(event["name"]), event.get("args", {})
    if name != "kernel":
        return name
    return f"kernel registers={args.get('registers per thread')} grid={args.get('grid')}"


def _flat(dims: object) -> Iterable[int]:
    if isinstance(dims, int):
        yield dims
    elif isinstance(dims, list | tuple):
        for inner in dims:
            yield from _flat(inner)


def table(kernels: Sequence[Kernel], calls: int) -> list[dict[str, Any]]:
    """Microseconds a call by kernel and operator, the longest first."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name, kernel.op].append(kernel.duration)
    rows = [
        {
            "kernel": name,
            "op": op,
            "launches": len(own) / calls,
            "microseconds": round(sum(own) / calls, 2),
        }
        for (name, op), own in times.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["microseconds"])))


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, end = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.stop - max(end, kernel.start))
        end = max(end, kernel.stop)
    return total
