"""The commands of a service's users, against a service that listens."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import as_scheduled, asked, job_file, listen  # noqa: F401  (a fixture)
from tlora_fx.cli import client, main
from tlora_fx.cli.client import uploads
from tlora_fx.cli.serve import ServeCommandOptions, _guarded_store, _limits
from tlora_fx.config.job_file import load_job_file
from tlora_fx.errors import RunFolderError, ServiceUnreachable, UploadRefused
from tlora_fx.runtime.run_folder import LEDGER

CODE = """
import sys
from tlora_fx.cli import main, client
client.PAUSE_SECONDS = 0
try:
    main(["client", "ls", "--server", "http://127.0.0.1:1"])
except SystemExit as end:
    assert end.code == 1
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


@pytest.fixture
def said(asked, monkeypatch, capsys):  # noqa: F811
    """What a client says to a service that has one user."""
    it = asked()
    monkeypatch.setenv("TLORA_FX_TOKEN", it.add("alice", priority=5))
    server, address, thread = listen(it.service)
    monkeypatch.setenv("TLORA_FX_SERVER", address)

    def say(*words, code=0):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["client", *map(str, words)])
        told = capsys.readouterr()
        assert (end.value.code or 0) == code, told
        return told.out if code == 0 else told.err

    yield it, say
    server.should_exit = True
    thread.join()


def test_a_job_goes_from_its_file_to_its_adapter(said, tmp_path):
    """Submitted with its data, watched, paused, resumed, and fetched at its end."""
    it, say = said
    data, path = tmp_path / "mine.jsonl", tmp_path / "jobs.yaml"
    data.write_text('{"text": "hello"}\n')
    path.write_text(job_file("a", data="data/mine.jsonl"))
    upload = f"data/mine.jsonl={data}"

    told = say("submit", path, "--upload", upload, "--key", "k", "--priority", "5")
    assert told == "submission 1: alice.a\n"
    assert "(submitted before)" in say(
        "submit", path, "--upload", upload, "--key", "k", "--priority", "5"
    )
    assert "not known yet" in say("status", "a")
    assert say("pause", "a") == "alice.a: paused\n"
    assert say("resume", "a") == "alice.a: received\n"
    as_scheduled(it.folder, [("alice.a",)])
    it.refresh()
    assert "running" in say("ls")
    assert "alice.a: running" in say("logs", "a").splitlines()[-1]
    told = say("status", "a", "--why")
    assert "group 1 on 0 alone" in told
    [submitted] = [line for line in told.splitlines() if line.startswith("submitted")]
    year = datetime.now().astimezone().strftime("%Y-")
    assert submitted.split(maxsplit=1)[1].startswith(year)
    assert "no adapter" in say("fetch", "a", code=1)
    (it.folder / "alice.a" / "adapter_model.safetensors").write_bytes(b"weights")
    it.service.store.rows("UPDATE jobs SET status = 'done', steps = 10")
    say("fetch", "a", "-o", tmp_path / "here")
    fetched = tmp_path / "here" / "alice.a" / "adapter_model.safetensors"
    assert fetched.read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (lambda it: setattr(it.service, "ending", True), "the service ended before the job did"),
        (lambda it: it.service.store.revoke("alice"), "the token was revoked before the job"),
    ],
)
def test_a_followed_log_that_ends_before_its_job_is_an_error(
    said, tmp_path, monkeypatch, ends, told
):
    """A script that waits for the job goes no further."""
    it, say = said
    path = tmp_path / "jobs.yaml"
    path.write_text(job_file("a"))
    say("submit", path)
    as_scheduled(it.folder, [("alice.a",)])
    shown = []

    def show(line):
        if not shown:
            ends(it)
        shown.append(line)

    monkeypatch.setattr(client, "echo", show)

    assert told in say("logs", "a", "-f", code=1)
    assert "step 1" in shown[0]


def archive(**files):
    """A tar archive of files of a job, open to be read."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"a/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    packed.seek(0)
    return tarfile.open(fileobj=packed)


def test_what_is_fetched_overwrites_no_file_that_holds_something_else(tmp_path):
    """Of a user's own folder of that name, or of an earlier job; the same may be fetched again."""
    for _ in "twice":
        client._unpack(archive(metrics=b"old", weights=b"old"), tmp_path)
    with pytest.raises(RunFolderError, match="another file of that name") as caught:
        client._unpack(archive(metrics=b"new", weights=b"new"), tmp_path)

    assert caught.value.facts["file"] == f"{tmp_path}/a/metrics"
    assert {path.read_bytes() for path in (tmp_path / "a").iterdir()} == {b"old"}


def test_a_folder_into_which_nothing_can_be_fetched_is_told(tmp_path):
    """A file has its name."""
    (tmp_path / "a").touch()

    with pytest.raises(RunFolderError, match="cannot be written"):
        client._unpack(archive(weights=b"new"), tmp_path)


def test_a_mistake_is_told_with_the_name_that_the_user_gave_the_file(said, tmp_path):
    """The service knows its text alone."""
    _, say = said
    path = tmp_path / "größe.yaml"
    path.write_text(job_file("a", data="x.jsonl").replace("r: ", "rank: "))

    assert f"file  {path.name}:" in say("submit", path, code=1)


def test_a_state_that_no_job_has_is_refused(said):
    """An empty list would say that no job is in it."""
    _, say = said

    assert "did you mean 'running'?" in say("ls", "--state", "runing", code=1)
    assert say("ls", "--state", "running").startswith("job")


def test_an_address_without_a_scheme_is_told_how_to_be_written(said):
    """It is no service that does not run."""
    _, say = said

    assert "such as http://HOST:8642" in say("ls", "--server", "gpu1:8642", code=1)


@pytest.mark.parametrize(("gpu", "unit"), [("cpu", "CPU"), ("H200", "GPU")])
def test_a_list_names_what_the_service_has(said, tmp_path, gpu, unit):
    """A service on a CPU has no GPUs to tell of, nor has the state of one job."""
    it, say = said
    it.service.view.gpu = gpu
    (tmp_path / "mine.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "jobs.yaml").write_text(job_file("a", data="mine.jsonl"))
    say("submit", tmp_path / "jobs.yaml", "--upload", tmp_path / "mine.jsonl")
    as_scheduled(it.folder, [("alice.a",)])
    it.refresh()

    assert f"  {unit}  " in say("ls").splitlines()[0]
    assert f"\n{unit.lower()}s  " in say("status", "a")


@pytest.mark.parametrize("called", ["x.jsonl", "./x.jsonl", "data/x.jsonl"])
@pytest.mark.parametrize("where", ["beside the file", "above it", "elsewhere"])
@pytest.mark.parametrize("written", ["as the file calls it", "from here", "absolute"])
def test_an_upload_is_what_the_file_calls_so_from_any_folder(
    said, tmp_path, monkeypatch, called, where, written
):
    """Named as the job file does, as a shell completes it, or by its whole path."""
    it, say = said
    folder = tmp_path / "project" / "jobs"
    data = folder / called
    data.parent.mkdir(parents=True)
    data.write_text('{"text": "hello"}\n')
    (folder / "jobs.yaml").write_text(job_file("a", data=called))
    here = {"beside the file": folder, "above it": tmp_path, "elsewhere": tmp_path / "other"}[where]
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    name = {"as the file calls it": called, "absolute": data}.get(written, os.path.relpath(data))

    assert "alice.a" in say("submit", os.path.relpath(folder / "jobs.yaml"), "--upload", name)
    (document,) = it.service.store.inbox.iterdir()
    assert Path(load_job_file(document).jobs[0].data.path).read_text() == data.read_text()


def test_an_upload_from_elsewhere_has_the_name_that_the_file_uses(tmp_path, monkeypatch):
    """By its last name where the job file uses that once; else it has to be said."""
    monkeypatch.chdir(tmp_path)
    for folder in ("jobs", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "x.jsonl").write_text("")
    path = tmp_path / "jobs" / "jobs.yaml"
    path.write_text(job_file("a", data="train/x.jsonl"))

    assert uploads(path, ["data/x.jsonl"]) == {"train/x.jsonl": Path("data/x.jsonl")}
    assert uploads(path, ["./y.jsonl=data/x.jsonl"]) == {"y.jsonl": Path("data/x.jsonl")}
    (tmp_path / "jobs" / "data").mkdir()
    (tmp_path / "jobs" / "data" / "x.jsonl").write_text("another")
    with pytest.raises(UploadRefused, match="two files are called so"):
        uploads(path, ["data/x.jsonl"])


@pytest.mark.parametrize(
    ("method", "headers", "sent"),
    [("GET", {}, 2), ("POST", {"Idempotency-Key": "k"}, 2), ("PUT", {}, 2), ("POST", {}, 1)],
)
def test_what_may_be_repeated_is_sent_again_over_a_broken_connection(
    monkeypatch, method, headers, sent
):
    """A submission has its key; a cancel may have been done though no answer came."""
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.0)
    bodies = []

    def answer(request):
        bodies.append(request.read())
        if len(bodies) == 1:
            raise httpx.ReadError("closed")
        return httpx.Response(200, json={"jobs": []})

    here = client.Connection(client.ServiceOptions("http://here"))
    here.client = httpx.Client(base_url="http://here", transport=httpx.MockTransport(answer))
    with suppress(ServiceUnreachable):
        assert here.ask(method, "jobs", lambda: b"whole", headers=headers) == {"jobs": []}

    assert bodies == [b"whole"] * sent


def test_a_proxy_that_takes_no_large_bodies_is_told():
    """What it says is a page of its own."""
    page = httpx.Response(413, text="<html>413 Request Entity Too Large</html>")
    here = client.Connection(client.ServiceOptions("http://here"))
    transport = httpx.MockTransport(lambda request: page)
    here.client = httpx.Client(base_url="http://here", transport=transport)

    with pytest.raises(UploadRefused, match="a proxy before the service"):
        here.ask("PUT", "files/0", lambda: b"whole")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(200, html="<html>Sign in</html>"), "200 OK, text/html"),
        (httpx.Response(302, headers={"Location": "/sign-in"}), "302 Found, no content"),
        (httpx.Response(200), "200 OK, no content"),
        (httpx.Response(502, text="down"), "502 Bad Gateway, text/plain"),
    ],
)
def test_what_is_no_service_is_refused(answer, told):
    """Such as a proxy where one signs in first, whether or not an answer comes bit by bit."""
    here = client.Connection(client.ServiceOptions("http://here"))
    transport = httpx.MockTransport(lambda request: answer)
    here.client = httpx.Client(base_url="http://here", transport=transport)

    with pytest.raises(ServiceUnreachable, match=f"no service of tlora-fx(.|\n)*{told}"):
        here.ask("GET", "jobs")
    with (
        pytest.raises(ServiceUnreachable, match=f"no service of tlora-fx(.|\n)*{told}"),
        here.stream("jobs/a/adapter", "application/x-tar"),
    ):
        pass


def test_what_the_service_refuses_is_told_in_its_words(said, tmp_path, monkeypatch):
    """With exit code 1, and nothing is submitted."""
    it, say = said
    path = tmp_path / "jobs.yaml"
    path.write_text(job_file("a", data="/etc/passwd"))

    assert say("submit", path, code=1).startswith("error[T0982] a job may not read this path")
    assert "there is no job 'b'" in say("cancel", "b", code=1)
    absent = say("submit", path, "--upload", "none.jsonl", code=1)
    assert "no such file to upload" in absent
    folders = dict.fromkeys((path.parent.absolute(), Path.cwd()))
    assert f"a file below {' or '.join(map(str, folders))}\n" in absent
    assert say("submit", tmp_path / "none.yaml", code=1).startswith("error[T0104]")
    monkeypatch.setenv("TLORA_FX_TOKEN", "tlora-wrong")
    assert "no such token" in say("ls", code=1)
    assert it.service.store.jobs() == []


def test_a_client_needs_no_torch():
    """Nor does it take long to say that nobody answers."""
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)

    assert told.returncode == 0, told.stderr
    assert "error[T0987] no service answers" in told.stderr


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("TLORA_FX_SERVER", "http://[::1", "error[T0987] no service answers"),
        ("TLORA_FX_TOKEN", "schlüssel", "error[T0981] this is no access token"),
        ("TLORA_FX_TOKEN", "two words", "error[T0981] this is no access token"),
        ("TLORA_FX_CA", "nowhere.pem", "error[T0987] the certificate to trust cannot be read"),
        ("TLORA_FX_CA", "jobs.yaml", "error[T0987] the certificate to trust cannot be read"),
        ("SSL_CERT_FILE", "nowhere.pem", "error[T0987] the certificate to trust cannot be read"),
    ],
)
def test_a_variable_that_cannot_be_used_is_told(
    tmp_path, monkeypatch, capsys, variable, value, told
):
    """Before anything is sent, and without the token."""
    monkeypatch.chdir(tmp_path)
    Path("jobs.yaml").write_text("jobs: []")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit):
        main(["client", "ls"])

    said = capsys.readouterr().err
    assert said.startswith(told)
    assert variable != "TLORA_FX_TOKEN" or value not in said


def test_the_end_of_a_line_belongs_to_no_token(said, monkeypatch):
    """Where it was read from a file."""
    it, say = said
    monkeypatch.setenv("TLORA_FX_TOKEN", f"{it.tokens['alice']}\r\n")

    assert say("ls").startswith("job")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--port", "0", "--host", "0.0.0.0"], "obey everybody"),
        (["serve", "--port", "0", "--public-url", "https://train.example.com"], "obey everybody"),
        (["serve", "--public-url", "train.example.com"], "no address of a service"),
        (["serve", "--root", "nowhere"], "no such folder"),
        (["serve", "--tls-cert", "nowhere.pem"], "no such file"),
        (["tokens", "add", "Not.A-Name"], "cannot be called so"),
        (["tokens", "revoke", "nobody"], "no service in this folder"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(words, told, tmp_path, capsys):
    """Before anything listens."""
    with pytest.raises(SystemExit) as end:
        main([*words, "-o", str(tmp_path / "run")])

    assert end.value.code == 1
    assert told in capsys.readouterr().err


def test_a_folder_of_something_else_gets_no_users(tmp_path, capsys):
    """Such as that of `train`; a service would not begin there either."""
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        main(["tokens", "add", "ada", "-o", str(tmp_path)])

    assert end.value.code == 1
    assert "error[T0407]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_who_has_no_token_has_none_to_revoke(tmp_path, capsys):
    """In a folder in which another user has one."""
    folder = ["-o", str(tmp_path / "run")]
    codes = []
    for words in (["add", "ada"], ["revoke", "nobody"]):
        with pytest.raises(SystemExit) as end:
            main(["tokens", *words, *folder])
        codes.append(end.value.code)

    assert codes == [0, 1]
    assert "has no token" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_torch_is_imported(tmp_path):
    """Of a new service; the folder is not made."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", "-o", str(tmp_path / "run"), "--port", str(taken.getsockname()[1])]
        code = f"""
import sys
from tlora_fx.cli import main
try:
    main({words})
except SystemExit as end:
    assert end.code == 1
assert "torch" not in sys.modules
"""
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )

    assert told.returncode == 0, told.stderr
    assert "it cannot listen there" in told.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["tokens", "add", "alice"], ["tokens", "ls"], ["serve"]])
def test_a_service_whose_folder_cannot_be_made_is_told(words, tmp_path, capsys):
    """As in the folder of a run on a disk that has become read-only."""
    (tmp_path / LEDGER).touch()
    (tmp_path / "service").touch()
    with pytest.raises(SystemExit):
        main([*words, "-o", str(tmp_path)])

    assert "error[T0407] the output folder cannot be written" in capsys.readouterr().err


def test_tokens_are_made_listed_and_revoked(tmp_path, capsys):
    """A token is shown once."""
    run = str(tmp_path / "run")
    for words in (["add", "alice", "--jobs", "3"], ["ls"], ["revoke", "alice"]):
        with pytest.raises(SystemExit):
            main(["tokens", *words, "-o", run])
    token, _, row, revoked = capsys.readouterr().out.splitlines()

    assert token.startswith("tlora-")
    assert row.split()[:3] == ["alice", "1", "3"]
    assert revoked == "alice: 1 revoked"


def test_serve_requires_tokens_for_good_once_it_was_told_to(tmp_path):
    """The ledger remembers; before, and without the option, a run without users requires none."""
    run = tmp_path / "run"

    assert not _guarded_store(run, ServeCommandOptions()).tokens_required()
    assert _guarded_store(run, ServeCommandOptions(require_tokens=True)).tokens_required()
    assert _guarded_store(run, ServeCommandOptions(host="0.0.0.0")).tokens_required()


#: Outputs and inputs of the linears of a Llama of 8B, as a trainer tells them.
LAYERS = {
    f"model.layers.{at}.{name}": shape
    for at in range(32)
    for name, shape in {
        "q": [4096, 4096], "k": [1024, 4096], "v": [1024, 4096], "o": [4096, 4096],
        "gate": [14336, 4096], "up": [14336, 4096], "down": [4096, 14336],
    }.items()
}  # fmt: skip
LLAMA = {"train_attn": LAYERS, "train_mlp": {}, "train_unembed": {"lm_head": [128256, 4096]}}


@pytest.mark.parametrize(
    ("options", "max_rank", "mebibytes"),
    [
        # Of rank 64, that base's largest adapter has 176 million numbers.
        ({}, None, 1024),
        ({"tinker": True}, 64, 1024),
        ({"tinker": True}, 256, 2697),
        ({"tinker": True, "max_upload": 1.0}, 256, 1),
    ],
)
def test_serve_takes_uploads_of_the_largest_adapter(tmp_path, options, max_rank, mebibytes):
    """Of --tinker's base and largest rank; another bound is the operator's to give."""
    if max_rank is not None:
        file = tmp_path / "service/tinker/layout.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"layout": LLAMA, "max_rank": max_rank}))

    limits = _limits(ServeCommandOptions(output=tmp_path, **options))

    assert limits.upload_bytes >> 20 == mebibytes


def test_jobs_are_listed_by_pages_and_removed_once_they_have_ended(said, monkeypatch, tmp_path):
    """All of them, or those submitted last."""
    it, say = said
    monkeypatch.setattr(client, "PAGE", 2)
    path = tmp_path / "jobs.yaml"
    path.write_text(job_file(*"abcde"))
    say("submit", path)
    names = [f"alice.{name}" for name in "abcde"]

    assert [job["name"] for job in json.loads(say("ls", "--json"))] == names
    assert [job["name"] for job in json.loads(say("ls", "--json", "--last", "2"))] == names[3:]
    assert "cannot be removed" in say("rm", "a", code=1)
    as_scheduled(it.folder, [(name,) for name in names], ended=True)
    store = it.service.store
    store.rows("UPDATE jobs SET status = 'done', steps = 10")
    store.rows("INSERT INTO files VALUES (?, '', 'taken')", str(store.file_of(1).absolute()))
    assert say("rm", "a", "alice.b") == "a: removed\nalice.b: removed\n"
    assert [job["name"] for job in json.loads(say("ls", "--json"))] == names[2:]
    assert not (it.folder / "alice.a").exists()
