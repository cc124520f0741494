"""A worker that trains nothing and takes no time to import: its adapter is a number.

It keeps the worker's side of the protocol: it reads an order, tells lines, saves checkpoints in
the real format (without tensors), and stops at SIGTERM with a last one. What it does is written to
audit.jsonl of the run: who began where, which step was done, what was committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tlora_fx.config.halving import HalvingSpec
from tlora_fx.runtime.workers.protocol import (
    FILES_ABSENT,
    NEEDS_NEW_PROCESS,
    OUT_OF_MEMORY,
    SUCCESSOR,
    EventWriter,
    WorkerConfig,
    rung_losses,
)

#: In the folder of a run: while it is not there, no job goes beyond its step of option `gates`. So
#: a test has all the time it needs, however slowly its own process runs beside this one.
GATE = "gate-is-open"

#: In the folder of a run: holds a file for each job whose files cannot be read.
GONE = "gone"

#: Set where a server is to import for ever.
NEVER_READY = "TLORA_FX_TEST_NEVER_READY"


def warm() -> None:
    """There is nothing to import.

    To the server all of the machine's main memory is free, whatever else runs there: it ends idle
    workers where memory is short.
    """
    while NEVER_READY in os.environ:
        time.sleep(1.0)
    server = sys.modules["__main__"]
    if hasattr(server, "free_bytes"):
        server.free_bytes = server.total_bytes


def stays() -> bool:
    """Whether it waits for another order, as its last one said."""
    return bool(_orders[-1].options.get("stays"))


def memory() -> tuple[int, int]:
    """What it holds and what is free, as the base of its last order says."""
    held = _orders[-1].options.get("held", {}).get(_orders[-1].jobs[0]["base"], 0)
    return held, _orders[-1].options.get("free", 0)


_orders: list[WorkerConfig] = []


def main(path: Path) -> bool:
    order = WorkerConfig.read(path)
    _orders.append(order)
    if len(_orders) > 1 and any(job.get("anew") for job in order.jobs):
        raise SystemExit(NEEDS_NEW_PROCESS)
    rank = int(os.environ.get("RANK", "0"))
    path.with_name(f"pid{rank or ''}").write_text(str(os.getpid()))
    if rank:
        return _follow(path)
    mark = path.with_name("anew")
    if order.options.get("anew") and not mark.exists():
        mark.touch()
        return False
    _Fake(order).run()
    return True


def _follow(path: Path) -> bool:
    """Wait until the first process of the group has ended its order, or to be asked to stop."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    while not asked and '"kind": "ended"' not in _text_of(path.with_name("events.jsonl")):
        time.sleep(0.01)
    return True


def _text_of(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def is_there(pid: int | None) -> bool:
    """Whether a process runs."""
    with suppress(ProcessLookupError):
        return pid is not None and not os.kill(pid, 0)
    return False


def adapter_of(name: str, steps: int, value: int = 0, done: int = 0) -> int:
    """What a job's adapter is after some steps: each depends on all before."""
    for step in range(done, steps):
        digest = hashlib.sha256(f"{name} {step} {value}".encode()).digest()
        value = int.from_bytes(digest[:6], "little")
    return value


def rungs_of(spec: dict, steps: int) -> list[int]:
    """Steps at which a job is compared."""
    halving = spec.get("halving")
    return HalvingSpec(**halving).rungs(steps) if halving else []


class _Fake:
    def __init__(self, order: WorkerConfig) -> None:
        self.order = order
        self.specs = {job["name"]: job for job in order.jobs}
        self.output = Path(order.output)
        self.root = Path(order.job_folders)
        self.writer = EventWriter(order.event_log, every_seconds=0.01)
        self.stopping = False
        self.rounds = 0
        self.successor: WorkerConfig | None = None
        self.absent: dict[str, str] = {}
        self.jobs = {name: self.restored(name) for name in self.specs}

    def restored(self, name: str, order: WorkerConfig | None = None) -> dict:
        fresh = {"step": 0, "value": 0, "status": "running", "reason": ""}
        sources = (order or self.order).sources
        if name not in sources:
            return fresh
        folder = Path(sources[name]) / "checkpoints"
        newest = (folder / "latest").read_text().split()[0]
        state = json.loads((folder / newest / "state.json").read_text())
        return state["jobs"][name] | {"status": "running"}

    def audit(self, what: str, name: str, step: int) -> None:
        line = json.dumps([time.time(), self.order.epoch, what, name, step]) + "\n"
        handle = os.open(self.root / "audit.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, line.encode())
        os.close(handle)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self.stop)
        for spec in self.specs.values():
            if is_there(spec.get("crowded_by")):
                self.writer.write("failed", reason="out of memory", job=spec["name"])
                raise SystemExit(OUT_OF_MEMORY)
        if absent := {
            name: "it is gone" for name in self.specs if (self.root / GONE / name).exists()
        }:
            self.writer.write("failed", reason="it is gone", job=None, absent=absent)
            raise SystemExit(FILES_ABSENT)
        time.sleep(self.order.options.get("launch_seconds", 0.0))
        steps = {name: job["step"] for name, job in self.jobs.items()}
        for name, step in steps.items():
            self.audit("begin", name, step)
        self.writer.write("started", steps=steps)
        saved = time.monotonic()
        while not self.stopping and self.running():
            due = self.round() or time.monotonic() - saved >= self.order.save_seconds
            due |= self.changes()
            if due and self.running():
                self.save()
                saved = time.monotonic()
        self.save()
        while self.order.options.get("lingers") and not (self.root / GATE).exists():
            time.sleep(0.01)
        self.writer.write("ended")

    def changes(self) -> bool:
        """Let jobs come and go, if somebody asked for it; whether anyone did."""
        pointer = Path(self.order.event_log).with_name(SUCCESSOR)
        if self.successor is not None or not pointer.exists():
            return False
        successor = WorkerConfig.read(Path(pointer.read_text()))
        names = [job["name"] for job in successor.jobs]
        if successor.options.get("declines"):
            if not self.stopping:
                self.writer.write("declined", reason="no room")
            self.stopping = True
            return False
        absent = {
            name: "it is gone"
            for name in names
            if name not in self.specs and (self.root / GONE / name).exists()
        }
        there = tuple(job for job in successor.jobs if job["name"] not in absent)
        successor, self.absent = replace(successor, jobs=there), absent
        for name in self.specs.keys() - set(names):
            if self.jobs[name]["status"] == "running":
                self.jobs[name]["status"] = "paused"
        for job in successor.jobs:
            if job["name"] not in self.specs:
                self.jobs[job["name"]] = self.restored(job["name"], successor)
                self.audit("begin", job["name"], self.jobs[job["name"]]["step"])
        self.specs |= {job["name"]: job for job in successor.jobs}
        self.successor = successor
        return True

    def hand_over(self, successor: WorkerConfig) -> None:
        self.writer.write("handed_over", absent=self.absent)
        self.order, self.successor = successor, None
        self.specs = {job["name"]: job for job in successor.jobs}
        self.writer = EventWriter(successor.event_log, every_seconds=0.01)
        steps = {name: self.jobs[name]["step"] for name in self.specs}
        self.writer.write("started", steps=steps, paused=0.01)
        self.write_saved()

    def stop(self, number: int, frame: object) -> None:
        self.stopping = True

    def running(self) -> list[str]:
        return [name for name, job in self.jobs.items() if job["status"] == "running"]

    def round(self) -> bool:
        """A step of each job; whether one ended."""
        active = self.running()
        if self.rounds == self.order.options.get("warn_at"):
            self.writer.write("warned", text="the disk is full")
        time.sleep(self.order.options.get("step_seconds", 0.01))
        self.rounds += 1
        for name in active:
            if (self.root / name / "stop").exists():
                (self.root / name / "stop").unlink()
                self.jobs[name]["status"] = "done"
                self.write(name)
                continue
            self.step(name)
        self.writer.progress({name: self.jobs[name]["step"] for name in self.specs})
        return len(self.running()) < len(active)

    def step(self, name: str) -> None:
        job, spec = self.jobs[name], self.specs[name]
        gates = self.order.options.get("gates", {})
        if job["step"] >= gates.get(name, float("inf")) and not (self.root / GATE).exists():
            return
        if job["step"] == spec.get("hang_at", self.order.options.get("hang_at")):
            os.kill(os.getpid(), signal.SIGSTOP)
        if job["step"] == spec.get("crash_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if job["step"] == spec.get("exit_at", (None, 0))[0]:
            os._exit(spec["exit_at"][1])
        if job["step"] == spec.get("fail_at", self.order.options.get("fails", {}).get(name)):
            job["status"], job["reason"] = "failed", "loss nan"
            return
        job["value"] = adapter_of(name, job["step"] + 1, job["value"], job["step"])
        job["step"] += 1
        self.audit("step", name, job["step"])
        last = spec.get("steps", spec.get("max_steps"))
        if job["step"] >= last:
            job["status"] = "done"
            self.write(name)
        elif job["step"] in rungs_of(spec, last):
            job["status"] = "paused"
            job["evaluation"] = {"rungs": [[job["step"], float(job["value"])]]}
            self.write(name)

    def write(self, name: str) -> None:
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        job = self.jobs[name]
        (folder / "adapter.json").write_text(json.dumps(job["value"]))
        told = {"status": job["status"], "step": job["step"]}
        (folder / "status.json").write_text(json.dumps(told))

    def save(self) -> None:
        folder = self.output / "checkpoints"
        fresh = folder / f"step-{self.rounds:06d}"
        while fresh.exists():
            fresh = fresh.with_name(f"{fresh.name.partition('.')[0]}.{time.monotonic_ns()}")
        fresh.mkdir(parents=True)
        described = self.order.options.get("described", {})
        # As in a trainer's checkpoint, a job that has left goes on from there: it is running.
        jobs = {
            name: job | {"status": "running"} if job["status"] == "paused" else job
            for name, job in self.jobs.items()
        }
        state = json.dumps({"step": self.rounds, "run": described, "jobs": jobs}).encode()
        (fresh / "state.json").write_bytes(state)
        sums = {"state.json": hashlib.sha256(state).hexdigest()}
        (fresh / "manifest.json").write_text(json.dumps({"format": 1, "sha256": sums}))
        temporary = folder / ".latest.tmp"
        temporary.write_text(fresh.name + "\n")
        temporary.replace(folder / "latest")
        for name in self.specs:
            self.audit("commit", name, self.jobs[name]["step"])
        self.write_saved()
        if self.successor is not None:
            self.hand_over(self.successor)

    def write_saved(self) -> None:
        mine = {name: self.jobs[name] for name in self.specs}
        ended = {
            name: [job["status"], job["reason"]]
            for name, job in mine.items()
            if job["status"] not in ("running", "paused")
        }
        steps = {name: job["step"] for name, job in mine.items()}
        self.writer.write("saved", steps=steps, ended=ended, rungs=rung_losses(mine))
