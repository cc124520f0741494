"""Job files that hang, fill the memory, kill their reader or go away: the others train."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.fake_worker import GATE
from tests.scheduler.fork_here import ForkHere
from tests.scheduler.run_folder import (
    LONGEST_SECONDS,
    QUICKSTART,
    Heard,
    Prepared,
    records,
    run,
    write_job,
)
from tlora_fx.cost.load import Demand
from tlora_fx.runtime.workers.protocol import FORK_SERVER_DIED, EventWriter
from tlora_fx.scheduler import service
from tlora_fx.scheduler.local import admission, admission_worker
from tlora_fx.scheduler.local.admission import (
    Admission,
    AdmissionLimits,
    FileRead,
    JobPrepared,
    JobRefused,
    JobRestored,
)
from tlora_fx.scheduler.local.admission_worker import AdmissionOrder
from tlora_fx.scheduler.local.processes import WorkerStart
from tlora_fx.scheduler.state import REQUEST, JobRequest
from tlora_fx.scheduler.store import Ledger

#: So long that nothing reaches it that does not hang, however busy the machine is.
PATIENT = AdmissionLimits(seconds=900.0, memory_bytes=1 << 28)


@pytest.fixture
def impatient(monkeypatch):
    """A process has a second once it is at job "bad"; nothing else has a limit that it reaches."""
    plain, why = Admission._seconds, Admission._why

    def seconds(self, task):
        running = any(process.task is task for process in self._running)
        at_bad = running and not task.reads and task.jobs and task.jobs[0]["name"] == "bad"
        return 1.0 if at_bad else plain(self, task)

    def why_bad(self, *given):
        with monkeypatch.context() as patched:
            patched.setattr(Admission, "_seconds", lambda self, task: 1.0)
            return why(self, *given)

    monkeypatch.setattr(Admission, "_seconds", seconds)
    monkeypatch.setattr(Admission, "_why", why_bad)


@pytest.fixture(autouse=True)
def guests_here(monkeypatch):
    """What reads a file is forked from here, files are looked at often, and no pause is long.

    A busy machine may take long to read a file.
    """
    monkeypatch.setattr(admission, "READ_SECONDS", PATIENT.seconds)
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(admission, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(service, "ForkServer", ForkHere)


@pytest.fixture
def prepared_by(monkeypatch):
    """Have job "bad" prepared by a function."""
    plain = Prepared.request

    def use(function):
        def request(self, job, now):
            if job.name == "bad":
                function()
            return plain(self, job, now)

        monkeypatch.setattr(Prepared, "request", request)

    return use


def write_jobs(folder, *names, **fields):
    """One file of several jobs; fields by name."""
    content = [
        yaml.safe_load(write_job(folder, name, 5, **fields.get(name, {})).read_text())
        for name in names
    ]
    for name in names:
        (folder / f"{name}.yaml").unlink()
    entries = [entry for one in content for entry in one["jobs"]]
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump(content[0] | {"jobs": entries}))
    return path


def backtrack():
    """Longer than anybody lives, in C, where no signal of Python's is heard."""
    re.match("(a+)+$", "a" * 60 + "b")


def fill_memory():
    """A gibibyte, written to."""
    return b"x" * (1 << 30)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (backtrack, "at most 1 s"),
        (fill_memory, "more memory than a run allows"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: exec("raise SystemExit(4)"), "SystemExit: 4"),
    ],
    ids=["backtracks", "fills-memory", "is-killed", "exits", "asks-to-exit"],
)
def test_whatever_a_job_does_to_its_reader_its_neighbours_train(
    tmp_path, prepared_by, function, reason, request
):
    """Those before and behind it in its file too."""
    if function is backtrack:
        request.getfixturevalue("impatient")
    prepared_by(function)
    write_jobs(tmp_path / "jobs", "a", "bad", "z")
    heard = run(tmp_path / "jobs", tmp_path / "run", admission=PATIENT)

    [refused] = [said for said in heard.said if said[0] == "refused"]
    assert refused[1] == "bad"
    assert reason in refused[2]
    found = {name: one.status for name, one in records(tmp_path / "run").items()}
    assert found == {"a": "done", "bad": "refused", "z": "done"}


class Dying:
    """As `ForkServer`: its processes answer at once, or die at the job or file that is next.

    deaths   by job, and by file, the exit codes of the processes that are still to die of it
    """

    ready = True

    def __init__(self, deaths: dict[str, list[int]]) -> None:
        self.deaths = deaths
        self.codes: list[int] = []

    def start(self, start: WorkerStart) -> int:
        asked = AdmissionOrder.read(Path(start.order))
        self.codes.append(self._run(asked, EventWriter(asked.event_log)))
        return len(self.codes) - 1

    def _run(self, asked: AdmissionOrder, writer: EventWriter) -> int:
        if asked.file:
            if self.deaths.get(asked.file):
                return self.deaths[asked.file].pop()
            writer.write("read", jobs=[])
        for spec in asked.jobs:
            if self.deaths.get(spec["name"]):
                return self.deaths[spec["name"]].pop()
            request = JobRequest(spec["name"], "base", Demand(), 1, 5, submitted=0.0)
            writer.write("prepared", request=REQUEST.dump_python(request, mode="json"), shape=None)
        return 0

    def code(self, worker: int) -> int:
        return self.codes[worker]


CODES = [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGXCPU, -40, 1, 143, FORK_SERVER_DIED]
DEATHS = st.lists(st.sampled_from(CODES), max_size=8)


@given(jobs=st.lists(DEATHS, max_size=5), files=st.lists(DEATHS, max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_a_limit_or_five_deaths_in_a_row_refuse_a_job(tmp_path, jobs, files, monkeypatch):
    """Each file and job has one answer, whatever becomes of others' processes and their server."""
    monkeypatch.setattr(admission, "RETRY_SECONDS", 0.0)
    deaths = {f"job{i}": list(codes) for i, codes in enumerate(jobs)}
    deaths |= {f"/{i}.yaml": list(codes) for i, codes in enumerate(files)}

    def is_refused(codes: list[int]) -> bool:
        # The last one comes first.
        counted = [code for code in codes[::-1] if code != FORK_SERVER_DIED]
        return -signal.SIGXCPU in counted[:5] or len(counted) >= 5

    expected = {name: is_refused(codes) for name, codes in deaths.items()}
    it = Admission(tmp_path, Dying(deaths))
    for i in range(len(files)):
        it.read(Path(f"/{i}.yaml"))
    it.prepare([{"name": f"job{i}"} for i in range(len(jobs))], 0.0)

    refused = []
    for answer in ended(it):
        match answer:
            case FileRead():
                refused.append((str(answer.path), bool(answer.mistake)))
            case JobPrepared() | JobRefused():
                refused.append((answer.spec["name"], isinstance(answer, JobRefused)))
    assert sorted(refused) == sorted(expected.items())


def test_a_job_whose_process_was_killed_is_prepared_by_another(tmp_path, prepared_by):
    """After a pause that doubles, and the run says so; its neighbours do not wait."""
    mark = tmp_path / "killed"

    def die_three_times():
        count = mark.stat().st_size if mark.exists() else 0
        if count < 3:
            mark.write_bytes(b"x" * (count + 1))
            os.kill(os.getpid(), signal.SIGKILL)

    prepared_by(die_three_times)
    write_jobs(tmp_path / "jobs", "bad", "z")
    heard = run(tmp_path / "jobs", tmp_path / "run", Retries())

    assert heard.said_of("retried") == [
        ("", ["bad"], "killed by SIGKILL", seconds) for seconds in (0.01, 0.02, 0.04)
    ]
    found = {name: one.status for name, one in records(tmp_path / "run").items()}
    assert found == {"bad": "done", "z": "done"}


def test_a_file_whose_process_was_killed_is_read_by_another(tmp_path, monkeypatch):
    """Its jobs train as if nothing had happened."""
    mark, plain = tmp_path / "killed", admission_worker._read_file

    def die_once(*given):
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        plain(*given)

    monkeypatch.setattr(admission_worker, "_read_file", die_once)
    write_job(tmp_path / "jobs", "a", 5)
    heard = run(tmp_path / "jobs", tmp_path / "run", Retries())

    assert heard.said_of("retried") == [("a.yaml", [], "killed by SIGTERM", 0.01)]
    assert records(tmp_path / "run")["a"].status == "done"


class Retries(Heard):
    """Hears of processes that died too."""

    def retried(self, time, file, jobs, reason, seconds):
        self.said.append(("retried", file, jobs, reason, seconds))

    def said_of(self, what):
        return [tuple(said[1:]) for said in self.said if said[0] == what]


def test_the_run_goes_on_while_a_job_is_being_prepared(tmp_path, prepared_by):
    """Another file's job is done before the hanging one is given up."""
    prepared_by(backtrack)
    write_job(tmp_path / "jobs", "bad", 5)
    write_job(tmp_path / "jobs", "good", 5)
    limits = AdmissionLimits(LONGEST_SECONDS)
    done = []

    def stop(it):
        if not done and it.loop.ended.get("good") == "done":
            done.append(it.stop())

    run(tmp_path / "jobs", tmp_path / "run", until=stop, admission=limits)

    assert done
    assert {name: one.status for name, one in records(tmp_path / "run").items()} == {"good": "done"}


def test_jobs_that_come_together_are_decided_upon_together(tmp_path, monkeypatch):
    """The first decision sees all of a folder, and no group is formed for the first alone."""
    monkeypatch.setattr(service, "GATHER_SECONDS", LONGEST_SECONDS)
    write_jobs(tmp_path / "jobs", "a", "b", "c")
    write_job(tmp_path / "jobs", "d", 5)
    run(tmp_path / "jobs", tmp_path / "run", horizon=LONGEST_SECONDS)
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    first = ledger.decisions()[0]
    ledger.close()

    assert set(first.jobs) == set("abcd")


def test_what_a_stop_has_cut_is_prepared_by_the_next_run(tmp_path, prepared_by):
    """The run ends at once, whatever is being prepared."""
    write_job(tmp_path / "jobs", "bad", 5)
    prepared_by(backtrack)
    jobs, limits = tmp_path / "jobs", AdmissionLimits(LONGEST_SECONDS)
    run(jobs, tmp_path / "run", until=lambda it: it._open and it.stop(), admission=limits)
    prepared_by(lambda: None)
    run(tmp_path / "jobs", tmp_path / "run")

    assert records(tmp_path / "run")["bad"].status == "done"


def test_what_a_job_has_started_ends_with_its_reader(tmp_path, prepared_by, impatient):
    """The whole group of processes is killed."""
    mark = tmp_path / "pids"

    def start():
        with mark.open("a") as pids:
            pids.write(f"{subprocess.Popen(['sleep', '3600']).pid}\n")
        backtrack()

    prepared_by(start)
    write_job(tmp_path / "jobs", "bad", 5)
    run(tmp_path / "jobs", tmp_path / "run", admission=PATIENT)

    until(lambda: not any(map(runs, mark.read_text().split())))


def until(true):
    """Wait until something is true."""
    end = time.monotonic() + LONGEST_SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(pid):
    """Whether a process has not ended. Nobody waits for an orphan here: init does, in its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_reader_gives_way_to_what_trains_and_answers(tmp_path, prepared_by):
    """Whether Linux shares CPUs among processes or among sessions."""
    mark, autogroup = tmp_path / "mark", Path("/proc/self/autogroup")

    def write_niceness():
        session = autogroup.read_text().split()[-1] if autogroup.exists() else "5"
        leads = os.getsid(0) == os.getpid()
        mark.write_text(f"{leads} {os.getpriority(os.PRIO_PROCESS, 0)} {session}")

    prepared_by(write_niceness)
    write_job(tmp_path / "jobs", "bad", 5)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    run(tmp_path / "jobs", tmp_path / "run")

    assert mark.read_text() == f"True {min(19, before + 5)} 5"


def test_a_reader_is_the_first_that_a_full_machine_ends(tmp_path, prepared_by):
    """The kernel looks at this number; workers and the run keep theirs."""
    mark, score = tmp_path / "score", Path("/proc/self/oom_score_adj")
    before = score.read_text()
    prepared_by(lambda: mark.write_text(score.read_text()))
    write_job(tmp_path / "jobs", "bad", 5)
    run(tmp_path / "jobs", tmp_path / "run")

    assert mark.read_text().strip() == "1000"
    assert score.read_text() == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("surrogate", 'base: {config: "\\ud800"}\njobs: [{name: a}]'),
        ("deep", "[" * 5000),
        ("wide", "a: &a [" + "x, " * 9 + "x]\n" + "b: [" + "*a, " * 50000 + "*a]"),
        ("long", "a: &a " + "x" * 500_000 + "\nbase: {config: b}\njobs: [" + "*a, " * 90000 + "]"),
    ],
)
def test_files_that_unfold_are_told_and_others_train(tmp_path, name, text):
    """Within the limits of their reader."""
    write_job(tmp_path / "jobs", "a", 5)
    (tmp_path / "jobs" / f"{name}.yaml").write_text(text)
    heard = run(tmp_path / "jobs", tmp_path / "run", admission=AdmissionLimits(LONGEST_SECONDS))

    assert [said[1] for said in heard.said if said[0] == "took" and said[3]] == [f"{name}.yaml"]
    assert records(tmp_path / "run")["a"].status == "done"


def test_a_file_whose_name_is_no_text_is_told(tmp_path):
    """Its bytes can be written into no ledger."""
    write_job(tmp_path / "jobs", "a", 5)
    (tmp_path / "jobs" / "a.yaml").rename(tmp_path / "jobs" / "\udcff.yaml")
    heard = run(tmp_path / "jobs", tmp_path / "run")

    assert [said[3] for said in heard.said] == ["the name of the file is not UTF-8"]


def ended(admission):
    """All that a batch of files came to."""
    answers, end = [], time.monotonic() + LONGEST_SECONDS
    while admission.busy and time.monotonic() < end:
        answers += admission.answers()
        time.sleep(0.01)
    return answers


WRONG = {
    "long": {"max_length": 10**30},
    "rank": {"lora": {"r": 10**42}},
    "batch": {"per_device_train_batch_size": 10**40},
    "steps": {"max_steps": 10**400},
}


def test_numbers_that_nobody_thought_of_are_answered(tmp_path):
    """By the code that prepares real jobs: refused, or told as numbers; a neighbour prepared."""
    path = write_jobs(tmp_path / "jobs", "good", *WRONG, **WRONG)
    it = Admission(tmp_path / "run", ForkHere(None), AdmissionLimits(LONGEST_SECONDS))
    it.read(path)
    [file] = ended(it)
    assert isinstance(file, FileRead)
    it.prepare(file.jobs, 0.0)
    answers = {answer.spec["name"]: answer for answer in ended(it)}
    it.close()

    assert list(answers) == ["good", *WRONG]
    assert isinstance(answers["good"], JobPrepared)
    assert all(isinstance(answer, JobPrepared | JobRefused) for answer in answers.values())
    assert "OverflowError" in answers["long"].reason


def test_code_of_a_base_is_refused_unless_the_run_trusts_it(tmp_path):
    """When a file is read, and when a run goes on with a job that another one took."""
    path = write_job(tmp_path / "jobs", "a", 5)
    content = yaml.safe_load(path.read_text())
    content["base"]["trust_remote_code"] = True
    path.write_text(yaml.safe_dump(content))
    told = []
    for trusted in (True, False):
        limits = AdmissionLimits(LONGEST_SECONDS, trust_remote_code=trusted)
        it = Admission(tmp_path / "run", ForkHere(None), limits)
        it.read(path)
        told += ended(it)
        it.restore(told[0].jobs, {})
        told += ended(it)
    taken, restored, refused, parked = told

    assert (taken.mistake, isinstance(restored, JobRestored)) == ("", True)
    assert "error[T0105]" in refused.mistake
    assert isinstance(parked, JobRefused)
    assert "error[T0105]" in parked.reason


@pytest.mark.parametrize("gone", ["records.jsonl", "base"])
def test_a_job_whose_data_or_base_is_gone_cannot_go_on_now(tmp_path, gone):
    """By the code that restores real jobs; its reason names what is missing."""
    shutil.copytree(QUICKSTART / "base", tmp_path / "base")
    shutil.copy(QUICKSTART / "data" / "records.jsonl", tmp_path)
    path = write_job(tmp_path / "jobs", "a", 5)
    content = yaml.safe_load(path.read_text())
    content["base"]["config"] = str(tmp_path / "base")
    content["jobs"][0]["data"]["path"] = str(tmp_path / "records.jsonl")
    path.write_text(yaml.safe_dump(content))
    it = Admission(tmp_path / "run", ForkHere(None), AdmissionLimits(LONGEST_SECONDS))
    it.read(path)
    [file] = ended(it)
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    it.restore(file.jobs, {})
    [answer] = ended(it)

    assert isinstance(answer, JobRefused)
    assert answer.again
    assert gone in answer.reason


@pytest.mark.parametrize("again", [False, True])
def test_a_job_with_a_damaged_base_is_refused_with_its_file(tmp_path, again):
    """When it is prepared, and when a run goes on; a limit of memory or time has no part in it."""
    shutil.copytree(QUICKSTART / "base", tmp_path / "base")
    path = write_job(tmp_path / "jobs", "a", 5)
    content = yaml.safe_load(path.read_text())
    content["base"] = {"model": str(tmp_path / "base")}
    path.write_text(yaml.safe_dump(content))
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    it = Admission(tmp_path / "run", ForkHere(None), AdmissionLimits(LONGEST_SECONDS))
    it.read(path)
    [file] = ended(it)
    it.restore(file.jobs, {}) if again else it.prepare(file.jobs, 0.0)
    [answer] = ended(it)

    assert isinstance(answer, JobRefused)
    assert answer.reason.startswith("error[T0257]")
    assert str(weights) in answer.reason


def begun(it):
    return bool(it.loop.running)


#: b does not begin before a has ended, and a does not end before its gate is open.
ONE_AFTER_THE_OTHER = {"policy": "megatron", "slots": 1, "gates": {"a": 30}}


def test_a_job_whose_file_is_removed_before_it_begins_is_cancelled(tmp_path):
    """One that has begun goes on, and that is told."""
    write_job(tmp_path / "jobs", "a", 60)
    write_job(tmp_path / "jobs", "b", 60)
    heard = Cancels()

    def remove(it):
        if begun(it) and {"a", "b"} <= it.loop.ended.keys():
            for name in "ab":
                (tmp_path / "jobs" / f"{name}.yaml").unlink(missing_ok=True)
        if heard.said_of("cancelled") and heard.said_of("kept"):
            (tmp_path / "run" / GATE).touch()

    run(tmp_path / "jobs", tmp_path / "run", heard, until=remove, **ONE_AFTER_THE_OTHER)

    assert heard.said_of("cancelled") == ["b"]
    assert heard.said_of("kept") == ["a"]
    found = {name: one.status for name, one in records(tmp_path / "run").items()}
    assert found == {"a": "done", "b": "cancelled"}


def test_a_cancelled_job_may_come_again(tmp_path):
    """Its file is read as a new one."""
    write_job(tmp_path / "jobs", "a", 60)
    write_job(tmp_path / "jobs", "b", 5)
    heard, again = Cancels(), []

    def change(it):
        if begun(it) and "b" in it.loop.ended and not heard.said_of("cancelled"):
            (tmp_path / "jobs" / "b.yaml").unlink(missing_ok=True)
        elif heard.said_of("cancelled") and not again:
            again.append(write_job(tmp_path / "jobs", "b", 7))
        elif heard.said_of("took").count("b.yaml") == 2:
            (tmp_path / "run" / GATE).touch()

    run(tmp_path / "jobs", tmp_path / "run", heard, until=change, **ONE_AFTER_THE_OTHER)

    found = {name: (one.status, one.steps) for name, one in records(tmp_path / "run").items()}
    assert found == {"a": ("done", 60), "b": ("done", 7)}


def test_a_renamed_file_cancels_nothing(tmp_path):
    """Its jobs are known by its new name."""
    write_job(tmp_path / "jobs", "a", 60)
    write_job(tmp_path / "jobs", "b", 5)
    heard = Cancels()

    def rename(it):
        before = tmp_path / "jobs" / "b.yaml"
        if begun(it) and "b" in it.loop.ended and before.exists():
            before.rename(before.with_name("c.yaml"))
        if "c.yaml" in heard.said_of("took"):
            (tmp_path / "run" / GATE).touch()

    run(tmp_path / "jobs", tmp_path / "run", heard, until=rename, **ONE_AFTER_THE_OTHER)

    assert not heard.said_of("cancelled")
    assert records(tmp_path / "run")["b"].status == "done"


class Cancels(Heard):
    """Hears of removed files too."""

    def cancelled(self, time, name):
        self.said.append(("cancelled", name))

    def kept(self, time, name):
        self.said.append(("kept", name))

    def said_of(self, what):
        return [said[1] for said in self.said if said[0] == what]


class Slow(Dying):
    """Its processes tell all at once, and end when they are let go of; who began is remembered."""

    def __init__(self) -> None:
        super().__init__({})
        self.begun: list[str] = []
        self.at_work: dict[int, str] = {}

    def start(self, start: WorkerStart) -> int:
        asked = AdmissionOrder.read(Path(start.order))
        number = super().start(start)
        first = Path(asked.file).name if asked.file else asked.jobs[0]["name"]
        self.at_work[number] = user = first.partition(".")[0]
        self.begun.append(user)
        return number

    def code(self, worker: int) -> int | None:
        return None if worker in self.at_work else super().code(worker)


@pytest.fixture
def no_disk(monkeypatch):
    """Orders are written, and nobody waits for the disk."""
    monkeypatch.setattr(admission_worker, "replace_file", Path.write_bytes)


def _through(it: Admission, server: Slow, until=lambda: False) -> list:
    """All answers, where the oldest process ends each time."""
    answers = []
    while it.busy and not until():
        answers += it.answers()
        if server.at_work:
            del server.at_work[min(server.at_work)]
    return answers


@pytest.mark.parametrize("what", ["read", "prepare", "restore"])
def test_a_user_with_one_submission_has_the_second_turn(tmp_path, no_disk, what):
    """Beside another one who had sent 200 before: in reading, in preparing and at a restart."""
    it = Admission(tmp_path, server := Slow())
    for user, count in (("alice", 200), ("bob", 1)):
        for index in range(count):
            name = f"{user}.{index}"
            if what == "read":
                it.read(Path(f"/{name}"), user)
            elif what == "restore":
                it.restore([{"name": name}], {}, user)
            else:
                it.prepare([{"name": name}], 0.0, user)

    _through(it, server, until=lambda: len(server.begun) > 2)
    assert sorted(server.begun[:2]) == ["alice", "bob"]


QUEUES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 10), min_size=1, max_size=5), min_size=1
)


@given(queues=QUEUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_user_has_two_turns_while_another_one_waits_for_the_first(tmp_path, no_disk, queues):
    """Whatever they have sent; each job has one answer, a user's in the order of sending."""
    it = Admission(tmp_path, server := Slow())
    sent = []
    for user, counts in queues.items():
        for index, count in enumerate(counts):
            names = [f"{user}.{index}.{job}" for job in range(count)]
            it.prepare([{"name": name} for name in names], 0.0, user)
            sent += names
    answers = [answer.spec["name"] for answer in _through(it, server)]

    assert sorted(answers) == sorted(sent)
    for user in queues:
        assert [n for n in answers if n[0] == user] == [n for n in sent if n[0] == user]
    assert sorted(server.begun[: len(queues)]) == sorted(queues)


def test_a_user_leaves_a_process_to_the_others(tmp_path, no_disk):
    """Whatever their jobs take to prepare; who comes later begins at once."""
    it = Admission(tmp_path, server := Slow())
    for file in range(8):
        it.prepare([{"name": f"alice.{file}.{index}"} for index in range(20)], 0.0, "alice")
    list(it.answers())
    assert server.begun == ["alice"]

    it.prepare([{"name": "bob.a"}], 0.0, "bob")
    list(it.answers())
    assert server.begun == ["alice", "bob"]


def test_a_large_file_of_a_user_is_read_beside_those_of_others(tmp_path, no_disk):
    """One file of each user at a time, and of a run without users one in all."""
    it = Admission(tmp_path, server := Slow())
    for user in ("alice", "alice", "bob"):
        it.read(Path(f"/{user}.yaml"), user)
    list(it.answers())
    assert server.begun == ["alice", "bob"]

    alone = Admission(tmp_path, server := Slow())
    for name in ("a", "b"):
        alone.read(Path(f"/{name}.yaml"))
    list(alone.answers())
    assert server.begun == ["a"]


def test_a_run_without_users_prepares_a_whole_file_in_one_process(tmp_path):
    """And two files at a time."""
    it = Admission(tmp_path, server := Slow())
    for file in ("a", "b"):
        it.prepare([{"name": f"{file}.{index}"} for index in range(100)], 0.0)

    assert len(_through(it, server)) == 200
    assert server.begun == ["a", "b"]
