"""The trainer's process, as the service starts it and keeps it alive."""

from __future__ import annotations

import os
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
    options: EngineOptions, log_format: str, say: Callable[[str], None],
    clock: SteadyClock | None = None, ended: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Answering, Path]]:  # fmt: skip
    """Inside, a trainer runs; yields what keeps it alive, and the socket of its bell.

    say      as of `Answering`
    clock    of the log; None: one of its own
    ended    whether the run shall end; nobody waits for the trainer then
    raises   ServiceRefused where it does not start; the error of a base that cannot be used
    """
    # A path of a socket is short, and a run's folder may not be.
    with tempfile.TemporaryDirectory(prefix="tlora-fx-") as folder:
        bell = Path(folder) / "bell"
        target = partial(_train, options, bell, log_format, clock)
        process = Answering(target, [], say, "trains for clients")
        try:
            process.start(ended)
            yield process, bell
        finally:
            process.close()


def _train(
    options: EngineOptions, bell: Path, log_format: str, clock: SteadyClock | None,
    sockets: list[socket], parent: Connection,
) -> None:  # fmt: skip
    """Train until the parent has ended; it alone hears signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr(log_format)
    ready, ended = threading.Event(), threading.Event()

    def watch() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        ended.set()
        if not ready.is_set():
            # Loading a base and compiling layers take minutes, and nothing has run yet.
            os._exit(0)

    def begin() -> None:
        ready.set()
        parent.send(True)

    threading.Thread(target=watch, daemon=True).start()
    import torch

    from tlora_fx.runtime.launching.launch import Launch, let_segments_grow
    from tlora_fx.training.engine import Engine
    from tlora_fx.training.log import CommandLog
    from tlora_fx.training.process import run_commands

    let_segments_grow(torch.device(options.device), Launch())
    with without_foreign_notices():
        try:
            log, engine = CommandLog(options.folder, clock), Engine(options)
        except TloraError as error:
            parent.send(error)
            return
        run_commands(log, engine, bell, begin, ended)
