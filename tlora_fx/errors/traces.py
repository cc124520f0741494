"""Traces of clusters, and the choices that make jobs of them."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class TraceFileError(TloraError):
    """A trace cannot be read or written, or is in no format that tlora-fx knows.

    The formats are AcmeTrace's CSV, Pollux's workload CSV, the converted Kalos CSV, and our own
    (`tlora-fx simulate --save-trace`); `docs/simulating.md` has the columns of each.
    """

    code = "T0930"


class TraceColumnMissing(TloraError):
    """A trace lacks a column that its jobs cannot do without."""

    code = "T0931"


class TraceRowsWrong(TloraError):
    """A trace has rows that say what no job can be, and `--bad-rows refuse` was asked for.

    Wrong are numbers that are none (NaN, empty, words), negative durations, clocks that run
    backwards (a start before its submission, an end before its start) and names that stand twice.
    By default (`--bad-rows drop`) such rows are left out and counted, by reason.
    """

    code = "T0932"


class TraceEmpty(TloraError):
    """Nothing is left of a trace after what cannot be replayed was left out.

    The message counts what was left out, by reason. Where jobs are larger than the cluster, ask for
    more GPUs.
    """

    code = "T0933"


class MarginalsFileError(TloraError):
    """A file of marginals cannot be read, or its counts are not those of a distribution.

    Counts of "at most x" rise with x, and the last one is the number of jobs.
    """

    code = "T0934"


class ReplayChoiceWrong(TloraError):
    """A choice about how a trace becomes jobs makes no sense, or does not go with the trace."""

    code = "T0935"


class ReportNotWritable(TloraError):
    """The folder of a report cannot be written."""

    code = "T0936"
