"""The recipes for clusters, checked as far as that can be done without one."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import yaml
from typer.main import get_command

from tlora_fx.cli import _app

RECIPES = Path(__file__).parents[2] / "examples" / "ray"


def options_of(command):
    """What `tlora-fx run` takes a line of a recipe for; typer ends with an error otherwise."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("tlora-fx", "run")
    group = get_command(_app("run"))
    context = group.make_context("tlora-fx", ["run", *words])
    return group.get_command(context, "run").make_context("run", words, parent=context).params


def test_the_slurm_script_is_bash_and_starts_a_run_on_ray():
    """Slurm itself is not here."""
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"tlora-fx run .*?--until-empty", text)

    options = options_of(command)

    assert (options["executor"], options["until_empty"]) == ("ray", True)


def test_the_ray_job_waits_for_kueue_and_runs_on_ray():
    """One image, one volume and one mount in all pods; the head trains nothing."""
    job = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())
    spec = job["spec"]["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    containers = [pod["template"]["spec"]["containers"][0] for pod in pods]
    options = options_of(job["spec"]["entrypoint"])

    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert job["spec"]["suspend"] is True
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    for kept in ("image", "volumeMounts", "env"):
        assert containers[0][kept] == containers[1][kept]
    (mount,) = containers[0]["volumeMounts"]
    assert str(options["output"]).startswith(mount["mountPath"])
    assert str(options["jobs"]).startswith(mount["mountPath"])
    assert options["executor"] == "ray"
