"""A fork server without a server: workers are forked from the test's own process."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module

from tlora_fx.runtime.workers import training as worker
from tlora_fx.scheduler.local import processes


class ForkHere:
    """As `ForkServer`; torch is imported already, so nobody waits ten seconds."""

    def __init__(self, log, *, module=None, held=None, environment=None):
        self.environment = dict(environment or {})
        self.module = import_module(module) if module else worker
        self.pids = {}
        self.codes = {}
        self.lifeline, self.mine = os.pipe()

    ready = True

    def begin(self):
        """There is nothing to begin."""

    def start(self, start) -> int:
        """Fork a worker, which ends with its order, or a guest."""
        asked = {**asdict(start), "environment": {**self.environment, **start.environment}}
        pid = os.fork()
        if pid == 0:
            os.close(self.mine)
            processes._become_worker(self.module, self.lifeline, asked)
        self.pids[pid] = pid
        return pid

    def free_memory(self, number: int, needs) -> None:
        """Nobody is idle."""

    def news(self) -> list:
        """Nothing becomes of idle workers."""
        return []

    def signal(self, number: int, signum: int) -> None:
        """Signal a worker that is there."""
        if self.code(number) is None:
            with suppress(ProcessLookupError):
                os.killpg(number, signum)  # a guest leads a group
            os.kill(number, signum)

    def code(self, number: int):
        """Its exit code, None while it runs."""
        if number not in self.codes:
            pid, status = os.waitpid(number, os.WNOHANG)
            if pid:
                self.codes[number] = os.waitstatus_to_exitcode(status)
        return self.codes.get(number)

    def close(self) -> None:
        """Let go of the lifeline, and wait for all."""
        os.close(self.mine)
        os.close(self.lifeline)
        for number in self.pids:
            if self.code(number) is None:
                self.codes[number] = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


class GuestsHere(processes.ForkServer):
    """A fork server whose guests are forked from the test's own process, and see its patches."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.here = ForkHere(None)
        self.guests = set()

    @property
    def ready(self):
        return True

    def start(self, start):
        if not start.module:
            return super().start(start)
        number = self.here.start(start)
        self.guests.add(number)
        return number

    def signal(self, worker, number):
        (self.here if worker in self.guests else super()).signal(worker, number)

    def code(self, worker):
        return (self.here if worker in self.guests else super()).code(worker)
