"""`tlora-fx serve` as its users have it: a process that trains, is killed, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import tlora_fx
from tests.server.conftest import QUICKSTART, job_file

PACKAGE = Path(tlora_fx.__file__).parent
PROFILE = Path(__file__).parents[1] / "scheduler" / "quickstart-cpu.json"
SECONDS = 600


@contextmanager
def serving(run, *more):
    """A service in a process of its own, killed at the end."""
    command = [
        sys.executable, "-m", "tlora_fx", "serve", "-o", str(run), "--device", "cpu",
        "--slots", "1", "--profile", str(PROFILE), "--root", str(QUICKSTART), "--port", "0",
        "--horizon", "2s", "--save-every", "1s", "--prepare-seconds", str(SECONDS),
        "--log-format", "json", *more,
    ]  # fmt: skip
    with (run.parent / "log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        address = process.stdout.readline().decode().strip()
        assert address, (run.parent / "log").read_text()
        yield process, httpx.Client(base_url=f"{address}/api/v1", timeout=300)
    finally:
        process.kill()
        process.wait()


def wait(client, true):
    """The jobs, once something is true of them."""
    end = time.monotonic() + SECONDS
    while not true(jobs := {job["name"]: job for job in client.get("/jobs").json()}):
        assert time.monotonic() < end, jobs
        assert not [job for job in jobs.values() if job["state"] in ("failed", "refused")]
        time.sleep(0.2)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "ray"])
def test_a_killed_service_loses_no_job_and_repeats_no_step(tmp_path, executor):
    """Two jobs, kill -9 while they train, another submission; all end with every step once."""
    run, more = tmp_path / "run", ("--executor", executor)
    body = {"job_file": job_file("a", "b", max_steps=60, max_length=32)}
    with serving(run, *more) as (process, client):
        first = client.post("/submissions", json=body, headers={"Idempotency-Key": "one"})
        assert first.status_code == 201, first.text
        wait(client, lambda jobs: any(job["step"] >= 3 for job in jobs.values()))
        os.kill(process.pid, signal.SIGKILL)
    with serving(run, *more) as (_, client):
        again = client.post("/submissions", json=body, headers={"Idempotency-Key": "one"})
        assert again.json() == first.json() | {"replayed": True}
        third = {"job_file": job_file("c", max_steps=5)}
        client.post("/submissions", json=third, headers={"Idempotency-Key": "two"})
        jobs = wait(client, lambda jobs: {job["state"] for job in jobs.values()} == {"done"})
        tar = client.get("/jobs/a/adapter")

    assert {name: (job["state"], job["step"]) for name, job in jobs.items()} == {
        "a": ("done", 60), "b": ("done", 60), "c": ("done", 5),
    }  # fmt: skip
    assert b"adapter_model.safetensors" in tar.content
    for name in "ab":
        rows = (run / name / "metrics.jsonl").read_text().splitlines()
        steps = [row["step"] for row in map(json.loads, rows) if "loss" in row]
        assert steps == list(range(1, 61))


def answering_process(serve: int) -> int:
    """The process of a service that answers requests; 0: there is none."""
    children = Path(f"/proc/{serve}/task/{serve}/children").read_text().split()
    for child in children:
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0


@pytest.mark.slow
def test_a_run_goes_on_when_the_process_that_answers_is_killed(tmp_path):
    """The same address answers again, and the job trains every step in one group."""
    run, end = tmp_path / "run", time.monotonic() + SECONDS
    body = {"job_file": job_file("a", max_steps=60, max_length=32)}
    with serving(run) as (process, client):
        client.post("/submissions", json=body, headers={"Idempotency-Key": "one"})
        wait(client, lambda jobs: any(job["step"] >= 3 for job in jobs.values()))
        killed = answering_process(process.pid)
        os.kill(killed, signal.SIGKILL)
        while answering_process(process.pid) in (0, killed):
            assert time.monotonic() < end
            time.sleep(0.05)
        jobs = wait(client, lambda jobs: jobs and jobs["a"]["state"] == "done")
        events = client.get("/events").json()
        groups = client.get("/groups").json()

    assert (jobs["a"]["step"], len(groups)) == (60, 1)
    assert [event["text"] for event in events if event["kind"] == "warning"] == [
        "the process that answers requests died (killed by SIGKILL); the next starts in 1 s"
    ]
