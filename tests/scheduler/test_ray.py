"""Runs over raylets on this machine; `test_ray_executor.py` is the quick sister of all of these."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from tests.scheduler.raylets import kill_worker, raylets, start
from tests.scheduler.run_folder import write_job
from tests.scheduler.test_service import require_trained_once

pytestmark = pytest.mark.slow

#: `TLORA_FX_RAY_KILLS=60` for the long one.
KILLS = int(os.environ.get("TLORA_FX_RAY_KILLS", "12"))


def test_twenty_four_jobs_over_four_raylets_are_trained_once(tmp_path):
    """Of different lengths, by workers that train nothing; the nodes are used, all of them."""
    steps = {f"j{index:02d}": 20 + 7 * index for index in range(24)}
    for name, count in steps.items():
        write_job(tmp_path / "jobs", name, count)
    with raylets(4) as here:
        run = start(here, tmp_path / "jobs", tmp_path / "run")

        assert run.wait() == 0, (tmp_path / "run.log").read_text()
    require_trained_once(tmp_path / "run", steps)


def test_no_kill_loses_a_job_or_trains_one_twice(tmp_path):
    """Of a worker, a raylet or the run itself, at random points."""
    chance = random.Random(11)
    steps = {f"j{index}": 60 * KILLS + 100 * index for index in range(5)}
    for name, count in steps.items():
        write_job(tmp_path / "jobs", name, count)
    hits = dict.fromkeys(("worker", "raylet", "driver"), 0)
    with raylets(3) as here:
        run = start(here, tmp_path / "jobs", tmp_path / "run")
        for _ in range(KILLS):
            time.sleep(chance.uniform(1.0, 8.0))
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
