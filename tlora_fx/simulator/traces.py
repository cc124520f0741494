"""Traces of clusters as one table of jobs, whatever file they come from."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tlora_fx.errors import TraceEmpty
from tlora_fx.scheduler.request import JobRequest

MONTH_SECONDS = 30 * 86400.0


class TraceJob(NamedTuple):
    """A job as a trace tells of it: nothing in it is of LoRA yet.

    name               unique in its trace
    submitted          seconds; any origin
    duration_seconds   how long it ran, on the GPUs that it had
    gpus               how many it had
    type               such as "SFT" or "Eval"; "job" where the trace does not say
    state              such as "COMPLETED"; empty where the trace does not say
    month              months since the trace's first one, by the calendar where it has dates
    """

    name: str
    submitted: float
    duration_seconds: float
    gpus: int
    type: str = "job"
    state: str = ""
    month: int = 0


@dataclass(slots=True)
class Dropped:
    """What was left out of a trace, by reason.

    wrong    rows that say what no job can be
    by_rule  jobs that are well told, and cannot or shall not be replayed
    first    where each reason was met first
    """

    wrong: Counter[str] = field(default_factory=Counter)
    by_rule: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str, *, rule: bool = False) -> None:
        """Count one."""
        (self.by_rule if rule else self.wrong)[reason] += 1
        self.first.setdefault(reason, where)

    @property
    def total(self) -> int:
        """How many in all."""
        return self.wrong.total() + self.by_rule.total()

    def together(self, other: Dropped) -> Dropped:
        """What was left out by both."""
        return Dropped(
            self.wrong + other.wrong, self.by_rule + other.by_rule, other.first | self.first
        )

    def rows(self) -> list[tuple[str, str, int, str]]:
        """Kind, reason, count and first place of each reason, the most frequent first."""
        found = [("wrong", *pair) for pair in self.wrong.most_common()]
        found += [("rule", *pair) for pair in self.by_rule.most_common()]
        return [(kind, reason, count, self.first[reason]) for kind, reason, count in found]

    def lines(self, verdict: str = "left out") -> list[str]:
        """For people; one line where nothing was left out.

        verdict    upon what is counted
        """
        if not self.total:
            return ["nothing was left out"]
        return [
            f"{count:,} {verdict}: {reason} (first: {where})"
            for _, reason, count, where in self.rows()
        ]


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a trace, in order of submission.

    source      file, or how it was drawn
    format      acme, pollux, kalos, own or synthetic
    synthetic   whether any of its numbers were drawn rather than observed
    rules       how what the file does not say was filled in, one line each
    requests    whole requests by name, where the trace is one of ours
    """

    jobs: tuple[TraceJob, ...]
    source: str
    format: str
    synthetic: bool = False
    rules: tuple[str, ...] = ()
    dropped: Dropped = field(default_factory=Dropped)
    requests: Mapping[str, JobRequest] | None = None

    def month(self, number: int) -> Trace:
        """The jobs of one month, counted from 1.

        raises    TraceEmpty, which names the months that have jobs
        """
        kept = tuple(job for job in self.jobs if job.month == number - 1)
        if not kept:
            raise TraceEmpty(
                f"the trace has no job in month {number}",
                trace=self.source,
                found=f"jobs in {_months({job.month + 1 for job in self.jobs})}",
                help="name one of these with --month, or none for all jobs",
            )
        return replace(self, jobs=kept, source=f"{self.source}, month {number}")

    def first(self, count: int) -> Trace:
        """The first so many jobs."""
        return replace(self, jobs=self.jobs[:count])

    @property
    def months(self) -> int:
        """How many months it spans."""
        return max((job.month for job in self.jobs), default=-1) + 1


def _months(numbers: set[int]) -> str:
    """Months that follow each other as a span: "months 1 to 6, 8"."""
    if not numbers:
        return "no month"
    ordered = sorted(numbers)
    starts = [number for number in ordered if number - 1 not in numbers]
    ends = [number for number in ordered if number + 1 not in numbers]
    spans = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    return f"month{'s' * (len(ordered) > 1)} {', '.join(spans)}"


def in_order(jobs: Iterable[TraceJob]) -> tuple[tuple[TraceJob, ...], int]:
    """The jobs by submission, and how many came before the one above them in the file."""
    given = list(jobs)
    back = sum(b.submitted < a.submitted for a, b in itertools.pairwise(given))
    return tuple(sorted(given, key=lambda job: job.submitted) if back else given), back


def with_months(jobs: Iterable[TraceJob]) -> list[TraceJob]:
    """Months of 30 days from the first job, for traces without a calendar."""
    given = list(jobs)
    first = min((job.submitted for job in given), default=0.0)
    return [job._replace(month=int((job.submitted - first) // MONTH_SECONDS)) for job in given]


def described(trace: Trace) -> dict[str, Any]:
    """What a report says of a trace, in plain values."""
    jobs = trace.jobs
    span = jobs[-1].submitted - jobs[0].submitted if jobs else 0.0
    gpu_seconds = sum(job.duration_seconds * job.gpus for job in jobs)
    return {
        "source": trace.source,
        "format": trace.format,
        "synthetic": trace.synthetic,
        "jobs": len(jobs),
        "span_days": span / 86400,
        "months": trace.months,
        "mean_gpus": sum(job.gpus for job in jobs) / max(1, len(jobs)),
        "gpu_hours": gpu_seconds / 3600,
        "mean_duration_seconds": sum(job.duration_seconds for job in jobs) / max(1, len(jobs)),
        "types": dict(Counter(job.type for job in jobs).most_common()),
        "rules": list(trace.rules),
    }
