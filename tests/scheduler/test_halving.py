"""Jobs of a run are compared at rungs, whatever groups they train in."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from contextlib import closing

import pytest
import safetensors.torch
import yaml

from tests.scheduler import run_folder
from tests.scheduler.fake_worker import GATE, adapter_of
from tests.scheduler.fork_here import ForkHere
from tests.scheduler.run_folder import QUICKSTART, Heard, audit, epochs, forked, kill, records
from tests.scheduler.test_service import Shuffling, require_no_step_past_a_commit_twice
from tests.scheduler.test_service_trainers import BOUND, options
from tlora_fx.compiler import compile
from tlora_fx.config.job_file import load_job_file
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.scheduler import service


@pytest.fixture(autouse=True)
def forked_here(monkeypatch):
    """Workers that need not import anything, and a folder that is looked at often."""
    monkeypatch.setattr(service, "ForkServer", ForkHere)
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.1)


class Compared(Heard):
    """What a run said of its rungs."""

    def compared(self, time, ended, text):
        self.said.append((sorted(ended), text))


def sweep_file(folder, values, halving, steps, **fields):
    """A job file with a sweep over learning rates, on the quickstart's base with one layer."""
    folder.mkdir()
    base = folder.parent / "base"
    base.mkdir()
    for path in (QUICKSTART / "base").iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 1}
    (base / "config.json").write_text(json.dumps(config))
    job = {
        "name": "a", "lora": {"r": 4}, "max_steps": steps, "max_length": 32, "eval_split": 0.2,
        "per_device_train_batch_size": 2, "lr_scheduler_type": "constant",
        "data": {"path": str(QUICKSTART / "data" / "records.jsonl")},
        "sweep": {"parameters": {"learning_rate": values}, "halving": halving}, **fields,
    }  # fmt: skip
    content = {"base": {"config": str(base), "dtype": "float32"}, "jobs": [job]}
    (folder / "a.yaml").write_text(yaml.safe_dump(content))
    return load_job_file(folder / "a.yaml").jobs


def decisions(output):
    """Of each job, by step, its loss there and whether it went on."""
    with closing(sqlite3.connect(output / "ledger.sqlite")) as base:
        rows = base.execute("SELECT job, step, loss, kept FROM rungs").fetchall()
    return {(job, step): (loss, kept) for job, step, loss, kept in rows}


def require_as_alone(job, steps, output, folder):
    """A job's adapter and losses are those of the same job alone, stopped after some steps."""
    fields = {name: getattr(job, name) for name in job.model_fields_set} | {"max_steps": steps}
    alone = type(job)(**fields)
    Trainer(compile([alone]), [alone], output=folder, device="cpu").run()
    solo, mine = folder / job.name, output / job.name
    expected = safetensors.torch.load_file(solo / "adapter_model.safetensors")
    found = safetensors.torch.load_file(mine / "adapter_model.safetensors")
    for key, tensor in expected.items():
        assert (found[key] - tensor).norm() <= BOUND * tensor.norm().clamp(min=1e-6)
    lines = [read_metrics(at / "metrics.jsonl") for at in (solo, mine)]
    for one, other in zip(*lines, strict=True):
        assert one["step"] == other["step"]
        (name,) = {"loss", "eval_loss"} & one.keys()
        assert one[name] == pytest.approx(other[name], rel=BOUND)


@pytest.mark.parametrize("policy", ["tlora", "megatron"])
def test_weak_jobs_end_at_the_rungs_and_each_is_what_it_is_alone(tmp_path, policy):
    """In groups that train on, or each alone; the survivor goes to its end."""
    jobs = sweep_file(
        tmp_path / "jobs", [1e-3, 1e-6, 3e-3, 1.0], {"min_steps": 2, "factor": 2}, 7,
        load_best_model_at_end=True,
    )  # fmt: skip
    output = tmp_path / "run"
    heard = run_folder.run(tmp_path / "jobs", output, Compared(), policy=policy, **options())

    there = records(output)
    assert (max(len(each.jobs) for each in epochs(output)) > 1) is (policy == "tlora")
    assert {record.status for record in there.values()} == {"done"}
    assert [record.steps for record in there.values() if not record.reason] == [7]
    assert sorted(record.steps for record in there.values()) == [2, 2, 4, 7]
    told = [each for each in heard.said if isinstance(each[0], list)]
    assert [len(ended) for ended, _ in told] == [2, 1]
    assert "2 of 4 jobs go on" in told[0][1]
    rungs = decisions(output)
    for step, count in ((2, 4), (4, 2)):
        at = sorted((loss, kept) for (_, each), (loss, kept) in rungs.items() if each == step)
        assert [kept for _, kept in at] == [1] * (count // 2) + [0] * (count // 2)
    for job in jobs:
        steps, status = int(there[job.name].steps), output / job.name / "status.json"
        said = json.loads(status.read_text())
        assert (said["status"], said["step"]) == ("done", steps)
        assert ("ended by halving" in said.get("reason", "")) is (steps < 7)
        require_as_alone(job, steps, output, tmp_path / job.name)


def expected(jobs, halving, steps):
    """Steps that each job does, with the fake worker's losses, and who goes on from each rung."""
    names, done, kept = [job.name for job in jobs], {}, {}
    for rung in halving.rungs(steps):
        losses = {name: float(adapter_of(name, rung)) for name in names}
        names, weak = halving.compare(losses)
        done |= dict.fromkeys(weak, rung)
        kept |= {(name, rung): (losses[name], int(name in names)) for name in losses}
    return done | dict.fromkeys(names, steps), kept


def killed_at_random(tmp_path, monkeypatch, seed, kills):
    monkeypatch.setattr(run_folder, "policy_of", lambda name: Shuffling())
    jobs = sweep_file(
        tmp_path / "jobs", [n / 1000 for n in range(1, 8)], {"min_steps": 8, "factor": 2}, 60
    )
    output, draw = tmp_path / "run", random.Random(seed)
    # Behind the last rung, so that no run has ended when it is to be killed.
    gates = {job.name: 50 for job in jobs}
    changed = {"horizon": 0.3, "refresh": 1, "step_seconds": 0.04, "gates": gates}
    for _ in range(kills):
        pid = forked(tmp_path / "jobs", output, **changed)
        time.sleep(draw.uniform(0.1, 1.2))
        assert kill(pid, workers=draw.random() < 0.5)
    (output / GATE).touch()
    run_folder.run(tmp_path / "jobs", output, horizon=0.3, refresh=1)

    steps, kept = expected(jobs, jobs[0].halving, 60)
    assert {name: record.steps for name, record in records(output).items()} == steps
    assert {record.status for record in records(output).values()} == {"done"}
    assert decisions(output) == kept
    for name, count in steps.items():
        require_no_step_past_a_commit_twice(output, name)
        assert max(step for *_, what, job, step in audit(output) if job == name) == count
        assert json.loads((output / name / "adapter.json").read_text()) == adapter_of(name, count)
        assert json.loads((output / name / "status.json").read_text())["status"] == "done"


def test_a_run_that_is_killed_decides_once(tmp_path, monkeypatch):
    """At random points, with its workers or without: nobody trains past a rung undecided."""
    killed_at_random(tmp_path, monkeypatch, seed=0, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_run_that_is_killed_at_twelve_points_decides_once(tmp_path, monkeypatch, seed):
    """As above."""
    killed_at_random(tmp_path, monkeypatch, seed, kills=12)


def test_a_job_that_has_failed_is_not_waited_for(tmp_path):
    """Nor compared: the others are, without it."""
    first, *others = sweep_file(
        tmp_path / "jobs", [0.1, 0.2, 0.3, 0.4], {"min_steps": 5, "factor": 3}, 20
    )
    run_folder.run(tmp_path / "jobs", tmp_path / "run", fails={first.name: 3})

    steps, kept = expected(others, first.halving, 20)
    there = records(tmp_path / "run")
    assert there.pop(first.name).status == "failed"
    assert {name: record.steps for name, record in there.items()} == steps
    assert decisions(tmp_path / "run") == kept


def test_jobs_of_other_halvings_are_apart(tmp_path):
    """Two sweeps in one run, each compared in itself."""
    jobs = sweep_file(tmp_path / "jobs", [0.1, 0.2, 0.3], {"min_steps": 5, "factor": 3}, 20)
    content = yaml.safe_load((tmp_path / "jobs" / "a.yaml").read_text())
    content["jobs"][0]["name"] = "b"
    (tmp_path / "jobs" / "b.yaml").write_text(yaml.safe_dump(content))
    others = load_job_file(tmp_path / "jobs" / "b.yaml").jobs
    heard = run_folder.run(tmp_path / "jobs", tmp_path / "run", Compared())

    for group in (jobs, others):
        steps, kept = expected(group, group[0].halving, 20)
        assert {name: records(tmp_path / "run")[name].steps for name in steps} == steps
        assert kept.items() <= decisions(tmp_path / "run").items()
    assert len([each for each in heard.said if isinstance(each[0], list)]) == 2
