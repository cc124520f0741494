"""Keeps a process alive that answers requests or trains, beside the one that schedules.

The scheduler's process listens, and each process that answers gets its sockets. The address
therefore stays the same when one dies, and whoever connects meanwhile waits for the next one.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tlora_fx.errors import ServiceRefused, TloraError
from tlora_fx.runtime.workers.protocol import exit_text

#: Connections that wait until a process accepts them.
BACKLOG = 2048
#: Pause before a process that died is replaced; it doubles up to `MAX_PAUSE_SECONDS` while each
#: one dies within `STEADY_SECONDS`.
PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 60.0
#: Between looks whether the run shall end while the first process starts.
LOOK_SECONDS = 0.1
#: For which the process may end what it is at when the run has ended.
END_SECONDS = 10.0


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on each address of a host, all on one port.

    port     0: a free one
    raises   ServiceRefused
    """
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        addresses, problem = [], error
    for family, _, _, _, address in addresses:
        bound = sockets[0].getsockname()[1] if sockets else port
        where = (address[0], bound, *address[2:])
        try:
            sockets.append(socket.create_server(where, family=family, backlog=BACKLOG))
        except OSError as error:
            problem = error
            # A name may have addresses of a kind that this machine does not have.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    else:
        if sockets:
            return sockets
    for each in sockets:
        each.close()
    raise ServiceRefused(
        "it cannot listen there",
        found=f"{host}:{port}",
        reason=problem,
        help="choose another --port or --host",
    )


class Answering:
    """A process that answers requests; another one takes its place when it dies.

    target    what it runs, with the sockets and its end of a pipe: it sends True once it answers,
              or the TloraError for which it ends, and ends when the other end is closed
    sockets   listening
    say       is told how the process ended, and in how many seconds the next one begins
    does      what it does, for what is said
    """

    def __init__(
        self,
        target: Callable[[list[socket.socket], Connection], None],
        sockets: list[socket.socket],
        say: Callable[[str], None],
        does: str = "answers requests",
    ) -> None:
        self._target, self._sockets, self._say, self._does = target, sockets, say, does
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._started = self._due = 0.0
        self._pause = PAUSE_SECONDS / 2

    def start(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Start the first process, and wait until it answers, or the run shall end.

        ended    whether it shall; no process is started then
        raises   ServiceRefused; the error that the process sends
        """
        if ended():
            self._due = math.inf
            return
        self._start()
        assert self._pipe is not None
        try:
            while not self._pipe.poll(LOOK_SECONDS):
                if ended():
                    return
            answer = self._pipe.recv()
        except EOFError:
            raise ServiceRefused(
                f"the process that {self._does} ended at its start", help="the log says why"
            ) from None
        if isinstance(answer, TloraError):
            raise answer

    def keep(self) -> None:
        """Replace a process that has died, once its pause is over. Never waits."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._due:
                self._start()
        elif not self._process.is_alive():
            how = self._how()
            steady = now - self._started > STEADY_SECONDS
            self._pause = PAUSE_SECONDS if steady else min(2 * self._pause, MAX_PAUSE_SECONDS)
            self._due = now + self._pause
            self._forget()
            self._say(
                f"the process that {self._does} died ({how}); the next starts in {self._pause:g} s"
            )

    def close(self) -> None:
        """End the process."""
        for each in self._sockets:
            each.close()
        process = self._process
        if process is not None and self._pipe is not None:
            self._pipe.close()
            process.join(END_SECONDS)

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, its = spawn.Pipe()
        self._process = spawn.Process(target=self._target, args=(self._sockets, its), daemon=True)
        self._started = time.monotonic()
        self._process.start()
        its.close()

    def _how(self) -> str:
        """How the process ended: its exit, or the error that it sent."""
        assert self._process is not None
        assert self._pipe is not None
        with suppress(EOFError, OSError):
            while self._pipe.poll():
                if isinstance(answer := self._pipe.recv(), TloraError):
                    return f"error[{answer.code}] {answer.what}"
        return exit_text(self._process.exitcode or 0)

    def _forget(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._process.close()
            self._pipe.close()
        self._process = self._pipe = None
