"""The processes of `train --gpus`: how many, what they know, what is told when they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tlora_fx.errors import LaunchError
from tlora_fx.runtime.launching import local_launch
from tlora_fx.runtime.launching.local_launch import process_count

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from tlora_fx.errors import TloraError
from tlora_fx.runtime.launching import local_launch
from tlora_fx.runtime.launching.local_launch import Ending, start_processes

# On a busy machine one process may begin long after another one has ended.
local_launch.TELL_SECONDS = float(os.environ.get("TEST_TELL_SECONDS", 600))
try:
    start_processes(3, lambda: "start again")
except TloraError as error:
    sys.exit(str(error))
except KeyboardInterrupt as stop:
    sys.exit(f"interrupted: {stop}")
rank, folder = int(os.environ["RANK"]), Path(os.environ["TLORA_FX_START_FOLDER"])

def say(*words):
    os.write(1, " ".join(map(str, words)).encode() + b"\\n")

def is_over(other):
    # Its number stands in a file, and its parent has waited for it.
    numbers = folder / f"pid-{other}"
    return numbers.exists() and not Path(f"/proc/{numbers.read_text()}").exists()

part = folder / f"part-{rank}"
part.write_text(str(os.getpid()))
part.rename(folder / f"pid-{rank}")

def leave(kind, text="", code=1):
    Ending(kind, text).write(folder, rank)
    os._exit(code)

"""


#: After which a test gives up.
SECONDS = 900


def start(code: str, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """A program that becomes three processes, each of which runs some code.

    before   what it runs before it becomes them
    """
    return subprocess.Popen(
        [sys.executable, "-c", before + BEGIN + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "", **environment},
    )


def ended(code: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of such a program."""
    program = start(code, **environment)
    out, err = program.communicate(timeout=SECONDS)
    return program.returncode, out, err


def test_each_process_has_the_variables_of_torchrun() -> None:
    """And the folder in which all meet, which is removed at the end."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    code, out, _ = ended(f"say(*(os.environ[n] for n in {names}), folder)")

    lines = sorted(line.rpartition(" ") for line in out.splitlines())
    assert code == 0
    assert [line[0] for line in lines] == [f"{rank} {rank} 3 3 0" for rank in range(3)]
    assert len({line[2] for line in lines}) == 1
    assert not Path(lines[0][2]).exists()


def test_one_error_is_told_of_all_that_processes_have_met() -> None:
    """The one of the process in which it arose, not those that follow from it."""
    code, _, err = ended("""
kinds = {0: ("lost", "connection gone"), 1: ("echoed", "rank 2 failed"), 2: ("error", "the cause")}
leave(*kinds[rank])
""")

    assert (code, err) == (1, "rank 2: the cause\n")


def test_processes_that_hang_are_ended_after_an_error() -> None:
    """They hear no signal."""
    code, _, err = ended(
        """
if rank == 0:
    leave("error", "the cause")
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
say(os.getpid())
time.sleep(3600)
""",
        TEST_TELL_SECONDS="1",
    )

    assert (code, err) == (1, "the cause\n")


def test_a_killed_process_is_named() -> None:
    """With the signal, and with what to do."""
    code, _, err = ended("""
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not is_over(1):
    time.sleep(0.01)
leave("lost", "connection gone")
""")

    assert code == 1
    assert re.search(r"error\[T0812\].*\n  rank  +1\n  found +SIGKILL\n  help +start again", err)
    assert "connection gone" not in err


def test_a_process_that_has_said_all_ends_no_other() -> None:
    """Failed jobs make an exit code; the first process may still have work to do."""
    code, out, err = ended(
        """
if rank == 0:
    while not (is_over(1) and is_over(2)):
        time.sleep(0.01)
    time.sleep(2 * local_launch.TELL_SECONDS)
    say("all is written")
leave("exit")
""",
        TEST_TELL_SECONDS="1",
    )

    assert (code, out, err) == (1, "all is written\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_each_process_once(number: signal.Signals) -> None:
    """Also Ctrl-C, which a terminal sends to the whole foreground."""
    program = start("""
def hear(number, frame):
    say("heard")
    if rank == 0:
        leave("interrupted", "stopped after a checkpoint", 130)
    leave("interrupted", "", 130)

signal.signal(signal.SIGTERM, hear)
say("ready")
# Python hears a signal that comes just before a sleep begins after it.
while True:
    time.sleep(0.01)
""")
    assert program.stdout is not None
    for _ in range(3):
        assert program.stdout.readline() == "ready\n"
    program.send_signal(number)
    out, err = program.communicate(timeout=SECONDS)

    assert out == "heard\n" * 3
    assert err == "interrupted: stopped after a checkpoint\n"


INTERRUPTED_FORK = """
import os, signal
fork, forked = os.fork, []

def interrupted():
    forked.append(fork())
    if len(forked) == int(os.environ["TEST_LAST_FORK"]) and forked[-1]:
        os.kill(os.getpid(), signal.SIGINT)
    return forked[-1]

os.fork = interrupted
"""


@pytest.mark.parametrize("last", [1, 2, 3])
def test_no_process_outlives_a_signal_that_comes_at_a_fork(last: int) -> None:
    """It would train on, alone, and be waited for: that one, and any that is forked later."""
    program = start("time.sleep(3600)", INTERRUPTED_FORK, TEST_LAST_FORK=str(last))
    out, err = program.communicate(timeout=SECONDS)

    assert (program.returncode, out, err) == (1, "", "interrupted: \n")


def test_processes_end_with_the_one_that_has_started_them() -> None:
    """They are asked to stop, as by a user."""
    program = start("say(os.getpid())\ntime.sleep(3600)")
    assert program.stdout is not None
    pids = [int(program.stdout.readline()) for _ in range(3)]
    program.kill()
    program.communicate(timeout=SECONDS)

    end = time.monotonic() + SECONDS
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("gpus", "device", "count"), [("all", None, 4), ("3", "cuda", 3), ("6", "cpu", 6)]
)
def test_a_number_of_processes_is_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, gpus: str, device: str | None, count: int
) -> None:
    """On a CPU any number goes."""
    monkeypatch.setattr(local_launch, "visible_gpus", lambda _: 4)

    assert process_count(gpus, device, {}) == count


@pytest.mark.parametrize(
    ("gpus", "device", "environment"),
    [
        ("5", None, {}),
        ("0", None, {}),
        ("-1", None, {}),
        ("some", None, {}),
        ("all", "cpu", {}),
        ("2", "cpu", {"RANK": "0"}),
    ],
)
def test_other_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: str, device: str | None, environment: dict[str, str]
) -> None:
    """And so are processes that torchrun has started."""
    monkeypatch.setattr(local_launch, "visible_gpus", lambda _: 4)

    with pytest.raises(LaunchError, match=f"--gpus {gpus}"):
        process_count(gpus, device, environment)
