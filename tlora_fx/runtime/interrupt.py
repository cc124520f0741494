"""Ctrl-C and SIGTERM ask a run to stop after the round; a second one stops it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 10.0


class Interrupts:
    """Within this, `asked` says whether the user wants to stop.

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
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._hear)
            if self._grace is not None:
                self._watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        if self.asked:
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
