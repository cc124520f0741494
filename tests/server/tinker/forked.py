"""The service's two processes without what schedules jobs, forked from one that has the engine.

So either begins at once when it was killed, and is killed at work and not while it imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import httpx

PROCESSES = ("trainer", "answering")


def nursery(pipe, folder, options):
    """Fork a process for each name that comes, and send its id; first the address."""
    from tlora_fx.server.connections import make_server
    from tlora_fx.training.engine import Engine

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    engine = Engine(options)
    # Of the one who forks, so that the address stays, as in the service.
    bound = make_server(None, port=0).config.bind_socket()
    pipe.send(f"http://127.0.0.1:{bound.getsockname()[1]}")
    while name := pipe.recv():
        if pid := os.fork():
            pipe.send(pid)
            continue
        try:
            if name == "trainer":
                train(folder, engine)
            else:
                answer(folder, bound)
        finally:
            os._exit(1)


def train(folder, engine):
    """Run the log's commands until killed."""
    from tlora_fx.training.log import CommandLog
    from tlora_fx.training.process import run_commands

    log = CommandLog(folder / "tinker")
    run_commands(log, engine, folder / "bell", lambda: None, threading.Event())


def answer(folder, bound):
    """Answer HTTP until killed."""
    from tlora_fx.server.app import make_app
    from tlora_fx.server.connections import make_server
    from tlora_fx.server.service import make_service
    from tlora_fx.server.submission import IntakeLimits
    from tlora_fx.server.tinker.futures import Futures
    from tlora_fx.server.tinker.routes import Tinker
    from tlora_fx.training.log import CommandLog

    log = CommandLog(folder / "tinker")
    service = make_service(folder, IntakeLimits(), open_to_all=True)
    app = make_app(service, tinker=Tinker(log, Futures(log, folder / "bell")))
    make_server(app, port=0).run([bound])


class Forked:
    """A service of two processes that can be killed, at one address."""

    hits = (*PROCESSES, "both")

    def __init__(self, folder, **options):
        from tlora_fx.training.options import EngineOptions

        spawn = multiprocessing.get_context("spawn")
        self._pipe, its = spawn.Pipe()
        given = (its, folder, EngineOptions(folder / "tinker", **options))
        self._process = spawn.Process(target=nursery, args=given)
        self._process.start()
        # Of the other end alone, so that nobody waits for one that has ended.
        its.close()
        address = self._pipe.recv()
        self.client = httpx.Client(base_url=f"{address}/api/v1", timeout=300)
        self.models: Path = folder / "tinker" / "models"
        self._pids = {name: self._begin(name) for name in PROCESSES}

    def _begin(self, name):
        self._pipe.send(name)
        return self._pipe.recv()

    def kill(self, hit):
        """Kill -9 the trainer, who answers, or both, and begin them anew."""
        hits = PROCESSES if hit == "both" else (hit,)
        for name in hits:
            os.kill(self._pids[name], signal.SIGKILL)
        self._pids |= {name: self._begin(name) for name in hits}
        return True

    def end(self):
        """Kill all."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        self._pipe.send("")
        self._process.join()
