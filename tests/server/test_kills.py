"""A service whose processes are killed at random points while three users' jobs train.

The number of points is small here; `TLORA_FX_KILLS=20 TLORA_FX_KILLS_SEED=1` is a longer run, and
`TLORA_FX_KILLS_ONLY=actor` one of kills of one kind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import yaml

from tests.scheduler.raylets import actors, raylets
from tests.scheduler.run_folder import records
from tests.scheduler.test_service_trainers import require_as_alone
from tests.server.conftest import job_file
from tests.server.test_serve import SECONDS, answering_process, serving
from tlora_fx.server.ledger import User
from tlora_fx.server.store import ServiceStore

USERS = ("alice", "bob", "carol")
POINTS = int(os.environ.get("TLORA_FX_KILLS", "5"))
SEED = int(os.environ.get("TLORA_FX_KILLS_SEED", "1"))
LOCAL_KINDS = ("server", "scheduler", "admission", "worker", "fork server")
RAY_KINDS = ("server", "scheduler", "admission", "actor", "raylet")
#: Those that are killed, such as "actor,raylet"; "": all.
ONLY = os.environ.get("TLORA_FX_KILLS_ONLY", "")
#: Seconds until a process of a kind is there to be killed.
WAIT_SECONDS = 40.0


def children(pid: int) -> list[int]:
    """Processes that a process has started; none where it has ended."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def forked(serve: int, folder: str) -> list[int]:
    """Processes below a service whose log lies in a folder of the run: workers, or admission's."""
    found = []
    for server in children(serve):
        for pid in children(server):
            with suppress(OSError):
                if f"/{folder}/" in str(Path(f"/proc/{pid}/fd/2").readlink()):
                    found.append(pid)
    return found


class Service:
    """A service of three users with tokens, started again whenever it was killed."""

    def __init__(self, run: Path, *more: str) -> None:
        self.run, self.more = run, more
        self.store = ServiceStore(run)
        self.tokens = {user: self.store.add_user(User(user)) for user in USERS}
        self.stack = ExitStack()
        self.process, self.client = self.stack.enter_context(serving(run, "--slots", "2", *more))

    def restart(self) -> None:
        self.stack.close()
        self.process, self.client = self.stack.enter_context(
            serving(self.run, "--slots", "2", *self.more)
        )

    def ask(self, user: str, method: str, path: str, **more) -> httpx.Response:
        """An answer, however often the service dies meanwhile."""
        headers = {"Authorization": f"Bearer {self.tokens[user]}"} | more.pop("headers", {})
        end = time.monotonic() + SECONDS
        while True:
            try:
                return self.client.request(method, path, headers=headers, **more)
            except httpx.TransportError:
                assert time.monotonic() < end
                time.sleep(0.1)

    def submit(self, user: str, name: str, text: str) -> None:
        """Submit a job under its name as key."""
        answer = self.ask(
            user, "POST", "/submissions", json={"job_file": text}, headers={"Idempotency-Key": name}
        )
        assert answer.status_code in (200, 201), answer.text

    def states(self) -> dict[str, str]:
        return {
            job["name"]: job["state"]
            for user in USERS
            for job in self.ask(user, "GET", "/jobs", params={"limit": 100}).json()
        }

    def target(self, kind: str) -> int:
        """A process of a kind; 0: there is none now."""
        pid = self.process.pid
        if kind == "scheduler":
            return pid
        if kind == "server":
            return answering_process(pid)
        if kind == "fork server":
            return next((each for each in children(pid) if children(each)), 0)
        if kind == "actor":
            return next(iter(actors(self.run)), 0)
        found = forked(pid, {"admission": "admission", "worker": "groups"}[kind])
        return found[0] if found else 0


def killed(service: Service, kind: str, chance: random.Random) -> bool:
    """Kill -9 of a process of a kind, once there is one and some time has passed."""
    end = time.monotonic() + WAIT_SECONDS
    while not (pid := service.target(kind)) and time.monotonic() < end:
        time.sleep(0.005)
    if kind == "admission":
        # It lives for a part of a second.
        time.sleep(chance.uniform(0.0, 0.3))
    else:
        time.sleep(chance.uniform(0.0, 3.0))
        pid = service.target(kind)
    if not pid:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        if kind == "scheduler":
            service.restart()
        return True
    return False


def twelve(points: int) -> dict[str, tuple[str, str]]:
    """By full name: a user, and a job file of one job that differs from the others."""
    found = {}
    for number in range(12):
        user, name = USERS[number % 3], f"j{number:02d}"
        text = job_file(
            name, max_steps=15 * points + 10 * number, max_length=32, seed=number,
            per_device_train_batch_size=2, lora={"r": (4, 8, 2)[number % 3], "lora_dropout": 0.1},
        )  # fmt: skip
        found[f"{user}.{name}"] = user, text
    return found


def kill_at_random(service: Service, points: int, seed: int, kinds, kill=killed) -> Counter:
    """Submit twelve jobs, most of them between kills; how many kills hit, by kind."""
    chance, hits, tried = random.Random(seed), Counter(), 0
    jobs = list(twelve(points).items())
    # Each kind has its turn, in another order each time.
    order: list[str] = []
    while sum(hits.values()) < points:
        tried += 1
        assert tried < 3 * points, hits
        if not order:
            order = chance.sample(kinds, len(kinds))
        kind = order.pop()
        # All along there are jobs that train, and jobs that wait.
        while jobs and 12 - len(jobs) < 4 + 8 * sum(hits.values()) / points:
            full, (user, text) = jobs.pop(0)
            service.submit(user, full, text)
        if kind == "admission":
            # Somebody submits the same again, under other names that end here.
            text = job_file(f"more{tried}", max_steps=1, max_length=32)
            service.submit(chance.choice(USERS), f"more{tried}", text)
        hits[kind] += kill(service, kind, chance)
    for full, (user, text) in jobs:
        service.submit(user, full, text)
    return hits


def require_all_done(service: Service, tmp_path: Path, points: int) -> None:
    """Every accepted job has ended, once, and the twelve equal the same job alone."""
    end = time.monotonic() + 3 * SECONDS
    while (states := service.states()) and set(states.values()) != {"done"}:
        assert not {"failed", "refused", "cancelled"} & set(states.values()), states
        assert time.monotonic() < end, states
        time.sleep(1.0)
    jobs = twelve(points)
    for full, (user, text) in jobs.items():
        before = service.ask(user, "GET", "/jobs", params={"limit": 100}).json()
        service.submit(user, full, text)
        after = service.ask(user, "GET", "/jobs", params={"limit": 100}).json()
        assert [job["name"] for job in after] == [job["name"] for job in before]
    accepted = [key for (key,) in service.store.rows("SELECT key FROM submissions")]
    assert len(accepted) == len(set(accepted)) == len(states)
    assert {name: one.status for name, one in records(service.run).items()} == states
    folder = tmp_path / "alone-files"
    folder.mkdir()
    for full, (_, text) in jobs.items():
        content = yaml.safe_load(text)
        content["jobs"][0]["name"] = full
        (folder / f"{full}.yaml").write_text(yaml.safe_dump(content))
    require_as_alone(folder, service.run, jobs, tmp_path)


def kinds_of(every: tuple[str, ...]) -> list[str]:
    """Kinds of processes that are killed."""
    return [kind for kind in every if not ONLY or kind in ONLY.split(",")]


def note(tmp_path: Path, **facts) -> None:
    """Leave what was counted beside the run."""
    (tmp_path / "kills.json").write_text(json.dumps({"seed": SEED, **facts}))


@pytest.mark.slow
def test_no_kill_of_a_process_of_a_service_loses_or_changes_a_job(tmp_path):
    """Of who answers, who schedules, who prepares, who forks, and who trains."""
    service = Service(tmp_path / "run")
    with service.stack:
        hits = kill_at_random(service, POINTS, SEED, kinds_of(LOCAL_KINDS))
        note(tmp_path, hits=hits)
        require_all_done(service, tmp_path, POINTS)
    note(tmp_path, hits=hits, points=POINTS, equal=True)


@pytest.mark.slow
def test_no_kill_of_a_process_of_a_service_over_ray_loses_or_changes_a_job(tmp_path):
    """Of these processes, of an actor, and of a raylet of three."""
    with raylets(3) as here:

        def kill(service: Service, kind: str, chance: random.Random) -> bool:
            if kind == "raylet":
                index = chance.randrange(3)
                here.kill(index)
                time.sleep(chance.uniform(0.0, 4.0))
                here.replace(index)
                return True
            return killed(service, kind, chance)

        service = Service(tmp_path / "run", "--executor", "ray", "--ray-address", here.address)
        with service.stack:
            hits = kill_at_random(service, POINTS, SEED, kinds_of(RAY_KINDS), kill)
            note(tmp_path, hits=hits)
            require_all_done(service, tmp_path, POINTS)
    note(tmp_path, hits=hits, points=POINTS, equal=True)
