"""The service with the Tinker API on a real port, its trainer in a thread; and its client."""

from __future__ import annotations

import os
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.training.clients import engine
from tlora_fx.server.app import make_app
from tlora_fx.server.connections import make_server
from tlora_fx.server.service import make_service
from tlora_fx.server.submission import IntakeLimits
from tlora_fx.server.tinker.futures import Futures
from tlora_fx.server.tinker.routes import Tinker
from tlora_fx.training.log import CommandLog
from tlora_fx.training.process import run_commands
from tlora_fx.training.records import Outcome, Ran, json_answer

#: Each client reads the machine's certificates anew, though none of these asks for one.
TRUSTED = ssl.create_default_context()
SDK = Path(os.environ.get("TINKER_SDK_PYTHON", ".tinker-sdk/bin/python"))
SDK = SDK if SDK.is_absolute() else Path(__file__).parents[3] / SDK
SECONDS = 600
KEY = {"X-API-Key": "tml-any"}
needs_sdk = pytest.mark.skipif(
    not SDK.is_file(), reason="no Tinker SDK: make tinker-sdk, or set TINKER_SDK_PYTHON"
)


def run_client(source: str, *arguments: str) -> str:
    """What a script prints in the SDK's own environment; it succeeds."""
    return _run([SDK, "-c", source, *arguments], {})


def run_command(address: str, key: str, *arguments: object) -> str:
    """What the SDK's command line prints; it succeeds."""
    env = {"TINKER_BASE_URL": address, "TINKER_API_KEY": key}
    return _run([SDK.parent / "tinker", *map(str, arguments)], env)


def _run(command: list[str | Path], env: dict[str, str]) -> str:
    env |= {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "TINKER_TELEMETRY": "0"}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error::FutureWarning:__main__"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@contextmanager
def trainer(folder: Path, socket: Path):
    """A trainer of the log, on an empty engine of this process."""
    own, ready, ended = engine(), threading.Event(), threading.Event()
    for member in list(own.step.members.values()):
        own.step.release(member.job.name)
    thread = threading.Thread(
        target=run_commands, args=(CommandLog(folder), own, socket, ready.set, ended)
    )
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield
    finally:
        ended.set()
        thread.join(SECONDS)


@contextmanager
def serving(
    folder: Path, *, open_to_all: bool = True, price: float = 0.0, waiting=None,
    public_url: str = "", **how,
):  # fmt: skip
    """A service without a trainer: its address, its socket, and itself."""
    with TemporaryDirectory() as place:
        socket = Path(place) / "bell"
        log = CommandLog(folder / "tinker", waiting=waiting)
        service = make_service(folder, IntakeLimits(), open_to_all=open_to_all)
        tinker = Tinker(log, Futures(log, socket, **how), price)
        app = make_app(service, public_url=public_url, tinker=tinker)
        server = make_server(app, port=0, timeout_graceful_shutdown=1)
        bound = server.config.bind_socket()
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", socket, service
        finally:
            service.ending = server.should_exit = True
            thread.join(SECONDS)


class Asked:
    """A service, and what may be asked of it."""

    def __init__(self, address, socket, service, folder):
        self.address, self.socket, self.service = address, socket, service
        self.folder = folder
        self.log = CommandLog(folder / "tinker")
        self.client = httpx.Client(base_url=f"{address}/api/v1", verify=TRUSTED, timeout=300)

    def post(self, path, body=None, key="tml-any", **more):
        content = {"json": body} if "content" not in more else {}
        headers = {"X-API-Key": key} | more.pop("headers", {})
        return self.client.post(path, headers=headers, **content, **more)

    def get(self, path, key="tml-any"):
        return self.client.get(path, headers={"X-API-Key": key})

    def session(self, key="tml-any"):
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        return self.post("/create_session", body, key).json()["session_id"]

    def model(self, session, key="tml-any"):
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tlora-fx/small"}
        return self.post("/create_model", body, key).json()

    def finish(self, answer=None, seconds=0.0):
        """Do what a trainer would: answer all that may run, which takes so long together."""
        ran = [command for own in self.log.runnable().values() for command in own]
        cycle = Ran("forward_backward", time.time(), dict.fromkeys(ran, 3), seconds)
        outcomes = [Outcome(each, json_answer(answer or {"did": each.kind}), 3) for each in ran]
        self.log.finish(outcomes, cycle if seconds else None)
        return [each.number for each in ran]


@pytest.fixture
def asked(tmp_path):
    with serving(tmp_path, seconds=0.5) as (address, socket, service):
        yield Asked(address, socket, service, tmp_path)
