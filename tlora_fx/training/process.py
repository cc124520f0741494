"""The trainer's process: an engine, a cycle, and the bell by which it hears of new commands.

The bell is a Unix socket by which two processes tell each other that the command log has something
new. No data passes, so nothing is lost with a connection: whoever connects again looks at the log.
The trainer listens. A client rings for new commands; the trainer rings the number of each command
that it has answered.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tlora_fx.host.durable import replace_file
from tlora_fx.training.cycle import Cycle
from tlora_fx.training.engine import Engine
from tlora_fx.training.folders import LAYOUT
from tlora_fx.training.log import WAITING, CommandLog

logger = logging.getLogger(__name__)
#: For which a cycle waits for models that took part in the one before.
GATHER_SECONDS = 0.01
#: Between looks at the log without a ring, and between looks for expired checkpoints.
LOOK_SECONDS, TIDY_SECONDS = 1.0, 60.0
#: For which answers can be fetched again.
KEPT_SECONDS = 24 * 3600.0


class Bell:
    """The trainer's end.

    path   of the socket; one that a killed trainer has left is replaced
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        self._clients: list[socket.socket] = []
        self._lock, self._rung = threading.Lock(), threading.Event()
        threading.Thread(target=self._accept, name="bell", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until somebody rings; False where nobody did."""
        rung = self._rung.wait(seconds)
        self._rung.clear()
        return rung

    def ring(self, numbers: Iterable[int]) -> None:
        """Tell all clients that these commands have answers."""
        text = "".join(f"{number}\n" for number in numbers).encode()
        with self._lock:
            for client in list(self._clients):
                try:
                    client.sendall(text)
                except OSError:
                    self._drop(client)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        with self._lock:
            for client in list(self._clients):
                self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        if client in self._clients:
            self._clients.remove(client)
        client.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._clients.append(client)
            threading.Thread(target=self._hear, args=(client,), daemon=True).start()
            # It may have written commands before it could ring.
            self._rung.set()

    def _hear(self, client: socket.socket) -> None:
        with suppress(OSError):
            while client.recv(4096):
                self._rung.set()
        with self._lock:
            self._drop(client)


def run_commands(
    log: CommandLog,
    engine: Engine,
    address: Path,
    ready: Callable[[], None],
    ended: threading.Event,
) -> None:
    """Run the commands of a log until the end, once no other trainer does.

    Another one may be ending: when the service was killed, its trainer ends its cycle first.

    address   path of the bell's socket
    ready     called once commands run
    """
    with log.held(ended):
        _tell(log, engine)
        bell = Bell(address)
        cycle = Cycle(log, engine, bell.ring)
        ready()
        _run_until(ended, cycle, bell)
        cycle.tenants.close()
        cycle.layers.close()
        bell.close()
    log.close()


def _tell(log: CommandLog, engine: Engine) -> None:
    """Say what the base is and what fits it, to who answers HTTP."""
    options = engine.options
    log.tell(
        {
            "base_model": options.base_name, "tokenizer": options.tokenizer,
            "max_context": None if engine.positions is None else engine.positions - 1,
            "sampleable": engine.sampler is not None, WAITING: [],
        }
    )  # fmt: skip
    fits = {"layout": engine.layout, "max_rank": options.max_rank}
    replace_file(log.folder / LAYOUT, json.dumps(fits).encode())


def _run_until(ended: threading.Event, cycle: Cycle, bell: Bell) -> None:
    tidied = 0.0
    while not ended.is_set():
        try:
            if not cycle.run():
                bell.wait(LOOK_SECONDS)
                gather(cycle, bell)
        except Exception:
            # A full disk, for one: what has no answer yet runs again.
            logger.exception("a cycle failed", extra={"event": "error"})
            cycle.forget()
            ended.wait(LOOK_SECONDS)
        if time.monotonic() - tidied > TIDY_SECONDS:
            tidied = time.monotonic()
            try:
                tidy(cycle.log)
            except (OSError, sqlite3.Error):
                logger.exception("nothing was tidied", extra={"event": "error"})


def gather(cycle: Cycle, bell: Bell) -> None:
    """Wait a moment for the models of the last cycle, whose clients are about to ask again."""
    end = time.monotonic() + GATHER_SECONDS
    while (left := end - time.monotonic()) > 0:
        if cycle.active <= cycle.log.runnable().keys() or not bell.wait(left):
            return


def tidy(log: CommandLog) -> None:
    """Delete what nobody reads any more: checkpoints that have expired, versions, answers."""
    log.prune(log.now() - KEPT_SECONDS)
    log.forget_stuck()
    log.forget_expired()
    log.sweep()
    for name, folder in log.past_versions().items():
        shutil.rmtree(log.folder / folder, ignore_errors=True)
        log.forget_sampler(name)
