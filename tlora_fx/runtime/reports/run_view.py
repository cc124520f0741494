"""Read how the jobs of a run stand, from their folders, while it goes on and afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tlora_fx.errors import RunFolderError
from tlora_fx.host.durable import whole_lines
from tlora_fx.host.formats import read_object, require_known_stamp
from tlora_fx.runtime.run_folder import (
    DATA,
    METRICS,
    RESERVED,
    START,
    STATUS,
    STATUS_FORMAT,
    parsed_metrics,
)

#: Steps over which a pace is taken.
RECENT = 20


@dataclass
class JobView:
    """A job of a run, as far as its folder tells.

    status        as status.json has it
    steps         lines of optimizer steps, in order
    evaluations   lines of evaluations
    samples       lines of answers to `sample_prompts`
    """

    folder: Path
    status: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.folder.name

    @property
    def state(self) -> str:
        """Status of the job, "starting" until there is one."""
        return str(self.status.get("status", "starting"))

    @property
    def step(self) -> int:
        """Steps that are done."""
        return int(self.steps[-1]["step"]) if self.steps else int(self.status.get("step", 0))

    @property
    def last_step(self) -> int:
        """Steps that the job has in all; 0 where nobody knows yet."""
        return int(self.status.get("steps", 0))

    def refresh(self) -> None:
        """Read what was written since the last time; a run that went back is read anew.

        raises   NewerFormat
        """
        self.status = read_object(self.folder / STATUS) or self.status
        place = self.folder / STATUS
        require_known_stamp("the job's status", place, self.status, known=STATUS_FORMAT)
        path = self.folder / METRICS
        try:
            if path.stat().st_size < self._read:
                self.steps, self.evaluations, self.samples, self._read = [], [], [], 0
            whole = whole_lines(path, self._read)
        except OSError:
            return
        self._read += len(whole)
        for row in parsed_metrics(whole):
            kind = self.steps if "loss" in row else self.samples
            (self.evaluations if {"loss", "samples"}.isdisjoint(row) else kind).append(row)

    def losses(self) -> Iterator[tuple[float, float]]:
        """Step and loss, where it is a number."""
        return _points(self.steps, "loss")

    def evaluated(self, name: str = "eval_loss") -> Iterator[tuple[float, float]]:
        """Step and a metric of evaluations."""
        return _points(self.evaluations, name)

    def pace(self) -> tuple[float, float] | None:
        """Seconds a step, their median, and tokens a second, over the last steady steps."""
        recent = self._steady()[-RECENT:]
        rate = _rate(recent)
        return None if rate is None else (median(seconds for seconds, _ in recent), rate)

    def mean_rate(self) -> float | None:
        """Tokens a second over all steady steps."""
        return _rate(self._steady())

    def replayed(self) -> float | None:
        """The share of rows that ran as CUDA graphs in steady rounds; None where none may."""
        rows = [row for row in self.steps if not _is_first(row)]
        ran = sum(row.get("rows", 0) for row in rows)
        return sum(row.get("rows_replayed", 0) for row in rows) / ran if ran else None

    def _steady(self) -> list[tuple[float, int]]:
        """Seconds and tokens of each step but the first of a start, which compiles."""
        before = [0, *(row["tokens"] for row in self.steps)]
        return [
            (row["seconds"], row["tokens"] - tokens)
            for tokens, row in zip(before, self.steps, strict=False)
            if not _is_first(row)
        ]

    def lengths(self) -> dict[int, int]:
        """Number of samples with at most so many tokens, and more than the number before."""
        data = read_object(self.folder / DATA) or {}
        return {int(most): int(count) for most, count in data.get("lengths", {}).items()}


def read_start(folder: Path) -> dict[str, Any] | None:
    """Times of the newest start of a run of `train`; None where its folder does not tell."""
    start = read_object(folder / START)
    return start if start is not None and isinstance(start.get("phases"), dict) else None


def _what_is(path: Path) -> str:
    """What stands where a run's folder was looked for."""
    if path.is_dir():
        return "no job in it"
    return "a file of that name" if path.exists() else "no folder of that name"


def read_run(folder: Path) -> list[JobView]:
    """The jobs of a run's folder, by name.

    raises   RunFolderError where it is none; NewerFormat
    """
    there = folder.iterdir() if folder.is_dir() else ()
    jobs = sorted(
        path
        for path in there
        if path.name not in RESERVED and any((path / name).is_file() for name in (STATUS, METRICS))
    )
    if not jobs:
        raise RunFolderError(
            "there is no run to look at",
            folder=folder,
            found=_what_is(folder),
            help="name the -o folder of train or run",
        )
    views = [JobView(path) for path in jobs]
    for view in views:
        view.refresh()
    return views


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Thinned points, at most `most`: means of equally many, each at the last of them."""
    every = -(-len(points) // most) or 1
    parts = (points[start : start + every] for start in range(0, len(points), every))
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def _is_first(row: Mapping[str, Any]) -> bool:
    """Whether a step is the first one of a start."""
    return "phases" in row


def _rate(steps: Sequence[tuple[float, int]]) -> float | None:
    """Tokens a second of steps, each its seconds and tokens; None where they took no time."""
    seconds = sum(seconds for seconds, _ in steps)
    return sum(tokens for _, tokens in steps) / seconds if seconds else None


def _points(rows: Sequence[dict[str, Any]], name: str) -> Iterator[tuple[float, float]]:
    return ((row["step"], row[name]) for row in rows if row.get(name) is not None)
