"""Reading traces: formats, bad rows, and our own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.cost.load import Demand
from tlora_fx.errors import TraceColumnMissing, TraceEmpty, TraceFileError, TraceRowsWrong
from tlora_fx.scheduler.state import JobRequest
from tlora_fx.simulator.traces import Trace, TraceJob, read_trace, write_own

DATA = Path(__file__).parents[3] / "shared" / "data"
ACME = (
    "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,"
    "queue,gpu_time"
)
#: In AcmeTrace's layout; the numbers are made up.
ROWS = [
    (
        "a,u1,1,8,64,Eval,COMPLETED,2023-03-31 23:59:00+08:00,2023-03-31 23:59:10+08:00,"
        "2023-04-01 00:00:10+08:00,60,10,480"
    ),
    "b,u1,0,0,4,Other,COMPLETED,2023-04-01 00:00:00+08:00,,,5,0,0",
    (
        "c,u2,4,32,256,SFT,FAILED,2023-04-02 00:00:00+08:00,2023-04-02 00:00:01+08:00,"
        "2023-04-02 01:00:01+08:00,3600,1,115200"
    ),
]


@pytest.fixture
def file(tmp_path):
    def write(*rows, header=ACME, name="trace.csv"):
        path = tmp_path / name
        path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
        return path

    return write


def known(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not at hand")
    return path


def test_a_trace_of_acme_is_read(file):
    """Jobs, GPUs, durations, states and calendar months are the file's."""
    trace = read_trace(file(*ROWS))

    assert trace.format == "acme"
    assert not trace.synthetic
    assert [(job.name, job.gpus, job.duration_seconds, job.type) for job in trace.jobs] == [
        ("a", 8, 60.0, "Eval"),
        ("b", 0, 5.0, "Other"),
        ("c", 32, 3600.0, "SFT"),
    ]
    assert [job.month for job in trace.jobs] == [0, 1, 1]
    assert trace.jobs[2].submitted - trace.jobs[1].submitted == 86400.0


def test_the_converted_kalos_file_is_read():
    """A worker is a node: 63 workers of 8 are the 504 GPUs of AcmeTrace's distribution."""
    trace = read_trace(known("acme/converted_kalos_trace.csv"))

    assert (trace.format, len(trace.jobs), trace.dropped.total) == ("kalos", 319, 0)
    assert {496, 504} <= {job.gpus for job in trace.jobs}
    assert trace.jobs[0].duration_seconds == 104.0


@pytest.mark.parametrize("number", range(1, 9))
def test_pollux_workloads_are_read(number):
    """160 jobs each; durations follow the stated rule and the seed."""
    path = known(f"pollux/workload-{number}.csv")

    one, again, other = (read_trace(path, seed=seed) for seed in (0, 0, 1))
    assert (one.format, len(one.jobs), one.synthetic) == ("pollux", 160, True)
    assert one.jobs == again.jobs != other.jobs
    hours = {job.type: job.duration_seconds * job.gpus / 3600 for job in one.jobs}
    assert 0.1 <= hours["cifar10"] <= 1.0
    assert 10.0 <= hours["yolov3"] <= 100.0


@pytest.mark.parametrize("replicas", [0, -1])
def test_a_pollux_job_without_replicas_is_a_wrong_row(tmp_path, replicas):
    """Its duration cannot be computed; the other rows are read."""
    path = tmp_path / "pollux.csv"
    path.write_text(f"time,name,application,num_replicas\n0,a,cifar10,{replicas}\n1,b,cifar10,2\n")

    trace = read_trace(path)
    assert [job.name for job in trace.jobs] == ["b"]
    assert trace.dropped.rows() == [("wrong", "num_replicas below 1", 1, "line 2")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,u,1,8,4,Eval,DONE,2023-03-01 00:00:00,,,-1,0,0", "negative duration"),
        ("x,u,1,8,4,Eval,DONE,2023-03-01 00:00:00,,,nan,0,0", "duration is not a finite number"),
        ("x,u,1,8,4,Eval,DONE,2023-03-01 00:00:00,,,,0,0", "duration is not a number"),
        ("x,u,1,8.5,4,Eval,DONE,2023-03-01 00:00:00,,,1,0,0", "gpu_num is not a whole number"),
        ("x,u,1,-8,4,Eval,DONE,2023-03-01 00:00:00,,,1,0,0", "negative number of GPUs"),
        ("x,u,1,8,4,Eval,DONE,yesterday,,,1,0,0", "submit_time is no date"),
        ("a,u,1,8,4,Eval,DONE,2023-05-01 00:00:00,,,1,0,0", "a name that stands twice"),
        (",u,1,8,4,Eval,DONE,2023-03-01 00:00:00,,,1,0,0", "no job_id"),
        (
            "x,u,1,8,4,Eval,DONE,2023-03-01 00:00:09,2023-03-01 00:00:05,,1,0,0",
            "clocks that run backwards",
        ),
        (
            "x,u,1,8,4,Eval,DONE,2023-03-01 00:00:01,2023-03-01 00:00:05,2023-03-01 00:00:04,1,0,0",
            "clocks that run backwards",
        ),
    ],
)
def test_a_wrong_row_is_named_counted_and_left_out_or_refused(file, row, reason):
    """By default it is left out; `refuse` makes it an error with the reason and the line."""
    path = file(*ROWS, row)

    trace = read_trace(path)
    assert trace.dropped.wrong == {reason: 1}
    assert trace.dropped.lines() == [f"1 left out: {reason} (first: line 5)"]
    assert len(trace.jobs) == 3
    with pytest.raises(TraceRowsWrong, match=reason):
        read_trace(path, bad_rows="refuse")


def test_rows_out_of_order_are_sorted_and_counted(file):
    """The trace says how many were."""
    trace = read_trace(file(*reversed(ROWS)))

    assert [job.name for job in trace.jobs] == ["a", "b", "c"]
    assert "2 rows were submitted before the row above them: sorted" in trace.rules


def test_missing_columns_are_refused_by_name(file):
    """All of them at once."""
    path = file("a,8,1", header="job_id,gpu_num,duration")

    with pytest.raises(TraceColumnMissing, match="without type, state, submit_time"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "columns of no trace"),
        ("colour,taste\nred,sweet\n", "columns of no trace"),
        ('{"name": "a"\n', "no JSON object"),
    ],
)
def test_other_files_are_refused(tmp_path, text, match):
    """Empty files, other tables, broken JSON."""
    path = tmp_path / "other"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(TraceFileError, match=match):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """With its name."""
    with pytest.raises(TraceFileError, match=r"nowhere\.csv"):
        read_trace(tmp_path / "nowhere.csv")


def test_an_unknown_format_is_refused(file):
    """With the nearest one."""
    with pytest.raises(TraceFileError, match="did you mean 'acme'"):
        read_trace(file(*ROWS), format="acne")


def test_a_trace_without_jobs_is_refused(file):
    """It says what was left out."""
    with pytest.raises(TraceEmpty, match="negative duration"):
        read_trace(file("x,u,1,8,4,Eval,DONE,2023-03-01 00:00:00,,,-1,0,0"))


numbers = st.floats(0, 1e6).map(lambda value: round(value, 3))
requests = st.builds(
    JobRequest,
    name=st.uuids().map(str),
    base=st.sampled_from(["llama-3-8b", "qwen3-8b"]),
    demand=st.builds(Demand, *(numbers for _ in Demand._fields)).map(
        lambda demand: demand._replace(samples=demand.samples + 1, tokens=demand.tokens + 1)
    ),
    gpus=st.integers(1, 64),
    steps=st.integers(1, 10**6),
    submitted=numbers,
    max_slowdown=st.floats(1, 4),
    deadline=st.none() | st.floats(1, 1e6),
    max_slowdown_opt_in=st.floats(1, 4),
    longest=st.integers(0, 4096),
)


@given(jobs=st.lists(requests, min_size=1, max_size=5, unique_by=lambda job: job.name))
@pytest.mark.parametrize("name", ["own.jsonl", "own.csv"])
def test_our_own_trace_comes_back_as_it_was_written(tmp_path_factory, name, jobs):
    """Every field of every request, as JSON lines and as CSV."""
    path = tmp_path_factory.mktemp("own") / name
    write_own(path, jobs, {}, "synthetic, seed 0")

    trace = read_trace(path)
    assert trace.requests == {job.name: job for job in jobs}
    assert trace.synthetic
    assert any("synthetic, seed 0" in rule for rule in trace.rules)


@pytest.mark.parametrize("field", ["samples", "tokens"])
def test_our_own_job_of_no_samples_or_tokens_is_a_wrong_row(tmp_path, field):
    """No step time can be estimated for it; the other rows are read."""
    demand = Demand(*range(1, len(Demand._fields) + 1))
    jobs = [
        JobRequest("a", "llama-3-8b", demand._replace(**{field: 0.0}), 1, 5),
        JobRequest("b", "llama-3-8b", demand, 1, 5),
    ]
    write_own(tmp_path / "own.jsonl", jobs, {}, "synthetic, seed 0")

    trace = read_trace(tmp_path / "own.jsonl")
    assert [job.name for job in trace.jobs] == ["b"]
    assert [row[1] for row in trace.dropped.rows()] == ["a demand of no samples or no tokens"]


@pytest.mark.parametrize("name", ["own.jsonl", "own.csv"])
def test_our_own_trace_of_before_graphs_is_read(tmp_path, name):
    """It has no columns that say whether a job's rows run so, and how it is evaluated."""
    later = [f"demand.{name}" for name in Demand._fields[Demand._fields.index("launched") :]]
    demand = Demand(*range(1, len(Demand._fields) - len(later) + 1))
    job = JobRequest("one", "llama-3-8b", demand, 1, 5)
    path = tmp_path / name
    write_own(path, [job], {}, "synthetic, seed 0")
    if name == "own.csv":
        header, row = (line.split(",") for line in path.read_text().splitlines())
        for column in later:
            place = header.index(column)
            del header[place], row[place]
        path.write_text(",".join(header) + "\n" + ",".join(row) + "\n")
    else:
        fields = json.loads(path.read_text())
        for column in later:
            del fields[column]
        path.write_text(json.dumps(fields) + "\n")

    assert read_trace(path).requests == {"one": job}


def test_a_quoted_header_is_read(file):
    """As spreadsheets write it, with each cell in quotes."""
    header, *rows = (",".join(f'"{cell}"' for cell in line.split(",")) for line in (ACME, *ROWS))

    assert read_trace(file(*rows, header=header)).jobs == read_trace(file(*ROWS)).jobs


@pytest.mark.parametrize("user", ['"u1', '"u1" x'])
def test_an_open_quote_is_an_error_with_its_line(file, user):
    """It would take the rows behind it into one field, and these would be missing."""
    rows = [ROWS[0], ROWS[1].replace("u1", user), ROWS[2]]
    rows = rows if user in rows[1] else [ROWS[0].replace("u1", user), *ROWS[1:]]
    with pytest.raises(TraceFileError, match="no CSV") as caught:
        read_trace(file(*rows))

    assert caught.value.facts["line"] == str(next(n for n, r in enumerate(rows, 2) if user in r))


def test_a_row_of_other_columns_is_wrong(file):
    """A line that is cut, one with a cell too many, and a quote that runs over several rows."""
    cut, more = ROWS[1].rsplit(",", 3)[0], ROWS[1].replace("b,", "d,", 1) + ",1"
    over = ROWS[2].replace("c,u2", 'e,"u2\nx"')
    trace = read_trace(file(ROWS[0], cut, more, over, ROWS[2] + ",,"))

    assert [job.name for job in trace.jobs] == ["a", "c"]
    assert sorted(trace.dropped.wrong) == [
        "10 fields under 13 names",
        "14 fields under 13 names",
        "a quoted field that runs over several lines",
    ]


@given(table=st.lists(st.lists(st.text(max_size=8), min_size=13, max_size=13), max_size=4))
def test_no_row_breaks_the_reader(tmp_path_factory, table):
    """Whatever stands in the cells, a row is read, or left out and counted."""
    path = tmp_path_factory.mktemp("any") / "trace.csv"
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(ACME.split(","))
        writer.writerows(table)
        out.write(ROWS[0] + "\n")

    trace = read_trace(path)
    assert len(trace.jobs) >= 1
    assert len(trace.jobs) + trace.dropped.total <= len(table) + 1


@given(months=st.sets(st.integers(1, 12), min_size=1), asked=st.integers(1, 14))
def test_a_month_without_jobs_is_refused_with_those_that_have_some(months, asked):
    """Spans that, read back, are the months."""
    jobs = tuple(TraceJob(f"j{one}", 0.0, 1.0, 1, month=one - 1) for one in sorted(months))
    trace = Trace(jobs, "a file", "acme")
    if asked in months:
        assert [job.name for job in trace.month(asked).jobs] == [f"j{asked}"]
        return
    with pytest.raises(TraceEmpty) as caught:
        trace.month(asked)

    spans = caught.value.facts["found"].removeprefix("jobs in month").removeprefix("s").split(",")
    ends = [[int(word) for word in span.split(" to ")] for span in spans]
    assert {one for span in ends for one in range(span[0], span[-1] + 1)} == months
