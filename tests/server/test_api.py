"""The service's API: who sees and changes what, and what stays of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pwd
import tarfile
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.server.conftest import as_scheduled, job_file, request
from tlora_fx.errors import LedgerError, ServiceRefused, TokenRefused
from tlora_fx.scheduler.executor import Drained, Finished
from tlora_fx.scheduler.state import Group
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.control import EventLog
from tlora_fx.server.ledger import User
from tlora_fx.server.service import make_service
from tlora_fx.server.store import ServiceStore
from tlora_fx.server.submission import IntakeLimits
from tlora_fx.server.view import RunView, log_lines


def test_users_see_and_change_their_own_jobs_alone(asked):
    """Another's is as unknown as none; an admin sees all."""
    it = asked()
    for name in ("alice", "bob"):
        it.add(name)
    it.add("root", admin=True)
    it.submit(job_file("a"), user="alice")
    as_scheduled(it.folder, [("alice.a",)])
    it.refresh()
    before = it.state()
    paths = ["", "/explain", "/logs", "/adapter"]

    for job in ("alice.a", "a", "nobody.a"):
        told = [it.ask("GET", f"/api/v1/jobs/{job}{path}", "bob") for path in paths]
        told += [
            it.ask("POST", f"/api/v1/jobs/{job}/{verb}", "bob") for verb in ("cancel", "pause")
        ]
        assert {answer.status_code for answer in told} == {404}
    assert it.ask("GET", "/api/v1/jobs", "bob").json() == []
    assert it.ask("GET", "/api/v1/curves", "bob").json() == {}
    (span,) = it.ask("GET", "/api/v1/groups", "bob").json()
    assert (span["jobs"], span["others"]) == ([], 1)
    assert it.state() == before
    assert it.ask("GET", "/api/v1/jobs/a", "alice").json()["name"] == "alice.a"
    assert [job["name"] for job in it.ask("GET", "/api/v1/jobs", "root").json()] == ["alice.a"]


def test_an_explanation_names_no_job_of_others(asked):
    """Whoever shares a group."""
    it = asked()
    for name in ("alice", "bob"):
        it.add(name)
        it.submit(job_file("a"), user=name)
    as_scheduled(it.folder, [("alice.a", "bob.a")])

    told = it.ask("GET", "/api/v1/jobs/a/explain", "alice").json()["text"]
    assert "group 1 on 0 with another's job" in told
    assert "bob" not in told


def test_what_is_wrong_with_a_submission_is_told_to_its_user_alone(asked):
    """Of a file that nobody could read, the scheduler knows no jobs."""
    it = asked()
    for name in ("alice", "bob"):
        it.add(name)
    it.submit(job_file("a", "b"), user="alice")
    events = EventLog(it.service.store)
    events.retried(1.0, "000001.yaml", [], "killed by SIGKILL", 2.0)
    events.read_file("000001.yaml", [], "the base /data/alice is not there")
    events.read_file("000007.yaml", [], "a file that is no submission")

    assert it.ask("GET", "/api/v1/events", "bob").json() == []
    told = it.ask("GET", "/api/v1/events", "alice").json()
    assert [event["jobs"] for event in told] == [["alice.a", "alice.b"]] * 2
    assert told[1]["text"].endswith("cannot be read: the base /data/alice is not there")


def test_why_a_group_failed_is_told_to_who_has_all_its_jobs(asked):
    """The reason may name the others."""
    it = asked()
    for name in ("alice", "bob"):
        it.add(name)
        it.submit(job_file("a"), user=name)
    it.add("root", admin=True)
    failed = SimpleNamespace(
        epoch=3, jobs={"alice.a": None, "bob.a": None}, failure="bob.a: out of memory\nmore"
    )
    EventLog(it.service.store).ended(1.0, failed, "failed")
    told = {
        user: [event["text"] for event in it.ask("GET", "/api/v1/events", user).json()]
        for user in it.tokens
    }

    short = "group 3 failed; its jobs wait"
    assert told["alice"] == told["bob"] == [short]
    assert told["root"] == [f"{short}. Reason: bob.a: out of memory"]


def test_tokens_are_needed_as_soon_as_there_are_users(asked):
    """Wrong ones, and revoked ones, are refused; what is kept of one is its hash."""
    it = asked()
    assert it.ask("GET", "/api/v1/jobs").status_code == 200
    token = it.add("alice")
    it.tokens["wrong"] = "tlora-x"

    assert it.ask("GET", "/api/v1/jobs").status_code == 401
    assert it.ask("GET", "/api/v1/jobs", "wrong").status_code == 401
    assert it.ask("GET", "/metrics").status_code == 401
    assert it.ask("GET", "/api/v1/jobs", "alice").status_code == 200
    kept = b"".join(path.read_bytes() for path in it.folder.rglob("*") if path.is_file())
    assert token.encode() not in kept
    assert hashlib.sha256(token.encode()).hexdigest().encode() in kept
    it.service.store.revoke("alice")
    it.service.users.clear()
    assert it.ask("GET", "/api/v1/jobs", "alice").status_code == 401


def test_without_tokens_it_listens_on_this_machine_alone(tmp_path):
    """An address of the network is refused until tokens are required."""
    store = ServiceStore(tmp_path / "run")

    with pytest.raises(ServiceRefused, match="obey everybody"):
        store.refuse_open_network("--host 0.0.0.0")
    store.require_tokens()
    store.refuse_open_network("--host 0.0.0.0")


_CHANGES = st.sampled_from(
    [("add", "alice"), ("add", "bob"), ("revoke", "alice"), ("revoke", "bob"), ("restart", ""),
     ("require", "")]
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([("add", "alice"), ("revoke", "alice"), ("restart", "")])
@given(st.lists(_CHANGES, max_size=8))
def test_revoking_tokens_opens_a_run_to_nobody(tmp_path_factory, changes):
    """In any order of adding, revoking and restarting, a run that required tokens still does."""
    folder = tmp_path_factory.mktemp("access") / "run"
    valid: dict[str, str] = {}
    revoked: list[str] = []
    required = False
    service = make_service(folder, IntakeLimits(), open_to_all=True)
    for change, name in changes:
        store = ServiceStore(folder)  # the command line's, in a process of its own
        if change == "add":
            valid[store.add_user(User(name))] = name
        elif change == "revoke":
            store.revoke(name)
            revoked += [token for token, user in valid.items() if user == name]
            valid = {token: user for token, user in valid.items() if user != name}
        elif change == "require":
            store.require_tokens()
        else:
            service = make_service(folder, IntakeLimits(), open_to_all=True)
        required |= change in ("add", "require")
        service.users.clear()

        if required:
            with pytest.raises(TokenRefused):
                service.user(None)
        else:
            assert service.user(None).admin
        for token in [*revoked, "tlora-x", ""]:
            with pytest.raises(TokenRefused):
                service.user(token)
        assert {token: service.user(token).name for token in valid} == valid


def test_a_run_whose_last_token_was_revoked_answers_no_stranger(asked):
    """Jobs, changes and metrics stay closed, also after a restart."""
    it = asked()
    it.add("alice")
    it.submit(job_file("a"), user="alice")
    it.service.store.revoke("alice")
    before = it.state()

    for again in (it, asked(it.folder)):
        assert again.ask("GET", "/api/v1/jobs").status_code == 401
        assert again.ask("GET", "/metrics").status_code == 401
        assert again.ask("POST", "/api/v1/jobs/alice.a/cancel").status_code == 401
        assert again.submit(job_file("b")).status_code == 401
    assert it.state() == before


def test_a_page_of_a_stranger_cannot_ask(asked):
    """Neither by another origin, nor by a name that leads here."""
    it = asked()
    headers = {"Idempotency-Key": "k", "Origin": "http://evil.example"}

    told = it.ask("POST", "/api/v1/submissions", json={"job_file": job_file()}, headers=headers)
    assert told.status_code == 403
    assert it.ask("GET", "/api/v1/jobs", headers={"Host": "evil.example"}).status_code == 403
    assert it.ask("GET", "/api/v1/jobs", headers={"Host": "127.0.0.1:80"}).status_code == 200


def test_whether_it_lives_and_is_ready_is_told_to_everybody(asked, monkeypatch):
    """Without a token and under any name; not ready where it ends, or its ledger is gone."""
    it = asked()
    it.add("alice")

    def told():
        answers = [
            it.ask("GET", path, headers={"Host": "pod-7"}) for path in ("/healthz", "/readyz")
        ]
        return [(answer.status_code, answer.json()["status"]) for answer in answers]

    assert told() == [(200, "ok"), (200, "ok")]
    it.service.ending = True
    assert told() == [(200, "ok"), (503, "it is ending")]
    it.service.ending = False

    def fails(*query):
        raise LedgerError("the service's ledger fails", reason="disk I/O error")

    monkeypatch.setattr(it.service.store, "rows", fails)
    assert told() == [(200, "ok"), (503, "its ledger cannot be read")]


def test_why_an_answer_is_500_stands_in_the_log(asked, monkeypatch, caplog):
    """The operator reads it there, whatever the client makes of its answer."""
    it = asked()

    def fails(*query):
        raise LedgerError("the service's ledger fails", reason="disk I/O error")

    monkeypatch.setattr(it.service.store, "rows", fails)
    answer = it.ask("GET", "/api/v1/jobs")

    assert answer.status_code == 500
    told = [text for text in caplog.messages if text.startswith("/api/v1/jobs: error[T0951]")]
    assert [text.count("disk I/O error") for text in told] == [1]


@pytest.mark.parametrize(
    ("method", "path", "sent", "facts"),
    [
        ("GET", "jobs?limit=0", {}, {
            "where": "query.limit", "found": "'0'",
            "expected": "Input should be greater than or equal to 1",
        }),
        ("POST", "submissions", {"json": {"job_file": "x"}}, {
            "where": "header.idempotency-key", "expected": "a value", "found": "nothing",
        }),
        ("POST", "submissions", {"content": b"{"}, {
            "where": "body.1", "expected": "JSON",
            "found": "Expecting property name enclosed in double quotes",
        }),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_told_with_what_was_expected(
    asked, method, path, sent, facts
):
    """In parameters, headers and bodies."""
    headers = {"Content-Type": "application/json"}
    answer = asked().ask(method, f"/api/v1/{path}", headers=headers, **sent)

    assert answer.status_code == 422
    assert answer.json()["facts"] == facts


def test_quotas_bound_jobs_hours_and_priority(asked):
    """Refused with what is allowed and what is used; ended jobs count no more."""
    it = asked()
    it.add("alice", jobs=2, priority=3)
    it.add("bob", gpu_hours=0.0)
    told = [
        it.submit(job_file("a", "b", "c"), "1", "alice"),
        it.submit(job_file("a", "b"), "2", "alice", priority=3),
        it.submit(job_file("c"), "3", "alice"),
        it.submit(job_file("c"), "4", "alice", priority=4),
        it.submit(job_file("a"), "5", "bob"),
    ]

    assert [answer.status_code for answer in told] == [429, 201, 429, 429, 429]
    as_scheduled(it.folder, [("alice.a",)], ended=True)
    assert it.service.store.gpu_hours("alice") == pytest.approx(5 / 3600)
    it.service.store.rows("UPDATE jobs SET status = 'done', steps = 10")
    assert it.submit(job_file("c"), "3", "alice").status_code == 201


def test_a_refused_or_cancelled_job_gives_its_name_back(asked):
    """No other does; what was submitted before is answered as before."""
    it = asked()
    first = it.submit(job_file("a", "b", "c", "d"), "1")
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.refuse(request("a"), "its data are wrong")
    ledger.submit(request("b"))
    ledger.cancel("b", "its user cancelled it", 1.0)
    ledger.submit(request("c"))
    ledger.close()
    told = {name: it.submit(job_file(name.upper()), name) for name in "abcd"}

    assert {name: answer.status_code for name, answer in told.items()} == {
        "a": 201, "b": 201, "c": 409, "d": 409,
    }  # fmt: skip
    assert told["c"].json()["facts"] == {"found": "queued"}
    states = {job.name: job.state for job in it.service.store.jobs()}
    assert states == {"c": "queued", "d": "received", "A": "received", "B": "received"}
    again = it.submit(job_file("a", "b", "c", "d"), "1")
    assert again.json() == first.json() | {"replayed": True}


def test_a_name_is_taken_as_long_as_a_process_knows_its_job(asked, monkeypatch):
    """The group that the job was in, and one that took over its processes."""
    with monkeypatch.context() as patched:
        # The application looks every half a second; here only the test does.
        patched.setattr(RunView, "refresh", lambda view: None)
        it = asked()
    it.submit(job_file("a", "b"), "1")
    as_scheduled(it.folder, [("a", "b")])
    it.ask("POST", "/api/v1/jobs/a/cancel")
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.record(Finished(5.0, 1, "a", 5))
    refused = [it.submit(job_file("a"), "2")]
    ledger.launch(Group(("b",), 1, (0,)), 2, None, 6.0, origin=1)
    ledger.record(Drained(7.0, 1, {}, 2))
    refused.append(it.submit(job_file("a"), "2"))
    ledger.end(2, "drained", 8.0)
    ledger.close()

    assert [answer.status_code for answer in refused] == [409, 409]
    assert [answer.json()["facts"] for answer in refused] == [{"group": "1"}, {"group": "2"}]
    it.refresh()
    assert it.submit(job_file("a"), "2").status_code == 201
    assert it.ask("GET", "/api/v1/jobs/a").json()["state"] == "cancelled"
    it.refresh()
    shown = it.ask("GET", "/api/v1/jobs/a").json()
    assert (shown["state"], shown["step"], shown["loss"]) == ("received", 0, None)
    assert not (it.folder / "a").exists()
    assert (it.service.store.folder / "replaced" / "000001.a" / "metrics.jsonl").is_file()


def test_a_job_is_cancelled_once(asked):
    """The second time is an error that changes nothing; pausing it is too."""
    it = asked()
    it.submit(job_file("a"))

    assert it.ask("POST", "/api/v1/jobs/a/resume").status_code == 409
    assert it.ask("POST", "/api/v1/jobs/a/pause").json()["state"] == "paused"
    assert it.ask("POST", "/api/v1/jobs/a/pause").status_code == 409
    assert it.ask("POST", "/api/v1/jobs/a/cancel").json()["state"] == "cancelling"
    before = it.state()
    for verb in ("cancel", "pause", "resume"):
        assert it.ask("POST", f"/api/v1/jobs/a/{verb}").status_code == 409
    assert it.state() == before


def test_every_call_that_changes_something_is_in_the_ledger(asked):
    """With who did it, for tokens the operator's account; what changed nothing is not."""
    it = asked()
    it.add("alice")
    it.submit(job_file("a"), user="alice")
    it.submit(job_file("a"), user="alice")
    it.submit(job_file("a"), key="2", user="alice")
    it.ask("POST", "/api/v1/jobs/a/pause", "alice")
    it.ask("POST", "/api/v1/jobs/a/resume", "alice")
    it.ask("POST", "/api/v1/jobs/a/cancel", "alice")

    it.service.store.revoke("alice")
    it.service.store.revoke("alice")

    operator = f"os:{pwd.getpwuid(os.getuid()).pw_name}"
    assert [row[1:] for row in it.service.store.actions()] == [
        (operator, "token", "alice"), ("alice", "submit", "alice.a"),
        ("alice", "pause", "alice.a"), ("alice", "resume", "alice.a"),
        ("alice", "cancel", "alice.a"), (operator, "revoke", "alice"),
    ]  # fmt: skip


def test_a_restart_puts_back_what_was_taken(asked):
    """A file that a killed service did not write, and nothing that nobody was told of."""
    it = asked()
    it.submit(job_file("a"))
    sent = it.folder / "service" / "tmp0a1b.tar"
    sent.write_bytes(b"half")
    (written,) = it.service.store.inbox.iterdir()
    content = written.read_text()
    written.unlink()
    stray = it.folder / "service" / "submitted" / "stray"
    stray.mkdir()
    make_service(it.folder, IntakeLimits(), open_to_all=True)

    assert written.read_text() == content
    assert not stray.exists()
    assert not sent.exists()


def test_a_file_that_is_being_sent_is_not_removed(asked):
    """Its time is that of the machine's clock, which somebody may have set back by days."""
    it = asked(keep_seconds=100.0)
    it.upload(b"rows")
    part = it.service.store.folder / "uploads" / "local" / "0a1b.part"
    part.write_bytes(b"ro")
    os.utime(part, (1, 1))
    it.service.intake.collect()

    assert part.is_file()


def test_uploads_that_no_job_needs_are_removed(asked):
    """Those of jobs that may still train stay, and so does all that is new."""
    it = asked(keep_seconds=100.0)
    sha256 = it.upload(b'{"text": "hello"}\n')
    for name in "ab":
        body = {"files": {"mine.jsonl": sha256}}
        it.submit(job_file(name, data="mine.jsonl"), name, **body)
    store = it.service.store
    names = [name for (name,) in store.rows("SELECT folder FROM submissions")]
    folders = [store.folder / "submitted" / name for name in names]
    as_scheduled(it.folder, [("a", "b")])
    store.rows("UPDATE jobs SET status = 'done', steps = 10, ended = 0 WHERE name = 'a'")
    it.service.intake.collect()
    assert all((folder / "mine.jsonl").is_file() for folder in folders)
    upload = store.folder / "uploads" / "local" / sha256
    assert upload.is_file()

    os.utime(upload, (1, 1))
    store.rows("UPDATE submissions SET time = 1")
    store.rows("UPDATE owned SET over = 1 WHERE final IS NOT NULL")
    it.service.intake.collect()
    assert [folder.exists() for folder in folders] == [False, True]
    assert (folders[1] / "mine.jsonl").is_file()
    assert not upload.exists()


def test_what_a_start_took_is_a_text_in_the_lines_of_a_job():
    """Of the first step; people read it."""
    row = {"step": 1, "loss": 2.5, "start_seconds": 3.25, "phases": {"data": 0.125, "other": 3.0}}

    assert [*log_lines(json.dumps(row).encode() + b"\n")] == [
        "step 1  loss 2.5  start_seconds 3.25  phases data 0.125, other 3"
    ]


def test_what_a_job_did_is_told(asked):
    """Steps, losses, where it is, its lines, and its folder once it has ended."""
    it = asked()
    it.submit(job_file("a", "b"))
    as_scheduled(it.folder, [("a", "b")])
    it.refresh()
    a = it.ask("GET", "/api/v1/jobs").json()[0]

    assert (a["state"], a["step"], a["steps"], a["loss"], a["group"], a["gpus"]) == (
        "running", 5, 10, 0.4, 1, [0],
    )  # fmt: skip
    assert a["tokens_per_second"] == pytest.approx(100.0)
    assert it.ask("GET", "/api/v1/curves").json()["b"][-1] == [5, 0.4]
    lines = it.ask("GET", "/api/v1/jobs/a/logs").text.splitlines()
    assert lines[0] == "step 1  loss 2  tokens 10  seconds 0.1"
    assert (len(lines), lines[-1]) == (6, "a: running")
    answer = it.ask("GET", "/api/v1/jobs/a/adapter")
    assert (answer.status_code, answer.json()["help"]) == (409, "wait for its end")
    assert 'tlora_jobs{state="running"} 2.0' in it.ask("GET", "/metrics").text
    (it.folder / "a" / "adapter_model.safetensors").write_bytes(b"weights")
    it.service.store.rows("UPDATE jobs SET status = 'done', steps = 10")
    content = io.BytesIO(it.ask("GET", "/api/v1/jobs/a/adapter").content)
    with tarfile.open(fileobj=content) as tar:
        assert tar.extractfile("a/adapter_model.safetensors").read() == b"weights"
    assert not list((it.folder / "service").glob("*.tar"))
    it.service.store.rows("UPDATE jobs SET status = 'failed' WHERE name = 'b'")
    help_ = it.ask("GET", "/api/v1/jobs/b/adapter").json()["help"]
    assert help_ == "`tlora-fx client status b` says why it ended"


@pytest.mark.parametrize("asked_for", ["bytes=9-", "bytes=999999-", "bytes=x", "lines=1-2"])
def test_nothing_is_left_of_an_adapter_that_was_sent(asked, asked_for):
    """Whatever part of it a client asks for: it gets the whole folder."""
    it = asked()
    it.submit(job_file("a"))
    as_scheduled(it.folder, [("a",)], ended=True)
    (it.folder / "a" / "adapter_model.safetensors").write_bytes(b"weights")
    it.service.store.rows("UPDATE jobs SET status = 'done', steps = 10")
    answer = it.ask("GET", "/api/v1/jobs/a/adapter", headers={"Range": asked_for})

    assert answer.status_code == 200
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        assert tar.extractfile("a/adapter_model.safetensors").read() == b"weights"
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    assert not list(it.service.store.folder.glob("*.tar"))


def test_the_folder_of_a_service_is_private(asked):
    """What was uploaded tells what is trained on."""
    it = asked()

    assert it.folder.stat().st_mode & 0o077 == 0
