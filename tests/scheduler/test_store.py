"""The ledger of a run: nothing that it confirmed is lost, and commits only go forward."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.cost.load import Demand
from tlora_fx.errors import LedgerError, NewerFormat
from tlora_fx.host.version import __version__
from tlora_fx.scheduler.executor import Committed, Drained, Failed, Finished, GroupStarted
from tlora_fx.scheduler.history import History
from tlora_fx.scheduler.state import REQUEST, Decision, FailureRecord, Group, JobRequest
from tlora_fx.scheduler.store import LOCKED_SECONDS, Ledger
from tlora_fx.server.store import ServiceStore

OLD_FORMATS = Path(__file__).parents[1] / "old_formats"


def request(name: str, steps: int = 10) -> JobRequest:
    return JobRequest(name, "base", Demand(jobs=1, samples=4, tokens=99.5), 1, steps, deadline=9.0)


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    for name in ("a", "b"):
        made.submit(request(name), {"seed": 1})
    made.launch(Group(("a", "b"), 1, (0,)), 1, None, 5.0)
    return made


def by_name(ledger: Ledger):
    return {record.name: record for record in ledger.jobs()}


def test_a_job_is_read_back_as_it_was_submitted():
    """Request, demand and what came with it."""
    ledger = Ledger()
    ledger.submit(request("a"), {"lora": {"r": 4}})

    [record] = ledger.jobs()
    assert (record.request, record.spec, record.status) == (
        request("a"),
        {"lora": {"r": 4}},
        "queued",
    )


def test_a_ledger_waits_while_a_service_writes(tmp_path, monkeypatch):
    """A transaction may take seconds on a slow disk; who waits for it ends no run."""
    waits, connect = [], sqlite3.connect

    def connected(*words, timeout=0.0, **how):
        waits.append(timeout)
        return connect(*words, timeout=timeout, **how)

    monkeypatch.setattr(sqlite3, "connect", connected)
    with closing(Ledger(tmp_path / "ledger.sqlite")):
        ServiceStore(tmp_path).users()

    assert len(waits) > 1
    assert set(waits) == {LOCKED_SECONDS}


def test_a_request_of_before_graphs_is_read():
    """A run's ledger from then says nothing of them, nor of evaluations."""
    fields = REQUEST.dump_python(request("a"))
    for name in ("launched", "evaluation_rows", "evaluation_tokens", "decoding_steps"):
        del fields["demand"][name]

    assert REQUEST.validate_json(json.dumps(fields)) == request("a")


def test_a_request_that_lends_is_read_by_its_older_name():
    """A ledger of before calls the slowdown that a job consents to `lends`."""
    fields = REQUEST.dump_python(request("a"))
    del fields["max_slowdown_opt_in"]

    found = REQUEST.validate_json(json.dumps(fields | {"lends": 2.5}))
    assert found.max_slowdown_opt_in == 2.5


def test_submitting_twice_changes_nothing(ledger):
    """A run that goes on submits what it finds in its folder."""
    ledger.record(Committed(6.0, 1, {"a": 4.0}, "here"))
    ledger.submit(request("a", steps=99))

    record = by_name(ledger)["a"]
    assert (record.request.steps, record.steps, record.path) == (10, 4.0, "here")


def test_jobs_of_a_failed_group_are_queued_at_their_last_commits(ledger):
    """What was not committed is done again, and nothing else."""
    ledger.record(Committed(6.0, 1, {"a": 4.0, "b": 3.0}, "here"))
    ledger.record(Failed(7.0, 1, None, "killed"))

    assert {r.name: (r.status, r.steps) for r in ledger.jobs()} == {
        "a": ("queued", 4.0),
        "b": ("queued", 3.0),
    }
    assert ledger.epochs()[0].how == "failed: killed"


def test_a_job_that_is_done_stays_done(ledger):
    """Its group may fail afterwards, or tell of it again."""
    ledger.record(Finished(6.0, 1, "a", 10.0))
    ledger.record(Failed(7.0, 1, "a", "late"))
    ledger.record(Failed(7.0, 1, None, "killed"))
    ledger.launch(Group(("a", "b"), 1, (0,)), 2, None, 8.0)

    record = by_name(ledger)["a"]
    assert (record.status, record.steps, record.ended) == ("done", 10.0, 6.0)


def test_a_job_at_fault_ends_and_its_neighbour_goes_on(ledger):
    """Its reason is kept for its user."""
    ledger.record(Failed(6.0, 1, "b", "loss nan"))

    jobs = by_name(ledger)
    assert (jobs["a"].status, jobs["b"].status) == ("running", "failed")
    assert jobs["b"].reason == "loss nan"


def test_a_drained_group_is_over(ledger):
    """Its jobs wait, and its times are known."""
    ledger.record(GroupStarted(5.5, 1))
    ledger.record(Drained(9.0, 1, {"a": 7.0}))

    [epoch] = ledger.epochs()
    assert (epoch.launched, epoch.started, epoch.ended, epoch.how) == (5.0, 5.5, 9.0, "drained")
    assert by_name(ledger)["a"].status == "queued"


def test_a_refused_job_is_remembered_with_its_reason_until_it_comes_again():
    """Then it is queued, or refused for what is wrong now."""
    ledger = Ledger()
    ledger.refuse(request("a"), "needs 9 GPUs", file="a.yaml")
    ledger.refuse(request("a"), "needs 5 GPUs")

    [record] = ledger.jobs()
    assert (record.status, record.reason) == ("refused", "needs 5 GPUs")
    assert ledger.origins() == {"a": "a.yaml"}
    ledger.submit(request("a"))
    [record] = ledger.jobs()
    assert (record.status, record.reason) == ("queued", "")


def test_decisions_are_read_back(ledger):
    """With their groups and those that wait; and the credit that they left."""
    decision = Decision((Group(("a",), 1, (0,), 0.5, 2.0),), ("b",))
    ledger.decide(3.0, decision, {"a": -4.5})

    [record] = ledger.decisions()
    assert (record.time, record.decision) == (3.0, decision)
    assert by_name(ledger)["a"].credit == -4.5


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.floats(0, 10, allow_nan=False)), min_size=1, max_size=20
    )
)
def test_commits_only_go_forward(told):
    """Whatever comes late, of whatever epoch, steps and epochs never fall."""
    ledger = Ledger()
    ledger.submit(request("a"))
    before = (0.0, 0)
    for epoch, steps in told:
        ledger.record(Committed(0.0, epoch, {"a": steps}, f"epoch-{epoch}"))
        [record] = ledger.jobs()
        now = (record.steps, record.epoch or 0)

        assert now[0] >= before[0]
        assert now[1] >= before[1]
        assert not record.path or record.path == f"epoch-{now[1]}"
        before = now


def test_what_was_confirmed_is_there_after_a_kill(tmp_path):
    """A process that is killed while it writes leaves all that it had printed."""
    script = textwrap.dedent("""
        import sys
        from tlora_fx.cost.load import Demand
        from tlora_fx.scheduler.store import Ledger
        from tlora_fx.scheduler.state import JobRequest
        ledger = Ledger(sys.argv[1])
        for number in range(100000):
            ledger.submit(JobRequest(f"job-{number}", "base", Demand(), 1, 1))
            print(number, flush=True)
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "ledger.sqlite")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    confirmed = [process.stdout.readline() for _ in range(20)][-1]
    os.kill(process.pid, signal.SIGKILL)
    rest = process.communicate()[0].splitlines()
    last = int((rest or [confirmed])[-1])

    names = {record.name for record in Ledger(tmp_path / "ledger.sqlite").jobs()}
    assert {f"job-{number}" for number in range(last + 1)} <= names


def test_the_disk_holds_each_transition(tmp_path):
    """WAL, and synchronous=FULL."""
    ledger = Ledger(tmp_path / "ledger.sqlite")

    modes = [
        ledger._base.execute(f"PRAGMA {of}").fetchone()[0] for of in ("journal_mode", "synchronous")
    ]
    assert modes == ["wal", 2]


def test_a_ledger_of_a_newer_format_is_refused(tmp_path):
    """Nothing is guessed about what a newer version wrote, and nothing is changed."""
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("UPDATE facts SET value = '5' WHERE name = 'format'")
        base.execute("UPDATE facts SET value = '9.0' WHERE name = 'version'")
        base.execute("DROP TABLE origins")
    dump = dumped(path)

    for read in (Ledger, lambda path: History.of_run(path.parent)):
        with pytest.raises(NewerFormat, match="newer version of tlora-fx") as error:
            read(path)
        assert error.value.facts["found"] == "format 5, by tlora-fx 9.0"
        assert "upgrade" in error.value.help
    assert dumped(path) == dump


def test_a_ledger_says_its_format_and_the_version_that_wrote_it(tmp_path):
    """The last version that opened it."""
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("UPDATE facts SET value = '0.1' WHERE name = 'version'")
    Ledger(path).close()

    with closing(sqlite3.connect(path)) as base:
        facts = dict(base.execute("SELECT name, value FROM facts"))
    assert (facts["format"], facts["version"]) == ("4", __version__)


def test_a_ledger_of_the_first_format_is_read_and_migrated(tmp_path):
    """Reading changes nothing. Opening it keeps every job, and adds what groups are charged."""
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.executescript((OLD_FORMATS / "ledger-1.sql").read_text())
    dump = dumped(path)
    before = History.of_run(tmp_path)
    assert dumped(path) == dump

    ledger = Ledger(path)
    jobs = {record.name: (record.status, record.steps, record.path) for record in ledger.jobs()}
    assert jobs == {
        "alice.done": ("done", 10.0, "epoch-1"),
        "alice.half": ("running", 6.0, "epoch-1"),
        "alice.new": ("queued", 0.0, ""),
    }
    ledger.close()
    assert History.of_run(tmp_path) == before
    with closing(sqlite3.connect(path)) as base:
        facts = dict(base.execute("SELECT name, value FROM facts"))
        held = base.execute("SELECT epoch, held FROM epochs").fetchall()
    assert (facts["format"], facts["version"]) == ("4", __version__)
    assert held == [(1, 60.0), (2, 0.0)]


def test_a_ledger_of_the_second_format_is_read_and_migrated(tmp_path):
    """It has what groups are charged, and not the groups and the last decision of each job."""
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.executescript((OLD_FORMATS / "ledger-1.sql").read_text())
        base.executescript("""
            ALTER TABLE epochs ADD COLUMN held REAL NOT NULL DEFAULT 0;
            UPDATE epochs SET held = 7;
            UPDATE facts SET value = '2' WHERE name = 'format';
            INSERT INTO decisions (time, groups, waiting)
                VALUES (1, '[]', '["alice.new"]'), (2, '[]', '["alice.new"]');
        """)
    Ledger(path).close()

    with closing(sqlite3.connect(path)) as base:
        facts = dict(base.execute("SELECT name, value FROM facts"))
        held = base.execute("SELECT held FROM epochs").fetchall()
        members = base.execute("SELECT job, epoch FROM members ORDER BY job, epoch").fetchall()
        last = base.execute("SELECT max(number) FROM decisions").fetchone()
        decided = base.execute("SELECT decision FROM decided WHERE job = 'alice.new'").fetchone()
    assert (facts["format"], facts["version"]) == ("4", __version__)
    assert held == [(7.0,), (7.0,)]
    assert members == [("alice.done", 1), ("alice.half", 1), ("alice.half", 2)]
    assert decided == last


def dumped(path):
    with closing(sqlite3.connect(path)) as base:
        return list(base.iterdump())


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    """With its path."""
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)

    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(path)


def test_a_record_of_failures_of_a_newer_version_is_read(ledger):
    """As far as this one knows it."""
    ledger.note_failures({"a": {"alone": 2, "steps": 7.0, "suspect": False, "blamed": "b"}})

    assert ledger.failures("a") == FailureRecord(alone=2, steps=7.0, suspect=False)


@pytest.mark.parametrize("record", [[1, 2], 3, {"alone": "often"}, {"steps": {}}])
def test_a_record_of_failures_that_is_none_is_an_error_of_the_ledger(ledger, record):
    """Its kind of content is wrong, as any other column's may be."""
    ledger.note_failures({"a": record})
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger.failures("a")
