"""A run of job files with workers that train nothing, in a process that may be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import yaml

from tests.scheduler import fake_admission
from tests.scheduler.fake_admission import Prepared
from tests.scheduler.toy import Roofline
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.formations import Callback
from tlora_fx.scheduler.local.executor import LocalOptions
from tlora_fx.scheduler.local.watchdog import StallLimits
from tlora_fx.scheduler.loop import LoopOptions
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.scheduler.service import RunOptions, opened
from tlora_fx.scheduler.store import Ledger

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
FAKE = "tests.scheduler.fake_worker"
#: What the fake worker is told besides.
MORE = ("step_seconds", "warn_at", "hang_at", "described", "fails", "gates")
#: No run of a test takes longer.
LONGEST_SECONDS = 900.0


class Heard(Callback):
    """What a run said."""

    def __init__(self):
        self.said = []

    def resumed(self, jobs, done):
        self.said.append(("went on", jobs, done))

    def read_file(self, name, jobs, mistake):
        self.said.append(("took", name, jobs, mistake))

    def refused(self, time, request, reason):
        self.said.append(("refused", request.name, reason))

    def warned(self, time, run, text):
        self.said.append(("warned", run.group.jobs, text))

    def gave_up(self, time, job, reason):
        self.said.append(("gave up", job.name, reason))


def write_job(folder: Path, name: str, steps: int, **fields) -> Path:
    """A job file with one job, written as an editor does: beside, then renamed."""
    entry = {"name": name, "lora": {"r": 4}, "max_steps": steps} | fields
    entry["data"] = {"path": str(QUICKSTART / "data" / "records.jsonl")}
    content = {"base": {"config": str(QUICKSTART / "base")}, "jobs": [entry]}
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{name}.tmp"
    hidden.write_text(yaml.safe_dump(content))
    return hidden.rename(folder / f"{name}.yaml")


def options(**changed):
    more = {name: changed.pop(name) for name in MORE if name in changed}
    more = {"step_seconds": 0.01} | more
    accept = changed.pop("accept_changes", False)
    stall = changed.pop("stall", StallLimits())
    local = LocalOptions(save_seconds=0.05, more=more, stall=stall, accept_changes=accept)
    loop = {
        name: changed.pop(name)
        for name in ("horizon", "switch_seconds", "refresh", "tries")
        if name in changed
    }
    loop = LoopOptions(**({"horizon": 0.4, "switch_seconds": 0.1} | loop))
    fixed = {"loop": loop, "linger": 0.0, "worker": FAKE, "local": local}
    fixed["admission_worker"] = fake_admission.__name__
    return RunOptions(**(fixed | changed))


def run(jobs: Path, output: Path, heard=None, until=lambda running: False, **changed):
    """Run until all is done, or something is true."""
    policy = policy_of(changed.pop("policy", "tlora"))
    callback = heard or Heard()
    slots = changed.pop("slots", 2)
    cluster = Cluster(slots, slots, 1, "cpu")
    with opened(
        jobs, output, cluster, policy, Roofline(), Prepared(), callback, options(**changed)
    ) as running:
        turn(running, until)
    return callback


def turn(running, until=lambda running: False):
    """Turn a run until it is over, or something is true; one that stands still says how it does."""
    end = time.monotonic() + LONGEST_SECONDS
    while running.turn() and not until(running):
        assert time.monotonic() < end, standing(running)
        time.sleep(0.01)


def standing(running) -> str:
    """What a run waits for."""
    loop, admission = running.loop, running.admission
    return (
        f"it goes on for {LONGEST_SECONDS:.0f} s: window {list(loop.window.jobs)}, held "
        f"{loop.held}, runs {loop.running}, files waiting {running.files.waiting}, admission "
        f"{admission._files} {admission._tasks} {admission._running}, gathered {running._gathered}"
    )


def forked(jobs: Path, output: Path, **changed) -> int:
    """The same in a process of its own; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(jobs, output, **changed)
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def kill(pid: int, *, workers: bool = False) -> bool:
    """Kill -9, with all that it has started or without; whether it was still running."""
    ended, _ = os.waitpid(pid, os.WNOHANG)
    if ended:
        return False
    servers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if workers else []
    os.kill(pid, signal.SIGKILL)
    for server in servers:
        # A fork server leads a session of its own, with its workers.
        with suppress(ProcessLookupError):
            os.killpg(int(server), signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def audit(output: Path) -> list[list]:
    """What the workers did: time, epoch, what, job, step."""
    return [json.loads(line) for line in (output / "audit.jsonl").read_text().splitlines()]


def records(output: Path) -> dict:
    """The ledger's jobs by name."""
    return {record.name: record for record in _read(output, Ledger.jobs)}


def epochs(output: Path) -> list:
    """The ledger's formations."""
    return _read(output, Ledger.epochs)


def _read(output: Path, what):
    """From a copy, so that nobody is disturbed."""
    copy = output.with_name(f"{output.name}.ledger")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path in output.glob("ledger.sqlite*"):
        shutil.copy(path, copy)
    ledger = Ledger(copy / "ledger.sqlite")
    found = what(ledger)
    ledger.close()
    return found
