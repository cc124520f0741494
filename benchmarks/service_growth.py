"""What jobs that have ended cost a service: its scheduler's look, its views, a submission.

    python -m benchmarks.service_growth --ended 0 10000 100000

For each number the script fills a run's folder with ended jobs, as a service leaves them: one
submission, one formation of a group, one decision and two events for each job. It opens the
service on that folder and measures CPU seconds of this process. A look is a turn of the scheduler
in which everything is due. A view is a refresh after a change of the ledger, or the answer to a
request. Bounds are printed beside the medians; the file has the least and the most too.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from starlette.testclient import TestClient

from benchmarks.arguments import parser_of
from benchmarks.results_file import console, described, write
from benchmarks.service import QUICKSTART, job_file
from benchmarks.synthetic_roofline import SyntheticEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.runtime.run_folder import LEDGER
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.scheduler.service import RunOptions, SchedulerService, opened
from tlora_fx.scheduler.state import REQUEST, JobRequest
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.app import make_app
from tlora_fx.server.control import Control, EventLog
from tlora_fx.server.ledger import User
from tlora_fx.server.service import Service, make_service
from tlora_fx.server.store import ServiceStore
from tlora_fx.server.submission import IntakeLimits

#: Milliseconds of CPU that an action may take at the median, by how its name begins.
BOUNDS = {"look": 5.0, "view": 20.0, "submission": 30.0}
USERS = ("alice", "bob", "carol", "dave")
STEPS = 200
#: Ended jobs that have a folder with metrics, the newest.
FOLDERS = 500


def fill(folder: Path, ended: int) -> None:
    """Rows and files of jobs that have ended, as a service leaves them."""
    store = ServiceStore(folder)
    for user in USERS:
        store.add_user(User(user, jobs=1000, gpu_hours=1e9, priority=9))
    ledger = Ledger(folder / LEDGER)
    ledger.close()
    names = [f"{USERS[number % len(USERS)]}.job-{number:06d}" for number in range(ended)]
    begun = time.time() - 86_400.0
    with closing(sqlite3.connect(folder / LEDGER)) as base:
        base.execute("INSERT OR REPLACE INTO facts VALUES ('started', ?)", (repr(begun),))
        for number, name in enumerate(names, start=1):
            _fill_job(base, store, begun, number, name)
        base.commit()
    for name in names[-FOLDERS:]:
        (folder / name).mkdir()
        rows = [
            {"step": step, "loss": 1 + 1 / step, "tokens": 1000 * step, "seconds": 0.1}
            for step in range(1, STEPS + 1)
        ]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / name / "metrics.jsonl").write_text(text)


def _fill_job(
    base: sqlite3.Connection, store: ServiceStore, begun: float, number: int, name: str
) -> None:
    """One ended job, with its submission, group, decision and events."""
    user, _, short = name.partition(".")
    start = 0.5 * number
    document = job_file(short, STEPS)
    demand = Demand(jobs=1, samples=4, tokens=99.5)
    request = REQUEST.dump_json(JobRequest(name, "base", demand, 1, STEPS, start)).decode()
    file = store.file_of(number)
    file.write_text(document)
    status, reason = ("failed", "loss nan") if number % 50 == 0 else ("done", "")
    place, jobs = json.dumps([number % 8]), json.dumps([name])
    group = json.dumps([{"jobs": [name], "gpus": 1, "place": [number % 8]}])
    base.execute(
        "INSERT INTO submissions (number, user, key, sha256, time, folder, document) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (number, user, name, name, begun + start, name, document),
    )
    base.execute(
        "INSERT INTO owned (name, user, submission, priority) VALUES (?, ?, ?, 0)",
        (name, user, number),
    )
    digest = hashlib.sha256(document.encode()).hexdigest()
    base.execute("INSERT INTO files VALUES (?, ?, 'taken')", (str(file.absolute()), digest))
    base.execute("INSERT INTO origins VALUES (?, ?)", (name, str(file.absolute())))
    base.execute(
        "INSERT INTO jobs (name, request, spec, status, reason, steps, epoch, first_started, ended)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (name, request, document, status, reason, STEPS, number, start + 1, start + 90),
    )
    base.execute(
        "INSERT INTO epochs (epoch, jobs, gpus, layout, seconds, launched, started, ended, how, "
        "held) VALUES (?, ?, ?, '', 0.1, ?, ?, ?, 'drained', 90)",
        (number, jobs, place, start, start + 1, start + 90),
    )
    base.execute(
        "INSERT INTO decisions (time, groups, waiting) VALUES (?, ?, '[]')", (start, group)
    )
    base.executemany(
        "INSERT INTO events (time, kind, jobs, text) VALUES (?, 'done', ?, ?)",
        [(begun + start, jobs, "is in the queue"), (begun + start + 90, jobs, "has ended")],
    )


class Nothing:
    """Learns of no base: nothing trains here."""

    def learn(self, job: str, base: str, shape: object) -> None:
        """Know nothing."""


@contextmanager
def scheduler(folder: Path) -> Iterator[SchedulerService]:
    """The scheduler of a service, which has nothing to train."""
    cluster = Cluster(8, 8, 1, "cpu")
    store = ServiceStore(folder)
    with opened(
        store.inbox, folder, cluster, policy_of("tlora"), SyntheticEstimator(cluster=cluster),
        Nothing(), EventLog(store), RunOptions(linger=None, retries=False, removes_files=True),
    ) as running:  # fmt: skip
        running.before_advance = Control(store, folder, running)
        yield running


def cpu_milliseconds(action: Callable[[], object], count: int) -> dict[str, float]:
    """CPU time of this process in an action: the median of some times, the least and the most."""
    times = []
    for _ in range(count):
        begun = time.process_time()
        action()
        times.append(1e3 * (time.process_time() - begun))
    return {"median": median(times), "least": min(times), "most": max(times)}


def looks(folder: Path, count: int) -> dict[str, Any]:
    """The start of a scheduler, and turns in which everything is due."""
    begun = time.process_time()
    with scheduler(folder) as running:
        control: Any = running.before_advance

        def look() -> None:
            running._looked = control._looked = float("-inf")
            running.turn()

        # A file is read when it was the same at two looks; this is what a start has to do.
        for _ in range(3):
            look()
        start = 1e3 * (time.process_time() - begun)
        return {"start of the scheduler": {"median": start}, "look": cpu_milliseconds(look, count)}


def views(service: Service, token: str, count: int) -> dict[str, Any]:
    """A refresh of the view after a change, and requests of a page; sizes of answers in bytes."""
    client = TestClient(make_app(service, ("testserver",)))
    client.headers["Authorization"] = f"Bearer {token}"
    begun = time.process_time()
    service.view.refresh()
    first = 1e3 * (time.process_time() - begun)
    name = service.store.rows("SELECT name FROM owned WHERE user = 'alice' LIMIT 1")

    def refresh() -> None:
        service.store.tell(time.time(), "service", [], "something happened")
        service.view.refresh()

    measured = {"first view": {"median": first}, "view: refresh": cpu_milliseconds(refresh, count)}
    paths = ["jobs?limit=100", "overview", "groups", "events", "curves?limit=100"]
    paths += [f"jobs/{job}" for (job,) in name]
    for path in paths:
        label = f"view: GET /{path.partition('?')[0].replace(name[0][0], 'NAME') if name else path}"
        answer = client.get(f"/api/v1/{path}")
        answer.raise_for_status()
        times = cpu_milliseconds(partial(client.get, f"/api/v1/{path}"), count)
        measured[label] = {**times, "bytes": float(len(answer.content))}
    return measured


def submissions(service: Service, count: int) -> dict[str, float]:
    """A file of one job, taken from a user with quotas."""
    user = User("alice", jobs=10_000, gpu_hours=1e9, priority=9)
    numbers = iter(range(count))

    def submit() -> None:
        name = f"new-{next(numbers)}"
        service.intake.submit(user, name, job_file(name, 1), {}, 0)

    return cpu_milliseconds(submit, count)


def measured(ended: int, count: int) -> dict[str, Any]:
    """All figures over a folder with so many ended jobs."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name) / "run"
        fill(folder, ended)
        times = looks(folder, count)
        begun = time.process_time()
        service = make_service(folder, IntakeLimits(roots=(QUICKSTART,)), open_to_all=False, gpus=8)
        start = 1e3 * (time.process_time() - begun)
        token = service.store.add_user(User("alice", jobs=10_000, gpu_hours=1e9, priority=9))
        times |= {"start of the process that answers": {"median": start}}
        times |= views(service, token, count)
        times |= {"submission": submissions(service, count)}
    return times


def bound_of(action: str) -> float | None:
    """The most that an action may take at the median, in milliseconds; None: any time."""
    return next((most for name, most in BOUNDS.items() if action.startswith(name)), None)


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__, device=False)
    parser.add_argument("--ended", type=int, nargs="+", default=[0, 10_000, 100_000])
    parser.add_argument("--count", type=int, default=20, help="times that each action is measured")
    given = parser.parse_args()
    by_ended = {str(ended): measured(ended, given.count) for ended in given.ended}
    table = Table("CPU milliseconds, median", *(f"{ended} ended" for ended in by_ended), "bound")
    for action in by_ended[str(given.ended[-1])]:
        values = [times.get(action, {}).get("median") for times in by_ended.values()]
        shown = ["" if value is None else f"{value:.1f}" for value in values]
        table.add_row(action, *shown, str(bound_of(action) or ""))
    console().print(table)
    whole = {**described("service_growth", "cpu"), "bounds": BOUNDS, "milliseconds": by_ended}
    write(given.out / f"service_growth-{whole['date']}.json", whole)


if __name__ == "__main__":
    main()
