"""The service's API: what is taken once, what is refused, and who sees what."""

from __future__ import annotations

import hashlib
import io
import os
import pwd
import tarfile
import threading
from functools import partial
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.clocks import machine  # noqa: F401  (a fixture)
from tests.server.conftest import EXAMPLES, QUICKSTART, Asked, as_scheduled, job_file, request
from tlora_fx.config.job_file import load_job_file
from tlora_fx.errors import LedgerError, ServiceRefused, TokenRefused
from tlora_fx.scheduler.estimates import require_measured
from tlora_fx.scheduler.executor import Drained, Finished
from tlora_fx.scheduler.state import Group
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server import submission
from tlora_fx.server.app import make_app
from tlora_fx.server.ledger import User
from tlora_fx.server.service import make_service
from tlora_fx.server.store import ServiceStore
from tlora_fx.server.submission import IntakeLimits
from tlora_fx.server.view import RunView

PROFILE = Path(__file__).parents[1] / "scheduler" / "quickstart-cpu.json"


def test_a_submission_becomes_a_job_file_of_the_scheduler(asked):
    """With the same jobs, under their full names; numbers and text as they were."""
    it = asked()
    it.add("alice")
    text = job_file(
        "a", "b-2", learning_rate=1e-05, sample_prompts=["yes: ünï 😀 #"], max_grad_norm=None
    )
    answer = it.submit(text, user="alice")

    assert (answer.status_code, answer.json()["jobs"]) == (201, ["alice.a", "alice.b-2"])
    (written,) = it.service.store.inbox.iterdir()
    sent = it.folder / "sent.yaml"
    sent.write_text(text)
    expected = [
        job.model_copy(update={"name": f"alice.{job.name}"}) for job in load_job_file(sent).jobs
    ]
    assert list(load_job_file(written).jobs) == expected


def test_a_replayed_key_takes_nothing_twice(asked):
    """The same answer; another submission with it is refused."""
    it = asked()
    first = it.submit(job_file("a"))
    before = it.state()
    again, other = it.submit(job_file("a")), it.submit(job_file("b"))

    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert again.json() == first.json() | {"replayed": True}
    assert it.state() == before


def test_a_key_that_many_send_at_once_is_taken_once(asked):
    """Whoever comes first; the others are told the same."""
    it = asked()
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(it.submit(job_file("a"), key="one")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [201]
    assert len(list(it.service.store.inbox.iterdir())) == 1


def test_an_upload_is_found_by_its_name_in_the_job_file(asked, tmp_path, monkeypatch):
    """Below the folder of the submission; a file of that name where the service runs is another."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").write_text("another")
    monkeypatch.chdir(tmp_path)
    it = asked()
    sha256 = it.upload(b'{"text": "hello"}\n')
    answer = it.submit(job_file("a", data="data/mine.jsonl"), files={"data/mine.jsonl": sha256})

    assert answer.status_code == 201, answer.text
    (written,) = it.service.store.inbox.iterdir()
    (job,) = load_job_file(written).jobs
    assert Path(job.data.path).read_bytes() == b'{"text": "hello"}\n'


OUTSIDE = [
    {"data": "/etc/passwd"},
    {"data": "/etc/hosts.jsonl"},
    {"data": "../../../../etc/passwd"},
    {"data": "x/../../../uploads/bob/y.jsonl"},
    {"data": "~/secret.jsonl"},
    {"data": "~root/secret.jsonl"},
    {"data": "file:///etc/passwd"},
    {"data": "tests/server"},
    {"adapter": "/etc", "lora": None},
    {"eval_data": {"path": "/etc/passwd"}},
    {"data": [{"path": str(QUICKSTART / "data/records.jsonl")}, {"path": "/etc/passwd"}]},
    {"data": {"path": "a.jsonl", "more": [{"path": "/etc/passwd"}]}},
    {"compute_metrics": "/etc/x.py:f"},
    {"data": "a\0b"},
    {"data": str(EXAMPLES.parent / "README.md")},
    {"data": str(EXAMPLES / ".." / "README.md")},
]


@pytest.mark.parametrize("fields", OUTSIDE, ids=lambda fields: str(next(iter(fields.values()))))
def test_a_path_outside_is_refused_and_nothing_is_kept(asked, fields, monkeypatch):
    """Whoever wrote it, and however; nothing below it is looked at."""
    monkeypatch.chdir(EXAMPLES.parent)
    it = asked()
    before = it.state()
    answer = it.submit(job_file("a", **fields))

    assert answer.status_code == 422
    assert answer.json()["code"] == "T0982"
    assert [where for where in answer.json()["facts"] if where.startswith("jobs[0].")]
    assert it.state() == before
    assert str(it.folder) not in answer.text


def test_names_that_differ_in_case_alone_are_refused(asked):
    """As `train` refuses them, and nothing is kept."""
    it = asked()
    before = it.state()
    answer = it.submit(job_file("case", "Case"))

    assert (answer.status_code, answer.json()["code"]) == (422, "T0982")
    assert answer.json()["facts"] == {"found": "case, Case"}
    assert it.state() == before


def test_a_name_that_is_taken_in_another_case_is_told_as_it_is_written(asked):
    """Which is how it stands in the list."""
    it = asked()
    it.submit(job_file("case"), "1")
    answer = it.submit(job_file("CASE"), "2")

    assert (answer.status_code, answer.json()["code"]) == (409, "T0983")
    assert answer.json()["what"] == "there is a job 'case' already"


def test_a_file_whose_name_is_refused_may_have_another(asked):
    """The answer says how."""
    it = asked()
    answer = it.submit(job_file("a", data="my rows.jsonl"), files={"my rows.jsonl": "0" * 64})

    assert (answer.status_code, answer.json()["code"]) == (422, "T0982")
    assert "--upload NAME=FILE" in answer.json()["help"]


def test_a_key_that_utf_8_cannot_hold_is_named_in_the_answer(asked):
    """Escaped, as every other mistake of a job file."""
    it = asked()
    answer = it.submit(job_file("a") + '"\\uD800": null\n')

    assert (answer.status_code, answer.json()["code"]) == (422, "T0982")
    assert "\\ud800" in answer.json()["text"]


@pytest.mark.parametrize(
    ("fields", "where", "told"),
    [
        ({"data": "x.jsonl"}, "jobs[0].data.path", "client submit JOBS.yaml --upload x.jsonl"),
        ({"data": "d/*.jsonl"}, "jobs[0].data.path", "--upload d/*.jsonl"),
        ({"data": str(EXAMPLES / "none.jsonl")}, "jobs[0].data.path", "the service's machine"),
        ({"eval_data": {"path": "e.jsonl"}}, "jobs[0].eval_data.path", "--upload e.jsonl"),
        (
            {"data": [{"path": str(QUICKSTART / "data/records.jsonl")}, {"path": "y.csv"}]},
            "jobs[0].data[1].path",
            "--upload y.csv",
        ),
    ],
)
def test_data_that_is_not_there_is_refused_at_once(asked, fields, where, told):
    """With its place in the job file, what was uploaded, and the command that sends it."""
    it = asked()
    sha256, before = it.upload(b""), it.state()
    answer = it.submit(job_file("a", **fields), files={"z.jsonl": sha256})

    assert (answer.status_code, answer.json()["what"]) == (422, "a data file is not there")
    assert where in answer.json()["facts"]
    assert told in answer.json()["text"]
    assert it.state() == before


def test_data_that_lies_where_the_service_was_started_is_not_there(asked, tmp_path, monkeypatch):
    """As where its user and the service have one folder, and the upload was forgotten."""
    (tmp_path / "x.jsonl").write_text('{"text": "hello"}\n')
    monkeypatch.chdir(tmp_path)
    answer = asked().submit(job_file("a", data="x.jsonl"))

    assert (answer.status_code, answer.json()["what"]) == (422, "a data file is not there")
    assert "client submit JOBS.yaml --upload x.jsonl" in answer.json()["text"]


def test_a_base_that_is_not_there_is_refused_at_once(asked, tmp_path, monkeypatch):
    """A folder without a config or weights, with pickles, and a hub id where there is no hub."""
    it = asked(roots=(EXAMPLES, tmp_path))
    base = tmp_path / "base"
    base.mkdir()

    def told(model):
        top = yaml.safe_load(job_file("a")) | {"base": {"model": str(model)}}
        answer = it.submit(yaml.safe_dump(top))
        assert answer.status_code == 422
        return answer.json()["text"]

    assert "config.json" in told(base)
    (base / "config.json").write_text("{")
    assert "holds no weights" in told(base)
    (base / "pytorch_model.bin").write_text("")
    assert "a pickle may run any code" in told(base)
    assert "does not exist" in told(tmp_path / "none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "which is offline" in told("some/base")
    assert it.service.store.jobs() == []


def test_a_base_beside_the_job_file_of_its_user_is_told_to_be_named_by_its_whole_path(
    asked, tmp_path, monkeypatch
):
    """Whatever lies where the service was started, and however its folder was named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    it = asked(folder=Path("runs/team"), roots=(tmp_path, EXAMPLES))
    top = yaml.safe_load(job_file("a"))
    told = it.submit(yaml.safe_dump(top | {"base": {"config": "base"}})).json()
    assert (told["what"], told["facts"]["base.config"]) == ("the base is not there", "base")

    top["jobs"][0] |= {"adapter": "adapter"}
    (tmp_path / "adapter").mkdir()
    text = it.submit(yaml.safe_dump(top)).json()["text"]
    assert "adapter" in text
    assert "submitted" not in text
    assert str(tmp_path / "adapter") not in text


def test_a_link_out_of_a_root_is_refused(asked, tmp_path):
    """A root holds what lies in it, not what it points to."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.jsonl").symlink_to(EXAMPLES.parent / "README.md")
    it = asked(roots=(root, QUICKSTART))

    answer = it.submit(job_file("a", data=str(root / "link.jsonl")))
    assert answer.json()["what"] == "a job may not read this path"


@pytest.mark.parametrize("pattern", ["{root}/*.jsonl", "{root}/**/*.jsonl", "{outside}/*.jsonl"])
def test_a_pattern_of_files_out_of_a_root_is_refused(asked, tmp_path, pattern):
    """Nor is a link taken because a pattern matches it."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.jsonl").symlink_to(QUICKSTART / "data" / "records.jsonl")
    it = asked(roots=(root, QUICKSTART / "base"))
    path = pattern.format(root=root, outside=QUICKSTART / "data")

    answer = it.submit(job_file("a", data=path))
    assert answer.json()["what"] == "a job may not read this path"


@pytest.mark.parametrize("section", ["jobs", "defaults"])
def test_a_path_in_a_sweep_out_of_a_root_is_refused(asked, tmp_path, section):
    """Values of a sweep are paths as those of a job are."""
    (tmp_path / "secret.jsonl").write_text("{}")
    it = asked(roots=(QUICKSTART,))
    top = yaml.safe_load(job_file("a"))
    inside = str(QUICKSTART / "data" / "records.jsonl")
    values = [inside, str(tmp_path / "secret.jsonl")]
    sweep = {"sweep": {"parameters": {"data.path": values}}}
    if section == "jobs":
        top["jobs"][0] |= sweep
    else:
        top["defaults"] = top.get("defaults", {}) | sweep

    answer = it.submit(yaml.safe_dump(top))
    assert answer.json()["what"] == "a job may not read this path"


def test_a_submission_with_a_sweep_makes_its_jobs(asked):
    """Each combination is a job."""
    it = asked(roots=(QUICKSTART,))
    top = yaml.safe_load(job_file("a"))
    top["jobs"][0]["sweep"] = {"parameters": {"seed": [1, 2]}}

    answer = it.submit(yaml.safe_dump(top))
    assert [name.split(".")[-1] for name in answer.json()["jobs"]] == ["a-seed-1", "a-seed-2"]


def test_patterns_are_looked_up_for_a_bounded_time_by_a_few_requests_of_a_user(asked, monkeypatch):
    """In a process of its own: each `**` may stand for any of the folders, however many there are.

    Nothing is kept, and a pattern that is right is taken as before.
    """
    it = asked()
    files = {"a/" * 90 + "x.jsonl": it.upload(b'{"text": "hello"}\n')}
    before = it.state()
    with monkeypatch.context() as changes:
        changes.setattr(submission, "LOOK_SECONDS", 0.5)
        slow = it.submit(job_file("a", data="**/" * 12 + "none.jsonl"), files=files)
        changes.setattr(submission, "MAX_LOOKS", 0)
        many = it.submit(job_file("a", data="**/x.jsonl"), files=files)

    assert (slow.status_code, many.status_code) == (422, 429)
    assert "takes too long to find the files" in slow.json()["what"]
    assert it.state() == before
    assert it.submit(job_file("a", data="**/x.jsonl"), files=files).status_code == 201


BAD = [
    ("", {}),
    ("base: [", {}),
    ("a: &a [*a]", {}),
    ("jobs: 3", {}),
    (job_file("a", learning_rat=1.0), {}),
    (job_file("a", "a"), {}),
    (job_file("service"), {"user": None}),
    (job_file("x" * 98), {}),
    (job_file("a", learning_rate=float("inf")), {}),
    (job_file("a"), {"files": {"../x": "0" * 64}}),
    (job_file("a"), {"files": {"/x": "0" * 64}}),
    (job_file("a"), {"files": {"jobs.yaml": "0" * 64}}),
    (job_file("a"), {"files": {"x": "0" * 64}}),
    (job_file("a"), {"files": {"x": "zz"}}),
    (job_file("a"), {"priority": -1}),
    (job_file("a"), {"more": 1}),
    (job_file("a", compute_metrics="os:system"), {}),
]


def test_whatever_is_wrong_with_a_submission_nothing_is_kept(asked):
    """An error with a code each."""
    it = asked()
    it.add("alice")
    before = it.state()
    for text, more in BAD:
        user = more.get("user", "alice")
        if user is None:
            continue
        body = {name: value for name, value in more.items() if name != "user"}
        answer = it.submit(text, user=user, **body)
        assert answer.status_code == 422, (text, more, answer.text)
        assert answer.json()["code"].startswith("T0")
    half = b'{"job_file": "\\ud800"}'
    headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
    told = it.ask("POST", "/api/v1/submissions", "alice", content=half, headers=headers)
    assert told.status_code == 422
    assert it.state() == before


def test_without_users_a_job_cannot_be_called_as_the_service(asked):
    """Its folder is taken."""
    it = asked()

    assert it.submit(job_file("service")).status_code == 422
    assert it.submit(job_file("a")).status_code == 201
    assert it.submit(job_file("A"), key="other").status_code == 409


def test_a_base_that_was_not_measured_is_told_to_who_submits(tmp_path, monkeypatch):
    """At once, and nothing has changed; the scheduler would refuse the job later."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    limits, require = IntakeLimits(roots=(EXAMPLES,)), partial(require_measured, gpu="cpu")
    service = make_service(
        tmp_path / "run", limits, open_to_all=True, require_measured=partial(require, files=())
    )
    client = TestClient(make_app(service, ("testserver",)))
    it = Asked(tmp_path / "run", service, client)
    before = it.state()
    refused = it.submit(job_file("a"))

    assert refused.status_code == 422
    assert "was not measured on this machine's cpu" in refused.json()["what"]
    assert "tlora-fx profile" in refused.json()["help"]
    assert it.state() == before
    service.intake._require_measured = partial(require, files=(PROFILE,))
    assert it.submit(job_file("a")).status_code == 201


@pytest.mark.parametrize("hours", [-30, 30])
def test_setting_the_machines_clock_removes_no_upload_and_no_job(asked, machine, hours):  # noqa: F811
    """They stay for as long as they are to, from when they were sent and had ended."""
    day = 86_400.0
    it = asked(keep_seconds=day, keep_job_seconds=day)
    it.submit(job_file("a"))
    as_scheduled(it.folder, [("a",)], ended=True)
    store = it.service.store
    store.rows("UPDATE jobs SET status = 'done', steps = 10, ended = 0")
    store.rows("INSERT INTO files VALUES (?, '', 'taken')", str(store.file_of(1).absolute()))
    store.settle()
    machine.day += hours * 3600
    sha256 = it.upload(b"rows")
    machine.day -= 2 * hours * 3600
    upload = store.folder / "uploads" / "local" / sha256

    def there():
        it.service.intake.collect()
        return upload.exists(), bool(store.rows("SELECT 1 FROM owned"))

    assert there() == (True, True)
    machine.pass_by(day + 1)
    assert there() == (False, False)


def test_uploads_are_bounded_and_are_what_they_say(asked):
    """However they are sent; nothing is left of them."""
    it = asked(upload_bytes=100, stored_bytes=150)
    before = it.state()
    path = "/api/v1/files/" + hashlib.sha256(b"x" * 101).hexdigest()
    parts = (b"x" * 50 for _ in range(40))

    assert it.ask("PUT", path, content=b"x" * 200).status_code == 413
    assert it.ask("PUT", path, content=parts).status_code == 413
    changed = it.ask("PUT", path, content=b"y")
    assert changed.status_code == 422
    assert changed.json()["facts"]["found"] == hashlib.sha256(b"y").hexdigest()
    assert "send it again" in changed.json()["help"]
    assert it.ask("PUT", "/api/v1/files/abc", content=b"y").status_code == 422
    assert it.submit("x" * (2 << 20)).status_code == 413
    assert it.state() == before
    it.upload(b"x" * 90)
    assert it.ask("PUT", path, content=b"z" * 90).status_code == 429


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
    (written,) = it.service.store.inbox.iterdir()
    content = written.read_text()
    written.unlink()
    stray = it.folder / "service" / "submitted" / "stray"
    stray.mkdir()
    make_service(it.folder, IntakeLimits(), open_to_all=True)

    assert written.read_text() == content
    assert not stray.exists()


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


def test_the_folder_of_a_service_is_private(asked):
    """What was uploaded tells what is trained on."""
    it = asked()

    assert it.folder.stat().st_mode & 0o077 == 0
