"""Waiting times of clients' requests, their slowdown by others, and a trace of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from sqlite3 import Row
from typing import Any

#: What a request waits for, each the reason of the seconds of that name.
REASONS: Mapping[str, str] = {
    "order": "requests of its model before it were not answered yet",
    "queue": "cycles of others ran, its model had no place in memory, or no trainer ran",
    "computed": "its pieces were computed, with those of others in the same cycles",
    "between": "pieces of others ran between its own, or its answer was written",
}

#: The process of a trace in which is what all sessions share.
SERVICE = "service"


def explained(row: Row) -> dict[str, Any]:
    """A request's times, from a row of `CommandLog.times`.

    `slowdown` is how many times longer than its own part of the cycles it took at most, from when
    its model could run it: alone, it would have taken that part at least.
    """
    said: dict[str, Any] = {
        "seq_id": row["seq"], "kind": row["kind"], "made": row["made"], "done": row["done"],
        "tokens": row["tokens"], "pieces": row["pieces"], "together": row["together"] or 0,
    }  # fmt: skip
    if row["done"] is None or row["began"] is None:
        return said
    ready = max(row["made"], row["before"] or 0.0)
    seconds = {
        "order": ready - row["made"], "queue": max(0.0, row["began"] - ready),
        "computed": row["computed"],
        "between": max(0.0, row["done"] - row["began"] - row["computed"]),
    }  # fmt: skip
    said |= {"seconds": seconds, "own_seconds": row["own"]}
    said["why"] = REASONS[max(seconds, key=lambda name: seconds[name])]
    if row["own"] > 0:
        said["slowdown"] = max(1.0, (row["done"] - ready) / row["own"])
    return said


def slowdowns(rows: Iterable[Row]) -> dict[str, float]:
    """By user, the slowdown that 95 of 100 requests do not exceed."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if (slowdown := explained(row).get("slowdown")) is not None:
            found[row["user"]].append(slowdown)
    return {user: sorted(own)[int(0.95 * (len(own) - 1))] for user, own in found.items()}


def trace(
    rows: Iterable[Row], pieces: Iterable[Row], took_over: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Events of Chrome's trace format, which Perfetto reads: a process a model or sampler.

    In its first thread are its requests, in the second their pieces. Where layers were compiled
    there is a process of the service, in which they took over.

    rows, pieces   of `CommandLog.times` and `CommandLog.cycles`
    took_over      the fact of that name
    source         Trace Event Format, https://perfetto.dev/docs/getting-started/other-formats
    """
    processes: dict[str, int] = {}
    if took_over is not None:
        processes[SERVICE] = 1
        said = {"cycle": took_over["cycle"]}
        yield {
            "pid": 1, "tid": 1, "name": "compiled layers take over", "ph": "X",
            "ts": 1e6 * took_over["began"], "dur": 1e6 * took_over["seconds"], "args": said,
        }  # fmt: skip
    for at, row in ((at, row) for at, own in enumerate((rows, pieces)) for row in own):
        process = processes.setdefault(row["queue"], len(processes) + 1)
        named = {"pid": process, "tid": at + 1, "name": f"{row['kind']} {row['seq']}", "ph": "X"}
        if at:
            compiled = took_over is not None and row["cycle"] > took_over["cycle"]
            said = {
                "cycle": row["cycle"], "tokens": row["tokens"], "together": row["together"],
                "compiled": compiled,
            }  # fmt: skip
            yield named | {"ts": 1e6 * row["began"], "dur": 1e6 * row["seconds"], "args": said}
        elif row["done"] is not None:
            duration = row["done"] - row["made"]
            yield named | {"ts": 1e6 * row["made"], "dur": 1e6 * duration, "args": explained(row)}
    for name, process in processes.items():
        yield {"pid": process, "ph": "M", "name": "process_name", "args": {"name": name}}
