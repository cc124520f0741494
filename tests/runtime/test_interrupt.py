"""A process that waits for one that has died ends all the same."""

from __future__ import annotations

import signal
import subprocess
import sys

WAITING = """
import os, signal, threading
from tlora_fx.runtime.launching.interrupts import Interrupts

with Interrupts(grace_seconds=0.2) as interrupts:
    os.kill(os.getpid(), signal.SIGTERM)
    {settled}
    threading.Event().wait(2)
    assert interrupts.asked
"""


def test_a_round_that_never_ends_is_ended() -> None:
    """After SIGTERM the process has its grace, and no longer."""
    told = _run(WAITING.format(settled="pass"))

    assert told.returncode == 128 + signal.SIGTERM, told.stderr
    assert "stopped without a checkpoint" in told.stderr


def test_a_run_that_stops_takes_its_time() -> None:
    """Once all processes have agreed to stop, the last checkpoint may take longer."""
    told = _run(WAITING.format(settled="interrupts.settle()"))

    assert told.returncode == 0, told.stderr


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
