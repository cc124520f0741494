"""A process that waits for one that has died ends all the same."""

from __future__ import annotations

import signal
import subprocess
import sys

WAITING = """
import os, signal, threading
from tlora_fx.runtime.launching.interrupts import Interrupts

with Interrupts(grace_seconds={grace}) as interrupts:
    os.kill(os.getpid(), signal.SIGTERM)
    {settled}
    threading.Event().wait({seconds})
    assert interrupts.asked
"""


def test_a_round_that_never_ends_is_ended() -> None:
    """After SIGTERM the process has its grace, and no longer."""
    told = _run(WAITING.format(grace=0.2, settled="pass", seconds=600))

    assert told.returncode == 128 + signal.SIGTERM, told.stderr
    assert "stopped without a checkpoint" in told.stderr


def test_a_run_that_stops_takes_its_time() -> None:
    """Once all processes have agreed to stop, the last checkpoint may take longer."""
    told = _run(WAITING.format(grace=3, settled="interrupts.settle()", seconds=5))

    assert told.returncode == 0, told.stderr


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=900
    )
