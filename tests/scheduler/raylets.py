"""A Ray cluster of several raylets on this machine, and runs on it in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from tlora_fx.scheduler.lease import is_granted

ROOT = Path(__file__).parents[2]
STORE = 80 << 20
#: A dead node is told after two seconds, not after fifteen.
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500,
         "health_check_timeout_ms": 1500, "health_check_failure_threshold": 3}  # fmt: skip
#: Workers are no nicer than others here; nobody is told that tests ran.
ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class Raylets:
    """A head without CPUs, and nodes with one CPU each in racks of two."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False,
                "_system_config": QUICK,
            },
        )  # fmt: skip
        self.nodes = [self.add(f"r{index // 2}") for index in range(count)]

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, rack: str):
        return self.cluster.add_node(
            num_cpus=1, object_store_memory=STORE, labels={"rack": rack}, wait=False
        )

    def kill(self, index: int) -> None:
        """Kill -9 of a raylet; its workers see it and end."""
        process = self.nodes[index].all_processes["raylet"][0].process
        process.kill()
        process.wait()

    def replace(self, index: int) -> None:
        """What is left of a killed raylet goes, and another node of its rack comes."""
        self.cluster.remove_node(self.nodes[index], allow_graceful=False)
        self.nodes[index] = self.add(f"r{index // 2}")


@contextmanager
def raylets(count: int):
    """A cluster for some time."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ |= ENVIRONMENT
    here = Raylets(count)
    try:
        yield here
    finally:
        here.cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def start(here: Raylets, jobs: Path, output: Path, **changed) -> subprocess.Popen:
    """A run of `run_folder` over a cluster, in a process of its own."""
    code = (
        "import json, sys; from tests.scheduler import raylets;"
        "raylets.main(*sys.argv[1:4], **json.loads(sys.argv[4]))"
    )
    arguments = [here.address, str(jobs), str(output), json.dumps(changed)]
    with output.with_name(f"{output.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=log, stderr=log,
            start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip


def main(address: str, jobs: str, output: str, **changed) -> None:
    """What `start` has its process do: train all, then end."""
    from tests.scheduler import run_folder
    from tlora_fx.scheduler import service
    from tlora_fx.scheduler.local.executor import LocalOptions
    from tlora_fx.scheduler.loop import LoopOptions
    from tlora_fx.scheduler.policies import policy_of
    from tlora_fx.scheduler.ray.cluster import RayCluster
    from tlora_fx.scheduler.ray.executor import on_ray

    service.LOOK_SECONDS = 0.2
    nodes = RayCluster.join(address, "cpu", None)
    assert nodes.cluster.gpus_per_node == 1
    policy = policy_of(changed.pop("policy", "tlora"))
    if changed.pop("trains", False):
        changed["worker"] = "tlora_fx.runtime.workers.training"
        changed["local"] = LocalOptions(save_seconds=1.0)
    # Kills that come too early are no fault of a job.
    loop = LoopOptions(horizon=0.4, switch_seconds=0.1, tries=1000)
    options = on_ray(nodes, run_folder.options(loop=loop, **changed))
    with service.opened(
        Path(jobs), Path(output), nodes.cluster, policy, run_folder.Roofline(),
        run_folder.Prepared(), run_folder.Heard(), options,
    ) as running:  # fmt: skip
        run_folder.turn(running)


def actors(output: Path) -> list[int]:
    """Processes of the actors that are at a group's order, by the log that they print into."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/2"):
        with suppress(OSError):
            log = link.readlink()
            if log.is_relative_to(output / "groups") and is_granted(log.parent):
                found.append(int(link.parts[2]))
    return found


def kill_worker(output: Path, chance: Random) -> bool:
    """Kill -9 of an actor of some group; whether there was one."""
    there = actors(output)
    with suppress(ProcessLookupError):
        if there:
            os.kill(chance.choice(there), signal.SIGKILL)
            return True
    return False
