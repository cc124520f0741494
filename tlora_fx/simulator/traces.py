"""Traces of clusters as one table of jobs, whatever file they come from."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from pydantic import ValidationError

from tlora_fx.cost.load import Demand
from tlora_fx.errors import TraceColumnMissing, TraceEmpty, TraceFileError, TraceRowsWrong, nearest
from tlora_fx.host.durable import write_output
from tlora_fx.inspect.wording import spans
from tlora_fx.scheduler.state import REQUEST, JobRequest

MONTH_SECONDS = 30 * 86400.0


class TraceJob(NamedTuple):
    """A job as a trace tells of it: nothing in it is of LoRA yet.

    submitted          seconds; any origin
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
    """Counts of what was left out of a trace, by reason.

    wrong    rows that say what no job can be
    by_rule  jobs that are well told, and cannot or shall not be replayed
    """

    wrong: Counter[str] = field(default_factory=Counter)
    by_rule: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str, *, rule: bool = False) -> None:
        """Count one more row that was left out."""
        (self.by_rule if rule else self.wrong)[reason] += 1
        self.first.setdefault(reason, where)

    @property
    def total(self) -> int:
        """Number of all that was left out."""
        return self.wrong.total() + self.by_rule.total()

    def rows(self) -> list[tuple[str, str, int, str]]:
        """Kind, reason, count and first place of each reason, the most frequent first."""
        counts = [("wrong", *pair) for pair in self.wrong.most_common()]
        counts += [("rule", *pair) for pair in self.by_rule.most_common()]
        return [(kind, reason, count, self.first[reason]) for kind, reason, count in counts]

    def lines(self, verdict: str = "left out") -> list[str]:
        """Lines for people; one line where nothing was left out."""
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
        """Trace of the first so many jobs."""
        return replace(self, jobs=self.jobs[:count])

    @property
    def months(self) -> int:
        """Number of months that the trace spans."""
        return max((job.month for job in self.jobs), default=-1) + 1


def _months(numbers: set[int]) -> str:
    """Months that follow each other as a span: "months 1 to 6, 8"."""
    if not numbers:
        return "no month"
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in spans(sorted(numbers))]
    return f"month{'s' * (len(numbers) > 1)} {', '.join(texts)}"


def in_order(jobs: Iterable[TraceJob]) -> tuple[tuple[TraceJob, ...], int]:
    """The jobs by submission, and how many came before the one above them in the file."""
    given = list(jobs)
    back = sum(b.submitted < a.submitted for a, b in itertools.pairwise(given))
    return tuple(sorted(given, key=lambda job: job.submitted) if back else given), back


def span_text(days: float) -> str:
    """A span of time in the largest unit of which it has one."""
    for unit, part in (("days", 1.0), ("hours", 24.0)):
        if days * part >= 1:
            return f"{days * part:.3g} {unit}"
    return f"{days * 1440:.3g} minutes"


def described(trace: Trace) -> dict[str, Any]:
    """Description of a trace in a report, in plain values."""
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


Row = Mapping[str, Any]


class WrongRow(Exception):
    """A row that says what no job can be; its text is the reason."""


def number(row: Row, column: str) -> float:
    """A finite number of a row."""
    try:
        value = float(row.get(column))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WrongRow(f"{column} is not a number") from None
    if not math.isfinite(value):
        raise WrongRow(f"{column} is not a finite number")
    return value


def whole(row: Row, column: str) -> int:
    """A whole number of a row; "8.0" is one."""
    value = number(row, column)
    if value != int(value):
        raise WrongRow(f"{column} is not a whole number")
    return int(value)


def date(row: Row, column: str) -> datetime:
    """A date with time, as ISO text or in seconds since 1970."""
    text = str(row.get(column) or "").strip()
    try:
        return datetime.fromtimestamp(float(text), UTC)
    except (ValueError, OverflowError, OSError):
        pass
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise WrongRow(f"{column} is no date") from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def duration(row: Row, column: str) -> float:
    """Seconds, not negative."""
    value = number(row, column)
    if value < 0:
        raise WrongRow(f"negative {column}")
    return value


def gpus(count: int) -> int:
    """A job's GPUs; 0 is a job of CPUs alone, which a choice leaves out."""
    if count < 0:
        raise WrongRow("negative number of GPUs")
    return count


def jobs_of(path: Path, reader: TraceReader, dropped: Dropped) -> Iterator[TraceJob]:
    """The jobs of a file; what is wrong is counted and left out."""
    seen: set[str] = set()
    for line, row in rows_of(path):
        try:
            if isinstance(row, WrongRow):
                raise row
            job = reader.job(row)
            if job.name in seen:
                raise WrongRow("a name that stands twice")
        except WrongRow as reason:
            dropped.add(str(reason), f"line {line}")
        else:
            seen.add(job.name)
            yield job


def header_of(path: Path) -> list[str]:
    """The columns of a file: of a CSV's first line, or the keys of the first JSON object."""
    with _opened(path) as (file, has_objects):
        if has_objects:
            return list(_object(file.readline(), 1, path))
        _, names = next(_records(file, path), (1, []))
    return [name.strip() for name in names if name.strip()]


def require_columns(path: Path, header: Iterable[str], needed: Iterable[str], format: str) -> None:
    """Refuse a file that lacks a needed column.

    raises    TraceColumnMissing, with all that are missing
    """
    there = set(header)
    missing = [name for name in needed if name not in there]
    if missing:
        raise TraceColumnMissing(
            f"a trace of format {format} without {', '.join(missing)}",
            file=path,
            expected=", ".join(needed),
            found=", ".join(header),
            help="add the columns, or say --format if this is another kind of trace",
        )


def rows_of(path: Path) -> Iterator[tuple[int, Row | WrongRow]]:
    """The rows of a CSV file, or of a file of JSON lines, each with the number of its first line.

    A row that has other columns than its file is given as what is wrong with it.

    raises    TraceFileError
    """
    with _opened(path) as (file, has_objects):
        if has_objects:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, _object(text, line, path)
            return
        records = _records(file, path)
        names = [name.strip() for name in next(records, (1, []))[1]]
        for line, cells in records:
            yield line, _row(names, cells)


def _records(file: IO[str], path: Path) -> Iterator[tuple[int, list[str]]]:
    """The records of a CSV file, blank lines left out, each with the number of its first line."""
    reader = csv.reader(file, skipinitialspace=True, strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise TraceFileError(
            "a trace that is no CSV",
            file=path,
            line=line,
            found=f"{error}, in line {reader.line_num}",
            help='close each quote that is opened; double a quote inside a quoted field: ""',
        ) from None


def _row(names: Sequence[str], cells: Sequence[str]) -> Row | WrongRow:
    if any("\n" in cell or "\r" in cell for cell in cells):
        return WrongRow("a quoted field that runs over several lines")
    while len(cells) > len(names) and not cells[-1].strip():
        cells = cells[:-1]
    if len(cells) != len(names):
        return WrongRow(f"{len(cells)} fields under {len(names)} names")
    return dict(zip(names, cells, strict=True))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[str], bool]]:
    """A file as text, a byte-order mark skipped, and whether its lines are JSON objects.

    raises    TraceFileError, also inside for bytes that are no text
    """
    try:
        opened = path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        raise TraceFileError(
            "there is no such trace" if gone else "the trace cannot be read",
            file=path,
            found=None if gone else error.strerror or error,
            help="name a file that you may read, or leave --trace out for a synthetic trace",
        ) from None
    with opened as file:
        try:
            has_objects = file.read(1) == "{"
            file.seek(0)
            yield file, has_objects
        except UnicodeDecodeError as error:
            raise TraceFileError(
                "a trace that is no UTF-8 text",
                file=path,
                found=f"{error.reason} at byte {error.start}",
                help="write it anew in UTF-8",
            ) from None


def _object(text: str, line: int, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(
            "a line that is no JSON object", file=path, line=line, found=error
        ) from None
    if not isinstance(content, dict):
        raise TraceFileError("a line that is no JSON object", file=path, line=line, found=text)
    return content


class TraceReader:
    """Reader that turns the rows of one file into jobs.

    columns     that the format cannot do without
    """

    columns: ClassVar[tuple[str, ...]]
    rules: tuple[str, ...] = ()
    synthetic = False
    requests: dict[str, JobRequest] | None = None

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def job(self, row: Row) -> TraceJob:
        """A row as a job; raises WrongRow."""
        raise NotImplementedError

    def with_months(self, jobs: Iterable[TraceJob]) -> list[TraceJob]:
        """Months of 30 days from the first job, for traces without a calendar."""
        jobs = list(jobs)
        first = min((job.submitted for job in jobs), default=0.0)
        return [job._replace(month=int((job.submitted - first) // MONTH_SECONDS)) for job in jobs]


class AcmeReader(TraceReader):
    """AcmeTrace's CSV: jobs of the clusters Seren and Kalos, March to August 2023.

    user, cpu_num, queue and gpu_time are not read; clocks, where they are there, show whether time
    runs backwards.

    source   github.com/InternLM/AcmeTrace, trace_seren.csv and trace_kalos.csv
    """

    columns = ("job_id", "gpu_num", "type", "state", "submit_time", "duration")
    rules = ("a job's duration is the observed one, whatever its last state",)

    def job(self, row: Row) -> TraceJob:
        """A row as a job; its month is that of the calendar, counted from the year 0."""
        submitted = date(row, "submit_time")
        clocks = [name for name in ("start_time", "end_time") if str(row.get(name) or "").strip()]
        times = [submitted, *(date(row, name) for name in clocks)]
        if any(after < before for before, after in itertools.pairwise(times)):
            raise WrongRow("clocks that run backwards")
        name = str(row.get("job_id") or "").strip()
        if not name:
            raise WrongRow("no job_id")
        return TraceJob(
            name=name,
            submitted=submitted.timestamp(),
            duration_seconds=duration(row, "duration"),
            gpus=gpus(whole(row, "gpu_num")),
            type=str(row.get("type") or "Other").strip() or "Other",
            state=str(row.get("state") or "").strip().upper(),
            month=submitted.year * 12 + submitted.month,
        )

    def with_months(self, jobs: Iterable[TraceJob]) -> list[TraceJob]:
        """Months of the calendar from the first one."""
        jobs = list(jobs)
        first = min((job.month for job in jobs), default=0)
        return [job._replace(month=job.month - first) for job in jobs]


class KalosReader(TraceReader):
    """The converted Kalos file: completed jobs of AcmeTrace's smaller cluster, as iterations.

    A worker is a node, which shows in the counts (62 and 63 workers of 8 are the 496 and 504 GPUs
    of AcmeTrace's own distribution). The converter drew the iterations from the duration at half a
    second each, and its networking time stands for the type (Pretrain, or any other).
    """

    columns = (
        "job_id",
        "arrival_time",
        "num_iteration",
        "iteration_computing_time",
        "gpu_workers",
        "gpu_per_worker",
    )
    rules = (
        "duration = num_iteration * iteration_computing_time",
        "GPUs = gpu_workers * gpu_per_worker (a worker is a node)",
        "type = Pretrain where the networking time exceeds the computing time, else Other",
    )

    def job(self, row: Row) -> TraceJob:
        computing = duration(row, "iteration_computing_time")
        count = number(row, "gpu_workers") * number(row, "gpu_per_worker")
        if count != int(count):
            raise WrongRow("gpu_workers * gpu_per_worker is not a whole number")
        networking = "iteration_networking_time"
        pretrain = bool(row.get(networking)) and number(row, networking) > computing
        return TraceJob(
            name=str(row["job_id"]),
            submitted=number(row, "arrival_time"),
            duration_seconds=duration(row, "num_iteration") * computing,
            gpus=gpus(int(count)),
            type="Pretrain" if pretrain else "Other",
        )


#: GPU-hours, least and most, of the Pollux paper's classes small, medium, large and extra large;
#: the paper's small class begins at 0, ours at six minutes.
SMALL, MEDIUM, LARGE, EXTRA_LARGE = (0.1, 1.0), (1.0, 10.0), (10.0, 100.0), (100.0, 1000.0)
GPU_HOURS = {
    "cifar10": SMALL,
    "ncf": SMALL,
    "deepspeech2": MEDIUM,
    "bert": MEDIUM,
    "yolov3": LARGE,
    "imagenet": EXTRA_LARGE,
}


class PolluxReader(TraceReader):
    """Pollux's workload CSVs: 160 jobs in eight hours, with applications and without durations.

    What a job does in GPU-hours is drawn, log-uniformly, from the size class of its application in
    the Pollux paper. The draw belongs to the seed and the job's name.

    source   github.com/petuum/adaptdl, branch osdi21-artifact; Pollux (OSDI 2021), section 5.1
    """

    columns = ("name", "time", "application", "num_replicas")
    rules = (
        (
            "the file has no durations: GPU-hours are drawn log-uniformly from the size class of "
            "the application (cifar10, ncf 0.1-1; deepspeech2, bert 1-10; yolov3 10-100; imagenet "
            "100-1000), duration = GPU-hours / num_replicas"
        ),
    )
    synthetic = True

    def job(self, row: Row) -> TraceJob:
        application = str(row.get("application") or "").strip()
        if application not in GPU_HOURS:
            raise WrongRow(f"an application of unknown size: {application or 'none'}")
        count, name = whole(row, "num_replicas"), str(row["name"])
        if count < 1:
            # Its duration is GPU-hours over replicas.
            raise WrongRow("num_replicas below 1")
        least, most = GPU_HOURS[application]
        key = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        draw = random.Random(key).random()  # noqa: S311  (a draw, not a secret)
        hours = least * (most / least) ** draw
        return TraceJob(name, number(row, "time"), hours * 3600.0 / count, count, application)


DEMAND = tuple(f"demand.{name}" for name in Demand._fields)
REQUEST_FIELDS = tuple(field.name for field in fields(JobRequest) if field.name != "demand")


class OwnReader(TraceReader):
    """Our own traces: whole job requests, one a line, as JSON or as CSV.

    What `tlora-fx simulate --save-trace` writes: the jobs after every choice was made, so that the
    same replay can be done again, or elsewhere, without the trace they came from.
    """

    # Older files have neither `demand.launched` nor what follows it.
    columns = (
        "name", "base", "gpus", "steps", "submitted", *DEMAND[: DEMAND.index("demand.launched")],
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.requests: dict[str, JobRequest] = {}
        self.origins: set[str] = set()

    def job(self, row: Row) -> TraceJob:
        """A row as a job; its request is kept."""
        request = request_of_row(row)
        self.requests.setdefault(request.name, request)
        if row.get("origin"):
            self.origins.add(str(row["origin"]))
        seconds = duration(row, "duration_seconds") if row.get("duration_seconds") else 0.0
        kind = str(row.get("type") or "job")
        return TraceJob(request.name, request.submitted, seconds, request.gpus, kind)

    @property
    def rules(self) -> tuple[str, ...]:  # type: ignore[override]
        """Rules: nothing is filled in, and where the jobs came from."""
        origins = (f"the jobs came from: {origin}" for origin in sorted(self.origins))
        return ("jobs are replayed as they are written: no other choice applies", *origins)

    @property
    def synthetic(self) -> bool:  # type: ignore[override]
        """Whether the jobs came from a synthetic trace."""
        return any("synthetic" in origin for origin in self.origins)


def request_of_row(row: Row) -> JobRequest:
    """The request that a row of our own traces is of; raises WrongRow."""
    given = {name: value for name, value in row.items() if value not in ("", None)}
    known = {name: given[name] for name in (*REQUEST_FIELDS, "lends") if name in given}
    demand = {name.removeprefix("demand."): given[name] for name in DEMAND if name in given}
    try:
        request = REQUEST.validate_python({**known, "demand": demand})
    except ValidationError as error:
        first = error.errors()[0]
        raise WrongRow(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    numbers = (*request.demand, request.submitted, request.max_slowdown)
    if not all(map(math.isfinite, numbers)):
        raise WrongRow("a number that is not finite")
    if min(request.demand) < 0:
        raise WrongRow("negative demand")
    if min(request.demand.samples, request.demand.tokens) == 0:
        raise WrongRow("a demand of no samples or no tokens")
    if min(request.gpus, request.steps) < 1:
        raise WrongRow("fewer GPUs or steps than one")
    if request.max_slowdown < 1:
        raise WrongRow("max_slowdown below 1")
    return request


def row_of(request: JobRequest, job: TraceJob | None, origin: str) -> dict[str, Any]:
    """A request as a row."""
    row = REQUEST.dump_python(request)
    demand = row.pop("demand")
    return {
        **{name: row.pop(name) for name in OwnReader.columns[:5]},
        **{f"demand.{name}": value for name, value in demand.items()},
        **row,
        "type": job.type if job else "job",
        "duration_seconds": job.duration_seconds if job else None,
        "origin": origin,
    }


def write_own(
    path: Path, requests: Sequence[JobRequest], jobs: Mapping[str, TraceJob], origin: str
) -> None:
    """Write requests; CSV where the name ends in .csv, else JSON lines.

    origin    where they came from; a synthetic trace says so
    raises    TraceFileError
    """
    rows = [row_of(request, jobs.get(request.name), origin) for request in requests]
    lines = (json.dumps(row) + "\n" for row in rows)
    text = _csv(rows) if path.suffix == ".csv" else "".join(lines)
    try:
        write_output(path, text.encode())
    except OSError as error:
        raise TraceFileError("the trace cannot be written", file=path, found=error) from None


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]) if rows else OwnReader.columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


READERS: dict[str, type[TraceReader]] = {
    "acme": AcmeReader,
    "pollux": PolluxReader,
    "kalos": KalosReader,
    "own": OwnReader,
}


def read_trace(
    path: Path, *, format: str | None = None, bad_rows: str = "drop", seed: int = 0
) -> Trace:
    """The jobs of a file, in order of submission.

    format     acme, pollux, kalos or own; None: by the columns
    bad_rows   drop: rows that are wrong are left out and counted; refuse: they are an error
    seed       of what the format does not say and is drawn
    raises     TraceFileError, TraceColumnMissing, TraceRowsWrong, TraceEmpty
    """
    header = header_of(path)
    kind = format or guessed(path, header)
    if kind not in READERS:
        close = nearest(kind, READERS)
        hint = f"did you mean {close!r}?" if close else f"one of {', '.join(READERS)}"
        raise TraceFileError(f"no trace format is called {kind!r}", help=hint)
    if kind == "own" and "demand" in header:
        raise TraceFileError("demand is written flat, as demand.samples and so on", file=path)
    require_columns(path, header, READERS[kind].columns, kind)
    dropped, reader = Dropped(), READERS[kind](seed)
    jobs, back = in_order(reader.with_months(jobs_of(path, reader, dropped)))
    if bad_rows == "refuse" and dropped.wrong:
        raise TraceRowsWrong(
            f"{dropped.wrong.total():,} rows of the trace are wrong",
            file=path,
            found="\n".join(Dropped(wrong=dropped.wrong, first=dropped.first).lines("wrong")),
            help="mend them, or leave them out with --bad-rows drop",
        )
    if not jobs:
        raise TraceEmpty(
            "the trace has no job",
            file=path,
            found="\n".join(dropped.lines()),
            help="see docs/simulating.md for what a row must say",
        )
    notes = (f"{back:,} rows were submitted before the row above them: sorted",) if back else ()
    rules = (*reader.rules, *notes)
    return Trace(jobs, path.name, kind, reader.synthetic, rules, dropped, reader.requests)


def guessed(path: Path, header: Sequence[str]) -> str:
    """The format whose columns a header has most of.

    raises    TraceFileError where it has less than a third of any format's
    """
    shares = {
        name: sum(column in header for column in reader.columns) / len(reader.columns)
        for name, reader in READERS.items()
    }
    best = max(shares, key=lambda name: shares[name])
    if shares[best] < 1 / 3:
        raise TraceFileError(
            "a file with the columns of no trace that is known",
            file=path,
            expected="\n".join(
                f"{name}: {', '.join(reader.columns)}" for name, reader in READERS.items()
            ),
            found=", ".join(header)[:200] or "an empty file",
            help="say which it is with --format, or convert it (docs/simulating.md)",
        )
    return best
