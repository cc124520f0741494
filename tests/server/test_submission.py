"""Submissions and uploads: what is taken once, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import unicodedata
from functools import partial
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient

from tests.clocks import machine  # noqa: F401  (a fixture)
from tests.server.conftest import EXAMPLES, QUICKSTART, Asked, as_scheduled, job_file
from tlora_fx.config.job_file import load_job_file, read_yaml
from tlora_fx.errors import QuotaReached
from tlora_fx.scheduler.estimates import require_measured
from tlora_fx.server import submission
from tlora_fx.server.app import make_app
from tlora_fx.server.file_patterns import may_enter
from tlora_fx.server.ledger import User
from tlora_fx.server.service import make_service
from tlora_fx.server.submission import IntakeLimits

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


@pytest.mark.parametrize(
    "name",
    [
        "trän ing.jsonl", "データ/a-1.jsonl", "a b/c d.jsonl", "a.b.jsonl",
        "re\u0301sume\u0301.jsonl", "हिन्दी.jsonl", "ไทย/ข้อมูล.jsonl", "தமிழ்.jsonl",
    ],
)  # fmt: skip
def test_an_upload_may_be_called_in_any_script(asked, name):
    """With spaces inside, and accents as macOS parts them from their letters."""
    it = asked()
    sha256 = it.upload(b'{"text": "hello"}\n')

    answer = it.submit(job_file("a", data=name), files={name: sha256})
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("data", ["é/ré.jsonl", "./é/ré.jsonl", "é/r*.jsonl"])
@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC"), ("NFD", "NFD")])
def test_an_upload_is_found_though_its_accents_are_parted_from_their_letters(asked, data, forms):
    """By macOS in names of files, or by an editor in the job file; the folder has it once."""
    written = unicodedata.normalize(forms[0], data)
    sent = unicodedata.normalize(forms[1], "é/ré.jsonl")
    it = asked()
    sha256 = it.upload(b'{"text": "hello"}\n')
    answer = it.submit(job_file("a", data=written), files={sent: sha256})

    assert (answer.status_code, answer.json().get("what")) == (201, None)
    [job] = it.service.store.inbox.iterdir()
    [entry] = yaml.safe_load(job.read_text())["jobs"]
    path = Path(entry["data"]["path"])
    [found] = path.parent.glob(path.name)
    assert list(path.parent.iterdir()) == [found]


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_uploads_whose_names_differ_in_their_accents_alone_are_two_files(asked, forms):
    """A job names each, and each job has its own."""
    names = [unicodedata.normalize(form, "é/ré.jsonl") for form in forms]
    texts = [f'{{"text": "{form}"}}\n' for form in forms]
    it = asked()
    files = {name: it.upload(text.encode()) for name, text in zip(names, texts, strict=True)}
    jobs = yaml.safe_load(job_file("a", "b"))
    for job, name in zip(jobs["jobs"], names, strict=True):
        job["data"] = {"path": name}
    answer = it.submit(yaml.safe_dump(jobs, allow_unicode=True), files=files)

    assert (answer.status_code, answer.json().get("what")) == (201, None)
    [written] = it.service.store.inbox.iterdir()
    paths = [entry["data"]["path"] for entry in yaml.safe_load(written.read_text())["jobs"]]
    assert [Path(path).read_text() for path in paths] == texts


@pytest.mark.parametrize("data", ["é/ré.jsonl", "é/r*.jsonl", "other/*.jsonl"])
@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_file_that_is_sent_under_both_spellings_of_its_name_is_found(asked, data, forms):
    """By a client that does not know which one the job file has."""
    it = asked()
    sha256 = it.upload(b'{"text": "hello"}\n')
    files = {unicodedata.normalize(form, "é/ré.jsonl"): sha256 for form in forms}
    files["other/a.jsonl"] = sha256
    answer = it.submit(job_file("a", data=unicodedata.normalize("NFC", data)), files=files)

    assert (answer.status_code, answer.json().get("what")) == (201, None)


def test_a_spelling_that_no_file_can_have_is_refused(asked):
    """File systems have names of 255 bytes at most, and the job file's is longer."""
    it = asked()
    sha256 = it.upload(b'{"text": "hello"}\n')
    name = "é" * 90 + ".jsonl"
    answer = it.submit(job_file("a", data=unicodedata.normalize("NFD", name)), files={name: sha256})

    assert (answer.status_code, answer.json()["what"]) == (422, "a data file is not there")


def test_the_length_of_a_name_is_that_of_the_name_that_was_sent(asked):
    """The job file's spelling may be longer."""
    it = asked()
    sha256 = it.upload(b'{"text": "hello"}\n')
    name = "é" * 40 + "/" + "é" * 45 + ".jsonl"
    answer = it.submit(job_file("a", data=unicodedata.normalize("NFD", name)), files={name: sha256})

    assert (answer.status_code, answer.json().get("what")) == (201, None)


@pytest.mark.parametrize(
    "name",
    [
        "a /x", " a.jsonl", "a.jsonl ", ".a.jsonl", "a/../b", "a\tb", "a\nb", "ä" * 101,
        "a/\u0301b", "\u0301.a", ".\u0301a", "a\u200bb", "a\u202eb", "a\\b",
    ],
)  # fmt: skip
def test_an_upload_may_not_be_called_so_that_nobody_sees_it(asked, name):
    """Neither may it lead elsewhere, or be too long for a file."""
    it = asked()
    sha256 = it.upload(b'{"text": "hello"}\n')
    answer = it.submit(job_file("a"), files={name: sha256})

    assert answer.status_code == 422
    assert "cannot be called so" in answer.json()["what"]


def test_a_submission_that_is_sent_twice_at_a_time_fills_its_own_quota_once(asked, monkeypatch):
    """The one that is read later is told what the other one was."""
    it = asked()
    it.add("alice", jobs=1)
    answers = []

    def read(path):
        monkeypatch.setattr(submission, "read_yaml", read_yaml)
        answers.append(it.submit(job_file("a"), user="alice"))
        return read_yaml(path)

    monkeypatch.setattr(submission, "read_yaml", read)
    answers.append(it.submit(job_file("a"), user="alice"))

    assert [answer.status_code for answer in answers] == [201, 200]
    assert answers[1].json()["jobs"] == ["alice.a"]


@pytest.mark.parametrize(
    ("limits", "jobs", "read"),
    [
        ({"gpu_hours": 0.0}, [{"name": "a"}], ["read_yaml"]),
        ({"jobs": 2}, [{"name": name} for name in "abc"], ["read_yaml"]),
        (
            {"jobs": 2},
            [{"name": "a", "sweep": {"parameters": {"lora.r": [2, 4, 8]}}}],
            ["read_yaml", "load_job_file"],
        ),
    ],
    ids=["no hours", "entries", "sweep"],
)
def test_a_submission_beyond_the_quota_is_refused_before_the_costly_checks(
    asked, monkeypatch, limits, jobs, read
):
    """Nothing is read of it once its jobs are known to be too many."""
    it, calls = asked(), []
    it.add("alice", **limits)
    for name in ("read_yaml", "load_job_file"):
        function = getattr(submission, name)
        monkeypatch.setattr(
            submission,
            name,
            lambda *given, name=name, function=function, **more: (
                calls.append(name) or function(*given, **more)
            ),
        )
    document = yaml.safe_load(job_file("a"))
    shared = {key: value for key, value in document["jobs"][0].items() if key != "name"}
    text = yaml.safe_dump({**document, "defaults": shared, "jobs": jobs})
    answer = it.submit(text, user="alice")

    assert (answer.status_code, calls) == (429, read), answer.text
    assert not list((it.service.store.folder / "submitted").iterdir())


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
    answer = it.submit(job_file("a", data="rows (2).jsonl"), files={"rows (2).jsonl": "0" * 64})

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
        ({"data": "d/*.jsonl"}, "jobs[0].data.path", "--upload 'd/*.jsonl'"),
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


@pytest.mark.parametrize(
    "reach",
    [
        {"data": {"path": "{run}/service/submitted/*/mine.jsonl"}},
        {"data": {"path": "{root}/*/**/mine.jsonl"}},
        {"data": {"path": "{root}/*/service/submitted/*/mine.jsonl"}},
        {"data": {"path": "{run}/alice.a/metrics.jsonl"}},
        {"adapter": "{run}/alice.a", "lora": None},
        {"adapter": "{run}/service/replaced/000001.alice.a", "lora": None},
    ],
    ids=str,
)
def test_a_root_that_holds_the_run_shows_nothing_of_other_users(asked, tmp_path, reach):
    """Neither uploads nor adapters; an administrator may read all."""
    it = asked(roots=(tmp_path, EXAMPLES))
    for name in ("alice", "bob"):
        it.add(name)
    it.add("root", admin=True)
    sha256 = it.upload(b'{"text": "secret"}\n', "alice")
    sent = it.submit(job_file("a", data="mine.jsonl"), user="alice", files={"mine.jsonl": sha256})
    assert sent.status_code == 201
    as_scheduled(it.folder, [("alice.a",)])
    text = json.dumps(reach).replace("{run}", str(it.folder)).replace("{root}", str(tmp_path))
    sent = job_file("b", **json.loads(text))

    refused = it.submit(sent, user="bob").json()
    assert refused.get("what") == "a job may not read this path"
    assert it.submit(sent, user="root").json().get("what") != refused["what"]


def test_a_pattern_reaches_nothing_that_others_put_into_the_run_later(asked, tmp_path):
    """Workers look for what it names when the job starts; beside the run, patterns are read."""
    it = asked(roots=(tmp_path, EXAMPLES))
    it.add("bob")
    mine = {"mine.jsonl": it.upload(b'{"text": "own"}\n', "bob")}
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "a.jsonl").write_text('{"text": "a"}\n')
    later = job_file("a", data=f"{tmp_path}/*/service/submitted/*/mine.jsonl")
    beside = job_file("b", data=f"{tmp_path}/sets/*.jsonl")

    refused = it.submit(later, user="bob", files=mine).json()
    assert refused.get("what") == "a job may not read this path"
    assert it.submit(beside, key="2", user="bob").status_code == 201


@pytest.mark.parametrize(
    ("pattern", "enters"),
    [
        ("/data/*.jsonl", False), ("/data/*", False), ("/data/sets/*.jsonl", False),
        ("/other/*/x", False), ("/*/*", False), ("/data/**", True), ("/data/*/x.jsonl", True),
        ("/data/r*/**/x", True), ("/**/x.jsonl", True), ("/data/run/*/x", True), ("/*/*/x", True),
    ],
)  # fmt: skip
def test_patterns_that_may_enter_a_folder(pattern, enters):
    """By names alone, whatever is there now."""
    assert may_enter(pattern, "/data/run") == enters


def test_a_root_that_holds_the_run_shows_users_their_own_jobs(asked, tmp_path):
    """Such as an adapter to continue."""
    it = asked(roots=(tmp_path, EXAMPLES))
    it.add("alice")
    it.submit(job_file("a"), user="alice")
    as_scheduled(it.folder, [("alice.a",)])
    own = str(it.folder / "alice.a" / "metrics.jsonl")

    assert it.submit(job_file("b", data=own), key="2", user="alice").status_code == 201


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
    large = it.submit("x" * (2 << 20))
    assert (large.status_code, large.json()["code"]) == (413, "T0985")
    assert large.json()["facts"] == {
        "path": "/api/v1/submissions", "expected": "at most 1048576 bytes",
    }  # fmt: skip
    assert it.state() == before
    it.upload(b"x" * 90)
    assert it.ask("PUT", path, content=b"z" * 90).status_code == 429


def test_an_upload_that_is_sent_again_takes_no_more_of_the_quota(asked):
    """Each submission sends its files, whether they are there or not."""
    it = asked(stored_bytes=150)

    assert it.upload(b"x" * 90) == it.upload(b"x" * 90)
    other = hashlib.sha256(b"y" * 61).hexdigest()
    refused = it.ask("PUT", f"/api/v1/files/{other}", content=b"y" * 61)
    assert refused.status_code == 429
    assert refused.json()["facts"]["found"] == "at least 151 bytes with this one"
    assert "--keep-uploads" in refused.json()["help"]
    it.upload(b"y" * 60)


def test_a_file_that_is_sent_again_beside_a_stalled_upload_counts_once(asked):
    """The client sends it again after a moment; the connection that broke is found out later."""
    intake, content = asked(stored_bytes=100).service.intake, b"x" * 90
    sha256, kept = hashlib.sha256(content).hexdigest(), asyncio.Event()

    async def stalled():
        yield content[:60]
        await kept.wait()
        raise ConnectionResetError

    async def whole():
        yield content

    async def both() -> None:
        first = asyncio.create_task(intake.upload(User("local"), sha256, stalled()))
        await asyncio.sleep(0)
        assert await intake.upload(User("local"), sha256, whole()) == 90
        kept.set()
        with pytest.raises(ConnectionResetError):
            await first

    asyncio.run(both())
    (path,) = intake.store.folder.glob("uploads/*/*")
    assert path.read_bytes() == content


@pytest.mark.parametrize("together", [True, False])
def test_uploads_at_one_time_keep_to_the_quota(asked, together):
    """Both begin while nothing is kept; the second ends beside the first or after it."""
    intake = asked(stored_bytes=150).service.intake
    contents = [b"x" * 90, b"y" * 90]
    first_kept = asyncio.Event()

    async def chunks(content: bytes):
        yield content[:40]
        if content is contents[1] and not together:
            await first_kept.wait()
        await asyncio.sleep(0)
        yield content[40:]

    async def send(content: bytes) -> bool:
        sha256 = hashlib.sha256(content).hexdigest()
        try:
            await intake.upload(User("local"), sha256, chunks(content))
        except QuotaReached:
            return False
        first_kept.set()
        return True

    async def both() -> list[bool]:
        return await asyncio.gather(*map(send, contents))

    assert sorted(asyncio.run(both())) == [False, True]
    (kept,) = intake.store.folder.glob("uploads/*/*")
    assert kept.stat().st_size == 90
    assert asyncio.run(send(kept.read_bytes()))
