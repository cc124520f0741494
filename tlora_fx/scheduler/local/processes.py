"""The fork server and its workers, from the parent's side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKER = "tlora_fx.scheduler.local.worker"
LOST = -signal.SIGKILL


class ForkServer:
    """Starts workers, and hears when they end.

    module        what workers run; see `forkserver`
    log           file for what the server and its imports say
    held          a file descriptor that the server and all workers inherit; what is locked by it
                  stays locked until the last of them has ended
    environment   beside the parent's own
    """

    def __init__(
        self,
        log: Path,
        *,
        module: str = WORKER,
        held: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._log, self._held = module, log, held
        self._environment = dict(environment or {})
        self._ended: dict[int, int] = {}
        self._running: set[int] = set()
        self._heard = b""
        self._next = 1
        self._ready = False
        self._lifeline: int | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the server, so that it imports while there is nothing else to do yet."""
        if self._server is not None and self._server.poll() is None:
            return
        self.close()
        reading, self._lifeline = os.pipe()
        kept = [reading] + ([] if self._held is None else [self._held])
        command = [sys.executable, "-m", "tlora_fx.scheduler.local.forkserver"]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(  # noqa: S603  (our own module)
                [*command, self._module, str(reading)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=kept,
                env={**os.environ, **self._environment},
                bufsize=0,
                # Ctrl-C is for the parent, which drains its groups in order.
                start_new_session=True,
            )
        os.close(reading)
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._heard, self._ready = b"", False

    @property
    def ready(self) -> bool:
        """Whether it has imported everything, so that workers begin at once."""
        self._hear()
        return self._ready

    def start(self, order: Path, log: Path, environment: Mapping[str, str]) -> int:
        """Start a worker; its number."""
        self.begin()
        number, self._next = self._next, self._next + 1
        self._running.add(number)
        self._ask(
            {"start": number, "order": str(order), "log": str(log), "environment": environment}
        )
        return number

    def signal(self, worker: int, number: int) -> None:
        """Send a worker a signal; nothing happens where it has ended."""
        if worker in self._running:
            self._ask({"signal": worker, "number": number})

    def code(self, worker: int) -> int | None:
        """The exit code of a worker, negative for a signal; None while it runs."""
        self._hear()
        return self._ended.get(worker)

    def close(self) -> None:
        """Ask all workers to stop, and wait until they have ended."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._server is not None:
            self._server.wait()
            for pipe in (self._server.stdin, self._server.stdout):
                if pipe is not None:
                    pipe.close()
            self._server = None
        self._lose()

    def _ask(self, what: dict[str, Any]) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(json.dumps(what).encode() + b"\n")
        except BrokenPipeError:
            self._lose()

    def _hear(self) -> None:
        if self._server is None or self._server.stdout is None:
            return
        gone = self._server.poll() is not None
        while content := self._server.stdout.read(65536):
            self._heard += content
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "ready" in told:
                self._ready = True
                continue
            self._running.discard(told["ended"])
            self._ended[told["ended"]] = told["code"]
        if gone:
            self._lose()

    def _lose(self) -> None:
        """The server is gone, and by its death each of its workers."""
        self._ended |= dict.fromkeys(self._running, LOST)
        self._running.clear()
