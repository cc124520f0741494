"""`tlora-fx serve` as its users have it: a process that trains, is killed, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tokenize
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
        yield process, httpx.Client(base_url=f"{address}/api/v1", timeout=60)
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


def lines_of_code(path):
    """Lines of a file without blank ones, comments and docstrings."""
    if path.suffix != ".py":
        return sum(bool(line.strip()) for line in path.read_text().splitlines())
    lines, begins = set(), True
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            name = tokenize.tok_name[token.type]
            if name in ("NEWLINE", "INDENT", "DEDENT", "ENCODING"):
                begins = True
            elif name not in ("NL", "COMMENT", "ENDMARKER"):
                if not (begins and name == "STRING"):
                    lines.update(range(token.start[0], token.end[0] + 1))
                begins = False
    return len(lines)


def test_the_service_is_at_most_three_thousand_lines_of_code():
    """With its page, its commands, and its part on Ray."""
    folders = [PACKAGE / "server", PACKAGE / "scheduler" / "ray"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [PACKAGE / "cli" / f"{name}.py" for name in ("client", "serve", "tokens")]
    files += [PACKAGE / "scheduler" / "lease.py"]
    known = [path for path in files if path.suffix in (".py", ".js", ".css", ".html")]

    assert sum(map(lines_of_code, known)) <= 3000
