"""What a service bears: many clients, a hostile user, many jobs, a page with many jobs.

    python -m benchmarks.service load --clients 200 --submissions 2000 --status 20000
    python -m benchmarks.service hostile --clients 200 --streams 200
    python -m benchmarks.service many --jobs 200
    python -m benchmarks.service page --jobs 500 --points 100 --seconds 600

`load` starts `tlora-fx serve` on the CPU with a job that trains. Each client submits, a tenth of
the times twice under one key, and asks how its jobs are, with a pause between calls. At the end the
ledger and the folder must hold each submission once, or the script says what is lost or doubled.
With `--submissions 0` the clients only ask how the job is that trains. All clients are one process:
`client_lag` is how much later than it asked for it was woken, in ms, which is a part of the times
that it measured. `hostile` times how long one user's jobs of two steps take until the scheduler has
admitted them, alone and beside a user who submits bombs, uploads and floods; then it compares the
adapters. `many` trains tiny jobs by one service and reads what its processes hold. `page` fills a
run's folder, opens the page in Chromium while jobs get new steps, and reads when it first painted
and what its heap held at the start and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.table import Table

from benchmarks.results_file import RESULTS, console, described, write
from tlora_fx.cost.load import Demand
from tlora_fx.scheduler.state import Group, JobRequest
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.app import make_app
from tlora_fx.server.ledger import User
from tlora_fx.server.service import make_service
from tlora_fx.server.store import ServiceStore
from tlora_fx.server.submission import IntakeLimits

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
PROFILE = ROOT / "tests" / "scheduler" / "quickstart-cpu.json"
USERS = ("alice", "bob", "carol", "dave")
START_SECONDS = 300.0


def job_file(name: str, steps: int) -> str:
    """A job of the quickstart."""
    job = {"name": name, "lora": {"r": 4}, "max_steps": steps, "max_length": 64}
    data = {"path": str(QUICKSTART / "data" / "records.jsonl")}
    base = {"config": str(QUICKSTART / "base"), "dtype": "float32"}
    return json.dumps({"base": base, "jobs": [job | {"data": data}]})


class Clients:
    """Clients of a service, and what they saw.

    taken   by key, the jobs that the service said it took
    """

    def __init__(self, address: str, tokens: dict[str, str], given: argparse.Namespace) -> None:
        self.address, self.tokens, self.given = address, tokens, given
        self.taken: dict[str, tuple[str, ...]] = {}
        self.seconds: dict[str, list[float]] = {"submit": [], "status": [], "client_lag": []}
        self.wrong: list[str] = []
        # Reading them takes a client longer than a call, and all clients share one loop.
        self._certificates = ssl.create_default_context()

    async def run(self) -> float:
        """All of them at once; the seconds that it took."""
        begun, lag = time.perf_counter(), asyncio.create_task(self._lag())
        await asyncio.gather(*(self._one(number) for number in range(self.given.clients)))
        lag.cancel()
        return time.perf_counter() - begun

    async def _lag(self) -> None:
        """How late this process is woken."""
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.01)
            self.seconds["client_lag"].append(time.perf_counter() - begun - 0.01)

    async def _one(self, number: int) -> None:
        rng = random.Random(number)  # noqa: S311  (a draw that can be repeated)
        given, users = self.given, USERS if self.given.submissions else USERS[:1]
        token = self.tokens[users[number % len(users)]]
        mine = [] if given.submissions else [f"{USERS[0]}.trains"]
        submits = given.submissions // given.clients
        calls = ["submit"] * (submits - 1) + ["status"] * (given.status // given.clients)
        rng.shuffle(calls)
        if given.submissions:
            calls.insert(0, "submit")
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(
            base_url=self.address, headers=headers, timeout=60, verify=self._certificates
        ) as client:
            for call in calls:
                await asyncio.sleep(rng.expovariate(1 / given.pause))
                if call == "submit":
                    mine += await self._submit(client, f"job-{uuid.uuid4().hex[:12]}", rng)
                elif mine:
                    await self._status(client, rng.choice(mine))

    async def _submit(
        self, client: httpx.AsyncClient, name: str, rng: random.Random
    ) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        for _ in range(2 if rng.random() < 0.1 else 1):
            begun = time.perf_counter()
            answer = await client.post(
                "/api/v1/submissions",
                json={"job_file": job_file(name, 1)},
                headers={"Idempotency-Key": name},
            )
            self.seconds["submit"].append(time.perf_counter() - begun)
            if answer.status_code not in (200, 201):
                self.wrong.append(answer.text)
                continue
            names = tuple(answer.json()["jobs"])
            if self.taken.setdefault(name, names) != names:
                self.wrong.append(f"{name} was answered in two ways")
        return names

    async def _status(self, client: httpx.AsyncClient, name: str) -> None:
        begun = time.perf_counter()
        answer = await client.get(f"/api/v1/jobs/{name}")
        self.seconds["status"].append(time.perf_counter() - begun)
        if answer.status_code != 200 or answer.json()["name"] != name:
            self.wrong.append(answer.text)


@dataclass
class Serving:
    """A service that listens, with a user of each name in `USERS`."""

    folder: Path
    store: ServiceStore
    tokens: dict[str, str]
    address: str
    pid: int

    def client(self, user: str, **more: Any) -> httpx.Client:
        """A client with a user's token."""
        headers = {"Authorization": f"Bearer {self.tokens[user]}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=60, **more)


@contextmanager
def _serving() -> Iterator[Serving]:
    """A service on the CPU in a folder of its own, killed at the end."""
    with tempfile.TemporaryDirectory(prefix="service-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "run"
        store = ServiceStore(folder)
        tokens = {user: store.add_user(User(user, priority=5)) for user in USERS}
        command = [
            sys.executable, "-m", "tlora_fx", "serve", "-o", str(folder), "--device", "cpu",
            "--slots", "1", "--profile", str(PROFILE), "--root", str(QUICKSTART), "--port", "0",
        ]  # fmt: skip
        with (Path(name) / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            yield Serving(folder, store, tokens, address, process.pid)
        finally:
            process.kill()
            process.wait()


def load(given: argparse.Namespace) -> dict[str, Any]:
    """Many clients beside a job that trains."""
    with _serving() as here:
        _train(here.address, here.tokens["alice"], here.folder, given)
        clients = Clients(here.address, here.tokens, given)
        before = _cpu_seconds(here.pid)
        seconds = asyncio.run(clients.run())
        used = {name: now - before.get(name, 0.0) for name, now in _cpu_seconds(here.pid).items()}
        wrong = clients.wrong + _compared(here.store, clients)
    measured = {call: _percentiles(times) for call, times in clients.seconds.items() if times}
    return {
        "seconds": seconds, "calls": measured, "cpu_s": used, "wrong": wrong,
        "submitted": len(clients.taken),
    }  # fmt: skip


def _cpu_seconds(serve: int) -> dict[str, float]:
    """CPU time of a service's processes by what they do, and of this process."""
    used = {"clients": sum(os.times()[:2])}
    for name, pids in _processes(serve).items():
        for pid in pids:
            # A worker may end at any moment.
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                # Of the fork server also that of processes that have ended, such as admission's.
                ticks = fields[11:15] if name == "fork server" else fields[11:13]
                seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
                used[name] = used.get(name, 0.0) + seconds
    return used


def _train(address: str, token: str, folder: Path, given: argparse.Namespace) -> None:
    """Have a job train before anything is timed, unless nothing shall."""
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "trains"}
    body = {"job_file": job_file("trains", 1_000_000)}
    httpx.post(f"{address}/api/v1/submissions", json=body, headers=headers).raise_for_status()
    metrics = folder / "alice.trains" / "metrics.jsonl"
    end = time.monotonic() + START_SECONDS
    while not given.idle and not metrics.exists():
        if time.monotonic() > end:
            raise SystemExit(f"no job trained within {START_SECONDS:g} s")
        time.sleep(0.2)


def _compared(store: ServiceStore, clients: Clients) -> list[str]:
    """What the ledger and the folder have otherwise than the clients were told."""
    keys = [key for (key,) in store.rows("SELECT key FROM submissions WHERE key != 'trains'")]
    owned = {job.name for job in store.jobs()} - {"alice.trains"}
    told = {name for names in clients.taken.values() for name in names}
    # The scheduler removes a file that it has taken in, and notes it.
    taken = {path for (path,) in store.rows("SELECT path FROM files")}
    files = taken | {str(p.absolute()) for p in store.inbox.iterdir() if p.suffix == ".yaml"}
    acted = [action for action in store.actions() if action[2] == "submit"]
    facts = {
        "lost": set(clients.taken) - set(keys),
        "doubled": len(keys) - len(set(keys)),
        "jobs": told ^ owned,
        "files": len(files) - len(keys) - 1,
        "actions": len(acted) - len(keys) - 1,
    }
    return [f"{name}: {value}" for name, value in facts.items() if value]


def _percentiles(times: list[float]) -> dict[str, float]:
    at = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    told = {name: float(np.percentile(times, part)) * 1e3 for name, part in at.items()}
    return {"calls": float(len(times)), **told}


# A hostile user beside a good one.

#: Jobs of the good user, alone and then beside the other.
TIMED = 5
#: A pattern whose match takes longer than anybody waits.
BACKTRACKS = "(([a-z_.]+)+)+#"


def hostile(given: argparse.Namespace) -> dict[str, Any]:
    """How long a good user's jobs wait for admission, and whether their adapters are the same."""
    with _serving() as here, here.client("alice") as client:
        # The first one waits for imports, and compiles the base.
        _admitted(client, "first")
        alone = [_admitted(client, f"alone-{number}") for number in range(TIMED)]
        _until_done(client)
        over = threading.Event()
        enemy = Hostile(here, given, over)
        threads = [threading.Thread(target=target, daemon=True) for target in enemy.actions()]
        for thread in threads:
            thread.start()
        time.sleep(given.before)
        beside = []
        for number in range(TIMED):
            beside.append(_admitted(client, f"beside-{number}"))
            time.sleep(1.0)
        while not _done(client):
            time.sleep(1.0)
        over.set()
        files = sorted(here.folder.glob("alice.*/adapter_model.safetensors"))
        digests = {
            file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files
        }
        wrong = [job["name"] for job in client.get("/api/v1/jobs").json() if job["state"] != "done"]
        wrong += [] if len(digests) == 2 * TIMED + 1 else [f"{len(digests)} adapters"]
    told = {"alone_s": alone, "beside_s": beside, "ratio": max(beside) / max(alone)}
    bits = {"different_adapters": len(set(digests.values())), "wrong": wrong}
    return {**told, **bits, "answers_to_hostile": dict(sorted(enemy.answers.items()))}


def _admitted(client: httpx.Client, name: str) -> float:
    """Submit a job of two steps; seconds until the scheduler has admitted it."""
    body = {"job_file": job_file(name, 2), "priority": 1}
    begun = time.perf_counter()
    answer = client.post("/api/v1/submissions", json=body, headers={"Idempotency-Key": name})
    answer.raise_for_status()
    [full] = answer.json()["jobs"]
    while client.get(f"/api/v1/jobs/{full}").json()["state"] == "received":
        time.sleep(0.05)
    return time.perf_counter() - begun


def _done(client: httpx.Client) -> bool:
    return all(job["state"] == "done" for job in client.get("/api/v1/jobs").json())


def _until_done(client: httpx.Client) -> None:
    while not _done(client):
        time.sleep(0.5)


class Hostile:
    """A user who does all that a token allows, as fast as the service lets it.

    answers   how often each status came, by kind of request
    """

    def __init__(self, here: Serving, given: argparse.Namespace, over: threading.Event) -> None:
        self.here, self.given, self.over = here, given, over
        self.answers: Counter[str] = Counter()

    def actions(self) -> list[Callable[[], object]]:
        """What it does at the same time."""
        return [self.bombs, self.uploads, lambda: asyncio.run(self.floods())]

    def bombs(self) -> None:
        """Files of as many jobs as fit, and jobs with a pattern that backtracks."""
        number = 0
        with self.here.client("dave") as client:
            while not self.over.is_set():
                number += 1
                whole = json.loads(job_file("x", 1))
                [job] = whole["jobs"]
                count = 2000 if number == 1 else 40
                whole["jobs"] = [{**job, "name": f"b{number}-{n}"} for n in range(count)]
                if number % 2 == 0:
                    for each in whole["jobs"]:
                        each["lora"] = {"r": 4, "target_modules": BACKTRACKS}
                self._count("bomb", client, "POST", "/api/v1/submissions", json=_slim(whole),
                            headers={"Idempotency-Key": f"bomb-{number}"})  # fmt: skip
                time.sleep(1.0)

    def uploads(self) -> None:
        """A file of 8 MB, again and again."""
        with self.here.client("dave") as client:
            while not self.over.is_set():
                content = os.urandom(8 << 20)
                path = f"/api/v1/files/{hashlib.sha256(content).hexdigest()}"
                self._count("upload", client, "PUT", path, content=content)
                time.sleep(0.2)

    async def floods(self) -> None:
        """Clients that ask without a pause, and streams that stay open."""
        headers = {"Authorization": f"Bearer {self.here.tokens['dave']}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.here.address, headers=headers, timeout=60, limits=limits
        ) as client:
            asks = [self._ask(client) for _ in range(self.given.clients)]
            streams = [self._stream(client) for _ in range(self.given.streams)]
            await asyncio.gather(*asks, *streams)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while not self.over.is_set():
            with suppress(httpx.TransportError):
                answer = await client.get("/api/v1/jobs", params={"limit": 100})
                self.answers[f"list {answer.status_code}"] += 1
            await asyncio.sleep(self.given.pause)

    async def _stream(self, client: httpx.AsyncClient) -> None:
        while not self.over.is_set():
            with suppress(httpx.TransportError):
                async with client.stream("GET", "/api/v1/stream") as answer:
                    self.answers[f"stream {answer.status_code}"] += 1
                    async for _ in answer.aiter_raw():
                        if self.over.is_set():
                            return
            await asyncio.sleep(1.0)

    def _count(self, kind: str, client: httpx.Client, method: str, path: str, **more: Any) -> None:
        try:
            self.answers[f"{kind} {client.request(method, path, **more).status_code}"] += 1
        except httpx.TransportError as error:
            self.answers[f"{kind} {type(error).__name__}"] += 1


def _slim(whole: dict[str, Any]) -> dict[str, str]:
    """A body with a job file that fits into a submission: what all jobs share is a default."""
    shared = {key: value for key, value in whole["jobs"][0].items() if key != "name"}
    jobs = [{"name": job["name"]} for job in whole["jobs"]]
    return {"job_file": json.dumps({"base": whole["base"], "defaults": shared, "jobs": jobs})}


# Many jobs by one service.


def many(given: argparse.Namespace) -> dict[str, Any]:
    """Tiny jobs one after the other; what the service's processes hold meanwhile."""
    with _serving() as here, here.client("alice") as client:
        _admitted(client, "first")
        _until_done(client)
        over = threading.Event()
        watching = [
            threading.Thread(target=_watch, args=(here, user, over), daemon=True) for user in USERS
        ]
        for thread in watching:
            thread.start()
        begun, samples = time.monotonic(), [_held(here.pid, 0, 0.0)]
        done = sent = 0
        while done < given.jobs or time.monotonic() - begun < given.seconds:
            while (
                sent < given.jobs and time.monotonic() - begun >= given.seconds * sent / given.jobs
            ):
                body = {"job_file": job_file(f"job-{sent}", 2)}
                key = {"Idempotency-Key": f"job-{sent}"}
                client.post("/api/v1/submissions", json=body, headers=key).raise_for_status()
                sent += 1
            time.sleep(given.pause)
            states = [job["state"] for job in client.get("/api/v1/jobs?limit=1000").json()]
            done = states.count("done") - 1
            samples.append(_held(here.pid, done, time.monotonic() - begun))
            assert not {"failed", "refused"} & set(states), states
        over.set()
    return {"jobs": given.jobs, "spread_over_seconds": given.seconds, "samples": samples}


def _watch(here: Serving, user: str, over: threading.Event) -> None:
    """Read events for as long as it takes."""
    with here.client(user) as client, client.stream("GET", "/api/v1/stream") as answer:
        for _ in answer.iter_raw():
            if over.is_set():
                return


def _held(serve: int, done: int, seconds: float) -> dict[str, Any]:
    """Megabytes of resident memory and open files of each process of a service."""
    found: dict[str, Any] = {"done": done, "seconds": round(seconds, 1)}
    for name, pids in _processes(serve).items():
        sizes, files = [], 0
        for pid in pids:
            # A worker may end at any moment.
            with suppress(OSError):
                open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                sizes.append(_resident(pid))
                files += open_files
        found[name] = {"mb": round(sum(sizes), 1), "files": files, "processes": len(sizes)}
    return found


def _processes(serve: int) -> dict[str, list[int]]:
    """A service's processes by what they do; those that have ended meanwhile are left out."""
    below = {pid: _children(pid) for pid in _children(serve)}
    answers = [pid for pid in below if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    forks = [pid for pid, own in below.items() if own and pid not in answers]
    workers = [pid for server in forks for pid in below[server]]
    return {"scheduler": [serve], "answers": answers, "fork server": forks, "workers": workers}


def _children(pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _resident(pid: int) -> float:
    """Megabytes of main memory that a process alone holds, in proportion where it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1e3
    return 0.0


def page(given: argparse.Namespace) -> dict[str, Any]:
    """A page with many jobs, of which some get new steps."""
    import uvicorn
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="service-") as name:
        folder = Path(name)
        service = make_service(folder, IntakeLimits(), open_to_all=True, gpus=8, gpu="GPU")
        running = _fill(service.store, folder, given)
        config = uvicorn.Config(make_app(service), port=0, log_level="warning")
        server, socket = uvicorn.Server(config), config.bind_socket()
        threading.Thread(target=server.run, args=([socket],), daemon=True).start()
        with sync_playwright() as playwright:
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            tab.goto(f"http://127.0.0.1:{socket.getsockname()[1]}")
            tab.locator("tbody tr[data-job]").first.wait_for()
            rows = tab.evaluate("performance.now()")
            tab.locator("tbody .loss").first.wait_for()
            paint = tab.evaluate("performance.getEntriesByName('first-paint')[0].startTime")
            heaps = [_heap(tab)]
            end = time.monotonic() + given.seconds
            while time.monotonic() < end:
                for job in running:
                    _step(job)
                tab.wait_for_timeout(500)
                if len(heaps) * given.seconds / 10 < given.seconds - (end - time.monotonic()):
                    heaps.append(_heap(tab))
            browser.close()
        server.should_exit = True
    points = given.jobs * given.points
    return {"points": points, "first_paint_ms": paint, "rows_ms": rows, "heap_mb": heaps}


def _heap(tab: Any) -> float:
    """Megabytes that the page holds once garbage is gone."""
    session = tab.context.new_cdp_session(tab)
    session.send("HeapProfiler.collectGarbage")
    used = float(session.send("Runtime.getHeapUsage")["usedSize"]) / 1e6
    session.detach()
    return used


def _fill(store: ServiceStore, folder: Path, given: argparse.Namespace) -> list[Path]:
    """Jobs as a scheduler leaves them, groups of two; the files of those that run."""
    me = User("local", admin=True)
    names = [f"job-{number:03d}" for number in range(given.jobs)]
    for name in names:
        store.submit(me, name, name, [name], "", name, 0)
    ledger = Ledger(folder / "ledger.sqlite")
    demand = Demand(jobs=1, samples=4, tokens=99.5)
    for name in names:
        ledger.submit(JobRequest(name, "base", demand, 1, 1_000_000), {"name": name})
        (folder / name).mkdir()
        for _ in range(given.points):
            _step(folder / name / "metrics.jsonl")
    for epoch, first in enumerate(range(0, len(names), 2), start=1):
        group = Group(tuple(names[first : first + 2]), 1, (epoch % 8,))
        ledger.launch(group, epoch, None, -3600.0 + 12 * epoch)
        if first + 16 < len(names):
            ledger.end(epoch, "drained", -3600.0 + 12 * epoch + 80)
    ledger.close()
    return [folder / name / "metrics.jsonl" for name in names[-16:]]


def _step(path: Path) -> None:
    """One more line of a job's metrics."""
    step = path.read_bytes().count(b"\n") + 1 if path.exists() else 1
    loss = 1 + math.exp(-step / 30) + random.gauss(0, 0.05)
    row = {"step": step, "loss": loss, "tokens": 1000 * step, "seconds": 0.1}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("load")
    one.add_argument("--clients", type=int, default=200)
    one.add_argument("--submissions", type=int, default=2000)
    one.add_argument("--status", type=int, default=20_000)
    one.add_argument("--pause", type=float, default=1.0, help="mean seconds between calls")
    one.add_argument("--idle", action="store_true", help="wait for no job to train")
    enemy = kinds.add_parser("hostile")
    enemy.add_argument("--clients", type=int, default=200)
    enemy.add_argument("--streams", type=int, default=200)
    enemy.add_argument("--pause", type=float, default=1.0, help="seconds between a client's calls")
    enemy.add_argument("--before", type=float, default=10.0, help="seconds of it before any time")
    lot = kinds.add_parser("many")
    lot.add_argument("--jobs", type=int, default=200)
    lot.add_argument("--pause", type=float, default=5.0, help="seconds between two looks")
    lot.add_argument(
        "--seconds", type=float, default=0.0, help="time over which the jobs are spread"
    )
    other = kinds.add_parser("page")
    other.add_argument("--jobs", type=int, default=500)
    other.add_argument("--points", type=int, default=100)
    other.add_argument("--seconds", type=float, default=600.0)
    for each in (one, enemy, lot, other):
        each.add_argument("-o", "--output", type=Path, default=None)
    given = parser.parse_args()
    measured = {"load": load, "hostile": hostile, "many": many, "page": page}[given.kind](given)
    table = Table("what", "value")
    for name, value in measured.items():
        table.add_row(name, json.dumps(value))
    console().print(table)
    whole = {**described("service", "cpu"), "kind": given.kind, **measured}
    write(given.output or RESULTS / f"service-{given.kind}-{whole['date']}.json", whole)


if __name__ == "__main__":
    main()
