"""Runs over raylets on this machine; `test_ray_executor.py` is the quick sister of all of these."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.scheduler.raylets import ROOT, kill_worker, raylets, start
from tests.scheduler.run_folder import records, write_job
from tests.scheduler.test_service import require_trained_once
from tests.scheduler.test_service_trainers import COMING, come_and_go, require_as_alone, write
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.load import Demand
from tlora_fx.cost.plan import MeshShape
from tlora_fx.scheduler.local.processes import WORKER
from tlora_fx.scheduler.ray.cluster import RayCluster
from tlora_fx.scheduler.ray.executor import RayExecutor
from tlora_fx.scheduler.state import JobRequest

pytestmark = pytest.mark.slow

#: `TLORA_FX_RAY_KILLS=60` for the long one.
KILLS = int(os.environ.get("TLORA_FX_RAY_KILLS", "12"))


#: `TLORA_FX_RAY_JOBS=4` for a short one.
JOBS = int(os.environ.get("TLORA_FX_RAY_JOBS", "24"))


def until_trained(output, run):
    """Wait until somebody has done a step more than now, or all is done."""
    audit = output / "audit.jsonl"
    before = audit.stat().st_size if audit.exists() else 0
    while run.poll() is None and not (audit.exists() and audit.stat().st_size > before):
        time.sleep(0.1)


def test_twenty_four_jobs_over_four_raylets_are_trained_once(tmp_path):
    """Of different lengths, by workers that train nothing; the nodes are used, all of them."""
    steps = {f"j{index:02d}": 20 + 7 * index for index in range(24)}
    for name, count in steps.items():
        write_job(tmp_path / "jobs", name, count)
    with raylets(4) as here:
        run = start(here, tmp_path / "jobs", tmp_path / "run")

        assert run.wait() == 0, (tmp_path / "run.log").read_text()
    require_trained_once(tmp_path / "run", steps)


def test_jobs_over_four_raylets_end_as_they_would_alone(tmp_path):
    """Real trainers, real adapters: the policy shares nodes as it likes, and moves jobs."""
    steps = {f"j{index:02d}": 6 + index % 7 for index in range(JOBS)}
    folder = write(tmp_path / "jobs", **steps)
    with raylets(4) as here:
        run = start(here, folder, tmp_path / "run", trains=True)

        assert run.wait() == 0, (tmp_path / "run.log").read_text()
    assert {one.status for one in records(tmp_path / "run").values()} == {"done"}
    require_as_alone(folder, tmp_path / "run", steps, tmp_path)


def test_jobs_join_and_leave_a_group_over_two_nodes(tmp_path):
    """Two actors find each other by the address of the first; each job ends as it does alone."""
    folder = write(tmp_path / "jobs", **COMING)
    with raylets(2) as here:
        told = subprocess.run(
            [sys.executable, "-c", "from tests.scheduler.test_ray import wide; wide()",
             here.address, str(folder), str(tmp_path / "run")],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    assert told.returncode == 0, told.stderr
    require_as_alone(folder, tmp_path / "run", COMING, tmp_path)


def wide():
    """What that test has its process do."""
    address, folder, output = sys.argv[1:]
    jobs = [load_job_file(Path(folder, f"{name}.yaml")).jobs[0] for name in COMING]
    nodes = RayCluster.join(address, "cpu", None)
    executor = RayExecutor(
        nodes, WORKER, Path(output), nodes.cluster,
        {job.name: job.model_dump(mode="json") for job in jobs},
        SimpleNamespace(begin=lambda: None, close=lambda: None),
    )  # fmt: skip
    requests = [JobRequest(job.name, "base", Demand(), 1, 1) for job in jobs]
    come_and_go(executor, requests, Layout(MeshShape(dp=2)))
    executor.close()


def test_no_kill_loses_a_job_or_trains_one_twice(tmp_path):
    """Of a worker, a raylet or the run itself, at random points."""
    chance = random.Random(11)
    steps = {f"j{index}": 250 * KILLS + 100 * index for index in range(5)}
    for name, count in steps.items():
        write_job(tmp_path / "jobs", name, count)
    hits = dict.fromkeys(("worker", "raylet", "driver"), 0)
    with raylets(3) as here:
        run = start(here, tmp_path / "jobs", tmp_path / "run")
        for _ in range(KILLS):
            until_trained(tmp_path / "run", run)
            time.sleep(chance.uniform(0.0, 3.0))
            kind = chance.choice(sorted(hits))
            if kind == "driver":
                hits[kind] += run.poll() is None
                run.kill()
                run.wait()
                run = start(here, tmp_path / "jobs", tmp_path / "run")
            elif kind == "raylet":
                index = chance.randrange(3)
                here.kill(index)
                time.sleep(chance.uniform(0.0, 4.0))
                here.replace(index)
                hits[kind] += 1
            else:
                hits[kind] += kill_worker(tmp_path / "run", chance)

        assert run.wait() == 0, (tmp_path / "run.log").read_text()
    (tmp_path / "hits.json").write_text(json.dumps(hits))
    assert sum(hits.values()) > KILLS // 2
    require_trained_once(tmp_path / "run", steps)
