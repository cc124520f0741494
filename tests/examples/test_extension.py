"""The example package: installed as its user would, its own tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "examples" / "extension"
JOBS = PACKAGE.parents[1] / "examples" / "quickstart" / "jobs.yaml"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The variables of a process that finds the installed package."""
    site = tmp_path_factory.mktemp("site")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(PACKAGE),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": str(site)}


def run(environment, folder, *words):
    """Run a module of Python; its exit status and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_its_own_tests_pass(environment, tmp_path):
    """Passes, operator, rules, policy and planner: with what `tlora_fx.testing` offers."""
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(PACKAGE)]
    status, told = run(environment, PACKAGE, "pytest", *options, str(PACKAGE / "tests"))

    assert status == 0, told
    assert "18 passed" in told


def test_its_passes_are_listed_and_compile_a_job_file(environment, tmp_path):
    """`tlora-fx passes` names the package; `--add-pass` runs it, numbers verified."""
    status, told = run(environment, tmp_path, "tlora_fx", "passes")
    assert status == 0
    assert "(tlora-fx-extension 0.1.0)" in told

    added = ["--add-pass", "fuse-scale@after:fuse-backbone", "--verify", "numerics"]
    status, told = run(
        environment, tmp_path, "tlora_fx", "compile", str(JOBS), "-o", "build", *added
    )
    assert status == 0, told
    assert "not aten.mul.Tensor" in (tmp_path / "build" / "report.txt").read_text()


def test_its_policy_replays_a_trace(environment, tmp_path):
    """`--policies` finds it by its entry point, with its option."""
    words = ["--jobs", "20", "--gpus", "16", "--seeds", "1", "--processes", "1"]
    asked = "shortest-first:most_gpus=4"
    status, told = run(environment, tmp_path, "tlora_fx", "simulate", *words, "--policies", asked)

    assert status == 0, told
    assert asked in told


def test_its_planner_is_known(environment, tmp_path):
    """`--plan` finds it by its entry point."""
    names = "from tlora_fx.planners.protocol import planner_names; print(planner_names())"
    done = subprocess.run(
        [sys.executable, "-c", names],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "'tensor-pairs'" in done.stdout
