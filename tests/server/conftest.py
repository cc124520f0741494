"""A service over a real ledger, asked in this process or by a real port."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from fastapi.testclient import TestClient

from tlora_fx.cost.load import Demand
from tlora_fx.scheduler.state import Group, JobRequest
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.app import make_app
from tlora_fx.server.connections import ConnectionLimits, make_server
from tlora_fx.server.ledger import User
from tlora_fx.server.service import Service, make_service
from tlora_fx.server.submission import IntakeLimits

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"


def job_file(
    *names: str, data: Any = str(QUICKSTART / "data" / "records.jsonl"), **more: Any
) -> str:
    """A job file with these jobs.

    data     a path, or all of their `data`
    """
    data = {"path": data} if isinstance(data, str) else data
    jobs = [
        {"name": name, "lora": {"r": 4}, "max_steps": 10, "data": data} | more
        for name in names or ("a",)
    ]
    return yaml.safe_dump(
        {"base": {"config": str(QUICKSTART / "base"), "dtype": "float32"}, "jobs": jobs}
    )


class Asked:
    """A service and what may be asked of it, by several users."""

    def __init__(self, folder: Path, service: Service, client: TestClient) -> None:
        self.folder, self.service, self.client = folder, service, client
        self.tokens: dict[str, str] = {}

    def add(self, name: str, **limits: Any) -> str:
        self.tokens[name] = self.service.store.add_user(User(name, **limits))
        return self.tokens[name]

    def ask(self, method: str, path: str, user: str | None = None, **more: Any) -> Any:
        headers = more.pop("headers", {})
        if user is not None:
            headers = {"Authorization": f"Bearer {self.tokens[user]}"} | headers
        return self.client.request(method, path, headers=headers, **more)

    def submit(self, text: str, key: str = "k", user: str | None = None, **body: Any) -> Any:
        return self.ask(
            "POST", "/api/v1/submissions", user,
            json={"job_file": text} | body, headers={"Idempotency-Key": key},
        )  # fmt: skip

    def upload(self, content: bytes, user: str | None = None) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        assert self.ask("PUT", f"/api/v1/files/{sha256}", user, content=content).status_code == 201
        return sha256

    def refresh(self) -> None:
        self.service.view.refresh()

    def state(self) -> tuple:
        """All that a request may change: rows of the ledger, and files."""
        store = self.service.store
        tables = ("users", "tokens", "submissions", "owned", "actions", "jobs")
        rows = [store.rows(f"SELECT * FROM {table}") for table in tables]
        files = sorted(str(path) for path in store.folder.rglob("*") if path.is_file())
        return rows, files


@pytest.fixture
def asked(tmp_path):
    """A service on this machine, which may read the examples."""
    with ExitStack() as stack:

        def make(folder: Path = tmp_path / "run", *, open_to_all: bool = True, **limits: Any):
            limits = IntakeLimits(**({"roots": (EXAMPLES,)} | limits))
            service = make_service(folder, limits, open_to_all=open_to_all, gpus=2)
            client = TestClient(make_app(service, ("testserver",)), raise_server_exceptions=False)
            return Asked(folder, service, stack.enter_context(client))

        yield make


def listen(
    service: Service, limits: ConnectionLimits | None = None, public_url: str = ""
) -> tuple[uvicorn.Server, str, threading.Thread]:
    """A service on a free port of this machine; its thread ends with `should_exit`."""
    server = make_server(
        make_app(service, (), public_url), limits, port=0, timeout_graceful_shutdown=1
    )
    socket = server.config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    return server, f"http://127.0.0.1:{socket.getsockname()[1]}", thread


def request(name: str, steps: int = 10) -> JobRequest:
    return JobRequest(name, "base", Demand(jobs=1, samples=4, tokens=99.5), 1, steps)


def as_scheduled(folder: Path, groups: list[tuple[str, ...]], *, ended: bool = False) -> None:
    """What the scheduler writes of groups, one GPU each, and of their jobs' first steps."""
    # The ledger reads its clock at each launch and each end: a group holds its GPU for 5 seconds.
    ledger = Ledger(folder / "ledger.sqlite", clock=count(step=5.0).__next__)
    for epoch, names in enumerate(groups, start=1):
        for name in names:
            ledger.submit(request(name), {"name": name})
            (folder / name).mkdir(exist_ok=True)
            rows = [
                {"step": step, "loss": 2.0 / step, "tokens": 10 * step, "seconds": 0.1}
                for step in range(1, 6)
            ]
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder / name / "metrics.jsonl").write_text(lines)
        ledger.launch(Group(names, 1, (epoch - 1,)), epoch, None, float(epoch))
        if ended:
            ledger.end(epoch, "drained", epoch + 5.0)
    ledger.close()
