"""SIGTERM while a command's own modules are imported: one line, and the usual exit status."""

from __future__ import annotations

import os
import signal
from types import FrameType

TERMINATED = 143


def end_on_sigterm() -> None:
    """End this process on SIGTERM from now on, until the command hears it itself.

    Nothing changes under torchrun, which names the signal itself, and where SIGTERM is ignored or
    has a handler already.
    """
    if "RANK" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, ends)


def ends(number: int, frame: FrameType | None) -> None:
    """Handler that says why the process ends, and ends it in the middle of what it does."""
    os.write(2, b"terminated by SIGTERM\n")
    os._exit(TERMINATED)
