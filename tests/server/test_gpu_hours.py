"""GPU-hours are the time between signs of life of the scheduler, whatever the time of day does."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.errors import QuotaReached
from tlora_fx.scheduler.executor import Drained, Failed
from tlora_fx.scheduler.state import Group
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.ledger import User
from tlora_fx.server.store import ServiceStore

DAY = 86400.0
JOBS = ("alice.a", "alice.b", "bob.a", "bob.b")
STEP = st.one_of(
    st.tuples(st.just("pass"), st.floats(0.0, 100.0)),
    st.tuples(st.just("set clock"), st.floats(-2 * DAY, 2 * DAY)),
    st.tuples(st.just("crash"), st.floats(0.0, 3 * DAY)),
    st.tuples(st.just("start"), st.integers(1, 3)),
    st.sampled_from(
        [(name, 0) for name in ("heartbeat", "skip", "change", "drain", "fail", "end")]
    ),
)


class Scheduler:
    """A ledger with clocks that a test sets, and the GPU-seconds that each group shall have.

    clock         monotonic, of a process
    time_of_day   may be set at any time
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.sqlite"
        self.clock, self.time_of_day, self.epoch = 1000.0, 0.0, 0
        self.gpus: dict[int, int] = {}
        self.charged: dict[int, float] = {}
        self.running: dict[int, float] = {}
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.path, clock=lambda: self.clock)

    def group(self, gpus: int) -> Group:
        self.epoch += 1
        self.gpus[self.epoch], self.charged[self.epoch] = gpus, 0.0
        return Group(JOBS, gpus, tuple(range(gpus)))

    def sign_of_life(self, epoch: int) -> None:
        self.charged[epoch] += self.clock - self.running[epoch]
        self.running[epoch] = self.clock

    def look(self, *, charges: bool) -> None:
        if charges:
            self.ledger.heartbeat()
            for epoch in self.running:
                self.sign_of_life(epoch)
        else:
            self.ledger.skip_time()
            self.running = dict.fromkeys(self.running, self.clock)

    def take(self, what: str, value: float) -> None:
        now = self.time_of_day
        if what == "pass":
            self.clock, self.time_of_day = self.clock + value, now + value
        elif what == "set clock":
            self.time_of_day = now + value
        elif what == "start":
            self.ledger.launch(self.group(int(value)), self.epoch, None, now)
            self.running[self.epoch] = self.clock
        elif what in ("heartbeat", "skip"):
            self.look(charges=what == "heartbeat")
        elif what == "crash":
            self.ledger.close()
            # The machine may have been started again: its monotonic clock starts from 0.
            self.clock, self.time_of_day, self.running = 0.0, now + value, {}
            self.open()
            for record in self.ledger.epochs():
                if record.ended is None:
                    self.ledger.record(Failed(self.time_of_day, record.epoch, None, "killed"))
        elif self.running:
            self.end(what, min(self.running), now)

    def end(self, how: str, epoch: int, now: float) -> None:
        self.sign_of_life(epoch)
        del self.running[epoch]
        if how == "change":
            group = self.group(self.gpus[epoch])
            self.ledger.launch(group, self.epoch, None, now, origin=epoch)
            self.ledger.record(Drained(now, epoch, {}, self.epoch))
            self.running[self.epoch] = self.clock
        elif how == "drain":
            self.ledger.record(Drained(now, epoch, {}))
        elif how == "fail":
            self.ledger.record(Failed(now, epoch, None, "lost"))
        else:
            self.ledger.end(epoch, "finished", now)

    @property
    def expected_hours(self) -> float:
        """Hours of one of two users who have half of the jobs each."""
        return sum(self.gpus[epoch] * held for epoch, held in self.charged.items()) / 2 / 3600


def service(folder: Path) -> ServiceStore:
    store = ServiceStore(folder)
    for user in ("alice", "bob"):
        names = [name for name in JOBS if name.startswith(user)]
        store.submit(User(user), user, "", names, "", str(folder), 0)
    return store


@given(steps=st.lists(STEP, max_size=25))
def test_what_is_charged_is_the_time_between_signs_of_life(steps):
    """Never negative, never less than before, and nothing of what follows the last one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, scheduler, before = service(folder), Scheduler(folder), 0.0
        for step in steps:
            scheduler.take(*step)
            hours = store.gpu_hours("alice")
            assert hours >= before
            assert math.isclose(hours, scheduler.expected_hours, rel_tol=1e-9, abs_tol=1e-12)
            assert hours == store.gpu_hours("bob")
            before = hours
        scheduler.ledger.close()


def test_days_without_a_process_use_up_no_quota(tmp_path):
    """Two days and a half after the last heartbeat, the user may submit."""
    store, scheduler = service(tmp_path), Scheduler(tmp_path)
    alice = User("alice", gpu_hours=10.0)
    for step in (("start", 2), ("pass", 3600.0), ("heartbeat", 0), ("crash", 2.5 * DAY)):
        scheduler.take(*step)

    assert store.gpu_hours("alice") == pytest.approx(1.0)
    assert store.submit(alice, "k", "", ["alice.c"], "", "", 0).jobs == ("alice.c",)


def test_a_group_that_runs_uses_up_a_quota_at_each_heartbeat(tmp_path):
    """It need not end for that."""
    store, scheduler = service(tmp_path), Scheduler(tmp_path)
    for step in (("start", 2), ("pass", 36000.0), ("heartbeat", 0)):
        scheduler.take(*step)

    with pytest.raises(QuotaReached, match="no GPU-hours are left"):
        store.submit(User("alice", gpu_hours=10.0), "k", "", ["alice.c"], "", "", 0)


def test_a_group_is_charged_from_when_it_takes_over(tmp_path):
    """Until then its GPUs are charged to the group that it comes from."""
    store, scheduler = service(tmp_path), Scheduler(tmp_path)
    scheduler.take("start", 1)
    scheduler.ledger.launch(scheduler.group(1), 2, None, 0.0, origin=1)
    scheduler.take("pass", 3600.0)
    scheduler.ledger.record(Drained(0.0, 1, {}, 2))
    scheduler.take("pass", 3600.0)
    scheduler.ledger.heartbeat()

    assert store.rows("SELECT held FROM epochs") == [(3600.0,), (3600.0,)]


def test_a_ledger_of_before_is_charged_for_what_it_shows(tmp_path):
    """Ended groups keep their time; of killed ones the last thing that was written counts."""
    base = sqlite3.connect(tmp_path / "ledger.sqlite")
    base.executescript("""
        CREATE TABLE epochs (
            epoch INTEGER PRIMARY KEY, jobs TEXT NOT NULL, gpus TEXT NOT NULL,
            layout TEXT NOT NULL, seconds REAL NOT NULL, launched REAL NOT NULL, started REAL,
            ended REAL, how TEXT NOT NULL DEFAULT '');
        CREATE TABLE decisions (
            number INTEGER PRIMARY KEY, time REAL NOT NULL, groups TEXT NOT NULL,
            waiting TEXT NOT NULL);
        INSERT INTO decisions (time, groups, waiting) VALUES (0, '[]', '[]'), (70, '[]', '[]'),
            (990000, '[]', '[]');
        INSERT INTO epochs VALUES
            (1, '["alice.a"]', '[0]', '', 1, 10, 11, 50, 'drained'),
            (2, '["alice.a"]', '[0]', '', 1, 50, 51, 900000, 'failed: the run was killed'),
            (3, '["alice.a"]', '[0]', '', 1, 60, NULL, -5, 'drained'),
            (4, '["alice.a"]', '[0]', '', 1, 980000, NULL, NULL, '');
    """)
    base.close()

    for _ in range(2):
        store = ServiceStore(tmp_path)
        assert store.rows("SELECT held FROM epochs") == [(40.0,), (20.0,), (0.0,), (10000.0,)]
    Ledger(tmp_path / "ledger.sqlite").close()
    assert len(store.rows("SELECT held FROM epochs")) == 4
