"""Real workers of two bases that take turns on one GPU, or on one slot of a CPU."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from dataclasses import replace

import pytest

from tests.scheduler.fake_worker import is_there
from tests.scheduler.run_folder import QUICKSTART
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.runtime.workers.protocol import EventReader
from tlora_fx.scheduler.executor import Drained, Failed, GroupLaunch, Noted
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions
from tlora_fx.scheduler.local.processes import ForkServer
from tlora_fx.scheduler.state import Group, JobRequest

JOBS = """
base: {{config: {base}, dtype: float32}}
jobs:
  - {{name: {name}, max_steps: 4, lora: {{r: 4}}, max_length: 32, data: {{path: {data}}}}}
"""
MIB = 1 << 20
#: By job: the quickstart's base with so many layers.
LAYERS = {"a": 1, "b": 2, "c": 1, "d": 2}


@pytest.fixture
def specs(tmp_path):
    """What workers are told of each job."""
    found = {}
    for name, layers in LAYERS.items():
        base = shutil.copytree(QUICKSTART / "base", tmp_path / str(layers), dirs_exist_ok=True)
        config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": layers}
        (base / "config.json").write_text(json.dumps(config))
        file = tmp_path / f"{name}.yaml"
        data = QUICKSTART / "data" / "records.jsonl"
        file.write_text(JOBS.format(base=base, name=name, data=data))
        found[name] = load_job_file(file).jobs[0].model_dump(mode="json")
    return found


def run_through(executor, epoch, name):
    """Train a job; what was told, and the process that did it."""
    group, told = Group((name,), 1, (0,)), []
    executor.reserve(group, epoch)
    request = JobRequest(name, f"{LAYERS[name]} layers", Demand(), 1, 4)
    executor.launch(GroupLaunch(group, epoch, [request]))
    while not any(isinstance(event, Drained) for event in told):
        told += executor.events()
        assert not [event.reason for event in told if isinstance(event, Failed)]
        time.sleep(0.01)
    executor.release(group, epoch)
    log = EventReader(executor.folder / "groups" / f"{epoch:06d}" / "events.jsonl")
    [worker] = [line["process"] for line in log.lines() if line["kind"] == "started"]
    return [event.text for event in told if isinstance(event, Noted)], worker


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_two_bases_take_turns_until_one_needs_all_memory(tmp_path, specs, device):
    """Each comes back to its process; then one is too large for the other to stay."""
    server = ForkServer(tmp_path / "workers.log")
    options = LocalOptions(device=device, memory_of=lambda group, jobs: 64 * MIB)
    executor = LocalExecutor(tmp_path / "run", Cluster(1, 1, 1), specs, server, options=options)
    with closing(executor):
        _, one = run_through(executor, 1, "a")
        stays, two = run_through(executor, 2, "b")
        _, again = run_through(executor, 3, "c")
        executor.options = replace(options, memory_of=lambda group, jobs: 1e18)
        goes, last = run_through(executor, 4, "d")

        assert (one, two) == (again, last)
        assert one != two
        assert stays[0].startswith("idle 1 layers (")
        assert stays[0].endswith(" GiB) stays beside group 2")
        assert goes[0].endswith(" GiB) is let go of: group 4 needs its memory")
        assert [is_there(one), is_there(two)] == [False, True]
    assert not is_there(two)
