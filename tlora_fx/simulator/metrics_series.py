"""Amounts over time in a bounded number of buckets, however long a replay is."""

from __future__ import annotations

import numpy as np

from tlora_fx.simulator.metrics import Floats, Point

BUCKETS = 512
FIRST_SECONDS = 60.0
COLUMNS = (
    "capacity",
    "allocated",
    "busy",
    "running",
    "waiting",
    "groups",
    "samples",
    "lone",
)


class Series:
    """Sums by bucket; where time outgrows them, two neighbours become one.

    begin     seconds, of the first bucket
    """

    def __init__(self, begin: float, buckets: int = BUCKETS) -> None:
        self.begin = begin
        self.width = FIRST_SECONDS
        self.sums = np.zeros((buckets, len(COLUMNS)))

    def add(self, start: float, end: float, rates: Floats) -> None:
        """Amounts that flow evenly for a while.

        rates    [8] a second, in the order of COLUMNS
        """
        if end <= start:
            return
        self._reach(end)
        first, last = int((start - self.begin) / self.width), int((end - self.begin) / self.width)
        last = min(last, len(self.sums) - 1)
        if first >= last:
            self.sums[last] += rates * (end - start)
            return
        edge = self.begin + (first + 1) * self.width
        self.sums[first] += rates * (edge - start)
        if last > first + 1:
            self.sums[first + 1 : last] += rates * self.width
        self.sums[last] += rates * (end - (self.begin + last * self.width))

    def count_waiting(self, starts: Floats, ends: Floats) -> None:
        """Fill in the waiting jobs: those in the system, less those that run.

        starts, ends    [n] when each job was submitted and when it was gone
        """
        edges = self.begin + self.width * np.arange(len(self.sums) + 1, dtype=np.float64)
        inside = np.diff(_since(starts, edges) - _since(ends, edges))
        running, waiting = COLUMNS.index("running"), COLUMNS.index("waiting")
        self.sums[:, waiting] = np.maximum(0.0, inside - self.sums[:, running])

    def points(self, end: float) -> tuple[Point, ...]:
        """Means of each bucket that has begun before the end."""
        found = []
        for place, row in enumerate(self.sums):
            time = self.begin + place * self.width
            seconds = min(self.width, end - time)
            if seconds <= 0:
                break
            found.append(Point(time, seconds, *(float(value) / seconds for value in row)))
        return tuple(found)

    def _reach(self, time: float) -> None:
        count = len(self.sums)
        while time > self.begin + count * self.width:
            half = self.sums.reshape(count // 2, 2, -1).sum(axis=1)
            self.sums[: count // 2], self.sums[count // 2 :] = half, 0.0
            self.width *= 2


def _since(times: Floats, edges: Floats) -> Floats:
    """For each edge, the time since each moment before it, summed."""
    times = np.sort(times)
    before = np.searchsorted(times, edges)
    sums = np.concatenate([[0.0], np.cumsum(times - edges[0])])
    found: Floats = before * (edges - edges[0]) - sums[before]
    return found
