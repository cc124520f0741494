"""The example SD-LoRA: installed as its user would, its own tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh

PACKAGE = Path(__file__).parents[2] / "examples" / "sd_lora"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The variables of a process that finds the installed package."""
    site = tmp_path_factory.mktemp("site")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(PACKAGE),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(environment, folder, *words):
    """Run Python; its exit status and all that it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_its_own_tests_pass(environment):
    """Against the formula in plain PyTorch, through two tasks."""
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(PACKAGE)]
    status, told = run(environment, PACKAGE, "-m", "pytest", *options, str(PACKAGE / "tests"))

    assert status == 0, told
    assert "27 passed" in told


def test_its_kind_is_listed(environment, tmp_path):
    """`tlora-fx passes` names the package, in a fork that looks for it where it lies."""
    site = environment["PYTHONPATH"].partition(os.pathsep)[0]
    code = f"import sys; sys.path.insert(0, {site!r}); from tlora_fx.cli import main; main()"
    told = fresh.run("-c", code, "passes", cwd=tmp_path, env=environment)

    assert told.returncode == 0, told.stderr
    assert "adapters from other packages" in told.stdout
    assert "(tlora-fx-sd-lora 0.1.0)" in told.stdout


@pytest.mark.slow
def test_two_jobs_learn_a_sequence(environment, tmp_path):
    """The script prints what each forgot, by both methods."""
    script = str(PACKAGE / "sequence.py")
    status, told = run(environment, tmp_path, script, "-o", str(tmp_path / "out"), "--steps", "2")

    assert status == 0, told
    assert len(re.findall(r"^forgotten +[+-]\d", told, flags=re.MULTILINE)) == 4
