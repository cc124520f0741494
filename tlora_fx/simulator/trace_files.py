"""Read a trace file of any format that is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tlora_fx.errors import TraceEmpty, TraceFileError, TraceRowsWrong, nearest
from tlora_fx.simulator import acme, kalos, own_trace, pollux
from tlora_fx.simulator.trace_rows import demand_columns, header_of, jobs_of, rows_of
from tlora_fx.simulator.traces import Dropped, Trace, TraceJob, in_order, with_months

#: What each format cannot do without.
NEEDED = {
    "acme": acme.NEEDED,
    "pollux": pollux.NEEDED,
    "kalos": kalos.NEEDED,
    "own": own_trace.NEEDED,
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
    if kind not in NEEDED:
        close = nearest(kind, NEEDED)
        hint = f"did you mean {close!r}?" if close else f"one of {', '.join(NEEDED)}"
        raise TraceFileError(f"no trace format is called {kind!r}", help=hint)
    if kind == "own" and "demand" in header:
        raise TraceFileError("demand is written flat, as demand.samples and so on", file=path)
    demand_columns(path, header, NEEDED[kind], kind)
    dropped = Dropped()
    trace = _read(path, kind, dropped, seed)
    if bad_rows == "refuse" and dropped.wrong:
        raise TraceRowsWrong(
            f"{dropped.wrong.total():,} rows of the trace are wrong",
            file=path,
            found="\n".join(Dropped(wrong=dropped.wrong, first=dropped.first).lines("wrong")),
            help="mend them, or leave them out with --bad-rows drop",
        )
    if not trace.jobs:
        raise TraceEmpty(
            "the trace has no job", file=path, found="\n".join(dropped.lines()), help=_format_help()
        )
    return trace


def _format_help() -> str:
    return "see docs/simulating.md for what a row must say"


def guessed(path: Path, header: Sequence[str]) -> str:
    """The format whose columns a header has most of.

    raises    TraceFileError where it has less than a third of any format's
    """
    shares = {
        name: sum(column in header for column in needed) / len(needed)
        for name, needed in NEEDED.items()
    }
    best = max(shares, key=lambda name: shares[name])
    if shares[best] < 1 / 3:
        raise TraceFileError(
            "a file with the columns of no trace that is known",
            file=path,
            expected="\n".join(f"{name}: {', '.join(needed)}" for name, needed in NEEDED.items()),
            found=", ".join(header)[:200] or "an empty file",
            help="say which it is with --format, or convert it (docs/simulating.md)",
        )
    return best


def _read(path: Path, kind: str, dropped: Dropped, seed: int) -> Trace:
    rows = rows_of(path)
    make = partial(Trace, source=path.name, format=kind, dropped=dropped)
    if kind == "own":
        one, requests, origins = own_trace.reader()
        jobs, notes = _sorted(with_months(jobs_of(rows, one, dropped)))
        told = (*own_trace.RULES, *(f"the jobs came from: {origin}" for origin in sorted(origins)))
        drawn = any("synthetic" in origin for origin in origins)
        return make(jobs=jobs, synthetic=drawn, rules=(*told, *notes), requests=requests)
    if kind == "pollux":
        found = with_months(jobs_of(rows, pollux.reader(seed), dropped))
        jobs, notes = _sorted(found)
        return make(jobs=jobs, synthetic=True, rules=(*pollux.RULES, *notes))
    if kind == "kalos":
        jobs, notes = _sorted(with_months(jobs_of(rows, kalos.job_of, dropped)))
        return make(jobs=jobs, rules=(*kalos.RULES, *notes))
    jobs, notes = _sorted(_from_first_month(list(jobs_of(rows, acme.job_of, dropped))))
    return make(jobs=jobs, rules=(*acme.RULES, *notes))


def _from_first_month(jobs: list[TraceJob]) -> list[TraceJob]:
    first = min((job.month for job in jobs), default=0)
    return [job._replace(month=job.month - first) for job in jobs]


def _sorted(jobs: list[TraceJob]) -> tuple[tuple[TraceJob, ...], tuple[str, ...]]:
    ordered, back = in_order(jobs)
    if not back:
        return ordered, ()
    return ordered, (f"{back:,} rows were submitted before the row above them: sorted",)
