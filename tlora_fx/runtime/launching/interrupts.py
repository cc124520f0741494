"""Signals that ask a run to stop: it ends with a checkpoint."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tlora_fx.host import early_end

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask to stop; without SIGHUP where it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(n for n in SIGNALS if not (ignored and n == signal.SIGHUP))


def leave_terminal() -> None:
    """Write no more to a terminal that is closed: each line of it would be an error."""
    for descriptor in range(3):
        if not stat.S_ISCHR(os.fstat(descriptor).st_mode):
            continue
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, descriptor)
        os.close(nothing)


class Terminated(BaseException):
    """SIGTERM came while nothing ran that ends in an order of its own, as during imports."""


@contextmanager
def raising_terminated() -> Iterator[None]:
    """Context in which SIGTERM raises Terminated; a second one ends the process without a word.

    Nothing changes under torchrun, which names the signal itself, outside the main thread, and
    where SIGTERM is ignored or has a handler already. Processes that are forked inside begin with
    the default action, which also ends those that run no Python at that moment.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, early_end.ends)
    if not is_main or not is_default or "RANK" in os.environ:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    os.register_at_fork(after_in_child=forget_terminated)
    try:
        yield
    finally:
        forget_terminated()


def forget_terminated() -> None:
    """Give SIGTERM its default action again, where it would raise Terminated."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    forget_terminated()
    raise Terminated


class Interrupts:
    """Context in which `asked` says whether the user wants to stop after the round.

    Ctrl-C, SIGTERM and SIGHUP ask for it; a second one stops the run at once. SIGHUP comes when a
    terminal is closed, often twice, so that no number of them does more than one. Where it was
    ignored from the start, as under nohup, it stays ignored.

    grace_seconds   for one of several processes: how long the round may still take. Where another
                    process has died, the round never ends, and what waits for it hears no signal;
                    so a thread ends the process then. None: the round takes as long as it takes
    """

    def __init__(self, grace_seconds: float | None = None) -> None:
        self.asked = False
        self._grace = grace_seconds
        self._settled = threading.Event()
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Interrupts:
        """Take over the signals, where the main thread is asking."""
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._hear)
            if self._grace is not None:
                self._watch()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        self.settle()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            # The thread that waits for it ends.
            os.close(self._pipe[1])

    def settle(self) -> None:
        """All processes are about to stop: what is left to do may take its time."""
        self._settled.set()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        elif self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def _watch(self) -> None:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._end_in_time, args=(self._pipe[0],), daemon=True).start()

    def _end_in_time(self, end: int) -> None:
        # Reading ends when the other end is closed.
        while heard := os.read(end, 1):
            if heard[0] in SIGNALS and not self._settled.wait(self._grace):
                sys.stderr.write(
                    f"stopped without a checkpoint: the round did not end within {self._grace:g} "
                    "seconds, as where another process has died\n"
                )
                sys.stderr.flush()
                os._exit(128 + heard[0])
        os.close(end)
