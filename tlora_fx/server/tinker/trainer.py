"""The trainer's process, as the service starts it and keeps it alive."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from tlora_fx.errors import TloraError
from tlora_fx.host.clock import SteadyClock
from tlora_fx.host.quiet_import import without_foreign_notices
from tlora_fx.server.answering import Answering
from tlora_fx.server.log_lines import log_to_stderr

if TYPE_CHECKING:
    from tlora_fx.training.options import EngineOptions


@contextmanager
def training(
    options: EngineOptions, log_format: str, died: Callable[[str, float], None],
    clock: SteadyClock | None = None,
) -> Iterator[tuple[Answering, Path]]:  # fmt: skip
    """Inside, a trainer runs; yields what keeps it alive, and the socket of its bell.

    died     as of `Answering`
    clock    of the log; None: one of its own
    raises   ServiceRefused where it does not start; the error of a base that cannot be used
    """
    # A path of a socket is short, and a run's folder may not be.
    with tempfile.TemporaryDirectory(prefix="tlora-fx-") as folder:
        bell = Path(folder) / "bell"
        process = Answering(partial(_train, options, bell, log_format, clock), [], died, "trains")
        try:
            process.start()
            yield process, bell
        finally:
            process.close()


def _train(
    options: EngineOptions, bell: Path, log_format: str, clock: SteadyClock | None,
    sockets: list[socket], parent: Connection,
) -> None:  # fmt: skip
    """Train until the parent has ended; it alone hears signals."""
    from tlora_fx.training.engine import Engine
    from tlora_fx.training.log import CommandLog
    from tlora_fx.training.process import run_commands

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr(log_format)
    ended = threading.Event()

    def watch() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    with without_foreign_notices():
        try:
            log, engine = CommandLog(options.folder, clock), Engine(options)
        except TloraError as error:
            parent.send(error)
            return
        run_commands(log, engine, bell, lambda: parent.send(True), ended)
