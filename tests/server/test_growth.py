"""What has ended costs nothing any more: pages, removal, and the work of SQLite."""

from __future__ import annotations

import json
import tarfile
import threading
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import as_scheduled, job_file, request
from tlora_fx.errors import JobUnknown, RequestConflict
from tlora_fx.scheduler.executor import Drained, Finished
from tlora_fx.scheduler.state import Group
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.ledger import LOCAL, User
from tlora_fx.server.service import make_service
from tlora_fx.server.store import Page, ServiceStore
from tlora_fx.server.submission import IntakeLimits
from tlora_fx.server.view import RunView

ME = User(LOCAL, admin=True)
ALICE, BOB = User("alice"), User("bob")


def submit(store, user, *names):
    """A submission whose file the scheduler has taken in; its jobs wait."""
    full = [name if user.name == LOCAL else f"{user.name}.{name}" for name in names]
    key = ",".join(full)
    taken = store.submit(user, key, key, full, "", "", 0)
    ledger = Ledger(store.folder.parent / "ledger.sqlite")
    for name in full:
        ledger.submit(request(name), {"name": name})
    ledger.note_file(str(store.file_of(taken.number).absolute()), "", "taken")
    ledger.close()
    return full


def end(store, names, *, first=1):
    """Each of these jobs trains in a group of its own, and is done."""
    ledger = Ledger(store.folder.parent / "ledger.sqlite", clock=iter(range(10**9)).__next__)
    for epoch, name in enumerate(names, start=first):
        ledger.launch(Group((name,), 1, (0,)), epoch, None, float(epoch))
        ledger.record(Finished(epoch + 1.0, epoch, name, 10.0))
        ledger.end(epoch, "drained", epoch + 2.0)
    ledger.close()


def all_pages(store, user, limit, between=lambda: None, **wanted):
    """The numbers of a list, a page after the other."""
    numbers = []
    while True:
        after = numbers[-1] if numbers else None
        page = store.page(user, Page(after=after, limit=limit, **wanted))
        numbers += [job.number for job in page]
        if len(page) < limit:
            return numbers
        between()


class Past:
    """What users and the scheduler do to a store, a step after the other."""

    def __init__(self, store):
        self.store, self.count = store, 0
        self.waiting, self.ended = [], []

    def do(self, step):
        if step.startswith("submit"):
            names = [f"j{self.count + index}" for index in range(1 + step.endswith("two"))]
            self.count += len(names)
            self.waiting += submit(self.store, ALICE if self.count % 2 else BOB, *names)
        elif step == "end" and self.waiting:
            self.ended.append(self.waiting.pop(0))
            end(self.store, self.ended[-1:], first=len(self.ended) + 100 * self.count)
        elif step == "settle":
            self.store.settle()
        elif step == "remove" and self.ended:
            self.store.remove(ME, self.ended.pop())


STEPS = st.lists(st.sampled_from(["submit", "submit two", "end", "settle", "remove"]), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, limit=st.integers(1, 4), meanwhile=STEPS)
def test_pages_together_are_the_whole_list_whatever_comes_between(
    tmp_path_factory, steps, limit, meanwhile
):
    """Each job that is there all the time stands in one page, once, in its order."""
    store = ServiceStore(tmp_path_factory.mktemp("pages") / "run")
    history = Past(store)
    for step in steps:
        history.do(step)
    for user in (ME, ALICE):
        whole = [job for job in store.jobs() if user.admin or job.user == user.name]
        assert all_pages(store, user, limit) == [job.number for job in whole]
        for is_ended in (True, False):
            some = [job.number for job in whole if job.active != is_ended]
            assert all_pages(store, user, limit, ended=is_ended) == some
        newest = store.page(user, Page(before=1 << 62, limit=limit))
        assert newest == whole[::-1][:limit]
    before, todo = {job.number for job in store.jobs()}, list(meanwhile)

    def between():
        if todo:
            history.do(todo.pop(0))

    numbers = all_pages(store, ME, limit, between)
    there = before & {job.number for job in store.jobs()}
    assert numbers == sorted(set(numbers))
    assert there <= set(numbers)


def test_pages_have_each_job_once_while_others_submit(asked):
    """By the API, with several threads that submit meanwhile."""
    it = asked()
    names = [f"a{index}" for index in range(7)]
    submit(it.service.store, ME, *names)

    def more(letter):
        for index in range(5):
            submit(it.service.store, ME, f"{letter}{index}")

    threads = [threading.Thread(target=more, args=(letter,)) for letter in "bc"]
    for thread in threads:
        thread.start()
    got, page = [], None
    while page is None or len(page) == 2:
        after = f"&after={got[-1]['number']}" if got else ""
        page = it.ask("GET", f"/api/v1/jobs?limit=2{after}").json()
        got += page
    for thread in threads:
        thread.join()
    seen = [job["name"] for job in got]
    assert len(seen) == len(set(seen))
    assert seen[:7] == names
    whole = [job["name"] for job in it.ask("GET", "/api/v1/jobs").json()]
    assert seen == whole[: len(seen)]
    assert len(whole) == 17


def test_a_page_is_behind_a_job_or_before_one(asked):
    """And has at least one job, at most a thousand."""
    it = asked()

    for query in ("after=1&before=2", "limit=0", "limit=1001", "after=-1", "after=x"):
        assert it.ask("GET", f"/api/v1/jobs?{query}").status_code == 422, query


def test_a_job_that_may_train_or_is_another_users_is_not_removed(asked):
    """And nothing has changed; the second time there is no such job."""
    it = asked()
    it.add("alice")
    it.add("bob")
    store = it.service.store
    done, runs, waits = submit(store, ALICE, "done", "runs", "waits")
    end(store, [done])
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.launch(Group((runs,), 1, (0,)), 2, None, 3.0)
    ledger.close()
    before = it.state()

    for job in (runs, waits, "runs"):
        assert it.ask("DELETE", f"/api/v1/jobs/{job}", "alice").status_code == 409
    for user, job in (("bob", done), ("bob", "done"), ("alice", "nobody.x")):
        assert it.ask("DELETE", f"/api/v1/jobs/{job}", user).status_code == 404
    assert it.state() == before
    assert it.ask("DELETE", "/api/v1/jobs/done", "alice").status_code == 204
    assert it.ask("DELETE", "/api/v1/jobs/done", "alice").status_code == 404


def test_what_is_removed_is_gone_but_for_its_line_and_its_hours(asked):
    """Its folder, its rows, its submission; the name and the key may be used again."""
    it = asked()
    it.add("alice", gpu_hours=9.0)
    it.submit(job_file("a"), user="alice")
    as_scheduled(it.folder, [("alice.a",)])
    store = it.service.store
    store.rows("INSERT INTO files VALUES (?, '', 'taken')", str(store.file_of(1).absolute()))
    ledger = Ledger(it.folder / "ledger.sqlite", clock=iter([0.0, 3600.0]).__next__)
    ledger.record(Finished(5.0, 1, "alice.a", 10.0))
    ledger.close()
    it.refresh()
    [(number, folder)] = store.rows("SELECT number, folder FROM submissions")
    assert it.submit(job_file("a"), user="alice").json()["replayed"]

    assert it.ask("DELETE", "/api/v1/jobs/a", "alice").status_code == 204
    store.rows("UPDATE epochs SET held = 3600, ended = 9")
    assert store.gpu_hours("alice") == pytest.approx(1.0)
    store.settle()
    assert store.gpu_hours("alice") == pytest.approx(1.0)
    it.refresh()
    assert it.ask("GET", "/api/v1/jobs", "alice").json() == []
    assert it.ask("GET", "/api/v1/overview", "alice").json()["visible"] == {}
    assert not (it.folder / "alice.a").exists()
    assert not (it.folder / "service" / "submitted" / folder).exists()
    assert store.rows("SELECT name, user, state, steps FROM removed") == [
        ("alice.a", "alice", "done", 10.0)
    ]
    again = it.submit(job_file("a"), user="alice").json()
    assert (again["replayed"], again["submission"]) == (False, number + 1)


def test_the_name_of_a_removed_job_waits_until_its_group_has_ended(asked):
    """What the group still writes of that name is nothing of a new job."""
    it = asked()
    store = it.service.store
    submit(store, ME, "a", "b")
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.launch(Group(("a", "b"), 1, (0,)), 1, None, 1.0)
    ledger.record(Finished(2.0, 1, "a", 10.0))
    store.remove(ME, "a")
    it.service.intake.empty_trash()

    assert it.submit(job_file("a"), "again").status_code == 409
    ledger.end(1, "drained", 3.0)
    ledger.close()
    assert it.submit(job_file("a"), "again").status_code == 201


def test_the_name_of_a_removed_job_is_taken_while_its_process_runs_for_others(asked):
    """Another group took over the job's process; what tells of that is not forgotten either."""
    it = asked()
    store = it.service.store
    submit(store, ME, "a", "b")
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.launch(Group(("a", "b"), 1, (0,)), 1, None, 1.0)
    ledger.record(Finished(2.0, 1, "a", 10.0))
    ledger.launch(Group(("b",), 1, (0,)), 2, None, 3.0, origin=1)
    ledger.record(Drained(4.0, 1, {}, 2))
    store.remove(ME, "a")
    (it.folder / "a").mkdir()
    (it.folder / "a" / "late.txt").write_text("of the process")

    assert store.forget_past(store.started + 100.0) == []
    answer = it.submit(job_file("A"), "again")
    assert (answer.status_code, answer.json()["facts"]) == (409, {"group": "2"})
    ledger.end(2, "drained", 5.0)
    ledger.close()
    assert it.submit(job_file("a"), "again").status_code == 201
    assert not (it.folder / "a").exists()
    assert store.forget_past(store.started + 100.0) == [1]


def test_a_submission_that_is_refused_moves_nothing(asked):
    """The jobs of its names stay as they were: some gave theirs back, another does not."""
    it = asked()
    it.add("alice", jobs=2)
    it.submit(job_file("a", "b"), "1", "alice")
    as_scheduled(it.folder, [("alice.a",), ("alice.b",)])
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.record(Finished(5.0, 1, "alice.a", 5.0))
    ledger.end(1, "drained", 6.0)
    ledger.close()
    it.service.store.rows("UPDATE owned SET wanted = 'cancel' WHERE name = 'alice.a'")
    before = it.state()

    assert it.submit(job_file("a", "b"), "2", "alice").status_code == 409
    assert it.submit(job_file("a", "c"), "2", "alice").status_code == 429
    assert it.state() == before
    assert (it.folder / "alice.a" / "metrics.jsonl").is_file()
    assert it.submit(job_file("a"), "2", "alice").status_code == 201
    assert not (it.folder / "alice.a").exists()


def test_what_a_replaced_job_left_is_kept_as_long_as_jobs_are(tmp_path):
    """Then it is archived and removed; until then the key of its submission stays used."""
    limits = IntakeLimits(keep_job_seconds=1000.0, archive=tmp_path / "archive")
    it = make_service(tmp_path / "run", limits, open_to_all=True)
    it.store.submit(ME, "key", "", ["a"], "", "", 0)
    as_scheduled(tmp_path / "run", [("a",)])
    end(it.store, ["a"], first=2)
    it.store.rows("UPDATE epochs SET ended = 9")
    it.store.rows("UPDATE owned SET wanted = 'cancel'")
    it.store.rows("UPDATE jobs SET steps = 5, ended = 0")
    again = it.store.submit(ME, "another", "", ["a"], "", "", 0)
    kept = it.store.folder / "replaced" / "000001.a"

    assert (kept / "metrics.jsonl").is_file()
    assert it.store.replayed(ME, "key", "").jobs == ("a",)
    it.intake.collect()
    assert kept.is_dir()
    it.store.rows("UPDATE removed SET ended = 1")
    it.intake.collect()
    assert list(kept.parent.iterdir()) == []
    [path] = (tmp_path / "archive").iterdir()
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["a/archived.json", "a", "a/metrics.jsonl"]
    assert it.store.replayed(ME, "key", "") is None
    assert [job.submission for job in it.store.jobs()] == [again.number]


def test_a_job_named_as_a_folder_of_the_run_takes_nothing_with_it(asked):
    """The scheduler refuses it; removing it leaves the run's own folder."""
    it = asked()
    store = it.service.store
    (it.folder / "groups").mkdir()
    store.submit(ME, "k", "k", ["groups"], "", "", 0)
    store.rows("INSERT INTO files VALUES (?, '', 'taken')", str(store.file_of(1).absolute()))
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.refuse(request("groups"), "it cannot be called so", {"name": "groups"})
    ledger.close()

    assert it.ask("DELETE", "/api/v1/jobs/groups").status_code == 204
    assert (it.folder / "groups").is_dir()


def test_old_jobs_are_removed_and_archived(tmp_path):
    """With what tells of their groups; those that ended lately, or train, stay."""
    folder = tmp_path / "run"
    limits = IntakeLimits(keep_job_seconds=1000.0, archive=tmp_path / "archive")
    it = make_service(folder, limits, open_to_all=True)
    names = submit(it.store, ME, "old", "new", "waits")
    end(it.store, names[:2])
    (folder / "old").mkdir()
    (folder / "old" / "metrics.jsonl").write_text("{}\n")
    it.store.settle()
    it.store.rows("UPDATE owned SET over = 1 WHERE name = 'old'")
    it.intake.collect()

    assert [job.name for job in it.store.jobs()] == ["new", "waits"]
    assert not (folder / "old").exists()
    [path] = (tmp_path / "archive").iterdir()
    with tarfile.open(path) as tar:
        assert tar.extractfile("old/metrics.jsonl").read() == b"{}\n"
        told = json.load(tar.extractfile("old/archived.json"))
    assert (path.name, told["state"]) == ("000001-old.tar", "done")
    assert [row[2:] for row in it.store.actions() if row[2] == "rm"] == [("rm", "old")]


class Work:
    """Steps of SQLite's virtual machine that an action takes in a store."""

    def __init__(self, store: ServiceStore) -> None:
        self.steps = 0
        store._base.set_progress_handler(self._step, 1)

    def _step(self) -> int:
        self.steps += 1
        return 0

    def of(self, action) -> int:
        before = self.steps
        action()
        return self.steps - before


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """By action, the work over few and over many ended jobs; eight jobs wait in each."""
    told = []
    for count in (40, 400):
        store = ServiceStore(tmp_path_factory.mktemp("work") / "run")
        store.rows("PRAGMA synchronous=OFF")
        _fill(store, count)
        submit(store, ALICE, *(f"waits{index}" for index in range(8)))
        store.settle()
        view = RunView(store, store.folder.parent)
        view.refresh()
        user = User("alice", jobs=10**6, gpu_hours=1e9)
        measure = Work(store)

        def refresh(store=store, view=view):
            store.tell(0.0, "service", [], "something")
            view.refresh()

        def refused(store=store):
            with suppress(RequestConflict, JobUnknown):
                store.remove(ALICE, "waits0")

        actions = {
            "look": store.settle,
            "refresh": refresh,
            "overview": lambda view=view, user=user: view.overview(user),
            "first page": lambda view=view, user=user: view.page(user, Page(limit=5)),
            "newest page": lambda view=view: view.page(ME, Page(before=1 << 62, limit=5)),
            "page of a state": lambda view=view: view.page(ME, Page(state="failed", limit=5)),
            "one job": lambda view=view, user=user: view.one(user, "j3"),
            "events": lambda view=view, user=user: view.events(user, 0),
            "submission": lambda store=store, user=user: store.submit(
                user, "new", "new", ["alice.new"], "", "", 0
            ),
            "removal": lambda store=store: store.remove(ALICE, "j3"),
            "refused removal": refused,
            "unread": store.unread_submissions,
        }
        told.append({name: measure.of(action) for name, action in actions.items()})
    few, many = told
    return {name: (few[name], many[name]) for name in few}


def _fill(store, count):
    """Rows of ended jobs as a service leaves them, in one transaction."""
    base = store._base
    path = f"{store.inbox.absolute()}/"
    text = '{"steps": 10}'
    base.execute("BEGIN")
    for number in range(1, count + 1):
        name, state = f"alice.j{number}", "failed" if number % 10 == 0 else "done"
        base.execute(
            "INSERT INTO submissions VALUES (?, 'alice', ?, '', 1.0, '', '')", (number, name)
        )
        base.execute(
            "INSERT INTO owned (name, user, submission, priority) VALUES (?, 'alice', ?, 0)",
            (name, number),
        )
        base.execute(
            "INSERT INTO jobs (name, request, spec, status, steps, ended) "
            "VALUES (?, ?, '{}', ?, 10, 5)",
            (name, text, state),
        )
        base.execute("INSERT INTO files VALUES (?, '', 'taken')", (f"{path}{number:06d}.yaml",))
        base.execute(
            "INSERT INTO epochs (epoch, jobs, gpus, layout, seconds, launched, ended) "
            "VALUES (?, ?, '[0]', '', 1, 1, 5)",
            (number, json.dumps([name])),
        )
        base.executemany(
            "INSERT INTO events (time, kind, jobs, text) VALUES (1, 'done', ?, '')",
            [(json.dumps([name]),)] * 10,
        )
    base.execute("COMMIT")


@pytest.mark.parametrize(
    "action",
    ["look", "refresh", "overview", "first page", "newest page", "page of a state", "one job",
     "events", "submission", "removal", "refused removal", "unread"],
)  # fmt: skip
def test_sqlite_works_no_more_where_ten_times_as_many_jobs_have_ended(work, action):
    """Its steps are counted: an index that is missing shows at once."""
    few, many = work[action]

    assert few > 0
    assert many <= 1.1 * few + 20


def test_a_stream_hears_of_a_removed_job_and_not_of_one_whose_name_is_taken(tmp_path):
    """Of that the new job is told; it has nothing of the old one's metrics."""
    store = ServiceStore(tmp_path / "run")
    submit(store, ME, "a", "b")
    as_scheduled(tmp_path / "run", [("a",), ("b",)])
    end(store, ["a", "b"], first=3)
    store.rows("UPDATE epochs SET ended = 9")
    store.rows("UPDATE owned SET wanted = 'cancel' WHERE name = 'a'")
    store.rows("UPDATE jobs SET steps = 5 WHERE name = 'a'")
    view = RunView(store, tmp_path / "run")
    view.refresh()
    before = view.version
    assert (view.shown["a"].status.state, view.shown["a"].status.step) == ("cancelled", 5)
    store.submit(ME, "again", "", ["a"], "", "", 0)
    store.remove(ME, "b")
    view.refresh()

    assert view.removed_since(ME, before, view.version) == ["b"]
    assert view.removed_since(ME, before, before) == []
    [shown] = view.visible(ME, before)
    assert (shown.status.name, shown.status.state, shown.status.step) == ("a", "received", 0)


def test_an_ended_job_leaves_the_view_and_is_shown_as_before(tmp_path):
    """Its metrics are in the ledger then, and its file is not needed."""
    store = ServiceStore(tmp_path / "run")
    submit(store, ME, "a")
    as_scheduled(tmp_path / "run", [("a",)])
    view = RunView(store, tmp_path / "run")
    view.refresh()
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    ledger.record(Finished(5.0, 1, "a", 10.0))
    ledger.end(1, "drained", 6.0)
    ledger.close()
    view.refresh()
    before, curve = view.one(ME, "a").status, view.curve(ME, "a")
    store.settle()
    view.refresh()
    assert "a" in view.shown
    view._settled["a"] -= 1000.0
    view.refresh()
    (tmp_path / "run" / "a" / "metrics.jsonl").unlink()

    assert view.shown == {}
    assert view.one(ME, "a").status == before
    assert view.curve(ME, "a") == curve != []
    assert [shown.status for shown in view.page(ME, Page())] == [before]
    assert view.overview(ME).jobs == {"done": 1}
